"""The study's text: where it comes from, how it is split, and what is drawn from it."""

import json
import pathlib
import sys

import pytest
import torch

from ropewalk.study import corpus, data, settings

TINY = settings.Settings(train_len=16, eval_lens=(16, 32, 64), documents=3, control_documents=2)


def words(count: int, seed: int) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    return bytes((97 + torch.randint(20, (count,), generator=generator)).tolist())


@pytest.fixture
def folder(tmp_path):
    for index in range(10):
        (tmp_path / f"text{index}.txt").write_bytes(words(200, index))
    return tmp_path


def test_stdlib_is_read_without_tests_tables_or_short_files():
    documents = corpus.stdlib()
    assert {"inspect.py", "asyncio/tasks.py"} <= documents.keys()
    assert not [name for name in documents if {"test", "encodings", "site-packages"} & set(name.split("/"))]
    assert min(map(len, documents.values())) >= 2048


def test_folder_skips_hidden_and_binary_files_and_repeated_content(folder):
    (folder / ".hidden").write_bytes(b"x" * 100)
    (folder / "image.bin").write_bytes(b"\0" * 100)
    (folder / "zcopy.txt").write_bytes(words(200, 0))
    assert [f"text{index}.txt" for index in range(10)] == list(corpus.read(str(folder)))


def test_missing_path_is_refused():
    with pytest.raises(ValueError, match="data must be stdlib, hf:NAME or an existing file or folder, got '/no/where'"):
        corpus.read("/no/where")


def test_held_out_documents_are_whole_and_none_of_their_text_is_trained_on(folder):
    loaded = data.load(TINY.replace(data=str(folder)))
    assert len(loaded.held_out) == 3
    assert 7 * 200 == len(loaded.train)
    trained = bytes(loaded.train.tolist())
    for block in loaded.held_out:
        text = (folder / block.id).read_bytes()
        assert text[:65] == bytes(block.tokens.tolist())
        assert text[65:120] not in trained


def test_split_depends_on_names_alone(folder):
    before = [block.id for block in data.load(TINY.replace(data=str(folder))).held_out]
    for path in folder.iterdir():
        path.write_bytes(path.read_bytes()[::-1])
    assert before == [block.id for block in data.load(TINY.replace(data=str(folder))).held_out]


def test_pairs_of_one_content_stay_on_one_side():
    text = torch.zeros(100, dtype=torch.uint8)
    ends = torch.arange(1, 101)
    pairs = {f"{prefix}module{index}.py": (text, ends) for index in range(6) for prefix in ("", "_py", "_")}
    train, held_out = data.split(pairs, 64, 3, 16)
    assert 3 * len(text) * 3 == len(train)
    assert 3 == len({data.family(block.id) for block in held_out})


def test_single_file_is_cut_into_parts_of_one_block(tmp_path):
    (tmp_path / "book.txt").write_bytes(words(65 * 20 + 7, 0))
    loaded = data.load(TINY.replace(data=str(tmp_path / "book.txt")))
    assert 65 * 17 + 7 == len(loaded.train)
    assert [list(range(1, 66))] * 3 == [block.ends.tolist() for block in loaded.held_out]


def test_text_too_short_names_the_length_that_would_fit(folder):
    asked = TINY.replace(data=str(folder), eval_lens=(16, 32, 64, 128, 256))
    message = r"eval_lens must be at most 128 for this text \(2000 tokens, 3 documents held out\), got 256"
    with pytest.raises(ValueError, match=message) as caught:
        data.load(asked)
    fitting = str(caught.value).partition("--eval-lengths ")[2]
    lengths = tuple(int(length) for length in fitting.split(","))
    assert (16, 32, 64, 128) == lengths
    assert 3 == len(data.load(asked.replace(eval_lens=lengths)).held_out)


def test_text_too_short_for_any_length_is_refused(tmp_path):
    (tmp_path / "note.txt").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"data must be long enough to hold out 3 documents .*, got 5 tokens in 1 doc"):
        data.load(TINY.replace(data=str(tmp_path)))


def test_fingerprint_changes_with_the_text(folder):
    asked = TINY.replace(data=str(folder))
    before = data.load(asked).fingerprint
    assert before == data.load(asked).fingerprint
    (folder / "text0.txt").write_bytes(words(200, 99))
    assert before != data.load(asked).fingerprint


def test_batch_is_a_function_of_seed_and_step():
    train = torch.arange(1000)
    inputs, targets = data.batch(train, 1, 7, 4, 16)
    again, _ = data.batch(train, 1, 7, 4, 16)
    assert torch.equal(inputs, again)
    assert torch.equal(inputs + 1, targets)
    for other in (data.batch(train, 1, 8, 4, 16), data.batch(train, 2, 7, 4, 16)):
        assert not torch.equal(inputs, other[0])


def test_batches_reach_both_ends_of_the_text():
    train = torch.arange(18)
    starts = {row[0].item() for step in range(50) for row in data.batch(train, 0, step, 4, 16)[0]}
    assert {0, 1} == starts


@pytest.fixture
def tokenizer_file(tmp_path, folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([words(2000, 5).decode(), "grün ist die Hoffnung"], trainer)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_tokenizer_file_counts_every_byte_once(tokenizer_file):
    encoder = data.tokenizer(str(tokenizer_file))
    text = "grüne Äpfel, 漢字 und mehr".encode()
    tokens, ends = encoder.encode(text)
    assert len(tokens) < len(text)
    assert len(text) == ends[-1].item()
    assert (ends.diff() >= 0).all()
    assert 300 >= encoder.vocab_size > tokens.max().item()


def test_blocks_of_a_tokenizer_hold_more_bytes_than_tokens(tokenizer_file, folder):
    asked = TINY.replace(data=str(folder), tokenizer=str(tokenizer_file), eval_lens=(16, 32))
    block = data.load(asked).held_out[0]
    assert 33 == len(block.tokens)
    assert block.ends[-1] > 33


def test_unreadable_tokenizer_is_refused(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer must be byte or a JSON file of the tokenizers library, got "):
        data.tokenizer(str(tmp_path / "bad.json"))


@pytest.mark.parametrize("library", ["datasets", "tokenizers"])
def test_missing_library_names_the_extra(monkeypatch, library):
    monkeypatch.setitem(sys.modules, library, None)
    read = {"datasets": lambda: corpus.read("hf:name"), "tokenizers": lambda: data.tokenizer("t.json")}[library]
    with pytest.raises(ImportError, match=rf"`{library}` library, got .*\nhint: pip install 'ropewalk\[text\]'"):
        read()


@pytest.fixture
def offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    return pytest.importorskip("datasets")


@pytest.mark.filterwarnings("ignore")
def test_datasets_rows_are_documents(offline, tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    texts = [words(200, index).decode() for index in range(5)]
    (rows / "train.jsonl").write_text("".join(json.dumps({"n": 1, "body": text}) + "\n" for text in texts))
    for place in (rows, rows / "train.jsonl"):
        assert [text.encode() for text in texts] == list(corpus.read(f"hf:{place}").values())


@pytest.mark.filterwarnings("ignore")
def test_datasets_without_text_or_readable_files_are_refused(offline, tmp_path):
    (tmp_path / "numbers.jsonl").write_text('{"n": 1}\n')
    with pytest.raises(ValueError, match="data must be a dataset with a column of text, got columns"):
        corpus.read(f"hf:{tmp_path / 'numbers.jsonl'}")
    with pytest.raises(ValueError, match="data must be a dataset that `datasets` can load, got 'hf:no/such/thing/at'"):
        corpus.read("hf:no/such/thing/at")


def test_wikitext_lines_are_joined_to_articles():
    lines = ["", " = First = \n", " some text \n", " = = Section = = \n", " more \n", " = Second = \n", " end \n"]
    assert [" = First = \n some text \n = = Section = = \n more \n", " = Second = \n end \n"] == corpus._articles(lines)


def test_settings_survive_json_and_tell_their_differences():
    for name in settings.PRESETS:
        preset = settings.preset(name)
        read = settings.Settings.from_json(json.loads(json.dumps(preset.to_json())))
        assert preset == read
        assert preset.hash() == read.hash()
    changed = settings.Settings(steps=7, dtype="float32")
    assert {"steps": (550, 7), "dtype": ("auto", "float32")} == settings.difference(settings.Settings(), changed)
    assert settings.Settings().hash() != changed.hash()


def test_settings_of_another_format_are_refused():
    with pytest.raises(ValueError, match="settings must have exactly the known fields, got a difference in novel, st"):
        settings.Settings.from_json(
            {"novel": 1, **{k: v for k, v in settings.Settings().to_json().items() if k != "steps"}}
        )


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"steps": 0}, "steps must be an integer of at least 1, got 0"),
        ({"encodings": ("rotary", "rotary")}, "encodings must be at least one value and all different, got"),
        ({"encodings": ("a:b", "a_b")}, "encodings must have different folder names, got"),
        ({"seeds": ()}, r"seeds must be at least one value and all different, got \[\]"),
        ({"control_documents": 13}, "control_documents must be at most documents = 12, got 13"),
        ({"num_heads": 3}, "model_dim must be a multiple of num_heads = 3, got 128"),
        ({"dtype": "float16"}, "dtype must be auto, float32 or bfloat16, got 'float16'"),
        ({"train_len": 4}, "train_len must be at least 8 tokens, got 4"),
        ({"eval_lens": (512, 256)}, r"eval_lens must be in rising order, got \[512, 256\]"),
        (
            {"eval_lens": (256, 384)},
            r"eval_lens must be multiples of 4 that divide the longest \(384\), got 256\nhint: ",
        ),
    ],
)
def test_impossible_settings_are_refused(change, match):
    with pytest.raises(ValueError, match=match):
        settings.Settings(**change)


def test_customize_keeps_what_belongs_together():
    quick = settings.preset("quick")
    assert (128, 256, 512, 1024, 2048) == settings.customize(quick, train_len=128).eval_lens
    assert (256, 512) == settings.customize(quick, train_len=128, eval_lens=(256, 512)).eval_lens
    assert 50 == settings.customize(quick, steps=500).warmup_steps
    assert 2 == settings.customize(quick, documents=2).control_documents
    assert quick == settings.customize(quick, data=None, seeds=None)
    with pytest.raises(ValueError, match="preset must be one of smoke, quick, thorough, got 'slow'"):
        settings.preset("slow")


def test_stdlib_feeds_the_quick_preset():
    loaded = data.load(settings.preset("quick"))
    assert 12 == len(loaded.held_out)
    assert {4097} == {len(block.tokens) for block in loaded.held_out}
    assert len(loaded.train) > 5_000_000
    assert "stdlib" == loaded.to_json()["name"]
    assert pathlib.PurePosixPath(loaded.held_out[0].id).suffix == ".py"

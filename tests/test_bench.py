"""The benchmark measures what it says, refuses what is wrong, and reports in plain JSON and text."""

import itertools
import json
import time

import pytest
import torch

import ropewalk as rw
from ropewalk import bench
from ropewalk.study.settings import Settings

SMALL = bench.Plan(encodings=("rotary", "alibi"), lengths=(16, 32), num_heads=2, head_dim=8, budget_seconds=60.0)


@pytest.fixture(scope="module")
def result():
    return bench.run(SMALL)


def test_every_variant_has_a_row_per_length_for_both_directions(result):
    rows = {(row["name"], row["seq_len"]): row for row in result["rows"]}
    assert rows.keys() == set(itertools.product(("none", "torch", "rotary", "alibi"), (16, 32)))
    for row in rows.values():
        assert row["rounds"] >= bench.ROUNDS[0]
        for mode in bench.MODES:
            assert 0 < row[mode]["low"] <= row[mode]["ratio"] <= row[mode]["high"]
            assert row[mode]["seconds"] > 0
            assert row[f"{mode}_memory"]["bytes"] > 0


def test_attention_without_an_encoding_is_exactly_one(result):
    for row in result["rows"]:
        if row["name"] == "none":
            assert row["forward"]["ratio"] == row["training"]["ratio"] == 1.0
            assert row["forward_memory"]["ratio"] == row["training_memory"]["ratio"] == 1.0


def test_result_is_plain_json(result):
    assert json.loads(json.dumps(result)) == {**result, "settings": json.loads(json.dumps(result["settings"]))}


def test_text_shows_every_row_and_labels_the_other_comparison(result):
    text = bench.table(result)
    for row in result["rows"]:
        assert f"{row['training']['ratio']:.2f} [{row['training']['low']:.2f}" in text
    assert "neither of which attends" in text
    assert result["machine"] in text


def test_ratio_is_the_median_of_ratios_within_a_round():
    length = bench.Length(SMALL, {"none": bench.plain, "rotary": bench.plain}, 16)
    # the machine halves its speed in the second round; medians of times would say 2 or 4, ratios say 3
    length.times["none", "forward"] = [1.0, 2.0, 1.0]
    length.times["rotary", "forward"] = [3.0, 6.0, 3.5]
    assert length.against_none(("rotary", "forward"))["ratio"] == 3.0


def test_rounds_begin_with_another_variant_each_time():
    length = bench.Length(SMALL, {"none": bench.plain, "rotary": bench.plain}, 16)
    called = []
    length.calls = {key: (lambda key=key: called.append(key)) for key in length.calls}
    for number in range(3):
        length.round(number)
    size = len(length.calls)
    firsts = [called[0], called[size], called[2 * size]]
    assert len(set(firsts)) == 3
    assert all(set(called[k * size : (k + 1) * size]) == set(length.calls) for k in range(3))


def test_a_slow_call_is_seen_as_slow():
    x = torch.randn(96, 96)
    one, four = (lambda: x @ x), (lambda: [x @ x for _ in range(4)])
    ratios = [bench.seconds(SMALL, four, 30) / bench.seconds(SMALL, one, 30) for _ in range(9)]
    assert 2.5 < sorted(ratios)[4] < 6


def test_peak_memory_counts_what_is_held_at_once():
    x = torch.zeros(1000, 256)  # 1 MiB and a little less
    size = x.numel() * 4

    def in_turn():
        for _ in range(5):
            (x + 1).sum()

    def at_once():
        return [x + k for k in range(5)]

    assert size <= bench.peak_bytes(SMALL, in_turn) < 1.1 * size
    assert 5 * size <= bench.peak_bytes(SMALL, at_once) < 5.1 * size
    assert bench.peak_bytes(SMALL, lambda: None) == 0


def test_peak_memory_of_a_dense_bias_grows_with_the_square():
    def peak(seq_len):
        return bench.peak_bytes(SMALL, lambda: rw.compat.get_alibi_biases(4, seq_len))

    assert peak(512) > 3.5 * peak(256) > 3 * 4 * 256 * 256 * 4


def test_disagreement_measures_values_and_gradients():
    plan = bench.Plan(encodings=(), num_heads=2, head_dim=8)
    for name in ("rotary", "alibi", "rotary+alibi", "sinusoidal", "learned", "nope"):
        assert bench.disagreement(plan, plan.build(name), 48) < bench.TOLERANCE[torch.float32]


def wrong_backend(monkeypatch, change):
    """Let every backend but the reference answer something else."""
    right = bench.attend

    def attend(q, k, v, encoding=None, *, backend="auto", **options):
        out = right(q, k, v, encoding, backend=backend, **options)
        return change(out) if backend != "reference" and isinstance(encoding, rw.ALiBi) else out

    monkeypatch.setattr(bench, "attend", attend)


@pytest.mark.parametrize(
    "change",
    [
        lambda out: out * 1.001,
        lambda out: out * float("nan"),
        lambda out: out.detach() + out * 0,  # right values, no gradient
    ],
    ids=["values", "nan", "gradients"],
)
def test_an_encoding_that_disagrees_with_the_reference_gets_no_figure(monkeypatch, change):
    wrong_backend(monkeypatch, change)
    result = bench.run(SMALL)
    assert set(result["refused"]) == {"alibi"}
    assert "differs from the reference backend" in result["refused"]["alibi"]
    assert {row["name"] for row in result["rows"]} == {"none", "torch", "rotary"}
    assert "alibi: no figures, it differs" in bench.table(result)


def test_lengths_beyond_the_budget_are_left_out_by_name():
    started = time.perf_counter()
    plan = bench.Plan(encodings=("rotary",), lengths=(16, 65536), num_heads=4, head_dim=32, budget_seconds=20.0)
    result = bench.run(plan)
    assert time.perf_counter() - started < 20
    assert set(result["skipped"]) == {"65536"}
    assert {row["seq_len"] for row in result["rows"]} == {16}
    assert "65536 tokens: left out, not within 20 seconds; ropewalk bench --lengths 65536 measures it" in bench.table(
        result
    )


def test_embedding_is_timed_for_encodings_that_have_one():
    plan = bench.Plan(num_heads=2, head_dim=8, lengths=(16,))
    inputs = bench.Inputs(plan, 16)
    counts = {name: len(bench.encoded(plan, plan.build(name))(inputs)) for name in ("sinusoidal", "learned", "alibi")}
    assert counts == {"sinusoidal": 2, "learned": 2, "alibi": 1}


def test_for_study_measures_the_studys_encodings_at_its_sizes():
    settings = Settings(encodings=("rotary", "nope"), model_dim=16, num_heads=2)
    result = bench.for_study(settings.to_json(), budget_seconds=2.0)
    assert {row["name"] for row in result["rows"]} == {"none", "torch", "rotary"}
    assert (result["settings"]["num_heads"], result["settings"]["head_dim"]) == (2, 8)
    assert result["seconds"] < 15


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"lengths": ()}, "lengths must be at least one length, got none"),
        ({"lengths": (1,)}, "lengths must be at least 2, got 1"),
        ({"budget_seconds": 0.0}, "budget_seconds must be positive, got 0.0"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, float64, got int8"),
    ],
)
def test_errors_say_must_and_got(options, message):
    with pytest.raises(ValueError, match=message):
        bench.Plan(**options)


def test_unknown_encoding_is_refused_before_anything_is_timed():
    with pytest.raises(ValueError, match="encoding must be one of"):
        bench.run(bench.Plan(encodings=("wheel",), lengths=(16,)))

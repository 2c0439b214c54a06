"""The benchmark measures what it says, refuses what is wrong, and reports in plain JSON and text."""

import dataclasses
import functools
import itertools
import json
import math
import re
import time

import pytest
import torch

import ropewalk as rw
from ropewalk import bench
from ropewalk.bench import attention as bench_attention
from ropewalk.bench import distances, peers, timing, variants
from ropewalk.study.settings import Settings

SIZES = {"num_heads": 2, "head_dim": 8, "peers": False}
SMALL = bench.Plan(encodings=("rotary", "alibi"), lengths=(16, 32), budget_seconds=60.0, **SIZES)
ROWS = ("none", "torch", "rotary", "alibi", "alibi, sdpa", "alibi, banded")


@pytest.fixture(scope="module", autouse=True)
def _few_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", (3, 4))
        patch.setattr(timing, "FRESH_BYTES", 1 << 16)
        yield


@pytest.fixture(scope="module")
def result(_few_rounds):
    return bench.run(SMALL)


def test_every_variant_has_a_row_per_length_for_both_directions(result):
    rows = {(row["name"], row["seq_len"]): row for row in result["rows"]}
    assert rows.keys() == set(itertools.product(ROWS, (16, 32)))
    for row in rows.values():
        assert row["rounds"] >= timing.ROUNDS[0]
        for mode in bench.MODES:
            assert 0 < row[mode]["low"] <= row[mode]["ratio"] <= row[mode]["high"]
            assert row[mode]["seconds"] > 0
            assert row[f"{mode}_memory"]["bytes"] > 0
            assert 0 < row["error"][mode] < 1e-6


def test_torchs_own_attention_is_exactly_one(result):
    for row in result["rows"]:
        if row["name"] == "torch":
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
    race = bench.Race(SMALL, {"floor": print, "mine": print})
    # the machine halves its speed in the second round; medians of times would say 2 or 4, ratios say 3
    race.times = {"floor": [1.0, 2.0, 1.0], "mine": [3.0, 6.0, 3.5]}
    assert 3.0 == race.against("mine", "floor")["ratio"]
    assert 3.5 == race.against("mine", "floor")["seconds"]
    assert 2.5 == race.beyond("mine", "floor")["median"]


def test_rounds_begin_with_another_call_each_time():
    called = []
    race = bench.Race(SMALL, {key: functools.partial(called.append, key) for key in "abcd"})
    for number in range(3):
        race.round(number)
    assert list("abcdbcdacdab") == called


def test_short_calls_repeat_and_long_ones_do_not():
    x = torch.randn(1000, 1000)
    race = bench.Race(SMALL, {"short": lambda: None, "long": lambda: x @ x})
    race.warm_up()
    assert race.repeats["short"] > 5
    assert race.repeats["long"] == 1


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
    plan = bench.Plan(encodings=(), **SIZES)
    for name in ("rotary", "alibi", "rotary+alibi", "sinusoidal", "learned", "nope"):
        encoding = plan.build(name)
        assert bench.disagreement(plan, bench.Variant(bench.encoded(plan, encoding), encoding), 48) < 2e-5


def wrong_backend(monkeypatch, change, where=lambda q: True):
    """Let every backend but the reference answer something else."""
    right = variants.attend

    def attend(q, k, v, encoding=None, *, backend="auto", **options):
        out = right(q, k, v, encoding, backend=backend, **options)
        return change(out) if backend != "reference" and isinstance(encoding, rw.ALiBi) and where(q) else out

    monkeypatch.setattr(variants, "attend", attend)


CHANGES = {
    "values": lambda out: out * 1.001,
    "nan": lambda out: out * float("nan"),
    "gradients": lambda out: out.detach() + out * 0,  # right values, no gradient
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_encoding_that_disagrees_with_the_reference_gets_no_figure(monkeypatch, change):
    wrong_backend(monkeypatch, change)
    result = bench.run(dataclasses.replace(SMALL, lengths=(16,)))
    assert {"alibi", "alibi, sdpa", "alibi, banded"} == set(result["refused"])
    assert "differs from the reference backend" in result["refused"]["alibi"]
    assert {"none", "torch", "rotary"} == {row["name"] for row in result["rows"]}
    assert "alibi: no figures, it differs" in bench.table(result)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_goes_wrong_at_one_length_only_gets_no_figure_there(monkeypatch, change):
    wrong_backend(monkeypatch, change, lambda q: q.shape[2] == 32)
    result = bench.run(dataclasses.replace(SMALL, backends=()))
    assert {f"{name} at 32 tokens" for name in ROWS[3:4]} == set(result["refused"])
    assert {("alibi", 16), ("rotary", 16), ("rotary", 32)} == {
        (row["name"], row["seq_len"]) for row in result["rows"] if row["name"] in ("alibi", "rotary")
    }


def test_what_raises_gets_no_figure_and_says_why():
    plan = bench.Plan(**SIZES)

    def fails(inputs):
        raise RuntimeError("no kernel\nfor this")

    assert (
        "raises RuntimeError: no kernel"
        == timing.verdict(lambda: bench.disagreement(plan, bench.Variant(fails), 8), 1.0)[0]
    )


def test_error_at_a_length_is_that_of_float64_at_sampled_queries():
    plan = bench.Plan(encodings=(), **SIZES)
    encoding = plan.build("alibi")
    inputs = bench.Inputs(plan, 100)
    exact = bench.Variant(lambda i: (rw.attend(i.q.double(), i.k.double(), i.v.double(), encoding).float(),), encoding)
    shifted = bench.Variant(lambda i: (rw.attend(i.q, i.k, i.v, encoding) * 1.01,), encoding)
    found = variants.errors(plan, exact, inputs)
    assert max(found.values()) < 1e-7
    assert {"forward": pytest.approx(0.01, rel=1e-3), "training": pytest.approx(0.01, rel=1e-3)} == variants.errors(
        plan, shifted, inputs
    )


def test_symmetric_attention_is_measured_against_symmetric_attention():
    plan = bench.Plan(("alibi", "t5-like"), (24,), causal=False, modes=("forward",), budget_seconds=60.0, **SIZES)
    result = bench.run(plan)
    assert {} == result["refused"]
    assert {"none", "torch", "alibi", "t5-like"} < {row["name"] for row in result["rows"]}
    assert [] == result["tutorial"]
    inputs = bench.Inputs(plan, 24)
    full = torch.softmax(inputs.q @ inputs.k.transpose(-1, -2) / 8**0.5, -1) @ inputs.v
    torch.testing.assert_close(variants.plain(inputs, causal=False)[0], full)


def test_t5_like_buckets_are_those_of_t5():
    def bucket(ahead):
        """Raffel et al. 2020, as the authors' code has it: 32 buckets, both sides, up to distance 128."""
        offset, far = (16, ahead) if ahead > 0 else (0, -ahead)
        if far < 8:
            return offset + far
        return offset + min(15, 8 + int(math.log(far / 8) / math.log(128 / 8) * 8))

    encoding = distances.T5Like(3)
    q_pos, k_pos = torch.tensor(500), torch.arange(1000)
    for head in range(3):
        bias = encoding.bias(torch.tensor(head), q_pos, k_pos)
        assert [encoding.numbers[head][bucket(int(k) - 500)] for k in k_pos] == pytest.approx(bias.tolist(), rel=1e-6)


def test_dense_scores_beyond_a_gibibyte_are_not_tried(monkeypatch):
    monkeypatch.setattr(bench_attention, "DENSE_BYTES", 2 * 24**2 * 4)
    plan = bench.Plan(encodings=(), lengths=(24, 25), budget_seconds=30.0, **SIZES)
    step = bench.encoded(plan, None)
    entered = {"torch": bench.Variant(bench.plain), "dense": bench.Variant(step, dense=True)}
    assert {"torch", "dense"} == set(bench.Length(plan, entered, 24).variants)
    length = bench.Length(plan, entered, 25)
    assert {"torch"} == set(length.variants)
    assert "would hold scores of 0.0 GiB" == length.refused["dense at 25 tokens"]


def test_libraries_that_are_not_installed_are_named_and_have_no_row(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(peers, "_import", missing)
    plan = bench.Plan(("alibi",), (16,), num_heads=2, head_dim=8, budget_seconds=60.0)
    result = bench.run(plan)
    assert dict.fromkeys(peers.ALIBI, "not installed") == result["absent"]
    assert set(peers.ALIBI).isdisjoint(row["name"] for row in result["rows"])
    assert "alibi of x-transformers: absent, not installed" in bench.table(result)


@pytest.mark.parametrize("name", peers.ALIBI)
def test_other_libraries_alibi_is_alibi(name):
    needs, make = peers.ALIBI[name]
    if peers.missing([needs]):
        pytest.skip(f"{needs} is not installed")
    plan = bench.Plan(("alibi",), (40,), num_heads=8, head_dim=16)
    variant = variants.variants(plan)[name]
    assert bench.disagreement(plan, variant, 40) < 2e-5
    inputs = bench.Inputs(plan, 40)
    held = bench.peak_bytes(plan, lambda: variants.forward(variant.fresh(), inputs))
    assert held > 8 * 40 * 40 * 4
    assert make(8)(inputs.q, inputs.k, inputs.v).shape == inputs.v.shape


def test_lengths_beyond_the_budget_are_left_out_by_name():
    started = time.perf_counter()
    plan = bench.Plan(("rotary",), (16, 65536), num_heads=4, head_dim=32, peers=False, budget_seconds=20.0)
    result = bench.run(plan)
    assert time.perf_counter() - started < 20
    assert set(result["skipped"]) == {"65536"}
    assert {row["seq_len"] for row in result["rows"]} == {16}
    assert re.search(r"65536 tokens: left out, not within 20 seconds; --seconds \d{2,} should do", bench.table(result))


def test_embedding_is_timed_for_encodings_that_have_one():
    plan = bench.Plan(lengths=(16,), **SIZES)
    inputs = bench.Inputs(plan, 16)
    counts = {name: len(bench.encoded(plan, plan.build(name))(inputs)) for name in ("sinusoidal", "learned", "alibi")}
    assert counts == {"sinusoidal": 2, "learned": 2, "alibi": 1}


def test_for_study_measures_the_studys_encodings_at_its_sizes():
    settings = Settings(encodings=("rotary", "nope"), model_dim=16, num_heads=2)
    result = bench.for_study(settings.to_json(), budget_seconds=2.0)
    assert {row["name"] for row in result["rows"]} == {"none", "torch", "rotary"}
    assert {1.0} == {row["forward"]["ratio"] for row in result["rows"] if row["name"] == "none"}
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
        ({"modes": ("backward",)}, "modes must be among forward, training, got"),
        ({"floor": "rotary"}, "floor must be torch or none, got 'rotary'"),
    ],
)
def test_errors_say_must_and_got(options, message):
    with pytest.raises(ValueError, match=message):
        bench.Plan(**options)


def test_unknown_encoding_is_refused_before_anything_is_timed():
    with pytest.raises(ValueError, match="encoding must be one of"):
        bench.run(bench.Plan(encodings=("wheel",), lengths=(16,)))

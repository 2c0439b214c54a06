"""The rotation benchmark times right turns only, by whatever way, and says what they cost beside a copy."""

import json
import math

import pytest
import torch

from ropewalk import kernels
from ropewalk.bench import page, peers, rotate, timing
from ropewalk.bench.rotate import OTHERS, OURS, RotatePlan, Way

SIZES = {"num_heads": 4, "num_kv_heads": 2, "seq_len": 12, "head_dim": 8, "token_batch": 2, "table_positions": 64}
TINY = RotatePlan(**SIZES, budget_seconds=0.1, peers=False)


@pytest.fixture(scope="module", autouse=True)
def _few_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", (3, 4))
        patch.setattr(timing, "FRESH_BYTES", 1 << 16)
        yield


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def result(request, _few_rounds):
    return rotate.run(RotatePlan(**SIZES, budget_seconds=0.1, dtype=request.param, peers=False))


def turned(x, position, layout):
    """One head's channels turned by its formula, number by number."""
    pairs = len(x) // 2
    out = list(x)
    for i in range(pairs):
        first, second = (i, i + pairs) if layout == "half" else (2 * i, 2 * i + 1)
        angle = position * 10_000 ** (-i / pairs)
        out[first] = x[first] * math.cos(angle) - x[second] * math.sin(angle)
        out[second] = x[second] * math.cos(angle) + x[first] * math.sin(angle)
    return out


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_oracle_is_the_formula(layout):
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([0, 1, 7, 1000, -3])
    got = rotate.exact(x, positions, layout)
    for row, position in enumerate(positions.tolist()):
        assert turned(x[1, 2, row].tolist(), position, layout) == pytest.approx(got[1, 2, row].tolist(), abs=1e-12)


def test_every_section_has_its_unit_and_both_layouts(result):
    sections = {section["title"]: section for section in result["sections"]}
    assert [
        "head-major, forward",
        "head-major, forward + backward",
        "token-major, forward",
        "token-major, forward + backward",
        "one token of 2 sequences, forward",
        "tables for 64 positions",
    ] == list(sections)
    units = ["copy", "two copies", "copy", "two copies", "multiply in place", "angles in float32"]
    assert units == [section["unit"] for section in sections.values()]
    ours = {f"ropewalk{place}, {layout}" for place in ("", " in place") for layout in ("half", "interleaved")}
    for section in result["sections"]:
        rows = {row["name"]: row for row in section["rows"]}
        assert 1.0 == rows[section["unit"]]["time"]["ratio"]
        assert {} == section["refused"]
        assert rows.keys() >= ({"ropewalk"} if "tables" in section["title"] else ours)
        for row in section["rows"]:
            assert 0 < row["time"]["low"] <= row["time"]["ratio"] <= row["time"]["high"]


def test_each_row_names_the_kernel_that_ran(result):
    paths = {row["path"] for row in result["sections"][0]["rows"] if row["name"].startswith("ropewalk")}
    assert paths <= set(kernels.available())
    assert all(row["path"] is None for row in result["sections"][0]["rows"] if not row["name"].startswith("ropewalk"))


def test_in_place_holds_less_than_a_new_tensor(result):
    rows = {row["name"]: row["bytes"] for row in result["sections"][0]["rows"]}
    for layout in ("half", "interleaved"):
        assert result["copied_bytes"] <= rows[f"ropewalk, {layout}"] - rows[f"ropewalk in place, {layout}"]
    assert result["copied_bytes"] == rows["copy into new tensors"]
    assert 0 == rows["copy"]
    assert rows["multiply in place"] < 64  # the factor as a tensor


def test_errors_are_those_of_one_rounding(result):
    # the largest inputs are below 8: half a unit in the last place, or float32's products
    limit = 2**-6 if result["settings"]["dtype"] == "bfloat16" else 1e-6
    for section in result["sections"][:5]:
        for row in section["rows"]:
            if row["name"].startswith("ropewalk"):
                assert 0 < row["error"] <= limit
    tables = {row["name"]: row["error"] for row in result["sections"][5]["rows"]}
    assert tables["ropewalk"] < 5e-7


def pair(change):
    return lambda q, k: (change(q), change(k))


POSITIONS = torch.arange(12)
TURNS = {layout: rotate._ours(TINY, POSITIONS, torch.ones(1))[f"ropewalk, {layout}"].run for layout in ("half",)}


@pytest.mark.parametrize(
    ("reason", "run"),
    [
        ("is off by", lambda q, k: (q, k)),
        ("is off by", lambda q, k: tuple(x * 1.001 for x in TURNS["half"](q, k))),
        ("is off by nan", lambda q, k: tuple(x * math.nan for x in TURNS["half"](q, k))),
        ("is off by", lambda q, k: tuple(x.detach() + 0 * y for x, y in zip(TURNS["half"](q, k), (q, k), strict=True))),
        ("float64 comes out where float32 went in", lambda q, k: tuple(x.double() for x in TURNS["half"](q, k))),
        ("raises RuntimeError", lambda q, k: (_ for _ in ()).throw(RuntimeError("no kernel"))),
    ],
    ids=["unturned", "values", "nan", "gradients", "dtype", "raises"],
)
def test_a_wrong_turn_gets_no_figure(monkeypatch, reason, run):
    right = Way(TURNS["half"], "half", OURS)
    monkeypatch.setattr(rotate, "ways", lambda *_: {"right": right, "wrong": Way(run, "half", OTHERS)})
    field = rotate.Field(TINY, TINY.draw("head-major", 1, 12), POSITIONS)
    assert {"wrong"} == set(field.refused)
    assert reason in field.refused["wrong"]
    section = field.measure("title", {"multiply in place": field.scale}, False, 0.0)
    assert ["multiply in place", "right"] == [row["name"] for row in section["rows"]]
    assert "wrong: no figures, it " in page.text({"sections": [section], **timing.setting(TINY)})


def test_orders_differ_in_memory_and_not_in_numbers():
    by_head, by_token = (TINY.draw(order, 1, 12) for order in rotate.ORDERS)
    assert all(torch.equal(a, b) for a, b in zip(by_head, by_token, strict=True))
    assert by_head[0].is_contiguous()
    assert by_token[0].transpose(1, 2).is_contiguous()


def test_gradient_of_a_turn_in_place_reaches_what_was_turned():
    ways = rotate._ours(TINY, POSITIONS, torch.ones(1))
    q, k, grad_q, grad_k = TINY.draw("token-major", 1, 12)
    wanted = rotate.exact(grad_q, -POSITIONS, "interleaved")
    tensors = [q, k, grad_q, grad_k]
    outs = rotate.training(ways["ropewalk in place, interleaved"].run, tensors, rotate.leaves_of(tensors))
    torch.testing.assert_close(outs[2].double(), wanted, atol=1e-6, rtol=1e-6)
    assert outs[0].data_ptr() == q.data_ptr()


def test_error_of_tables_is_that_of_their_worst_entry():
    positions = torch.arange(100)
    angles = positions.double()[:, None] * torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    assert rotate.table_error((cos, sin), positions, 4, step=7) < 1e-13
    sin[99, 3] += 1e-3
    assert 1e-3 == pytest.approx(rotate.table_error((cos, sin), positions, 4, step=7))


def test_result_is_plain_json_and_text_has_every_row(result):
    assert result == json.loads(json.dumps(result))
    text = page.text(result)
    for section in result["sections"]:
        for row in section["rows"]:
            assert f"{row['time']['ratio']:.2f} [{row['time']['low']:.2f}, {row['time']['high']:.2f}]" in text


@pytest.mark.parametrize("name", peers.ROTATIONS)
@pytest.mark.parametrize("first", [0, 1000])
def test_other_libraries_turn_as_we_do(name, first):
    rotation = peers.ROTATIONS[name]
    if peers.missing([rotation.needs]):
        pytest.skip(f"{rotation.needs} is not installed")
    plan = RotatePlan(**SIZES)
    positions = torch.arange(first, first + 12)
    run = rotation.prepare(positions, 8, torch.float32)
    for order in rotate.ORDERS:
        # float32 angles at 1011 are off by half of 2^-14
        assert rotate.error(Way(run, rotation.layout, OTHERS), plan.draw(order, 1, 12), positions) < 4e-4


def test_libraries_that_are_not_installed_are_named_and_have_no_row(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(peers, "_import", missing)
    result = rotate.run(RotatePlan(**SIZES, budget_seconds=0.1))
    needed = {name for name, rotation in peers.ROTATIONS.items() if rotation.needs}
    assert dict.fromkeys(needed, "not installed") == result["absent"]
    rows = {row["name"] for section in result["sections"] for row in section["rows"]}
    assert needed.isdisjoint(rows)
    assert "LLaMA's complex view" in rows
    assert "transformers: absent, not installed" in page.text(result)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"head_dim": 1}, "head_dim must be at least 2, got 1"),
        ({"budget_seconds": -1.0}, "budget_seconds must be positive, got -1.0"),
        ({"dtype": "int8"}, "dtype must be one of bfloat16, float16, float32, float64, got int8"),
        ({"device": "tpu"}, "device must be cpu, cuda or cuda:N, got 'tpu'"),
        ({"head_dim": 7}, "head_dim must be even, got 7"),
    ],
)
def test_errors_say_must_and_got(options, message):
    with pytest.raises(ValueError, match=message):
        RotatePlan(**options)

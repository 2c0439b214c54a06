"""The page says what its results say, and every command of the suite reaches its measurement."""

import json
import pathlib

import pytest

from ropewalk.bench import page, suite, timing, variants
from ropewalk.bench.decode import DecodePlan
from ropewalk.bench.rotate import RotatePlan

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"
RESULTS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def test_page_is_what_its_results_give():
    assert page.page(FOLDER) == (FOLDER / "README.md").read_text()


def test_results_are_those_of_the_suite_and_name_their_machine():
    assert set(RESULTS) == set(suite.ALL)
    for name, result in RESULTS.items():
        assert result["command"].startswith("ropewalk bench " + result["what"])
        assert " ".join(suite.ALL[name][1:]) in result["command"]
        assert "torch" in result["machine"]


@pytest.mark.parametrize("name", RESULTS)
def test_every_row_stands_on_the_page(name):
    part = page.page(FOLDER).partition(f"## {name}\n")[2].partition("\n## ")[0]
    result = RESULTS[name]
    if "sections" in result:
        ratios = [row["time"] for section in result["sections"] for row in section["rows"]]
        notes = [reason for section in result["sections"] for reason in section["refused"].values()]
    elif result["what"] == "study":
        ratios, notes = [{**row, "ratio": row["speed"]} for row in result["rows"]], []
    else:
        ratios = [row[mode] for row in result["rows"] for mode in result["settings"]["modes"]]
        notes = [*result["refused"].values(), *result["skipped"].values()]
    for ratio in ratios:
        assert f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]" in part
    assert [] == [note for note in [*notes, *result.get("absent", {}).values()] if note not in part]


def test_rows_of_a_table_are_equally_long():
    for line in page.page(FOLDER).splitlines():
        if line.startswith("|---"):
            width = line.count("|")
        elif line.startswith("|"):
            head = line
            assert line.count("|") > 2
    assert width == head.count("|")


TEXTS = [("0.50 µs", 5e-7), ("1.00 ms", 1e-3), ("999 µs", 9.99e-4), ("10.0 s", 10.0), ("0.00 µs", 0.0)]


@pytest.mark.parametrize(("expected", "seconds"), [*TEXTS, ("-12.0 µs", -1.2e-5)])
def test_times_have_three_digits(expected, seconds):
    assert expected == page.time_of(seconds)


def test_options_become_the_plan_of_their_measurement():
    assert RotatePlan(seq_len=64, num_kv_heads=2) == suite.plan_for("rotate", {"lengths": (64,), "num_kv_heads": (2,)})
    assert DecodePlan(cached=64, num_kv_heads=(4, 2)) == suite.plan_for(
        "decode", {"lengths": (64,), "num_kv_heads": (4, 2), "dtype": None}
    )
    assert variants.Plan(("alibi", "t5-like"), causal=False) == suite.plan_for("attention", {"causal": False})
    assert variants.Plan(("nope",), causal=False) == suite.plan_for(
        "attention", {"causal": False, "encodings": ("nope",)}
    )
    assert ("bfloat16", "cpu") == (
        (planned := suite.plan_for("study", {"dtype": "bfloat16"})).dtype,
        planned.device,
    )


@pytest.mark.parametrize(
    ("what", "given", "message"),
    [
        ("walk", {}, "what must be attention, rotate, decode, study, all or page, got 'walk'"),
        ("rotate", {"lengths": (1, 2)}, "lengths must be one number, got 1, 2"),
        ("rotate", {"causal": False}, "options of bench rotate must be among .*, got causal"),
        ("decode", {"compiled": True}, "options of bench decode must be among .*, got compiled"),
        ("attention", {"compiled": True}, "options of bench attention must be among .*, got compiled"),
        ("study", {"lengths": (1,)}, "options of bench study must be among device, dtype, encodings, got lengths"),
    ],
)
def test_an_option_that_a_measurement_does_not_know_is_refused(what, given, message):
    with pytest.raises(ValueError, match=message):
        suite.plan_for(what, given)


def test_every_command_of_the_suite_has_a_plan(monkeypatch):
    from typer.testing import CliRunner

    from ropewalk import cli

    plans = []
    monkeypatch.setattr(suite, "prepare", lambda *_: None)
    monkeypatch.setattr(suite, "measure", lambda what, plan, tell: plans.append(plan) or {})
    for options in suite.ALL.values():
        assert 0 == CliRunner().invoke(cli.app, ["bench", *options, "--json"]).exit_code
    assert len(suite.ALL) == len(plans)
    assert (65536,) == plans[list(suite.ALL).index("attention-65536")].lengths
    assert () == plans[list(suite.ALL).index("attention-65536")].backends


TINY = ("decode", "--lengths", "16", "--num-heads", "2", "--num-kv-heads", "2", "--head-dim", "8")


@pytest.mark.slow
def test_a_folder_keeps_what_failed_and_gets_what_was_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(suite, "ALL", {"right": TINY, "wrong": (*TINY, "--batch-size", "0")})
    earlier = {"command": "ropewalk bench earlier", **suite.measure("rotate", _tiny_rotation(), lambda _: None)}
    (tmp_path / "wrong.json").write_text(json.dumps(earlier))
    told = []
    failed = suite.measure_all(str(tmp_path), {"budget_seconds": 0.1}, None, told.append)
    assert {"wrong": "error: batch_size must be at least 1, got 0"} == failed
    assert earlier == json.loads((tmp_path / "wrong.json").read_text())
    right = json.loads((tmp_path / "right.json").read_text())
    assert f"ropewalk bench {' '.join(TINY)} --seconds 0.1" == right["command"]
    assert [
        f"right: {right['command']}",
        f"wrong: ropewalk bench {' '.join(TINY)} --batch-size 0 --seconds 0.1",
    ] == told
    written = (tmp_path / "README.md").read_text()
    assert f"`{right['command']}`" in written
    assert "`ropewalk bench earlier`" in written


def _tiny_rotation():
    return RotatePlan(1, 2, 2, 4, 4, token_batch=1, table_positions=8, peers=False, budget_seconds=0.1)


def test_names_that_the_suite_does_not_know_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"only must be among rotate-float32, .*, got rotate-int8"):
        suite.measure_all(str(tmp_path), {}, ("rotate-int8",), lambda _: None)
    with pytest.raises(ValueError, match=r"out must be a folder with results, got .*\nhint: ropewalk bench all"):
        suite.write_page(str(tmp_path), {})
    with pytest.raises(ValueError, match="options of bench all must be among budget_seconds, got dtype"):
        suite.measure_all(str(tmp_path), {"dtype": "float32"}, None, lambda _: None)


def test_machine_line_names_processor_threads_versions_and_rotation():
    line = timing.machine()
    for part in (timing.processor(), "1 thread,", "torch 2.", "ropewalk 0.", "rotation: " + timing.running_kernel()):
        assert part in line

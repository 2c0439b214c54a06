"""The figures of the documentation are what their commands draw, and the words beside them are true."""

import json
import math
import pathlib
import re
import shlex
import sys

import matplotlib
import pytest

from ropewalk import cli

ROOT = pathlib.Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
PAGE = (FOLDER / "README.md").read_text()
COMMANDS = {shlex.split(line)[-1]: line for line in re.findall(r"^ropewalk plot .*$", PAGE, re.MULTILINE)}
# Drawn from random numbers and gradients, whose last digits depend on the processor
ROUNDED = {"attention", "attention-scores", "receptive"}
PINNED = re.search(r"^matplotlib==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


def call(monkeypatch, *arguments):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [*arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert 0 == ended.value.code


def numbers(monkeypatch, capsys, name):
    call(monkeypatch, *shlex.split(COMMANDS[f"docs/figures/{name}.svg"])[:-2], "--json")
    return json.loads(capsys.readouterr().out)


def test_every_figure_has_its_command_and_its_words():
    files = {f"docs/figures/{path.name}" for path in FOLDER.glob("*.svg")}
    assert files == set(COMMANDS)
    for path in files:
        assert re.search(rf"!\[[^\]]{{20,}}\]\({pathlib.Path(path).name}\)", PAGE)


@pytest.mark.parametrize("path", [pytest.param(p, marks=pytest.mark.slow) if "receptive" in p else p for p in COMMANDS])
def test_figures_are_what_their_commands_draw(path, monkeypatch, tmp_path):
    name = pathlib.Path(path).stem
    *arguments, option, _ = shlex.split(COMMANDS[path])
    assert "--out" == option
    call(monkeypatch, *arguments, "--out", str(tmp_path / "new.svg"))
    drawn, kept = (tmp_path / "new.svg").read_text(), (ROOT / path).read_text()
    if name in ROUNDED or matplotlib.__version__ != PINNED:
        assert drawn.count("<g id") == kept.count("<g id")
    else:
        assert kept == drawn


def test_words_about_wavelengths(monkeypatch, capsys):
    found = numbers(monkeypatch, capsys, "wavelengths")["spectra"][0]
    assert (6, 54_000) == (int(found["wavelengths"][0]), round(found["wavelengths"][-1], -3))
    assert (46, 64) == (found["complete_a_turn"]["train_len"], found["pairs"])
    stretched = numbers(monkeypatch, capsys, "wavelengths-yarn")["spectra"]
    plain, yarn = (row["wavelengths"] for row in stretched)
    assert math.isclose(1, yarn[0] / plain[0])
    assert math.isclose(8, yarn[-1] / plain[-1])


def test_words_about_spectra(monkeypatch, capsys):
    rows = {row["method"]: row["ratio"] for row in numbers(monkeypatch, capsys, "spectra")["methods"]}
    assert {0.125} == set(rows["linear"])
    assert min(rows["dynamic_ntk"]) < min(r for name, row in rows.items() if name != "dynamic_ntk" for r in row)


def test_words_about_decay(monkeypatch, capsys):
    ends = [row["above_0_up_to"] for row in numbers(monkeypatch, capsys, "decay")["bases"]]
    assert sorted(ends) == ends
    assert 3 == len(set(ends))


def test_words_about_attention(monkeypatch, capsys):
    panels = numbers(monkeypatch, capsys, "attention")["panels"]
    back = {(panel["encoding"], panel["head"]): panel["mean_distance"] for panel in panels}
    assert 1.6 == round(back["alibi", 0], 1)
    even = 63 / 4  # half of a query's past, on average over queries 0 ... 63
    assert even == pytest.approx(back["rotary", 0], rel=0.1)
    assert even == pytest.approx(back["alibi", 7], rel=0.1)


@pytest.mark.slow
def test_words_about_gradients(monkeypatch, capsys):
    rows = {row["encoding"]: row["norms"] for row in numbers(monkeypatch, capsys, "receptive")["encodings"]}
    far, near = slice(200, 256), slice(1, 57)
    for name, norms in rows.items():
        ratio = sum(norms[far]) / sum(norms[near])
        assert (0.8 < ratio < 1.25) if name in ("nope", "rotary") else ratio < 0.3

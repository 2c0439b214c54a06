"""`ropewalk plot`: files that are whole and the same each time, errors that leave earlier files alone."""

import json
import os
import pathlib
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import typer
from matplotlib import pyplot

import ropewalk as rw
from ropewalk import cli
from ropewalk.cli.plot import plot
from ropewalk.plots import output, save, style
from ropewalk.study import files
from test_plots import ROWS

QUICK = {
    "angles": ["--positions", "0,10"],
    "wavelengths": ["--train-length", "64"],
    "decay": ["--max-distance", "50"],
    "bias": ["--length", "8"],
    "attention": ["--length", "8", "--num-heads", "2", "--head-dim", "4"],
    "lengths": ["results.json"],
    "receptive": ["--length", "8", "--num-layers", "1", "--samples", "1"],
    "spectra": ["--stretch", "4"],
}


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Runs `ropewalk plot` in a scratch folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    (tmp_path / "results.json").write_text(json.dumps(ROWS))

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ropewalk", "plot", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


def test_every_kind_has_a_command_and_is_tried_here():
    commands = typer.main.get_command(plot).commands
    assert set(output.KINDS) == set(commands) == set(QUICK)


@pytest.mark.parametrize("kind", QUICK)
def test_every_commands_help_has_an_example(kind):
    command = typer.main.get_command(plot).commands[kind]
    assert f"Example: ropewalk plot {kind} " in command.help


@pytest.mark.parametrize("kind", QUICK)
def test_svg_and_png_are_the_same_bytes_each_time(run, kind, monkeypatch):
    for suffix in ("svg", "png"):
        for name in ("one", "two"):
            assert (0, "", "") == run(kind, *QUICK[kind], "--out", f"{name}.{suffix}")
            monkeypatch.setitem(pyplot.rcParams, "xtick.major.size", 12.0)  # nor do a user's settings change them
        first, second = (pathlib.Path(f"{name}.{suffix}").read_bytes() for name in ("one", "two"))
        assert first == second
        assert b"<svg" in first if suffix == "svg" else first.startswith(b"\x89PNG")
    assert [] == [path.name for path in pathlib.Path().iterdir() if path.suffix == ".tmp"]


@pytest.mark.slow
def test_svg_is_the_same_in_another_process_whatever_its_hash_seed(run):
    code = "import sys; from ropewalk.cli import main; sys.argv = sys.argv[1:]; main()"
    command = ["ropewalk", "plot", "bias", "--length", "8", "--out"]
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "MPLBACKEND": "svg"}
        subprocess.run([sys.executable, "-c", code, *command, f"{seed}.svg"], check=True, env=environment)
    assert pathlib.Path("1.svg").read_bytes() == pathlib.Path("2.svg").read_bytes()


def test_svg_says_what_it_is_without_a_date(run):
    run("angles", "--out", "angles.svg")
    text = pathlib.Path("angles.svg").read_text()
    ElementTree.fromstring(text)
    assert "Rotation angles" in text
    assert "<dc:date>" not in text


@pytest.mark.parametrize("kind", QUICK)
def test_json_holds_the_numbers_with_their_unit(run, kind):
    code, out, err = run(kind, *QUICK[kind], "--json")
    assert (0, "") == (code, err)
    assert "unit" in json.loads(out)
    assert ["results.json"] == [path.name for path in pathlib.Path().iterdir()]


def test_json_numbers_are_those_of_the_tutorial(run):
    _, out, _ = run("angles", "--json")
    found = json.loads(out)
    assert [0, 10, 100, 200, 500] == found["positions"]
    assert [[p * 10_000 ** (-2 * i / 64) for i in range(32)] for p in found["positions"]] == [
        pytest.approx(row, rel=1e-12) for row in found["angles"]
    ]


def test_config_marks_the_lengths_that_it_names(run, tmp_path):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
              "max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0,
              "original_max_position_embeddings": 1024}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, out, _ = run("wavelengths", "--config", tmp_path, "--json")
    found = json.loads(out)
    assert (1024, 4096) == (found["train_len"], found["eval_len"])
    assert list(rw.spectra.linear(16, stretch=4).wavelengths) == found["spectra"][0]["wavelengths"]


REFUSED = {
    "suffix": (["angles", "--out", "angles.pdf"], "out must be a file that ends in .svg or .png, got 'angles.pdf'"),
    "folder": (["angles", "--out", "missing/a.svg"], "out must be in a folder that exists"),
    "nothing wanted": (["angles"], "--out must be given, got None\nhint: --out angles.svg"),
    "encoding": (["angles", "--encoding", "foo", "--out", "old.svg"], "encoding must be one of alibi"),
    "no turns": (["angles", "--encoding", "alibi", "--out", "old.svg"], "encoding must be one that turns channels"),
    "position": (["angles", "--positions", str(2**63), "--out", "old.svg"], "positions must be below 2^63"),
    "no integers": (["angles", "--positions", "1,a", "--out", "old.svg"], "--positions must be integers"),
    "no config": (["wavelengths", "--config", "none", "--out", "old.svg"], "config must be a folder"),
    "config and base": (["wavelengths", "--config", "c", "--base", "5", "--out", "old.svg"], "--base must be absent"),
    "layer alone": (["wavelengths", "--layer", "1", "--out", "old.svg"], "--layer must be absent"),
    "no stretch": (["wavelengths", "--methods", "yarn", "--out", "old.svg"], "--stretch must be given for a method"),
    "stretch of 0": (["angles", "--method", "ntk", "--stretch", "0", "--out", "old.svg"], "stretch must be at least 1"),
    "base of 0": (["angles", "--base", "0", "--out", "old.svg"], "base must be finite and positive"),
    "no channels": (["angles", "--head-dim", "0", "--out", "old.svg"], "head_dim must be at least 2, got 0"),
    "encoding and method": (
        ["angles", "--encoding", "rotary", "--method", "ntk", "--stretch", "2", "--out", "old.svg"],
        "--method must be absent with --encoding",
    ),
    "encoding and methods": (
        ["wavelengths", "--encoding", "rotary", "--methods", "plain", "--out", "old.svg"],
        "--methods must be absent with --encoding, got 'plain'",
    ),
    "stretch alone": (["angles", "--stretch", "2", "--out", "old.svg"], "a method must be given with --stretch"),
    "no method": (["spectra", "--methods", "longrope", "--out", "old.svg"], "method must be one of plain, linear"),
    "stretch": (["spectra", "--stretch", "0.5", "--out", "old.svg"], "stretch must be at least 1"),
    "base": (["decay", "--bases", "0", "--out", "old.svg"], "base must be finite and positive"),
    "no bias": (["bias", "--encoding", "rotary", "--out", "old.svg"], "encoding must be one that adds a bias"),
    "head": (["bias", "--heads", "8", "--out", "old.svg"], r"heads must be below num_heads (8), got 8"),
    "of": (["attention", "--of", "scars", "--out", "old.svg"], "of must be 'weights' or 'scores', got 'scars'"),
    "no study": (["attention", "--study", ".", "--out", "old.svg"], "study must be a study's folder"),
    "no results": (["lengths", "none", "--out", "old.svg"], "results must be a study's results.json"),
    "protocol": (
        ["lengths", "results.json", "--protocol", "x", "--out", "old.svg"],
        "protocol must be one of those in",
    ),
    "length": (["receptive", "--length", "1", "--out", "old.svg"], "seq_len must be at least 2, got 1"),
    "too large": (["attention", "--length", "1025", "--out", "old.svg"], "seq_len must be at most 1024 in a map"),
    "show": (["angles", "--show", "--out", "old.svg"], "--show must be used where a display exists"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_drawn_is_refused_by_name_and_the_earlier_file_is_kept(run, case):
    pathlib.Path("old.svg").write_text("earlier")
    arguments, said = REFUSED[case]
    code, out, err = run(*arguments)
    assert (2, "") == (code, out)
    assert err.startswith(f"error: {said}")
    assert "earlier" == pathlib.Path("old.svg").read_text()
    assert {"old.svg", "results.json"} == {path.name for path in pathlib.Path().iterdir()}


def test_what_takes_long_says_so_unless_json_is_wanted(run, monkeypatch):
    monkeypatch.setattr(output, "PATIENCE", 0.0)
    code, out, err = run("receptive", *QUICK["receptive"], "--out", "a.svg")
    assert (0, "") == (code, out)
    assert ["nope, 1 of 4", "rotary+alibi, 4 of 4"] == [
        line.removeprefix("receptive: ") for line in err.splitlines() if "1 of" in line or "4 of" in line
    ]
    assert "" == run("receptive", *QUICK["receptive"], "--json")[2]


def test_negative_positions_are_taken(run):
    _, out, _ = run("angles", "--positions", "-5", "--json")
    assert [-5] == json.loads(out)["positions"]


def test_dynamic_config_asks_for_the_length(run, tmp_path):
    config = {"model_type": "llama", "head_dim": 16, "num_hidden_layers": 1, "max_position_embeddings": 64,
              "rope_scaling": {"type": "dynamic", "factor": 2.0}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run("angles", "--config", tmp_path, "--json")
    assert (2, True) == (code, err.startswith("error: --eval-length must be given"))
    assert 0 == run("angles", "--config", tmp_path, "--eval-length", 128, "--json")[0]


def test_an_interrupted_write_keeps_the_earlier_file(run, monkeypatch):
    pathlib.Path("old.svg").write_text("earlier")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    code, _, err = run("angles", "--out", "old.svg")
    assert (2, "error: out must be a file that can be written, got 'old.svg' (No space left on device)\n") == (
        code,
        err,
    )
    assert "earlier" == pathlib.Path("old.svg").read_text()


def test_save_takes_axes_or_figures_of_anybody(tmp_path):
    axes = pyplot.figure().add_subplot()
    axes.plot([1, 2])
    assert save(axes, tmp_path / "a.png").read_bytes() == save(axes.figure, tmp_path / "b.png").read_bytes()
    pyplot.close("all")
    with pytest.raises(ValueError, match=r"out must be a file that ends in .svg or .png, got"):
        save(axes, tmp_path / "a.jpg")


def test_show_draws_into_a_window_and_waits(run, monkeypatch):
    shown = []
    monkeypatch.setattr(output, "check_display", lambda: None)
    monkeypatch.setattr(pyplot, "show", lambda: shown.append(pyplot.gcf()))
    assert (0, "", "") == run("angles", "--show")
    [figure] = shown
    assert ["position 0", "position 10"] == [line.get_label() for line in figure.axes[0].get_lines()][:2]
    pyplot.close("all")


def test_show_names_a_backend_that_opens_no_window(run, monkeypatch):
    monkeypatch.setenv("DISPLAY", ":77")
    pyplot.switch_backend("agg")
    code, _, err = run("angles", "--show")
    assert (2, True) == (code, err.startswith("error: --show must be used where matplotlib can open windows"))
    assert "hint: --out figure.png writes a file instead" in err


def test_without_matplotlib_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import ropewalk as rw\n"
        "rw.plots\n"
        "try:\n    rw.plots.angles\n"
        "except ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "matplotlib must be installed to draw figures, got no module\nhint: pip install 'ropewalk[plot]'" == (
        done.stdout.strip()
    )


def test_python_needs_nothing_but_matplotlib():
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'safetensors', 'datasets', 'tokenizers', 'transformers'):\n"
        "    sys.modules[name] = None\n"
        "import ropewalk as rw\n"
        "print([getattr(rw.plots, name).__name__ for name in rw.plots.__all__] == rw.plots.__all__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "True" == done.stdout.strip()


def test_help_imports_neither_torch_nor_matplotlib():
    code = (
        "import sys; sys.argv = ['ropewalk', 'plot', 'angles', '--help']\n"
        "from ropewalk.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print({'torch', 'matplotlib', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "set()" == done.stdout.splitlines()[-1]


def test_legend_takes_fewer_columns_where_names_are_long():
    assert style._width(["a" * 30] * 4, 1) < style._width(["a" * 30] * 4, 2)
    plan = output.KINDS["angles"]
    with style.looks():
        figure = style.page(style.SIZE)
        plan.fill(plan.numbers([10**15, 10**16, 10**17, 10**18]), figure)
        figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 < box.x1 <= figure.bbox.x1

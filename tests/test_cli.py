"""The command line: what it says, where it says it, and with which exit code."""

import json
import subprocess
import sys

import pytest
import typer

import ropewalk
from ropewalk import bench, cli
from ropewalk.study import run
from study_fixtures import write_text


@pytest.fixture
def ropewalk_command(monkeypatch, capsys, tmp_path):
    """Runs a command line in a scratch folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["ropewalk", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    return call


@pytest.fixture
def text(tmp_path):
    return write_text(tmp_path / "text")


@pytest.fixture
def no_run(monkeypatch):
    """`run.run` replaced by a record of how it was called."""
    calls = []

    def pretend(settings, out, **options):
        calls.append((settings, out, options))
        return {"out": out, "cells": 2, "failed": {}, "results": [], "seconds": 1.0, "report": None}

    monkeypatch.setattr(run, "run", pretend)
    return calls


def test_help_and_parsing_need_neither_torch_nor_any_other_heavy_library():
    code = (
        "import sys\n"
        "try:\n    from ropewalk.__main__ import main; main()\n"
        "except SystemExit as ended:\n    assert not ended.code, ended.code\n"
        "heavy = {'torch', 'matplotlib', 'numpy', 'safetensors', 'datasets'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for arguments, words in ((["--help"], "study"), (["study", "--help"], "--eval-lengths"), (["--version"], "")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
        assert "" == done.stderr
        assert words in done.stdout


def test_version_is_the_packages(ropewalk_command):
    assert (0, ropewalk.__version__ + "\n", "") == ropewalk_command("--version")


def test_every_option_reaches_the_settings(ropewalk_command, no_run):
    code, _, _ = ropewalk_command(
        "study",
        "--preset",
        "smoke",
        "--data",
        "book.txt",
        "--tokenizer",
        "t.json",
        "--encodings",
        "rotary,a:B,nope+alibi",
        "--train-length",
        "64",
        "--eval-lengths",
        "64,128",
        "--seeds",
        "2",
        "--steps",
        "50",
        "--batch-size",
        "3",
        "--documents",
        "5",
        "--jobs",
        "1",
        "--device",
        "cuda",
        "--dtype",
        "bfloat16",
        "--out",
        "here",
        "--json",
    )
    [(settings, out, options)] = no_run
    assert 0 == code
    assert {
        "encodings": ("rotary", "a:B", "nope+alibi"),
        "seeds": (0, 1),
        "data": "book.txt",
        "tokenizer": "t.json",
        "train_len": 64,
        "eval_lens": (64, 128),
        "steps": 50,
        "batch_size": 3,
        "documents": 5,
        "device": "cuda",
        "dtype": "bfloat16",
        "model_dim": 32,
    }.items() <= vars(settings).items()
    assert "here" == out
    assert (1, False, True) == (options["jobs"], options["resume"], options["quiet"])
    assert options["command"].startswith("ropewalk study --preset smoke --data book.txt")


def test_study_needs_no_option(ropewalk_command, no_run):
    code, _, _ = ropewalk_command("study")
    [(settings, out, options)] = no_run
    assert (0, "runs/study-quick", None) == (code, out, options["jobs"])
    assert ("rotary", "alibi", "rotary+alibi") == settings.encodings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "slow"], "error: preset must be one of smoke, quick, thorough, got 'slow'\n"),
        (["--eval-lengths", "1,two"], "error: --eval-lengths must be integers separated by commas, got '1,two'\n"),
        (["--steps", "0"], "error: steps must be an integer of at least 1, got 0\n"),
        (["--seeds", "0"], "error: seeds must be at least one value and all different, got []\n"),
        (
            ["--data", "absent.txt"],
            "error: data must be stdlib, hf:NAME or an existing file or folder, got 'absent.txt'\n",
        ),
        (["--resume"], "error: out must be the folder of a study to resume, got runs/study-quick\n"),
        (["--jobs", "0", "--preset", "smoke"], "error: jobs must be at least 1, got 0\n"),
    ],
)
def test_mistake_is_one_line_on_stderr_and_exit_code_2(ropewalk_command, tmp_path, arguments, message):
    assert (2, "", message) == ropewalk_command("study", *arguments)
    assert not list(tmp_path.iterdir())


def test_wrong_encoding_and_option_are_refused(ropewalk_command):
    code, out, err = ropewalk_command("study", "--preset", "smoke", "--encodings", "spiral")
    assert (2, "") == (code, out)
    assert err.startswith("error: encoding must be one of")
    assert 2 == ropewalk_command("study", "--no-such-option")[0]
    assert 2 == ropewalk_command("no-such-command")[0]


def test_unwritable_folder_is_one_line(ropewalk_command, tmp_path, text):
    (tmp_path / "file").write_text("")
    code, out, err = ropewalk_command(
        "study",
        "--preset",
        "smoke",
        "--data",
        text,
        "--train-length",
        "16",
        "--eval-lengths",
        "16,32",
        "--documents",
        "3",
        "--out",
        "file/out",
    )
    assert (2, "") == (code, out)
    assert "error: out must be a folder that can be written, got file/out (Not a directory)\n" == err


def test_text_too_short_is_refused_with_what_would_fit(ropewalk_command, text):
    code, _, err = ropewalk_command(
        "study",
        "--preset",
        "smoke",
        "--data",
        text,
        "--train-length",
        "16",
        "--eval-lengths",
        "16,512",
        "--documents",
        "3",
    )
    assert 2 == code
    assert (
        "error: eval_lens must be at most 128 for this text (2000 tokens, 3 documents held out), got 512\n"
        "hint: --eval-lengths 16,128\n"
    ) == err


def test_dry_run_prints_the_plan_and_writes_nothing(ropewalk_command, tmp_path, text):
    asked = (
        "study",
        "--preset",
        "smoke",
        "--data",
        text,
        "--train-length",
        "16",
        "--eval-lengths",
        "16,64",
        "--documents",
        "3",
        "--steps",
        "20",
        "--dry-run",
    )
    before = set(tmp_path.iterdir())
    code, out, err = ropewalk_command(*asked)
    assert (0, "") == (code, err)
    assert "2 runs (2 encodings x 1 seeds)" in out
    assert "about " in out
    code, out, err = ropewalk_command(*asked, "--json")
    assert {"rotary", "alibi"} == json.loads(out)["parameters"].keys()
    assert before == set(tmp_path.iterdir())


def test_json_summary_is_all_that_stdout_gets(ropewalk_command, no_run):
    code, out, err = ropewalk_command("study", "--json")
    assert (0, "") == (code, err)
    assert {"out", "cells", "failed", "results", "seconds", "report"} == json.loads(out).keys()


def test_failed_run_is_told_in_a_line_with_exit_code_1(ropewalk_command, monkeypatch):
    ran = {
        "out": "here",
        "cells": 2,
        "failed": {"alibi-seed0": "ended by signal 9"},
        "results": [],
        "seconds": 65.0,
        "report": None,
    }
    monkeypatch.setattr(run, "run", lambda *_, **__: ran)
    assert (1, "1 of 2 runs in here, 1 min 05 s\n", "error: alibi-seed0: ended by signal 9\n") == ropewalk_command(
        "study"
    )


def test_command_line_without_its_libraries_names_the_extra():
    code = "import sys; sys.modules['typer'] = None; from ropewalk.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (1, "the command line needs typer\nhint: pip install 'ropewalk[study]'\n") == (done.returncode, done.stderr)


def test_bench_hands_its_options_to_the_measurement(ropewalk_command, monkeypatch):
    plans = []
    monkeypatch.setattr(bench, "run", lambda plan, progress: plans.append(plan) or {"rows": []})
    asked = (
        "--encodings",
        "alibi,nope",
        "--lengths",
        "64,128",
        "--num-heads",
        "2",
        "--head-dim",
        "16",
        "--seconds",
        "3",
    )
    assert (0, '{"rows": []}\n', "") == ropewalk_command("bench", *asked, "--json")
    expected = bench.Plan(("alibi", "nope"), (64, 128), num_heads=2, head_dim=16, budget_seconds=3.0)
    assert [expected] == plans
    code, out, err = ropewalk_command("bench", "--lengths", "1")
    assert (2, "") == (code, out)
    assert err.startswith("error: lengths must be")


def test_bench_prints_a_table_and_tells_progress_on_stderr(ropewalk_command):
    code, out, err = ropewalk_command("bench", "--encodings", "alibi", "--lengths", "32", "--seconds", "2")
    assert 0 == code
    assert out.startswith("Attention relative to attention without an encoding")
    assert "32" in err


def _commands(group, path=()):
    """Every command with its words, sub-commands too."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, (*path, name))
        yield " ".join((*path, name)), command


def test_every_commands_help_has_an_example_of_itself():
    commands = dict(_commands(typer.main.get_command(cli.app)))
    assert {"study", "bench", "plot", "plot bias", "explain", "advise", "check", "convert", "extend"} <= set(commands)
    assert [] == [name for name, command in commands.items() if f"Example: ropewalk {name}" not in (command.help or "")]

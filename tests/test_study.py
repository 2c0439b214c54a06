"""The study as a whole: side by side, killed, resumed, refused."""

import json
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import safetensors.torch
import torch

from ropewalk.study import data, files, plan, pool, progress, results, run, summary, train, worker
from study_fixtures import TINY, tiny, write_text

WAYS = ["training", "checkpoint", "weights", "evaluation", "line", "summary"]


def without_times(value):
    """The same JSON without what a clock decides."""
    if isinstance(value, dict):
        return {
            name: without_times(part)
            for name, part in value.items()
            if name not in ("seconds", "train_seconds", "evaluate_seconds", "tokens_per_second")
        }
    return [without_times(part) for part in value] if isinstance(value, list) else value


def record(folder: pathlib.Path) -> list:
    """All that a finished cell says, and its weights, exactly."""
    lines = [files.read_lines(folder / name) for name in ("train.jsonl", "evaluation.jsonl")]
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    return [
        without_times(lines),
        without_times(files.read_json(folder / "cell.json")),
        {name: tensor.tolist() for name, tensor in weights.items()},
    ]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def straight(home):
    """A tiny study run in this process without interruption: settings, corpus, folder."""
    settings, corpus = tiny(home / "text")
    out = home / "straight"
    for encoding in settings.encodings:
        worker.run_cell(settings, encoding, 0, corpus, out / "cells" / f"{encoding}-seed0", lambda **_: None)
    files.write_json(out / "study.json", run.describe(settings, corpus, "by hand"))
    return settings, corpus, out


@pytest.fixture(scope="module")
def killed(home):
    """Cells that were killed in each of the ways."""
    write_text(home / "text")
    script = pathlib.Path(__file__).with_name("killed_cells.py")
    done = subprocess.run([sys.executable, str(script), str(home), *WAYS], capture_output=True, text=True, check=True)
    return done.stdout.split("\n")


@pytest.mark.parametrize("way", WAYS)
def test_cell_killed_at_any_moment_ends_with_the_same_bits(straight, killed, home, way):
    settings, corpus, out = straight
    assert f"{way} {int(signal.SIGKILL)}" in killed
    assert not (home / way / "cell.json").exists()
    worker.run_cell(settings, "rotary", 0, corpus, home / way, lambda **_: None)
    assert record(out / "cells" / "rotary-seed0") == record(home / way)
    assert not (home / way / "checkpoint.pt").exists()


class Killer(progress.Quiet):
    """A display that kills one worker as soon as it evaluates."""

    def __init__(self, victim):
        self.victim, self.said = victim, []

    def update(self, cell, fields):
        self.said.append((cell, fields))
        if cell == self.victim and fields["phase"] == "evaluate":
            for process in multiprocessing.active_children():
                if process.name == cell:
                    os.kill(process.pid, signal.SIGKILL)


def test_killed_worker_is_told_in_a_line_the_others_finish_and_resume_completes(straight, home, monkeypatch):
    settings, _, whole = straight
    out = home / "broken"
    killer = Killer("rotary-seed0")
    monkeypatch.setattr(progress, "display", lambda quiet: killer)
    ran = run.run(settings, out, command="by hand", jobs=2)
    assert {"rotary-seed0": "ended by signal 9"} == ran["failed"]
    assert ("rotary-seed0", {"phase": "failed", "error": "ended by signal 9"}) in killer.said
    assert {"alibi"} == {row["encoding"] for row in ran["results"]}
    assert pathlib.Path(ran["report"]).stat().st_size > 10_000
    monkeypatch.undo()
    resumed = run.run(settings, out, resume=True, quiet=True)
    assert {} == resumed["failed"]
    assert results.rows(whole) == resumed["results"] == json.loads((out / "results.json").read_text())
    for encoding in settings.encodings:
        cell = pathlib.Path("cells", f"{encoding}-seed0")
        assert record(whole / cell) == record(out / cell)
    before = (out / "results.json").read_bytes()
    run.run(settings, out, resume=True, quiet=True)
    assert before == (out / "results.json").read_bytes()


def test_failing_worker_is_told_in_a_line_and_leaves_its_traceback(home):
    settings, corpus = tiny(home / "text", encodings=("alibi",), matrix_rate=1e30)
    out = home / "failing"
    (out / "cells").mkdir(parents=True)
    shown = Killer("nobody")
    failed = pool.run([("alibi", 0)], settings, corpus.fingerprint, out, 1, shown)
    assert {"alibi-seed0": "ValueError: loss must be finite, got nan at step 10"} == failed
    assert "Traceback" in (out / "cells" / "alibi-seed0" / "error.txt").read_text()


def test_worker_refuses_a_text_that_changed_since_the_start(home):
    settings, _ = tiny(home / "text")
    ours, theirs = multiprocessing.Pipe(duplex=False)
    threads = torch.get_num_threads()
    worker.main(theirs, settings, "alibi", 0, "another", str(home / "changed"))
    torch.set_num_threads(threads)
    error = f"ValueError: data must be unchanged since the study began, got another text in {settings.data}"
    assert {"phase": "failed", "error": error} == ours.recv()
    assert "traceback" == ours.recv()["phase"]
    ours.close()
    theirs.close()


def untouched(out):
    return {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_changed_settings_are_refused_by_name_and_results_stay(straight):
    settings, _, out = straight
    before = untouched(out)
    match = r"settings must be those of the study to resume, got steps: 40 -> 50, dtype: 'float32' -> 'bfloat16'\nhint"
    with pytest.raises(ValueError, match=match):
        run.run(settings.replace(steps=50, dtype="bfloat16"), out, resume=True, quiet=True)
    changed = untouched(out)
    assert before == {path: text for path, text in changed.items() if path.name != ".lock"}


def test_changed_text_or_torch_is_refused_by_name(straight, tmp_path):
    settings, corpus, out = straight
    study = files.read_json(out / "study.json")
    study["versions"]["torch"] = "1.0"
    study["corpus"]["fingerprint"] = "0123"
    files.write_json(tmp_path / "study.json", study)
    with pytest.raises(ValueError, match=f"got the text: 0123 -> {corpus.fingerprint}, torch: 1.0 -> 2"):
        run.check_same(tmp_path, settings, corpus)


def test_folder_that_is_not_empty_or_holds_no_study_is_refused(straight, tmp_path):
    settings, _, out = straight
    with pytest.raises(ValueError, match=r"out must be a new or empty folder, got .*\nhint: --resume continues"):
        run.run(settings, out, quiet=True)
    with pytest.raises(ValueError, match="out must be the folder of a study to resume, got"):
        run.run(settings, tmp_path / "new", resume=True, quiet=True)
    assert not (tmp_path / "new").exists()


def test_second_study_in_one_folder_is_refused(straight, tmp_path):
    second = files.lock(tmp_path, "study runs")
    with (
        files.lock(tmp_path, "study runs"),
        pytest.raises(ValueError, match="out must be a folder in which no other study runs, got"),
    ):
        second.__enter__()


@pytest.fixture
def never_trains(monkeypatch):
    def started(*_args, **_kwargs):
        pytest.fail("something was trained")

    monkeypatch.setattr(pool, "run", started)


def test_unwritable_folder_stops_before_training(straight, tmp_path, never_trains):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"out must be a folder that can be written, got .*out \(Not a directory\)"):
        run.run(straight[0], tmp_path / "file" / "out", quiet=True)


@pytest.mark.parametrize("full", ["fsync", "disk_usage"])
def test_full_disk_stops_before_training(straight, tmp_path, never_trains, monkeypatch, full):
    def no_space(*_):
        raise OSError(28, "No space left on device")

    if full == "fsync":
        monkeypatch.setattr(files.os, "fsync", no_space)
        match = r"out must be a folder that can be written, got .* \(No space left on device\)"
    else:
        monkeypatch.setattr(files.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
        match = r"out must be on a disk with \d+ MiB free, got 1 MiB at "
    with pytest.raises(OSError, match=match):
        run.run(straight[0], tmp_path / "out", quiet=True)
    assert not list((tmp_path / "out").iterdir())


def test_impossible_studies_are_refused_before_anything_is_written(straight, tmp_path, never_trains):
    settings = straight[0]
    out = tmp_path / "out"
    for changed, match in (
        ({"encodings": ("spiral",)}, "encoding must be one of .*, got 'spiral'"),
        ({"eval_lens": (16, 4096)}, "eval_lens must be at most 128 for this text"),
        ({"data": str(tmp_path / "none")}, "data must be stdlib, hf:NAME or an existing"),
    ):
        with pytest.raises(ValueError, match=match):
            run.run(settings.replace(**changed), out, quiet=True)
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        run.run(settings, out, jobs=0, quiet=True)
    assert not out.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="refused only where there is none")
def test_absent_cuda_device_is_refused(tmp_path):
    with pytest.raises(ValueError, match="device must be cpu where torch sees no CUDA device, got 'cuda'"):
        run.run(TINY.replace(device="cuda"), tmp_path / "out")


def test_dtype_is_decided_once_and_kept_on_resume(straight, monkeypatch):
    settings, _, out = straight
    monkeypatch.setattr(train, "faster_dtype", lambda _: "bfloat16")
    auto = settings.replace(dtype="auto")
    assert "bfloat16" == run.resolve(auto).dtype
    assert "float32" == run.resolve(auto, out).dtype
    assert settings == run.settings_for(out, resume=True, dtype="auto")
    assert settings.replace(seeds=(0, 1)) == run.settings_for(out, resume=True, seeds=(0, 1))


def test_plan_counts_and_estimates_without_writing(straight):
    settings, _, out = straight
    before = untouched(out)
    planned = plan.plan(settings.replace(encodings=("rotary", "learned"), seeds=(0, 1, 2)))
    assert (6, 40 * 2 * 16) == (planned["cells"], planned["train_tokens"])
    built = train.build(settings, "learned", 0, 256)
    assert sum(p.numel() for p in built.parameters()) == planned["parameters"]["learned"]
    assert 16 * 16 <= planned["parameters"]["learned"] - planned["parameters"]["rotary"]
    assert 0 < planned["estimated_minutes"] < 5
    text = summary.of_plan(planned)
    assert "6 runs (2 encodings x 3 seeds)" in text
    assert f"about {planned['estimated_minutes']} minutes" in text
    assert before == untouched(out)


def test_summary_shows_a_dash_where_there_is_no_answer():
    def row(encoding, seed, eval_len, perplexity):
        return {
            "protocol": "windows",
            "encoding": encoding,
            "seed": seed,
            "eval_len": eval_len,
            "perplexity": perplexity,
        }

    rows = [
        row("learned", 0, 16, 3.0),
        row("learned", 1, 16, 4.0),
        row("learned", 0, 32, None),
        row("learned", 1, 32, None),
        row("alibi", 0, 16, 2.0),
        row("alibi", 0, 32, 2.5),
    ]
    lines = [line.split() for line in summary.table(rows)]
    assert [["perplexity", "at", "16", "32"], ["learned", "3.500", "-"], ["alibi", "2.000", "2.500"]] == lines


def test_lines_of_a_display_without_a_terminal(capsys):
    with progress.display(quiet=False) as shown:
        for step in range(10, 210, 10):
            shown.update(
                "a-seed0",
                {
                    "phase": "train",
                    "step": step,
                    "steps": 200,
                    "loss": 2.5,
                    "tokens_per_second": 1234.5,
                    "elapsed": 1.0 * step,
                },
            )
        for eval_len in (16, 32):
            shown.update(
                "a-seed0", {"phase": "evaluate", "step": 0, "steps": 9, "protocol": "windows", "eval_len": eval_len}
            )
        shown.update("a-seed0", {"phase": "done"})
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert "" == out
    assert "a-seed0  train 20/200  2.500 nats/token  1,234 tokens/s  evaluates in 3 min 00 s" == lines[1]
    assert ["a-seed0  evaluate 1/9  windows 16", "a-seed0  done"] == lines[-2:]
    assert 11 + 2 == len(lines)


def test_live_display_shows_every_run(capsys):
    class Terminal:
        def __init__(self):
            self.text = ""

        def isatty(self):
            return True

        def write(self, text):
            self.text += text

        def flush(self):
            pass

    terminal = Terminal()
    with progress.display(quiet=False, stream=terminal) as shown:
        shown.say("2 runs")
        shown.update(
            "a-seed0",
            {"phase": "train", "step": 10, "steps": 20, "loss": 2.5, "tokens_per_second": 9.0, "elapsed": 5.0},
        )
        shown.update("b-seed0", {"phase": "failed", "error": "ended by signal 9"})
        shown.drawing.refresh()
    for words in ("2 runs", "a-seed0", "train 10/20", "2.500 nats/token", "evaluates in 5 s", "ended by signal 9"):
        assert words in terminal.text
    assert ("", "") == capsys.readouterr()


def test_quiet_display_says_nothing(capsys):
    with progress.display(quiet=True) as shown:
        shown.say("hello")
        shown.update("a-seed0", {"phase": "done"})
    assert ("", "") == capsys.readouterr()


def test_orphaned_worker_leaves_with_its_parent(home):
    """A study that is killed takes its workers along, so that a resume finds the folder in peace."""
    write_text(home / "text")
    out = home / "orphan"
    script = (
        "import sys; from study_fixtures import TINY; from ropewalk.study import run\n"
        "if __name__ == '__main__': run.run(TINY.replace(data=sys.argv[1], steps=10**6, encodings=('alibi',)),"
        " sys.argv[2])"
    )
    (home / "orphan.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(__file__).parent)}
    command = [sys.executable, str(home / "orphan.py"), str(home / "text"), str(out)]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as study:
        log = out / "cells" / "alibi-seed0" / "train.jsonl"
        _wait_until(lambda: log.exists() and log.stat().st_size > 0)
        study.kill()
        # the worker shares this pipe, so it ends only when the worker is gone; the training would take hours
        study.communicate(timeout=60)
    with files.lock(out, "study runs"):
        assert not (out / "cells" / "alibi-seed0" / "model.safetensors").exists()


def _wait_until(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.05)


def test_default_corpus_is_the_one_in_the_plan():
    assert "stdlib" == TINY.replace(data="stdlib").data == data.load(TINY.replace(data="stdlib")).name

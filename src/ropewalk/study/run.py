"""`ropewalk study` from the first check to the report."""

import contextlib
import hashlib
import importlib.util
import pathlib
import platform
import time
from importlib import metadata

import torch

import ropewalk as rw
from ropewalk.errors import message, require
from ropewalk.study import data, files, pool, progress, results, train
from ropewalk.study.settings import FORMAT, Settings, cell_name, customize, difference
from ropewalk.study.settings import preset as named

# Evaluation lines, maps, figures and the report, per cell
OTHER_BYTES = 4 * 2**20


def run(
    settings: Settings,
    out: str | pathlib.Path,
    *,
    jobs: int | None = None,
    resume: bool = False,
    command: str = "",
    quiet: bool = False,
) -> dict:
    """Run a study into a folder, or go on with the one that it holds.

    Args:
        settings: what to train and evaluate; a dtype of "auto" is decided here by a short race.
        out: the study's folder, new or empty unless `resume`.
        jobs: cells at a time; by default so many that the cores are shared evenly.
        command: how the study was started, for the report.
        quiet: no progress on stderr.

    Returns:
        {"out", "cells", "failed": {cell: error}, "results": rows of results.json, "seconds", "report"}.

    Raises:
        ValueError, OSError: when settings, text or folder do not allow it; nothing has been trained or changed.
    """
    started = time.monotonic()
    out = pathlib.Path(out)
    settings = resolve(settings, out if resume else None)
    sizes = parameters(settings, corpus := data.load(settings))
    cells = [(encoding, seed) for encoding in settings.encodings for seed in settings.seeds]
    jobs = pool.default_jobs(len(cells), pool.cores(settings.device)) if jobs is None else jobs
    require(jobs >= 1, "jobs", "at least 1", jobs)
    check_out(out, resume)
    files.check_folder(out, sum(20 * sizes[encoding] + OTHER_BYTES for encoding, _ in cells))
    with files.lock(out, "study runs"):
        if not (out / "study.json").exists():
            files.write_json(out / "study.json", describe(settings, corpus, command))
        check_same(out, settings, corpus)
        pending = [cell for cell in cells if not results.is_finished(out / "cells" / cell_name(*cell))]
        with progress.display(quiet) as display:
            display.say(f"{len(pending)} of {len(cells)} runs to do, {jobs} at a time, in {out}")
            failed = pool.run(pending, settings, corpus.fingerprint, out, jobs, display)
            if settings.cost_seconds and not (out / "cost.json").exists() and len(failed) < len(cells):
                display.say(f"measuring the cost of attention, {settings.cost_seconds:g} s")
                measure_cost(settings, out)
        rows = results.write(out)
        report = _write_report(out) if rows else None
    return {
        "out": str(out),
        "cells": len(cells),
        "failed": failed,
        "results": rows,
        "seconds": round(time.monotonic() - started, 1),
        "report": report,
    }


def measure_cost(settings: Settings, out: pathlib.Path) -> None:
    """cost.json: time and memory of attention with each encoding, on one thread like the training."""
    from ropewalk import bench

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        files.write_json(out / "cost.json", bench.for_study(settings.to_json(), settings.cost_seconds))
    finally:
        torch.set_num_threads(threads)


def _write_report(out: pathlib.Path) -> str:
    from ropewalk.study import report

    return str(report.write(out) or out / "report.html")


def settings_for(out: str | pathlib.Path, *, preset: str | None = None, resume: bool = False, **asked) -> Settings:
    """What a user asked for on top of a preset, or on top of the study that is resumed if no preset is named."""
    out = pathlib.Path(out)
    if resume:
        check_out(out, resume)
        if asked.get("dtype") == "auto":
            asked["dtype"] = None
    base = stored(out) if resume and preset is None else named(preset or "quick")
    return customize(base, **asked)


def resolve(settings: Settings, resumed: pathlib.Path | None = None) -> Settings:
    """Settings with a dtype instead of "auto": the resumed study's own, or the winner of a race."""
    if settings.device.startswith("cuda"):
        require(torch.cuda.is_available(), "device", "cpu where torch sees no CUDA device", repr(settings.device))
    if settings.dtype != "auto":
        return settings
    if resumed is not None and (resumed / "study.json").exists():
        return settings.replace(dtype=stored(resumed).dtype)
    return settings.replace(dtype=train.faster_dtype(settings.device))


def stored(out: pathlib.Path) -> Settings:
    """The settings of the study in a folder."""
    return Settings.from_json(files.read_json(out / "study.json")["settings"])


def parameters(settings: Settings, corpus: data.Corpus) -> dict[str, int]:
    """Trained numbers per encoding; builds each model, so a wrong name is refused here."""
    return {
        encoding: sum(p.numel() for p in train.build(settings, encoding, 0, corpus.vocab_size).parameters())
        for encoding in settings.encodings
    }


def check_out(out: pathlib.Path, resume: bool) -> None:
    """A folder for a new study must be new or empty; one to resume must hold a study."""
    if resume:
        require((out / "study.json").exists(), "out", "the folder of a study to resume", str(out))
    elif out.is_dir() and any(not _is_leftover(path) for path in out.iterdir()):
        raise ValueError(
            message(
                "out",
                "a new or empty folder",
                str(out),
                hint="--resume continues the study in it, --out names another folder",
            )
        )


def _is_leftover(path: pathlib.Path) -> bool:
    """What a study that was killed before it began may leave."""
    return path.name in (".lock", ".probe") or path.suffix == ".tmp"


def own_code(settings: Settings) -> dict[str, str]:
    """A digest of the file behind each `module:Class` among the encodings."""
    parts = {part for encoding in settings.encodings for part in encoding.split("+") if ":" in part}
    found = {}
    for part in sorted(parts):
        spec = importlib.util.find_spec(part.partition(":")[0])
        if spec is not None and spec.origin and pathlib.Path(spec.origin).is_file():
            found[part] = hashlib.sha256(pathlib.Path(spec.origin).read_bytes()).hexdigest()[:16]
    return found


def check_same(out: pathlib.Path, settings: Settings, corpus: data.Corpus) -> None:
    """Refuse to mix results of different settings, texts or versions of torch in one folder."""
    study = files.read_json(out / "study.json")
    changes = {
        name: f"{old!r} -> {new!r}"
        for name, (old, new) in difference(Settings.from_json(study["settings"]), settings).items()
    }
    if study["corpus"]["fingerprint"] != corpus.fingerprint:
        changes["the text"] = f"{study['corpus']['fingerprint']} -> {corpus.fingerprint}"
    for part, digest in own_code(settings).items():
        if study.get("code", {}).get(part, digest) != digest:
            changes[f"the file of {part}"] = f"{study['code'][part]} -> {digest}"
    if study["versions"]["torch"] != torch.__version__:
        changes["torch"] = f"{study['versions']['torch']} -> {torch.__version__}"
    if changes:
        what = ", ".join(f"{name}: {change}" for name, change in changes.items())
        raise ValueError(
            message("settings", "those of the study to resume", what, hint="another --out starts a new study")
        )


def describe(settings: Settings, corpus: data.Corpus, command: str) -> dict:
    """study.json: what it takes to do the study again."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "ropewalk": rw.__version__}
    for package in ("safetensors", "tokenizers", "datasets"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "format": FORMAT,
        "settings": settings.to_json(),
        "hash": settings.hash(),
        "versions": versions,
        "machine": machine(settings.device),
        "command": command,
        "code": own_code(settings),
        "corpus": corpus.to_json(),
    }


def machine(device: str) -> str:
    """The hardware in a few words."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    text = f"{name}, {pool.cores()} cores, {platform.system()}"
    return f"{torch.cuda.get_device_name(device)}, {text}" if device.startswith("cuda") else text

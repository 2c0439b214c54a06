"""Cells side by side, each in a process of its own; one that fails or is killed does not disturb the others."""

import contextlib
import dataclasses
import math
import multiprocessing
import os
import pathlib
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from ropewalk.study import files, worker
from ropewalk.study.settings import Settings, cell_name

Cell = tuple[str, int]


def cores(device: str = "cpu") -> int:
    """How many cells can run at full speed: usable processor cores, or graphics cards."""
    if device.startswith("cuda"):
        import torch

        return max(1, torch.cuda.device_count()) if device == "cuda" else 1
    with contextlib.suppress(AttributeError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def default_jobs(cells: int, cores: int) -> int:
    """Cells at a time so that all cores stay busy to the end.

    >>> [default_jobs(cells, 2) for cells in (1, 2, 3, 4, 5, 18)]
    [1, 2, 3, 2, 3, 2]
    """
    return math.ceil(cells / max(1, cells // cores))


@dataclasses.dataclass
class Running:
    """A cell at work."""

    cell: Cell
    process: BaseProcess
    connection: Connection
    last: dict


def run(cells: list[Cell], settings: Settings, fingerprint: str, out: pathlib.Path, jobs: int, display) -> dict:
    """Run all cells, `jobs` at a time; returns an error line per failed cell's name."""
    context = multiprocessing.get_context("spawn")
    waiting, running, errors = list(cells), [], {}
    cards = cores(settings.device)
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(context, waiting.pop(0), len(running) % cards, settings, fingerprint, out))
            wait([one.connection for one in running], timeout=1.0)
            for one in list(running):
                if not _listen(one, out, display):
                    running.remove(one)
                    _end(one, errors, display)
    finally:
        for one in running:
            one.process.terminate()
            one.process.join()
    return errors


def _start(context, cell: Cell, card: int, settings: Settings, fingerprint: str, out: pathlib.Path) -> Running:
    if settings.device == "cuda":
        settings = settings.replace(device=f"cuda:{card}")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=worker.main, daemon=True, name=cell_name(*cell), args=(theirs, settings, *cell, fingerprint, str(out))
    )
    process.start()
    theirs.close()
    return Running(cell, process, ours, {"phase": "start"})


def _listen(one: Running, out: pathlib.Path, display) -> bool:
    """Pass on what a cell has to say; False when it has ended."""
    try:
        while one.connection.poll():
            fields = one.connection.recv()
            if fields["phase"] == "traceback":
                with contextlib.suppress(OSError):
                    folder = out / "cells" / cell_name(*one.cell)
                    folder.mkdir(parents=True, exist_ok=True)
                    files.write_bytes(folder / "error.txt", fields["text"].encode())
                continue
            one.last = fields
            display.update(cell_name(*one.cell), fields)
    except (EOFError, OSError):
        return False
    return True


def _end(one: Running, errors: dict, display) -> None:
    one.process.join()
    one.connection.close()
    name = cell_name(*one.cell)
    if one.last["phase"] == "done":
        return
    if one.last["phase"] == "failed":
        errors[name] = one.last["error"]
    else:
        code = one.process.exitcode or 0
        errors[name] = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
        display.update(name, {"phase": "failed", "error": errors[name]})

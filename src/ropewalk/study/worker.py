"""One cell from the first step to its last line, in a process of its own."""

import contextlib
import ctypes
import functools
import os
import pathlib
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import parent_process

import torch

from ropewalk.study import attention, data, evaluate, files, train
from ropewalk.study.scoring import Scorer
from ropewalk.study.settings import Settings, cell_name


def run_cell(
    settings: Settings, encoding: str, seed: int, corpus: data.Corpus, folder: pathlib.Path, report: Callable[..., None]
) -> None:
    """Train, evaluate and write cell.json, going on from whatever the folder already holds."""
    keep_memory()
    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    if not weights.exists():
        train.Trainer(settings, encoding, seed, corpus, folder).run(report)
    model = train.build(settings, encoding, seed, corpus.vocab_size)
    summary = train.read_weights(weights, model)
    model.to(settings.device).eval()
    scorer = Scorer(model, settings.device, functools.partial(train.autocast, settings))
    evaluation = evaluate.Evaluation(settings, encoding, seed, scorer, corpus, folder)
    evaluation.run(report)
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    files.write_json(
        folder / "cell.json",
        {
            "encoding": encoding,
            "seed": seed,
            "parameters": sum(p.numel() for p in model.parameters()),
            **summary,
            "heldout_loss_same_length": evaluation.loss_at_train_len(),
            "lines": len(evaluation.lines),
            "evaluate_seconds": sum(line["seconds"] for line in evaluation.lines.values()),
            "attention": attention.maps(model, corpus.held_out[0], settings),
        },
    )


def main(connection: Connection, settings: Settings, encoding: str, seed: int, fingerprint: str, out: str) -> None:
    """Entry of the process: one thread, reports through the pipe, gone when its parent is gone."""
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    folder = pathlib.Path(out) / "cells" / cell_name(encoding, seed)
    try:
        corpus = data.load(settings)
        if corpus.fingerprint != fingerprint:
            raise ValueError(f"data must be unchanged since the study began, got another text in {settings.data}")
        run_cell(settings, encoding, seed, corpus, folder, lambda **fields: connection.send(fields))
        connection.send({"phase": "done"})
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        first = (str(error).splitlines() or [""])[0]
        connection.send({"phase": "failed", "error": f"{type(error).__name__}: {first}"})
        connection.send({"phase": "traceback", "text": traceback.format_exc()})


def keep_memory() -> None:
    """Have the C library keep freed memory instead of returning it to the system after every tensor.

    Fresh pages for each step's activations cost a third of the step of a small model (measured: 262 ms against
    169 ms with a batch of 4 x 256).  Only glibc knows these options; elsewhere nothing changes.
    """
    mmap_max, trim_threshold = -4, -1
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, 2**31 - 1)


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)

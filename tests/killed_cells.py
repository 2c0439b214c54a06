"""Helper of test_study: runs one cell per way to die, each in a fork that kills itself with SIGKILL on the way.

Usage: killed_cells.py FOLDER WAY [WAY ...]
"""

import os
import pathlib
import signal
import sys

import torch

from ropewalk.study import evaluate, files, train, worker
from study_fixtures import tiny


def die(*_args, **_kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def after(count, call, then=die):
    """`call`, replaced by `then` from its `count`-th use on."""
    uses = iter(range(count))
    return lambda *args, **options: call(*args, **options) if next(uses, None) is not None else then(*args, **options)


def half_a_line(path, value):
    with open(path, "ab") as file:
        file.write(b'{"encoding": "rotary", "seed": 0, "pro')
        file.flush()
        die()


def weights_then_die(path, content, write=files.write_bytes):
    write(path, content)
    if path.name == "model.safetensors":
        die()


WAYS = {
    "training": lambda: setattr(train.Trainer, "train_step", after(25, train.Trainer.train_step)),
    "checkpoint": lambda: setattr(files.os, "replace", after(3, os.replace)),
    "weights": lambda: setattr(files, "write_bytes", weights_then_die),
    "evaluation": lambda: setattr(evaluate.Evaluation, "answer", after(6, evaluate.Evaluation.answer)),
    "line": lambda: setattr(files, "append_line", after(8, files.append_line, half_a_line)),
    "summary": lambda: setattr(files, "write_json", after(0, files.write_json)),
}


def main(home: pathlib.Path, ways: list[str]) -> None:
    for way in ways:
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)
            settings, corpus = tiny(home / "text")
            WAYS[way]()
            worker.run_cell(settings, "rotary", 0, corpus, home / way, lambda **_: None)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(way, os.WTERMSIG(status) if os.WIFSIGNALED(status) else "survived")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2:])

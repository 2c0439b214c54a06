"""What a study would do and how long it would take, from a few measured steps (`--dry-run`)."""

import functools
import math
import pathlib
import time

import torch

from ropewalk.errors import require_count
from ropewalk.study import copying, data, evaluate, pool, run, train, worker
from ropewalk.study.scoring import Scorer
from ropewalk.study.settings import Settings

WARM_STEPS, TIMED_STEPS = 2, 4


def plan(settings: Settings, jobs: int | None = None) -> dict:
    """Cells, parameters and estimated minutes; nothing is written.

    Raises:
        ValueError: as `run` would.
    """
    settings = run.resolve(settings)
    corpus = data.load(settings)
    sizes = run.parameters(settings, corpus)
    cells = len(settings.encodings) * len(settings.seeds)
    cores = pool.cores(settings.device)
    jobs = pool.default_jobs(cells, cores) if jobs is None else require_count(jobs, "jobs")
    seconds = math.fsum(cell_seconds(settings, encoding, corpus) for encoding in settings.encodings)
    at_once = min(jobs, cores, cells)
    total = seconds * len(settings.seeds) / at_once + settings.cost_seconds + 15
    return {
        "cells": cells,
        "jobs": jobs,
        "cores": cores,
        "parameters": sizes,
        "train_tokens": settings.steps * settings.batch_size * settings.train_len,
        "estimated_minutes": round(total / 60, 1),
        "corpus": corpus.to_json(),
        "settings": settings.to_json(),
    }


def cell_seconds(settings: Settings, encoding: str, corpus: data.Corpus) -> float:
    """Seconds to train and evaluate one cell alone on a core, extrapolated from a few steps and two windows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    worker.keep_memory()
    try:
        trainer = train.Trainer(settings, encoding, settings.seeds[0], corpus, pathlib.Path())
        laps = []
        for _ in range(WARM_STEPS + TIMED_STEPS):
            started = time.perf_counter()
            trainer.train_step()
            laps.append(time.perf_counter() - started)
        return settings.steps * min(laps[WARM_STEPS:]) + _evaluation_seconds(settings, trainer, corpus)
    finally:
        torch.set_num_threads(threads)


def _evaluation_seconds(settings: Settings, trainer: train.Trainer, corpus: data.Corpus) -> float:
    scorer = Scorer(trainer.model, settings.device, functools.partial(train.autocast, settings))
    limit = trainer.model.encoding.max_positions or math.inf
    lengths = [length for length in settings.eval_lens if length <= limit]
    per_token = {length: _per_token(scorer, corpus, length) for length in {*lengths[:1], *lengths[-1:]}}

    def cost(tokens: int, length: int) -> float:
        if length > limit or not per_token:
            return 0.0
        short, long = min(per_token), max(per_token)
        share = 0.0 if long == short else max(0.0, (length - short) / (long - short))
        return tokens * (per_token[short] + share * (per_token[long] - per_token[short]))

    longest, train_len = settings.eval_lens[-1], settings.train_len
    headline, controls = settings.documents * longest, settings.control_documents * longest
    beyond = [length for length in lengths if length > train_len]
    total = sum(cost(headline, length) for length in lengths)
    total += sum(cost(4 * controls, length) for length in lengths if length < longest)
    stretches = evaluate.STRETCHES if evaluate.rotates(trainer.model) else ()
    # a mask shuts torch's causal shortcut off, which doubles the work at long lengths
    total += sum(cost((2 + len(stretches)) * controls, length) for length in beyond)
    for distance in copying.copy_distances(settings):
        tokens = copying.copy_tokens(settings, distance)
        total += cost(settings.copy_trials * tokens, tokens)
    return total


def _per_token(scorer: Scorer, corpus: data.Corpus, length: int) -> float:
    blocks = corpus.held_out[:1]
    started = time.perf_counter()
    scorer.windows(blocks, length)
    return (time.perf_counter() - started) / (len(blocks[0].tokens) - 1)

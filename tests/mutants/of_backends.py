"""Backends gone wrong: windows, blocks, and the gradients of both."""

import math

import torch

import ropewalk as rw
from mutants.registry import part
from ropewalk.attention import attend as right_attend

# K15, K17, K22: what a backend skips, forgets or restarts

BLOCK = 128


def _restarted(rows, axis, block=256):
    """What a backend reads that counts rows from 0 again in each block of queries."""
    index = torch.arange(rows.shape[axis]) % block
    return rows.index_select(axis, index)


@part("K17", "reference", "attend", backend="sdpa")
def mask_rows_restart_in_each_block(q, k, v, encoding=None, **options):
    if options["backend"] == "sdpa" and options.get("mask") is not None:
        options = {**options, "mask": _restarted(options["mask"], -2)}
    return right_attend(q, k, v, encoding, **options)


@part("K17", "reference", "attend", lambda: rw.Rotary(16), backend="sdpa")
def positions_restart_in_each_block(q, k, v, encoding=None, **options):
    if options["backend"] == "sdpa" and options.get("q_positions") is not None:
        options = {**options, "q_positions": _restarted(options["q_positions"], -1)}
    return right_attend(q, k, v, encoding, **options)


@part("K22", "reference", "attend", lambda: rw.ALiBi(8, learned=True), backend="sdpa")
def slopes_cut_off_from_their_gradient(q, k, v, encoding=None, **options):
    if options["backend"] == "sdpa":
        encoding = rw.ALiBi(8, slopes=encoding.slopes)
    return right_attend(q, k, v, encoding, **options)


def _within(q, k, encoding, reach, ahead=1.0):
    """Keys at most `reach` / slope behind, and `ahead` times that in front of each query."""
    window = (reach / encoding.falloff(torch.arange(q.shape[1])))[:, None, None]
    distance = torch.arange(q.shape[2])[:, None] + (k.shape[2] - q.shape[2]) - torch.arange(k.shape[2])
    return ((distance <= window) & (-distance <= ahead * window))[None]


def _also(mask, options):
    return {**options, "mask": mask if options.get("mask") is None else options["mask"] & mask}


@part("K15", "reference", "attend", lambda: rw.ALiBi(8), backend="banded")
def windows_that_ignore_the_scores(q, k, v, encoding=None, **options):
    if options["backend"] == "banded":
        options = _also(_within(q, k, encoding, math.log(2**24)), options)
    return right_attend(q, k, v, encoding, **options)


@part("K15", "reference", "attend", lambda: rw.ALiBi(8), backend="banded")
def windows_that_forget_the_future(q, k, v, encoding=None, **options):
    if options["backend"] == "banded":
        options = _also(_within(q, k, encoding, math.inf if options.get("causal", True) else 60.0, 0.05), options)
    return right_attend(q, k, v, encoding, **options)


@part("K15", "reference", "attend", lambda: rw.ALiBi(8), backend="banded")
def windows_of_the_steepest_head(q, k, v, encoding=None, **options):
    if options["backend"] == "banded":
        steepest = float(encoding.falloff(torch.arange(q.shape[1])).max())
        options = _also(_within(q, k, rw.ALiBi(8, slopes=[steepest] * 8), 60.0), options)
    return right_attend(q, k, v, encoding, **options)


@part("K17", "blocks", "attend", backend="banded")
def forgets_the_tail_of_the_keys(q, k, v, encoding=None, **options):
    """A loop over whole blocks of keys."""
    whole = torch.arange(k.shape[2]) < max(k.shape[2] // BLOCK, 1) * BLOCK
    return right_attend(q, k, v, encoding, **_also(whole[None], options))


@part("K17", "blocks", "attend", lambda: rw.ALiBi(8), backend="sdpa")
def leaves_the_tail_of_the_queries_at_zero(q, k, v, encoding=None, **options):
    out = right_attend(q, k, v, encoding, **options)
    whole = torch.arange(q.shape[2]) < max(q.shape[2] // BLOCK, 1) * BLOCK
    return out * whole[:, None]


@part("K17", "blocks", "attend", backend="sdpa")
def reads_slots_that_hold_nothing(q, k, v, encoding=None, **options):
    """Causality by the index in the storage: the last query is taken to stand on the last slot."""
    if q.shape[2] < k.shape[2] and options.get("q_positions") is not None:
        behind = k.shape[2] - 1 - int(options["q_positions"].max())
        options = {**options, "q_positions": options["q_positions"] + behind, "mask": None}
    return right_attend(q, k, v, encoding, **options)


class _LastBlockCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        whole = torch.arange(grad.shape[2]) < max(grad.shape[2] // BLOCK, 1) * BLOCK
        return grad * whole[:, None]


@part("K17", "blocks", "attend", lambda: rw.Rotary(16), backend="sdpa")
def drops_the_gradient_of_the_last_block(q, k, v, encoding=None, **options):
    return right_attend(q, _LastBlockCut.apply(k), v, encoding, **options)

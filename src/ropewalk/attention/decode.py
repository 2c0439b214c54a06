"""A few queries on many cached keys: what counts is how often, and how much of, the cache is read.

The queries of a group share their key head, so they are rows of one product, and the cache is read once.  Half
precision is widened a piece at a time into a scratch that stays in cache.  A head that sees `before` keys far reads
no others.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from ropewalk._shapes import Tensor
from ropewalk.attention.sight import Sight, score_dtype

SCRATCH = 1 << 20
"""Elements of a cache widened at a time."""
WASTE = 1.3
"""Neighbouring heads are read together if that reads at most so many times what each needs."""


def decode(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, before: list[int] | None = None) -> Tensor:
    """Attention of an aligned, unmasked sight without gradients.

    Args:
        before: keys before its own that each query head reads; None for all.
    """
    q_len, k_len, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    dtype = score_dtype(q)
    rows = (q.to(dtype) * scale).unflatten(1, (-1, group)).flatten(2, 3)
    out = torch.empty(*rows.shape[:3], v.shape[-1], dtype=v.dtype, device=v.device)
    for pairs, low in _runs(before, k.shape[1], group, k_len - q_len):
        score = _times_transposed(rows[:, pairs], k[:, pairs, low:])
        mask = _mask(sight, slice(pairs.start * group, pairs.stop * group), slice(low, k_len), dtype)
        if mask is not None:
            score = score + mask.expand(-1, score.shape[1] * group, -1, -1).unflatten(1, (-1, group)).flatten(2, 3)
        out[:, pairs] = _times(score.softmax(-1), v[:, pairs, low:])
    return out.unflatten(2, (group, q_len)).flatten(1, 2)


def _runs(before: list[int] | None, num_kv_heads: int, group: int, past: int) -> Iterator[tuple[slice, int]]:
    """Neighbouring key heads and the first key that any of their queries reads."""
    if before is None:
        yield slice(0, num_kv_heads), 0
        return
    lows = [max(past - max(before[h * group : (h + 1) * group]), 0) for h in range(num_kv_heads)]
    start = 0
    for stop in range(1, num_kv_heads + 1):
        read = [past + 1 - low for low in lows[start : stop + 1]]
        if stop == num_kv_heads or max(read) * len(read) > WASTE * sum(read):
            yield slice(start, stop), min(lows[start:stop])
            start = stop


def _mask(sight: Sight, heads: slice, columns: slice, dtype: torch.dtype) -> Tensor | None:
    """Bias and causality, broadcastable to (batch, heads, q_len, columns)."""
    some = replace(sight, known_heads=sight.heads[heads], causal=sight.causal and sight.q_len > 1)
    bias, allowed = some.bias(dtype, columns=columns), some.allowed(columns=columns)
    if allowed is None:
        return bias
    zero = torch.zeros((), dtype=dtype, device=allowed.device)
    return torch.where(allowed, zero if bias is None else bias, -torch.inf)


def _pieces(x: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """`x` as `dtype`, some keys at a time: valid until the next piece."""
    batch, num_heads, k_len, width = x.shape
    if x.dtype == dtype:
        yield slice(0, k_len), x
        return
    size = min(max(SCRATCH // (batch * num_heads * width), 1), k_len)
    scratch = torch.empty(batch, num_heads, size, width, dtype=dtype, device=x.device)
    for start in range(0, k_len, size):
        part = slice(start, min(start + size, k_len))
        yield part, scratch[:, :, : part.stop - start].copy_(x[:, :, part])


def _times_transposed(rows: Tensor, k: Tensor) -> Tensor:
    out = torch.empty(*rows.shape[:3], k.shape[2], dtype=rows.dtype, device=k.device)
    for part, piece in _pieces(k, rows.dtype):
        out[..., part] = rows @ piece.transpose(-1, -2)
    return out


def _times(weights: Tensor, v: Tensor) -> Tensor:
    out = torch.zeros(*weights.shape[:3], v.shape[-1], dtype=weights.dtype, device=v.device)
    for part, piece in _pieces(v, weights.dtype):
        out += weights[..., part] @ piece
    return out

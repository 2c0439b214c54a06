"""How far each head can see: the distance beyond which all keys together cannot matter.

A query attends its own key with score s.  By Cauchy and Schwarz no other score is above u = scale |q| max|k|, so a
key at distance D weighs, relative to the query's own key, at most

    exp(u - s + bias(D) - bias(0)).

The weights of all keys beyond a distance W are therefore at most exp(max(u - s)) times the sum of
exp(bias(D) - bias(0)) over D > W.  The window of a head is the smallest W for which this is at most eps.  The bound
is computed from the data at hand, so it holds for any input: with large norms, or without a falling bias, a head
reads everything.
"""

import math

import torch

from ropewalk._shapes import Float, Int, Tensor
from ropewalk.attention.sight import Sight, score_dtype

SLACK = 1e-3
"""Added to the bound, score units, beside what rounding of long dot products can hide."""


def default_eps(dtype: torch.dtype) -> float:
    """The rounding of one number of `dtype`, relative: what skipped keys may weigh by default."""
    return torch.finfo(dtype).eps / 2


@torch.no_grad()
def windows(
    q: Float[Tensor, "batch heads q_len head_dim"],
    k: Float[Tensor, "batch kv_heads k_len head_dim"],
    sight: Sight,
    scale: float,
    eps: float,
    max_key_norm: Float[Tensor, "kv_heads"] | None = None,
) -> tuple[Int[Tensor, "heads"], Int[Tensor, "heads"]]:
    """How many keys before and after its own each head has to read, at most k_len.

    Args:
        q, k: encoded, of an aligned sight with at most as many queries as keys.
        eps: what the skipped keys of a query may weigh together, relative to those it reads.
        max_key_norm: largest norm of a key, where it is known.
    """
    assert sight.encoding is not None
    num_heads, k_len = q.shape[1], k.shape[2]
    limit = math.log(eps) - (0 if sight.causal else math.log(2)) - _excess(q, k, scale, max_key_norm)
    slope = sight.encoding.falloff(sight.heads)
    if slope is not None:
        before = after = reach_of_slope(slope.double(), limit, k_len)
    else:
        bias = sight.bias_by_distance(torch.float64)
        zero = bias[:, k_len - 1, None]
        before = _reach(bias[:, : k_len - 1] - zero, limit)
        after = _reach(bias[:, k_len:].flip(-1) - zero, limit)
    after = torch.zeros_like(after) if sight.causal else after
    return before.expand(num_heads), after.expand(num_heads)


def _excess(q: Tensor, k: Tensor, scale: float, max_key_norm: Tensor | None) -> Tensor:
    """By how much any score can exceed that of a query's own key: the largest over batch and queries, (heads,)."""
    q_len, group, dtype = q.shape[2], q.shape[1] // k.shape[1], score_dtype(q)
    norm = max_key_norm
    if norm is None:
        norm = torch.linalg.vector_norm(k, dim=-1, dtype=dtype).amax((0, 2))
    most = torch.linalg.vector_norm(q, dim=-1, dtype=dtype) * norm.repeat_interleave(group)[:, None]
    own = k[:, :, k.shape[2] - q_len :].unsqueeze(2)
    score = torch.linalg.vecdot(q.unflatten(1, (-1, group)).to(dtype), own.to(dtype)).flatten(1, 2)
    most = abs(scale) * most
    rounding = 4 * q.shape[-1] * torch.finfo(dtype).eps * most
    return (most - scale * score + rounding).clamp(min=0).amax((0, 2)).double() + SLACK


def reach_of_slope(slope: Tensor, limit: Tensor, k_len: int) -> Tensor:
    """The smallest W with exp(-slope (W + 1)) / (1 - exp(-slope)) <= exp(limit), the sum of a geometric series."""
    needed = (-limit - torch.log(-torch.expm1(-slope))) / slope - 1
    # Written so that a bound that is not a number, or a slope of 0, reads everything.
    return torch.where(needed < k_len, needed.ceil().clamp(min=0), k_len).long()


def _reach(falling: Tensor, limit: Tensor) -> Tensor:
    """How many of the last entries of `falling`, (heads or 1, n), have to be read: those before them together weigh
    at most exp(limit), (heads,)."""
    total = falling.exp().cumsum(-1)
    # Where the sum is too small for a float64, the largest term times their number bounds it.
    count = math.log(max(falling.shape[-1], 1))
    weight = torch.where(total > 1e-290, total.log(), falling.cummax(-1).values + count)
    return (~(weight <= limit[:, None])).sum(-1)

"""Attention as its formula says: the specification that every other backend must match.

Dense, in float32 or float64, readable; memory grows with q_len times k_len.
"""

import torch

from ropewalk._shapes import Float, Tensor
from ropewalk.attention.sight import Sight, score_dtype


def reference(
    q: Float[Tensor, "batch heads q_len head_dim"],
    k: Float[Tensor, "batch kv_heads k_len head_dim"],
    v: Float[Tensor, "batch kv_heads k_len value_dim"],
    sight: Sight,
    scale: float,
) -> tuple[Float[Tensor, "batch heads q_len value_dim"], Float[Tensor, "batch heads q_len"]]:
    """softmax(scale q k^T + bias) v over the allowed keys, and the log of the softmax's denominator.

    A query that may attend no key gives 0, and -inf for the logarithm; its gradient is 0.
    """
    dtype = score_dtype(q)
    return block(q, k, v, sight, scale, dtype, slice(None), slice(None))


def block(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, dtype: torch.dtype, rows: slice, columns: slice
) -> tuple[Tensor, Tensor]:
    """`reference` for the queries `rows` and the keys `columns`, already cut out of q, k and v."""
    group = q.shape[1] // k.shape[1]
    k_wide, v_wide = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    score = q.to(dtype) @ k_wide.transpose(-1, -2) * scale
    bias = sight.bias(dtype, rows, columns)
    if bias is not None:
        score = score + bias
    allowed = sight.allowed(rows, columns)
    if allowed is None:
        allowed = torch.ones((), dtype=torch.bool, device=q.device)
    allowed = allowed.expand(score.shape)
    sees = allowed.any(-1, keepdim=True)
    # Rows that see nothing are given a harmless score first: softmax over nothing has no gradient.
    score = torch.where(sees, torch.where(allowed, score, -torch.inf), 0.0)
    weights = torch.where(allowed, score.softmax(-1), 0.0)
    lse = torch.where(sees.squeeze(-1), score.logsumexp(-1), -torch.inf)
    return (weights @ v_wide).to(v.dtype), lse

"""Attention through torch's scaled_dot_product_attention, with no H x Q x K bias ever stored.

A bias that depends on distance alone is one vector per head.  With the keys flipped along the sequence, query row
i and flipped key row j lie at entry i + j of that vector, so the whole bias is an overlapping view of it with
strides (1, 1): exact, and linear in memory.  Anything else is built for one block of queries at a time.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ropewalk._shapes import Tensor
from ropewalk.attention.reference import block
from ropewalk.attention.sight import Sight, score_dtype

QUERY_BLOCK = 256
"""Queries handled at a time: their slice of a mask stays in cache, and what causality hides from all of them is
never read."""


def sdpa(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Like `reference`; the logarithm is None unless `return_lse`."""
    if q.numel() == 0 or k.numel() == 0 or return_lse:
        return _in_blocks(q, k, v, sight, scale, return_lse)
    unmasked = sight.mask is None and sight.k_documents is None
    if sight.aligned and unmasked and not sight.has_bias:
        square = sight.q_len == sight.k_len
        if not sight.causal or sight.q_len == 1:
            return _call(q, k, v, None, scale), None
        if square:
            return _call(q, k, v, None, scale, causal=True), None
    if sight.aligned and unmasked and sight.has_bias and _strides_help(q, sight):
        return _strided(q, k, v, sight, scale), None
    return _in_blocks(q, k, v, sight, scale, return_lse)


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _strides_help(q: Tensor, sight: Sight) -> bool:
    """Other devices' kernels want aligned masks; a bias with a gradient needs its own formula."""
    assert sight.encoding is not None
    learned = any(p.requires_grad for p in sight.encoding.parameters()) and torch.is_grad_enabled()
    return sight.encoding.distance_only and q.device.type == "cpu" and not learned


def _strided(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float) -> Tensor:
    dtype = score_dtype(q)
    vector = sight.bias_by_distance(dtype).contiguous()
    q_len, k_len, num_heads = sight.q_len, sight.k_len, q.shape[1]
    if q_len == 1:
        return _call(q, k, v, vector.flip(-1)[None, :, None], scale)
    width = q_len + k_len - 1
    k, v = k.flip(2), v.flip(2)
    if torch.compiler.is_compiling():
        return _call(q, k, v, vector.as_strided((1, num_heads, q_len, k_len), (0, width, 1, 1)), scale)
    outputs = []
    for start in range(0, q_len, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, q_len)
        # Flipped keys before `hidden` lie in the future of every query of the block.
        hidden = min(max(q_len - stop, 0), k_len - 1) if sight.causal else 0
        view = vector.as_strided(
            (1, num_heads, stop - start, k_len - hidden), (0, width, 1, 1), vector.storage_offset() + start + hidden
        )
        outputs.append(_call(q[:, :, start:stop], k[:, :, hidden:], v[:, :, hidden:], view, scale))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _in_blocks(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Any positions, mask and bias: a dense mask for QUERY_BLOCK queries at a time, made again for the gradient."""
    dtype = score_dtype(q)

    def one(q_rows: Tensor, k: Tensor, v: Tensor, start: int, stop: int, width: int) -> tuple[Tensor, Tensor | None]:
        rows, columns = slice(start, stop), slice(0, width)
        k, v = k[:, :, columns], v[:, :, columns]
        if return_lse or k.numel() == 0:
            return block(q_rows, k, v, sight, scale, dtype, rows, columns)
        return _call(q_rows, k, v, _dense(q, sight, dtype, rows, columns), scale), None

    if torch.compiler.is_compiling() or sight.q_len <= QUERY_BLOCK:
        return one(q, k, v, 0, sight.q_len, sight.k_len)
    outputs = []
    for start in range(0, sight.q_len, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, sight.q_len)
        ahead = sight.q_len - stop if sight.aligned and sight.causal else 0
        arguments = (q[:, :, start:stop], k, v, start, stop, max(sight.k_len - ahead, 1))
        if torch.is_grad_enabled():
            outputs.append(checkpoint(one, *arguments, use_reentrant=False))
        else:
            outputs.append(one(*arguments))
    lse = torch.cat([o[1] for o in outputs], dim=2) if return_lse else None
    return torch.cat([o[0] for o in outputs], dim=2), lse


def _dense(q: Tensor, sight: Sight, dtype: torch.dtype, rows: slice, columns: slice) -> Tensor | None:
    allowed, bias = sight.allowed(rows, columns), sight.bias(dtype, rows, columns)
    if bias is None:
        return allowed
    mask = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    return mask.expand(-1, q.shape[1], -1, -1)

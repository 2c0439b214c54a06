"""Attention through torch's scaled_dot_product_attention, with no H x Q x K bias ever stored.

Where positions count up, the bias is a view of one vector per head and queries are handled in blocks (`banded`); a
few queries on many keys are handled by rows (`decode`).  Anything else, explicit positions and masks above all, gets
a dense mask for one block of queries at a time.
"""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from ropewalk._shapes import Tensor
from ropewalk._watch import has_tangents, watched
from ropewalk.attention.banded import QUERY_BLOCK, Bands, banded, everything
from ropewalk.attention.decode import decode
from ropewalk.attention.reference import block
from ropewalk.attention.sight import Sight, score_dtype
from ropewalk.attention.windows import default_eps, windows

KEPT = 0.95
"""Windows, once known, are worth using where they leave at most this share of the scores."""
WORTH_WINDOWS = 768
"""Queries from which on windows are worth computing."""
DECODE_ROWS, DECODE_KEYS = 16, 512
"""At most so many queries of a group on at least so many keys are handled by rows."""


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    return_lse: bool,
    skip: bool | None = False,
    eps: float | None = None,
    max_key_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Like `reference`; the logarithm is None unless `return_lse`.

    Args:
        skip: leave out keys that a falling bias makes lighter than `eps`; None where that is faster.
        eps, max_key_norm: as in `windows`; by default what the dtype rounds to, and what the keys say.
    """
    if has_tangents():
        return block(q, k, v, sight, scale, score_dtype(q), slice(None), slice(None))
    if q.numel() == 0 or k.numel() == 0 or not by_distance(sight):
        return _in_blocks(q, k, v, sight, scale, return_lse)
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or sight.learned)
    bare = q.device.type == "cpu" and not watched(q, k, v)
    if bare and not grad and not return_lse and _few_rows(q, k, sight):
        before = _windows_of_rows(q, k, sight, scale, skip, eps, max_key_norm)
        if before is not None or q.shape[1] > k.shape[1] or (q.dtype != score_dtype(q) and not _FAST_HALF):
            return decode(q, k, v, sight, scale, before), None
    if not sight.has_bias and sight.k_documents is None and not return_lse:
        if not sight.causal or sight.q_len == 1:
            return _call(q, k, v, None, scale), None
        if sight.q_len == sight.k_len:
            return _call(q, k, v, None, scale, causal=True), None
    if sight.q_len == 1 and sight.k_documents is None and not return_lse and not (grad and sight.learned):
        return _call(q, k, v, sight.bias_by_distance(score_dtype(q))[None, :, None], scale), None
    square = q.shape[-1] == v.shape[-1] and (not sight.causal or sight.q_len <= sight.k_len)
    if not square or (return_lse and grad) or q.device.type != "cpu":
        return _in_blocks(q, k, v, sight, scale, return_lse)
    if bare:
        bias = sight.bias_by_distance(score_dtype(q))
        bands = _bands(q, k, sight, scale, skip, eps, max_key_norm)
        out, lse = banded(q, k, v, bias, bands, scale)
        return out, lse if return_lse else None
    if return_lse or sight.k_documents is not None or sight.learned:
        return _in_blocks(q, k, v, sight, scale, return_lse)
    return _whole(q, k, v, sight, scale), None


_FAST_HALF = torch.ops.mkldnn._is_mkldnn_bf16_supported()


def by_distance(sight: Sight) -> bool:
    """What a query sees of a key depends on their distance, and on documents, alone."""
    if sight.encoding is not None and sight.has_bias and not sight.encoding.distance_only:
        return False
    return sight.aligned and sight.mask is None


def _few_rows(q: Tensor, k: Tensor, sight: Sight) -> bool:
    rows = q.shape[2] * (q.shape[1] // k.shape[1])
    return rows <= DECODE_ROWS and k.shape[2] >= DECODE_KEYS and sight.k_documents is None and q.shape[2] <= k.shape[2]


def _windows_of_rows(
    q: Tensor, k: Tensor, sight: Sight, scale: float, skip: bool | None, eps: float | None, max_key_norm: Tensor | None
) -> list[int] | None:
    """Keys before its own that each head reads, if that can be known without reading all of them."""
    if skip is False or not sight.has_bias or not sight.causal or (skip is None and max_key_norm is None):
        return None
    assert sight.encoding is not None
    if skip is None and sight.encoding.falloff(sight.heads) is None:
        return None
    return windows(q, k, sight, scale, eps or default_eps(q.dtype), max_key_norm)[0].tolist()


def _bands(
    q: Tensor, k: Tensor, sight: Sight, scale: float, skip: bool | None, eps: float | None, max_key_norm: Tensor | None
) -> Bands:
    all_of_it = everything(sight, q.shape[1], k.shape[1])
    if skip is False or not sight.has_bias or sight.q_len > sight.k_len:
        return all_of_it
    if skip is None and sight.q_len < WORTH_WINDOWS:
        return all_of_it
    before, after = windows(q, k, sight, scale, eps or default_eps(q.dtype), max_key_norm)
    bands = everything(sight, q.shape[1], k.shape[1], before.tolist(), after.tolist())
    return bands if skip or bands.kept() <= KEPT else all_of_it


def _call(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, causal: bool = False) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)


def _whole(q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float) -> Tensor:
    """All queries in one call, for compilers: with the queries flipped the bias is a view of one vector."""
    bias = sight.bias_by_distance(score_dtype(q)).contiguous()
    view = bias.as_strided((bias.shape[0], sight.q_len, sight.k_len), (bias.stride(0), 1, 1)).expand(q.shape[1], -1, -1)
    return _call(q.flip(2), k, v, view[None], scale).flip(2)


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

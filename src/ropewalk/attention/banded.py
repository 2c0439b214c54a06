"""Attention with a bias by distance, block by block: no bias is stored, and no key read that cannot matter.

A bias that depends on distance alone is one vector per head.  With the queries of a block flipped, query row i and
key row j lie at entry i + j of that vector, so the whole bias is an overlapping view of it with strides (1, 1):
exact, and linear in memory.  Each block of queries reads the keys that causality, its documents and, if `windows`
are given, the distance leave to each head.  The backward pass goes through the same blocks and stores nothing of
the size of q_len times k_len either; the gradient of the bias itself is summed along its diagonals.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ropewalk._shapes import Tensor
from ropewalk._watch import watched
from ropewalk.attention.sight import Sight, score_dtype

QUERY_BLOCK = 256
"""Queries handled at a time: their scores stay in cache, and what is hidden from all of them is never read."""
OPEN_BLOCK = 1024
"""The same where nothing is hidden."""
DENSE_BLOCK = 64
"""The same where scores are formed for the gradient of the bias."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class Tile(NamedTuple):
    """Queries `rows` of `heads` and the keys `columns` of `kv_heads` that they read."""

    rows: slice
    heads: slice
    kv_heads: slice
    columns: slice


@dataclass(frozen=True)
class Bands:
    """Which keys each block of queries reads.

    `before` and `after` are per head and count keys; documents are as in `Sight`.
    """

    q_len: int
    k_len: int
    num_kv_heads: int
    before: list[int]
    after: list[int]
    q_documents: Tensor | None = None
    k_documents: Tensor | None = None

    @property
    def block(self) -> int:
        """How many queries are handled at a time."""
        far = self.q_len + self.k_len
        is_open = min(*self.before, *self.after) >= far and self.k_documents is None
        return OPEN_BLOCK if is_open else QUERY_BLOCK

    def tiles(self, block: int) -> Iterator[Tile]:
        """Blocks of queries, and in each of them runs of neighbouring heads that read the same keys."""
        group = len(self.before) // self.num_kv_heads
        past = self.k_len - self.q_len
        edges = self._document_edges(block)
        for number, start in enumerate(range(0, self.q_len, block)):
            stop = min(start + block, self.q_len)
            least, most = edges[number] if edges else (0, self.k_len)
            spans = [
                (max(least, min(start + past - b, self.k_len)), max(min(most, stop + past + a), 0))
                for b, a in zip(self.before, self.after, strict=True)
            ]
            for first, last in _runs(spans, group):
                low, high = spans[first]
                if low < high:
                    pairs = slice(first // group, (last - 1) // group + 1)
                    yield Tile(slice(start, stop), slice(first, last), pairs, slice(low, high))

    def _document_edges(self, block: int) -> list[tuple[int, int]] | None:
        """First key and end of the documents that each block of queries touches, over the whole batch."""
        if self.k_documents is None:
            return None
        index = torch.arange(self.k_len, device=self.k_documents.device)
        changes = self.k_documents[:, 1:] != self.k_documents[:, :-1]
        edge = torch.nn.functional.pad(changes, (1, 1), value=True)  # before each key, and after the last
        starts = torch.where(edge[:, :-1], index, 0).cummax(-1).values.amin(0)
        stops = torch.where(edge[:, 1:], index + 1, self.k_len).flip(-1).cummin(-1).values.flip(-1).amax(0)
        first, last = starts[self.k_len - self.q_len :].tolist(), stops[self.k_len - self.q_len :].tolist()
        ends = [(s, min(s + block, self.q_len)) for s in range(0, self.q_len, block)]
        return [(min(first[s:e]), max(last[s:e])) for s, e in ends]

    def mask(self, bias: Tensor, tile: Tile) -> Tensor:
        """The bias of a tile with its query rows flipped, (1 or batch, heads, rows, columns), documents included."""
        rows, columns = tile.rows, tile.columns
        offset = self.q_len - rows.stop + columns.start
        view = diagonals(bias, offset, rows.stop - rows.start, columns.stop - columns.start)
        view = view.expand(len(self.before), -1, -1)[None, tile.heads]
        if self.q_documents is None or self.k_documents is None:
            return view
        same = self.q_documents[:, rows].flip(-1)[:, None, :, None] == self.k_documents[:, None, None, columns]
        return torch.where(same, view, -torch.inf)

    def kept(self) -> float:
        """About which share of the visible scores is formed, documents aside."""
        shares = []
        for before, after in zip(self.before, self.after, strict=True):
            share = min((before + after + QUERY_BLOCK) / self.k_len, 1.0)
            shares.append(share if any(self.after) else share * (2 - share))
        return sum(shares) / len(shares)


def _runs(spans: list[tuple[int, int]], group: int) -> list[tuple[int, int]]:
    """Neighbouring heads of one span, as (first, end): inside one group of query heads, or whole groups together."""
    runs: list[tuple[int, int]] = []
    for head, span in enumerate(spans):
        if runs and spans[runs[-1][0]] == span and head % group:
            runs[-1] = runs[-1][0], head + 1
        else:
            runs.append((head, head + 1))
        whole = len(runs) > 1 and spans[runs[-2][0]] == span and runs[-2][1] == runs[-1][0]
        if whole and all(first % group == 0 and end % group == 0 for first, end in runs[-2:]):
            runs[-2:] = [(runs[-2][0], runs[-1][1])]
    return runs


def diagonals(bias: Tensor, offset: int, rows: int, columns: int) -> Tensor:
    """(heads, rows, columns) view of (heads, n) with entry offset + i + j at row i, column j."""
    strides = (bias.stride(0), 1, 1)
    return bias.as_strided((bias.shape[0], rows, columns), strides, bias.storage_offset() + offset)


def everything(
    sight: Sight, num_heads: int, num_kv_heads: int, before: list[int] | None = None, after: list[int] | None = None
) -> Bands:
    """Bands that leave out nothing but the future and other documents, unless windows are given."""
    far = sight.k_len + sight.q_len
    before = [far] * num_heads if before is None else before
    after = [0 if sight.causal else far] * num_heads if after is None else after
    return Bands(sight.q_len, sight.k_len, num_kv_heads, before, after, sight.q_documents, sight.k_documents)


def banded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, bands: Bands, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of an aligned sight on a CPU: values (batch, heads, q_len, head_dim) and the logarithm of each
    softmax denominator, (batch, heads, q_len).

    Args:
        bias: from `Sight.bias_by_distance`, with its gradient.
        bands: what is read.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return _Banded.apply(q, k, v, bias.contiguous(), bands, scale)  # pyright: ignore[reportReturnType]


class _Banded(torch.autograd.Function):
    """Forward and backward over the same tiles."""

    @staticmethod
    def forward(ctx, q, k, v, bias, bands, scale):
        batch, num_heads, q_len, head_dim = q.shape
        # As a projection wants it: tokens first.  Rows that no tile reads keep what an empty softmax gives.
        out = q.new_zeros(batch, q_len, num_heads, head_dim).transpose(1, 2)
        lse = torch.full((batch, q_len, num_heads), -torch.inf, dtype=score_dtype(q), device=q.device).transpose(1, 2)
        for tile in bands.tiles(bands.block):
            rows, heads, pairs, columns = tile
            part, part_lse = _flash(
                q[:, heads, rows].flip(2), k[:, pairs, columns], v[:, pairs, columns],
                attn_mask=bands.mask(bias, tile), scale=scale,
            )  # fmt: skip
            out[:, heads, rows] = part.flip(2)
            lse[:, heads, rows] = part_lse.flip(2)
        if q_len > bands.k_len and not any(bands.after):  # the first queries stand before every key
            lse[:, :, : q_len - bands.k_len] = -torch.inf
        ctx.save_for_backward(q, k, v, bias, out, lse)
        ctx.bands, ctx.scale = bands, scale
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, *grads):
        if torch.is_grad_enabled() or watched(grads[0]):
            # A derivative of the gradient, or many gradients at once, are wanted: plain operations have them.
            q, k, v, bias = ctx.saved_tensors[:4]
            return *_dense_gradients(q, k, v, bias, grads[0], ctx.bands, ctx.scale), None, None
        one = _with_bias if ctx.needs_input_grad[3] else _fused
        with torch.autocast(grads[0].device.type, enabled=False):
            return *_gradients(ctx.saved_tensors, grads[0], ctx.bands, ctx.scale, one), None, None


def _dense_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grad: Tensor, bands: Bands, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of all queries on all keys, from nothing but the inputs, so that they have derivatives."""
    whole = Tile(slice(0, bands.q_len), slice(None), slice(None), slice(0, bands.k_len))
    group = q.shape[1] // k.shape[1]
    dtype = score_dtype(q)
    rows, grad = (_grouped(x.to(dtype), group).flip(3) for x in (q, grad))
    mask = _grouped(bands.mask(bias, whole), group)
    weights = (rows @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * scale + mask).softmax(-1)
    dq, dk, dv, d_score = _written_out(rows, k, v, weights, grad, scale)
    d_bias = _summed_along_diagonals(_ungrouped(d_score).sum(0))
    d_bias = d_bias if bias.shape[0] > 1 else d_bias.sum(0, keepdim=True)
    return dq.flip(2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_bias


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor, grad: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the scores; q, weights and grad are (batch, kv_heads, group, rows, ...)."""
    k, v = k.to(q.dtype).unsqueeze(2), v.to(q.dtype).unsqueeze(2)
    d_weights = grad @ v.transpose(-1, -2)
    d_score = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    dk, dv = d_score.transpose(-1, -2) @ q * scale, weights.transpose(-1, -2) @ grad
    return _ungrouped(d_score @ k * scale), dk.sum(2), dv.sum(2), d_score


def _gradients(saved, grad: Tensor, bands: Bands, scale: float, one) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    q, k, v, bias, out, lse = saved
    dtype = score_dtype(q)  # sums over blocks in half precision would lose what late blocks add
    dq = torch.zeros_like(q)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    d_bias = torch.zeros_like(bias) if one is _with_bias else None
    for tile in bands.tiles(bands.block if d_bias is None else DENSE_BLOCK):
        rows, heads, pairs, columns = tile
        row_data = [x[:, heads, rows].flip(2) for x in (q, out, lse, grad)]
        part_q, part_k, part_v = one(
            row_data, k[:, pairs, columns], v[:, pairs, columns], bands.mask(bias, tile), scale,
            None if d_bias is None else (d_bias, bands, tile),
        )  # fmt: skip
        dq[:, heads, rows] = part_q.flip(2)
        dk[:, pairs, columns] += part_k
        dv[:, pairs, columns] += part_v
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_bias


def _fused(row_data, k: Tensor, v: Tensor, mask: Tensor, scale: float, _) -> tuple[Tensor, Tensor, Tensor]:
    """torch's own backward of one tile.  It works on one head per thread, so a lone head's queries are spread."""
    q, out, lse, grad = row_data
    batch, num_heads, rows, _ = q.shape
    parts = torch.get_num_threads() // max(num_heads, 1)
    if batch > 1 or parts < 2 or rows % parts or rows // parts < DENSE_BLOCK:
        return _flash_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    spread = [x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (grad, q, out, lse)]
    grad, q, out, lse = spread
    mask = mask[0].unflatten(1, (parts, -1)).transpose(0, 1)
    k, v = (x.expand(parts, -1, -1, -1) for x in (k, v))
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, False, attn_mask=mask, scale=scale)
    return dq.transpose(0, 1).flatten(1, 2)[None], dk.sum(0, keepdim=True), dv.sum(0, keepdim=True)


def _with_bias(row_data, k: Tensor, v: Tensor, mask: Tensor, scale: float, into) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of one tile written out, for that of the bias, which is added to `into`'s tensor."""
    dtype = score_dtype(k)
    group = row_data[0].shape[1] // k.shape[1]
    q, _, lse, grad = (_grouped(x.to(dtype), group) for x in row_data)
    score = q @ k.to(dtype).unsqueeze(2).transpose(-1, -2) * scale + _grouped(mask, group)
    weights = torch.where(score == -torch.inf, 0.0, (score - lse.unsqueeze(-1)).exp())
    dq, dk, dv, d_score = _written_out(q, k, v, weights, grad, scale)
    d_bias, bands, tile = into
    d_heads = _summed_along_diagonals(_ungrouped(d_score).sum(0))
    offset = bands.q_len - tile.rows.stop + tile.columns.start
    span = slice(offset, offset + d_heads.shape[-1])
    if d_bias.shape[0] == 1:
        d_bias[0, span] += d_heads.sum(0)
    else:
        d_bias[tile.heads, span] += d_heads
    return dq.to(row_data[0].dtype), dk, dv


def _grouped(x: Tensor, group: int) -> Tensor:
    """(batch, heads, ...) as (batch, kv_heads, group, ...); by reshape, which also batched gradients know."""
    return x.reshape(x.shape[0], x.shape[1] // group, group, *x.shape[2:])


def _ungrouped(x: Tensor) -> Tensor:
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _summed_along_diagonals(x: Tensor) -> Tensor:
    """(heads, rows, columns) to (heads, rows + columns - 1): the sum of all entries with the same i + j."""
    heads, rows, columns = x.shape
    width = rows + columns - 1
    sheared = torch.nn.functional.pad(x, (0, rows)).reshape(heads, -1)[:, : rows * width]
    return sheared.reshape(heads, rows, width).sum(1)

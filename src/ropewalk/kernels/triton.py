"""The rotation on a GPU: one Triton kernel, which also turns gradients back.

Arithmetic is float32 for half precision, and float64 as soon as data or tables are.  Each program turns some rows
of one head; table rows are read again for the next head, out of the second-level cache.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ropewalk._shapes import Tensor

TILE = 4096
"""Pairs of channels that one program turns, about."""


@triton.jit
def turn_rows(
    out, x, cos, sin, heads, rows, pairs, rest,
    out_batch, out_head, out_row, x_batch, x_head, x_row, table_batch, table_head, table_row,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, BACK: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """(a, b) becomes (a cos - b sin, b cos + a sin), or with BACK the opposite turn, in `ROWS` rows of one head.

    The last axis of every tensor is contiguous; `PAIRS` and `REST` are powers of two that hold `pairs` and the
    `rest` of the channels, which is copied.
    """
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0).to(tl.int64)
    head, block, batch = program % heads, program // heads % blocks, program // heads // blocks
    row = block * ROWS + tl.arange(0, ROWS).to(tl.int64)
    pair = tl.arange(0, PAIRS)
    is_row = row < rows
    here = is_row[:, None] & (pair < pairs)[None, :]

    table = batch * table_batch + head * table_head + row[:, None] * table_row + pair[None, :]
    c = tl.load(cos + table, mask=here, other=0.0).to(REAL)
    s = tl.load(sin + table, mask=here, other=0.0).to(REAL)
    if BACK:
        s = -s
    x += batch * x_batch + head * x_head
    out += batch * out_batch + head * out_head
    if INTERLEAVED:
        channel = tl.arange(0, 2 * PAIRS)
        both = is_row[:, None] & (channel < 2 * pairs)[None, :]
        numbers = tl.load(x + row[:, None] * x_row + channel[None, :], mask=both, other=0.0).to(REAL)
        a, b = tl.split(tl.reshape(numbers, (ROWS, PAIRS, 2)))
        turned = tl.reshape(tl.join(a * c - b * s, b * c + a * s), (ROWS, 2 * PAIRS))
        tl.store(out + row[:, None] * out_row + channel[None, :], turned.to(out.dtype.element_ty), mask=both)
    else:
        first = x + row[:, None] * x_row + pair[None, :]
        a = tl.load(first, mask=here, other=0.0).to(REAL)
        b = tl.load(first + pairs, mask=here, other=0.0).to(REAL)
        into = out + row[:, None] * out_row + pair[None, :]
        tl.store(into, (a * c - b * s).to(out.dtype.element_ty), mask=here)
        tl.store(into + pairs, (b * c + a * s).to(out.dtype.element_ty), mask=here)
    if REST > 0:
        channel = tl.arange(0, REST)
        beyond = is_row[:, None] & (channel < rest)[None, :]
        kept = tl.load(x + row[:, None] * x_row + 2 * pairs + channel[None, :], mask=beyond)
        tl.store(out + row[:, None] * out_row + 2 * pairs + channel[None, :], kept, mask=beyond)


def write(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, back: bool, ask: bool = False) -> bool:
    """The turn of `x` into `out`, which may be `x`; False, and nothing done, where the last axis is not contiguous.

    Args:
        back: turn by the opposite angles.
        ask: only say whether it could.
    """
    if x.stride(-1) != 1 or out.stride(-1) != 1 or x.is_neg() or 0 in x.shape or not _fits(cos, sin, x):
        return False
    if out is x and any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True)):
        return False
    if ask:
        return True
    cos, sin = (t.resolve_neg().expand(*x.shape[:-1], -1) for t in (cos, sin))
    if cos.stride() != sin.stride() or cos.stride(-1) != 1:
        cos, sin = cos.contiguous(), sin.contiguous()
    _launch(out, x, cos, sin, layout, back, out is not x)
    return True


def _fits(cos: Tensor, sin: Tensor, x: Tensor) -> bool:
    if cos.shape != sin.shape or not 1 <= cos.ndim <= x.ndim or not 2 <= 2 * cos.shape[-1] <= x.shape[-1]:
        return False
    if not cos.device == sin.device == x.device:
        return False
    ahead = x.ndim - cos.ndim
    return all(n in (1, x.shape[ahead + d]) for d, n in enumerate(cos.shape[:-1]))


def _launch(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, back: bool, elsewhere: bool) -> None:
    """One launch for (batch, heads, rows, channels); further axes one after the other."""
    if x.ndim > 4:
        for parts in zip(out, x, cos, sin, strict=True):
            _launch(*parts, layout, back, elsewhere)
        return
    while x.ndim < 4:
        out, x, cos, sin = (t.unsqueeze(0) for t in (out, x, cos, sin))
    (batch, heads, rows, channels), pairs = x.shape, cos.shape[-1]
    rest = channels - 2 * pairs if elsewhere else 0
    wide = triton.next_power_of_2(pairs)
    many = max(1, min(TILE // wide, triton.next_power_of_2(rows)))
    constants: dict[str, Any] = {"ROWS": many, "PAIRS": wide, "REST": triton.next_power_of_2(rest) if rest else 0}
    constants |= {"INTERLEAVED": layout == "interleaved", "BACK": back}
    constants["REAL"] = tl.float64 if torch.float64 in (x.dtype, cos.dtype) else tl.float32
    strides = *out.stride()[:3], *x.stride()[:3], *cos.stride()[:3]
    programs = heads * triton.cdiv(rows, many) * batch
    kernel: Any = turn_rows
    with torch.cuda.device_of(x):
        kernel[(programs,)](out, x, cos, sin, heads, rows, pairs, rest, *strides, **constants)

"""Rotation in plain PyTorch: the formula, and the same written into memory once.

Half precision is turned in float32 and rounded once, because the tables are float32 and arithmetic promotes.
"""

import torch

from ropewalk._shapes import Tensor

SCRATCH = 1 << 17
"""Elements turned at a time: what is computed in between stays in cache, and takes little memory."""


def _pairs(x: Tensor, width: int, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second channel of each pair, as views."""
    if layout == "half":
        return x[..., : width // 2], x[..., width // 2 : width]
    return x[..., 0:width:2], x[..., 1:width:2]


def formula(x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """(a, b) becomes (a cos - b sin, b cos + a sin) for each pair (a, b): the specification, and what compilers see."""
    width = 2 * cos.shape[-1]
    # In one precision from the start, or autograd would round each term of a gradient before it adds them up.
    a, b = _pairs(x.to(torch.promote_types(x.dtype, cos.dtype)), width, layout)
    # Each half is cast before they are joined: inductor then writes the result once.
    turned = ((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype))
    rest = (x[..., width:],) if width < x.shape[-1] else ()
    if layout == "half":
        return torch.cat((*turned, *rest), dim=-1)
    joined = torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined, *rest), dim=-1) if rest else joined


def is_complex(out: Tensor, x: Tensor, cos: Tensor, layout: str) -> bool:
    """Whether neighbours in memory can be read as the complex numbers that they are."""
    whole = x.dtype in (torch.float32, torch.float64) and x.dtype == cos.dtype and 2 * cos.shape[-1] == x.shape[-1]
    return layout == "interleaved" and whole and x.is_contiguous() and out.is_contiguous() and not x.is_neg()


def write(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    """The formula into `out`, which may be `x`, a few rows at a time."""
    if is_complex(out, x, cos, layout):
        numbers, turned = (torch.view_as_complex(y.unflatten(-1, (-1, 2))) for y in (x, out))
        torch.mul(numbers, torch.complex(cos, sin), out=turned)
        return
    rows = x.shape[-2]
    step = max(1, SCRATCH * rows // max(x.numel(), 1))
    if step >= rows:
        _write_rows(out, x, cos, sin, layout)
        return
    for start in range(0, rows, step):
        part = slice(start, start + step)
        table = part if cos.shape[-2] > 1 else slice(None)
        there = x[..., part, :]
        _write_rows(there if out is x else out[..., part, :], there, cos[..., table, :], sin[..., table, :], layout)


def _write_rows(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> None:
    width = 2 * cos.shape[-1]
    a, b = _pairs(x, width, layout)
    out_a, out_b = _pairs(out, width, layout)
    new_a = torch.addcmul(a * cos, b, sin, value=-1)
    new_b = torch.addcmul(b * cos, a, sin)
    out_a.copy_(new_a)
    out_b.copy_(new_b)
    if out is not x and width < x.shape[-1]:
        out[..., width:] = x[..., width:]

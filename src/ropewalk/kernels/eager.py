"""Rotation in plain PyTorch: the formula, and the same written into memory once, with its gradient.

Half precision is turned in float32 and rounded once, because the tables are float32 and arithmetic promotes.
"""

import torch

from ropewalk._shapes import Float, Tensor

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
    a, b = _pairs(x, width, layout)
    # Each half is cast before they are joined: inductor then writes the result once.
    turned = ((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype))
    rest = (x[..., width:],) if width < x.shape[-1] else ()
    if layout == "half":
        return torch.cat((*turned, *rest), dim=-1)
    joined = torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined, *rest), dim=-1) if rest else joined


def _write(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
    """The formula into `out`, which may be `x`, a few rows at a time."""
    rows = x.shape[-2]
    step = max(1, SCRATCH * rows // max(x.numel(), 1))
    if step >= rows:
        _write_rows(out, x, cos, sin, layout, out is not x)
        return out
    for start in range(0, rows, step):
        part = slice(start, start + step)
        table = part if cos.shape[-2] > 1 else slice(None)
        tables = cos[..., table, :], sin[..., table, :]
        _write_rows(out[..., part, :], x[..., part, :], *tables, layout, out is not x)
    return out


def _write_rows(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, elsewhere: bool) -> None:
    width = 2 * cos.shape[-1]
    a, b = _pairs(x, width, layout)
    out_a, out_b = _pairs(out, width, layout)
    new_a = torch.addcmul(a * cos, b, sin, value=-1)
    new_b = torch.addcmul(b * cos, a, sin)
    out_a.copy_(new_a)
    out_b.copy_(new_b)
    if elsewhere and width < x.shape[-1]:
        out[..., width:] = x[..., width:]


def _turned_back(ctx, grad: Tensor) -> tuple[Tensor, None, None, None]:
    """The gradient of a turn: the opposite turn of what comes in, and none for tables and layout."""
    cos, sin = ctx.saved_tensors
    return turn(grad, cos, -sin, ctx.layout), None, None, None


class _Turn(torch.autograd.Function):
    """Turned into a new tensor; being linear, its own derivative, and its transpose turns back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, cos, sin, layout):
        return _write(torch.empty_like(x), x, cos, sin, layout)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, cos, sin, ctx.layout = inputs
        ctx.save_for_backward(cos, sin)
        ctx.save_for_forward(cos, sin)

    @staticmethod
    def backward(ctx, *grads):
        return _turned_back(ctx, grads[0])

    @staticmethod
    def jvp(ctx, *tangents):
        cos, sin = ctx.saved_tensors
        return turn(tangents[0], cos, sin, ctx.layout)


class _TurnInPlace(torch.autograd.Function):
    """Turned where it is; nothing but the tables is saved."""

    @staticmethod
    def forward(ctx, x, cos, sin, layout):
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        ctx.mark_dirty(x)
        return _write(x, x, cos, sin, layout)

    @staticmethod
    def backward(ctx, *grads):
        return _turned_back(ctx, grads[0])


def turn(
    x: Float[Tensor, "*lead rows head_dim"],
    cos: Float[Tensor, "*#lead #rows pairs"],
    sin: Float[Tensor, "*#lead #rows pairs"],
    layout: str,
) -> Float[Tensor, "*lead rows head_dim"]:
    """Each pair of channels turned by its angle; further channels pass untouched."""
    if torch.compiler.is_compiling() or cos.requires_grad or sin.requires_grad:
        return formula(x, cos, sin, layout)
    return _Turn.apply(x, cos, sin, layout)  # pyright: ignore[reportReturnType]


def turn_(
    x: Float[Tensor, "*lead rows head_dim"],
    cos: Float[Tensor, "*#lead #rows pairs"],
    sin: Float[Tensor, "*#lead #rows pairs"],
    layout: str,
) -> Float[Tensor, "*lead rows head_dim"]:
    """`turn`, written into `x` itself."""
    if torch.compiler.is_compiling() or cos.requires_grad or sin.requires_grad:
        return x.copy_(formula(x, cos, sin, layout))
    return _TurnInPlace.apply(x, cos, sin, layout)  # pyright: ignore[reportReturnType]

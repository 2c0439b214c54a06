"""Rotation in plain PyTorch: the formula, and its in-place form with a gradient.

Half precision is turned in float32 and rounded once, because the tables are float32 and arithmetic promotes.
"""

import torch

from .._shapes import Float, Tensor


def _pairs(x: Tensor, width: int, layout: str) -> tuple[Tensor, Tensor]:
    """The first and the second channel of each pair, as views."""
    if layout == "half":
        return x[..., : width // 2], x[..., width // 2 : width]
    return x[..., 0:width:2], x[..., 1:width:2]


def turn(
    x: Float[Tensor, "*lead seq head_dim"],
    cos: Float[Tensor, "*#lead seq pairs"],
    sin: Float[Tensor, "*#lead seq pairs"],
    layout: str,
) -> Float[Tensor, "*lead seq head_dim"]:
    """(a, b) becomes (a cos - b sin, b cos + a sin) for each pair (a, b); further channels pass untouched."""
    width = 2 * cos.shape[-1]
    a, b = _pairs(x, width, layout)
    # Each half is cast before they are joined: inductor then writes the result once.
    turned = ((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype))
    rest = (x[..., width:],) if width < x.shape[-1] else ()
    if layout == "half":
        return torch.cat((*turned, *rest), dim=-1)
    joined = torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined, *rest), dim=-1) if rest else joined


class _Turn(torch.autograd.Function):
    """Turns its input in place; the gradient is turned back.  Nothing but the tables is saved."""

    @staticmethod
    def forward(ctx, x, cos, sin, layout):
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        ctx.mark_dirty(x)
        if x.dtype == cos.dtype:
            a, b = _pairs(x, 2 * cos.shape[-1], layout)
            new_a = (a * cos).addcmul_(b, sin, value=-1)
            b.mul_(cos).addcmul_(a, sin)
            a.copy_(new_a)
        else:
            x.copy_(turn(x, cos, sin, layout))
        return x

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return turn(grads[0], cos, -sin, ctx.layout), None, None, None


def turn_(
    x: Float[Tensor, "*lead seq head_dim"],
    cos: Float[Tensor, "*#lead seq pairs"],
    sin: Float[Tensor, "*#lead seq pairs"],
    layout: str,
) -> Float[Tensor, "*lead seq head_dim"]:
    """`turn`, written into `x` itself."""
    if torch.compiler.is_compiling():
        return x.copy_(turn(x, cos, sin, layout))
    return _Turn.apply(x, cos, sin, layout)  # pyright: ignore[reportReturnType]

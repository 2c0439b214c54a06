"""The rotation as operators, for graphs that should keep it in one piece: torch.ops.ropewalk.turn and .turn_

Registered when this module is imported.  `turn` has a gradient; `turn_`, which writes into its argument, has none.
"""

import torch
from torch.library import custom_op, register_autograd, register_fake

from ropewalk.errors import message
from ropewalk.kernels.dispatch import write


@custom_op("ropewalk::turn", mutates_args=())
def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, back: bool = False) -> torch.Tensor:
    """`kernels.turn`, or with `back` the opposite turn."""
    return write(torch.empty_like(x), x, cos, sin, layout, back)


@custom_op("ropewalk::turn_", mutates_args=("x",))
def turn_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str, back: bool = False) -> None:
    """The same, written into `x` itself."""
    write(x, x, cos, sin, layout, back)


@register_fake("ropewalk::turn")
def _(x, cos, sin, layout, back=False):
    return torch.empty_like(x)


@register_fake("ropewalk::turn_")
def _(x, cos, sin, layout, back=False):
    return None


def _setup(ctx, inputs, output) -> None:
    _, cos, sin, ctx.layout, ctx.back = inputs
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        hint = "kernels.turn gives learned tables their gradient"
        raise ValueError(message("cos and sin", "tables without a gradient", "tables that require one", hint))
    ctx.save_for_backward(cos, sin)


def _backward(ctx, grad):
    cos, sin = ctx.saved_tensors
    return torch.ops.ropewalk.turn(grad, cos, sin, ctx.layout, not ctx.back), None, None, None, None


register_autograd("ropewalk::turn", _backward, setup_context=_setup)

"""Which way a rotation takes: the formula where it is watched, else the fastest that this machine has.

Every way gives the same numbers up to the rounding of one product; `eager.formula` says which.
"""

import contextlib
import contextvars
import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch._C import _get_tracing_state, _increment_version, _len_torch_dispatch_stack
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.nn import Parameter

from ropewalk._shapes import Float, Tensor
from ropewalk.errors import message, require
from ropewalk.kernels import eager, native
from ropewalk.kernels.eager import formula

CHOICES = ("auto", "eager", "formula")


def _choice(name: str, value: str) -> str:
    require(value in CHOICES, name, " or ".join(map(repr, CHOICES)), repr(value))
    return value


VARIABLE = "ROPEWALK_KERNELS"
_default = _choice(VARIABLE, os.environ.get(VARIABLE, "auto"))
_allowed = contextvars.ContextVar("allowed", default=_default)


@contextlib.contextmanager
def using(choice: str) -> Iterator[None]:
    """Within it, rotations keep to plain PyTorch; the environment variable ROPEWALK_KERNELS does so for a process.

    Args:
        choice: "auto", the fastest way; "eager", plain PyTorch; "formula", the specification itself.

    >>> with using("eager"):
    ...     path(torch.ones(2, 4), torch.ones(2, 2), torch.zeros(2, 2), "half")
    'eager'
    """
    token = _allowed.set(_choice("choice", choice))
    try:
        yield
    finally:
        _allowed.reset(token)


def may_be_fast() -> bool:
    """Whether compiled kernels may run: nobody asked for plain PyTorch."""
    return _allowed.get() == "auto"


class Found(NamedTuple):
    """Whether a way exists on this machine, and why or why not."""

    usable: bool
    note: str


def available() -> dict[str, Found]:
    """The ways that this machine has, fastest first within a device, then whether large tensors share threads.

    >>> available()["formula"].usable
    True
    """
    missing = _missing_triton()
    return {
        "triton": Found(missing == "", missing or "runs on this device"),
        "native": Found(native.MISSING == "", native.state()),
        "complex": Found(True, "plain PyTorch; float32 with neighbours paired, in one piece of memory"),
        "eager": Found(True, "plain PyTorch, block by block"),
        "formula": Found(True, "plain PyTorch; under compilers, transforms, tracers and tensor subclasses"),
        "threads": Found(*native.threads()),
    }


def path(x: Tensor, cos: Tensor, sin: Tensor, layout: str, in_place: bool = False) -> str:
    """The way that `turn` (or `turn_`) would take, a key of `available()`."""
    if _watched(x, cos, sin):
        return "formula"
    out = x if in_place else torch.empty_like(x)
    fast = native.write if x.is_cpu else _write_on_device
    if may_be_fast() and fast(out, x, cos, sin, layout, back=False, ask=True):
        return "native" if x.is_cpu else "triton"
    return "complex" if eager.is_complex(out, x, cos, layout) else "eager"


def _watched(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether more than the numbers is wanted: a trace, a derivative of the tables, a batch of calls, a subclass.

    `watched` written out, with batched gradients, which no transform announces: a token's turn takes little longer.
    """
    return (
        is_compiling()
        or (type(x) is not Tensor and type(x) is not Parameter)
        or type(cos) is not Tensor
        or type(sin) is not Tensor
        or cos.requires_grad
        or sin.requires_grad
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or is_legacy_batchedtensor(x)
        or _allowed.get() == "formula"
    )


@functools.cache
def _missing_triton() -> str:
    """Why no Triton kernel runs here, or "" if one does: tried once, for it needs a driver and a C compiler as well."""
    if importlib.util.find_spec("triton") is None:
        return "not installed (the extra ropewalk[triton])"
    if not torch.cuda.is_available():
        return "no GPU that torch can use"
    try:
        from ropewalk.kernels import triton

        x, table = torch.ones(1, 2, device="cuda"), torch.ones(1, 1, device="cuda")
        triton.write(x, x, table, table, "half", back=False)
        torch.cuda.synchronize()
    except Exception as error:
        return f"does not run here ({type(error).__name__}: {error})"
    return ""


def write(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, back: bool) -> Tensor:
    """The turn of `x`, or the opposite one, into `out`, which may be `x`; no derivative is recorded."""
    fast = native.write if x.is_cpu else _write_on_device
    if _allowed.get() == "auto" and fast(out, x, cos, sin, layout, back):
        if out is x and not x.is_inference():
            _increment_version((x,))  # autograd did not see it written to
    else:
        eager.write(out, x, cos, -sin if back else sin, layout)
    return out


def _write_on_device(
    out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, back: bool, ask: bool = False
) -> bool:
    """`native.write` for other devices."""
    if not x.is_cuda or _missing_triton():
        return False
    from ropewalk.kernels import triton  # a second to import, for tensors on a GPU alone

    return triton.write(out, x, cos, sin, layout, back, ask)


class _Turn(torch.autograd.Function):
    """Turned into a new tensor; being linear, its transpose turns back, and nothing but the tables is kept."""

    @staticmethod
    def forward(ctx, x, cos, sin, layout, back):
        ctx.save_for_backward(cos, sin)
        ctx.layout, ctx.back = layout, back
        return write(torch.empty_like(x), x, cos, sin, layout, back)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, ctx.layout, not ctx.back), None, None, None, None


class _TurnInPlace(torch.autograd.Function):
    """The same, written where it is."""

    @staticmethod
    def forward(ctx, x, cos, sin, layout):
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        ctx.mark_dirty(x)
        return write(x, x, cos, sin, layout, back=False)

    @staticmethod
    def backward(ctx, *grads):
        cos, sin = ctx.saved_tensors
        return _turned(grads[0], cos, sin, ctx.layout, back=True), None, None, None


def _check_writable(x: Tensor) -> None:
    """RuntimeError, as of torch's own writes, where autograd could not follow a write into `x`."""
    if x.is_leaf:
        condition = "no leaf Variable that requires a gradient, to be written into"
    elif x._is_view() and _get_creation_meta(x) != CreationMeta.DEFAULT:
        condition = "no part of a chunk, split or unbind, nor a view made without gradients, to be written into"
    else:
        return
    raise RuntimeError(message("x", condition, tuple(x.shape), "rotate gives a new tensor"))


def _turned(x: Tensor, cos: Tensor, sin: Tensor, layout: str, back: bool) -> Tensor:
    """`turn`, or the opposite turn."""
    if _watched(x, cos, sin):
        return formula(x, cos, -sin if back else sin, layout)
    if x.requires_grad and torch.is_grad_enabled():
        return _Turn.apply(x, cos, sin, layout, back)  # pyright: ignore[reportReturnType]
    return write(torch.empty_like(x), x, cos, sin, layout, back)


def turn(
    x: Float[Tensor, "*lead rows head_dim"],
    cos: Float[Tensor, "*#lead #rows pairs"],
    sin: Float[Tensor, "*#lead #rows pairs"],
    layout: str,
) -> Float[Tensor, "*lead rows head_dim"]:
    """Each pair of channels turned by its angle; further channels pass untouched."""
    return _turned(x, cos, sin, layout, back=False)


def turn_(
    x: Float[Tensor, "*lead rows head_dim"],
    cos: Float[Tensor, "*#lead #rows pairs"],
    sin: Float[Tensor, "*#lead #rows pairs"],
    layout: str,
) -> Float[Tensor, "*lead rows head_dim"]:
    """`turn`, written into `x` itself."""
    if _watched(x, cos, sin):
        return x.copy_(formula(x, cos, sin, layout))
    is_frozen = x.is_inference()
    if is_frozen and not torch.is_inference_mode_enabled():
        return x.copy_(formula(x, cos, sin, layout))  # for torch to say that it may not be written to here
    if x.requires_grad and torch.is_grad_enabled():
        _check_writable(x)  # torch looks only after the kernel has written
        return _TurnInPlace.apply(x, cos, sin, layout)  # pyright: ignore[reportReturnType]
    if x.is_cpu and _allowed.get() == "auto" and native.write(x, x, cos, sin, layout, False):  # as `write`, but sooner
        if not is_frozen:
            _increment_version((x,))
        return x
    return write(x, x, cos, sin, layout, False)

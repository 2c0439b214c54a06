"""Whether anyone but the caller looks at a computation: then it has to be made of plain operations."""

import torch
from torch._C import _get_tracing_state, _len_torch_dispatch_stack
from torch._C._functorch import is_legacy_batchedtensor, peek_interpreter_stack
from torch.autograd import forward_ad

_OWN = (torch.Tensor, torch.nn.Parameter)


def has_tangents() -> bool:
    """Whether forward-mode derivatives are being taken, which torch's fused attention has none of."""
    return forward_ad._current_level >= 0


def watched(*tensors: torch.Tensor) -> bool:
    """Whether a trace, a compiler, a batch of calls, forward-mode derivatives or a subclass wants more than numbers."""
    if (
        torch.compiler.is_compiling()
        or _get_tracing_state() is not None
        or _len_torch_dispatch_stack() > 0
        or peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    ):
        return True
    for x in tensors:  # noqa: SIM110 - any() would cost more, and this runs before every rotation of a token
        if type(x) not in _OWN or x.is_meta or is_legacy_batchedtensor(x):  # the last: gradients in a batch
            return True
    return False

"""The rotation on a CPU by compiled code (`_turn.c`), where it could be built."""

import torch

from ropewalk._shapes import Tensor

try:
    from ropewalk.kernels import _turn
except ImportError as error:
    _turn = None
    MISSING = f"not built ({error})"
else:
    MISSING = ""

CODES = {} if _turn is None else {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.float64: 3}
"""What compiled code turns: the order of dtypes in `_rows.h`."""


def state() -> str:
    """What the compiled code found on this machine, or why there is none."""
    return MISSING or f"built, runs {_turn.found()[0]} instructions"  # pyright: ignore[reportOptionalMemberAccess]


def threads() -> tuple[bool, str]:
    """Whether large tensors are shared among torch's threads, and how."""
    if _turn is None:
        return True, "torch's own, within its operations"
    return (True, "torch's OpenMP pool") if _turn.found()[1] else (False, "torch's OpenMP pool was not found")


def write(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor, layout: str, back: bool, ask: bool = False) -> bool:
    """The turn of `x` into `out`, which may be `x`; False, and nothing done, where the compiled code cannot.

    Args:
        back: turn by the opposite angles.
        ask: only say whether it could.
    """
    code = CODES.get(x.dtype)
    table_dtype = torch.float64 if code == 3 else torch.float32
    if code is None or cos.dtype is not table_dtype or sin.dtype is not table_dtype:
        return False
    if not (x.is_cpu and cos.is_cpu and sin.is_cpu):
        return False
    if x.is_neg() or cos.is_neg() or sin.is_neg():  # views whose memory holds the opposite numbers
        return False
    flags = (layout == "interleaved") | back << 1 | ask << 2
    elsewhere = None if out is x else (out.data_ptr(), out.shape, out.stride())
    assert _turn is not None
    return _turn.turn(  # one by one: unpacked tuples would double the cost of the call
        elsewhere,
        x.data_ptr(), x.shape, x.stride(),
        cos.data_ptr(), cos.shape, cos.stride(),
        sin.data_ptr(), sin.shape, sin.stride(),
        code, flags, torch.get_num_threads(), 0,
    )  # fmt: skip


def fill(cos: Tensor, sin: Tensor, fine: Tensor, cos_a: Tensor, sin_a: Tensor) -> bool:
    """cos(a + b) and sin(a + b) for every a and b in order, into tables that are contiguous; False: not done.

    Args:
        fine: cos b beside sin b, (number of b, 2 pairs).
        cos_a: (number of a, pairs), like `sin_a`.
    """
    code, (blocks, pairs), block = CODES.get(cos.dtype), cos_a.shape, len(fine)
    if code is None or not (cos.is_cpu and fine.is_cpu):
        return False
    assert _turn is not None
    table = (blocks, 1, pairs), (pairs, pairs, 1)
    return _turn.turn(
        (cos.data_ptr(), (blocks, block, 2 * pairs), (block * pairs, pairs, 1)),
        fine.data_ptr(), (blocks, block, 2 * pairs), (0, 2 * pairs, 1),
        cos_a.data_ptr(), *table,
        sin_a.data_ptr(), *table,
        code, 0, torch.get_num_threads(), (sin.data_ptr() - cos.data_ptr()) // cos.element_size(),
    )  # fmt: skip

"""Tables of cosines and sines: long runs by the addition theorem, everything else from its angles."""

import torch

from ropewalk import phases
from ropewalk._shapes import Float, Int, Tensor
from ropewalk.kernels import dispatch, native


def tables(
    positions: Int[Tensor, "*batch seq"], step: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[Float[Tensor, "*batch seq pairs"], Float[Tensor, "*batch seq pairs"]]:
    """Cosines and sines of `phases.angles(positions, step, dtype)`, within 4e-7 of the exact ones in float32.

    The table at 1024 a + b is the table at b turned by the angle of 1024 a, so consecutive positions need few cosines.
    """
    first = phases.run_start(positions)
    if first is None:
        angles = phases.angles(positions, step, dtype)
        return angles.cos(), angles.sin()
    cos, sin = _run(first, positions.numel(), step, dtype)
    return cos.view(*positions.shape, -1), sin.view(*positions.shape, -1)


def _run(
    first: int, length: int, step: tuple[int, ...], dtype: torch.dtype
) -> tuple[Float[Tensor, "seq pairs"], Float[Tensor, "seq pairs"]]:
    cos_a, sin_a, fine = phases.factors(first, length, step, dtype)
    whole = len(cos_a) * len(fine)  # the last block's end is cut off
    cos, sin = (torch.empty(whole, len(step), dtype=dtype, device=cos_a.device)[:length] for _ in range(2))
    if not (dispatch.may_be_fast() and native.fill(cos, sin, fine, cos_a, sin_a)):
        phases.combine(cos, sin, cos_a, sin_a, fine)
    return cos, sin

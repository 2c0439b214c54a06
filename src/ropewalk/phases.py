"""Exact angles: a phase is an integer, in units of 2^-64 of a turn.

An angle matters modulo one turn only, and integers of 64 bits wrap modulo 2^64 by themselves.  So a frequency
becomes the integer step = round(2^64 inv_freq / 2 pi), computed once on the host with 50 digits, and

    phase = position * step   (mod 2^64)

is exact for every 64-bit position, on every device, whatever dtype the model has.  Read as a signed number it is
a fraction of a turn in [-1/2, 1/2), which float32 holds to 2^-25 of a turn.  The step itself is off by at most
2^-65 turns per token: 2e-10 radians at position 10^9.
"""

import math
from collections.abc import Iterable
from decimal import Context, Decimal, localcontext

import torch

from ropewalk._shapes import Float, Int, Tensor

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
DIGITS = Context(prec=60)
_TURN = 1 << 64
_RADIANS = 2.0 * math.pi / _TURN  # per unit of phase; a plain float, for the compiler traces no decimals


def steps(inv_freq: Iterable[Decimal]) -> tuple[int, ...]:
    """Radians per token as 2^-64ths of a turn per token, each in [-2^63, 2^63).

    >>> steps([PI, PI / 2])    # half a turn and a quarter of a turn
    (-9223372036854775808, 4611686018427387904)
    """
    with localcontext(DIGITS):
        wrapped = [int((w * _TURN / (2 * PI)).to_integral_value()) % _TURN for w in inv_freq]
    return tuple(s - _TURN if s >= _TURN // 2 else s for s in wrapped)


def angles(
    positions: Int[Tensor, "*batch seq"], step: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch seq pairs"]:
    """The angle of each position and frequency in radians, in [-pi, pi), with cosines within 4e-7 in float32.

    Args:
        positions: tokens; any integers of 64 bits, negative ones too.
        step: from `steps`.
        dtype: float32, or float64 (then within 1e-9 up to position 10^9).
    """
    # Made anew at each call: a stored tensor could be cast, left unfilled after meta initialisation, or traced.
    step_tensor = torch.tensor(step, dtype=torch.int64, device=positions.device)
    phase = positions.unsqueeze(-1) * step_tensor
    return phase.to(dtype) * _RADIANS

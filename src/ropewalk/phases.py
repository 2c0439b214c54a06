"""Exact angles: a phase is an integer, in units of 2^-64 of a turn.

An angle matters modulo one turn only, and integers of 64 bits wrap modulo 2^64 by themselves.  So a frequency
becomes the integer step = round(2^64 inv_freq / 2 pi), computed once on the host with 50 digits, and

    phase = position * step   (mod 2^64)

is exact for every 64-bit position, on every device, whatever dtype the model has.  Read as a signed number it is
a fraction of a turn in [-1/2, 1/2), which float32 holds to 2^-25 of a turn.  The step itself is off by at most
2^-65 turns per token: 2e-10 radians at position 10^9.

Cosines and sines of a long run of positions follow from a few exact ones, by the addition theorem.
"""

import array
import functools
import math
from collections.abc import Iterable
from decimal import Context, Decimal, localcontext

import torch

from ropewalk._shapes import Float, Int, Tensor
from ropewalk._watch import watched

PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
DIGITS = Context(prec=60)
_TURN = 1 << 64
_RADIANS = 2.0 * math.pi / _TURN  # per unit of phase; a plain float, for the compiler traces no decimals
RUN = 4096
"""Consecutive positions from which the addition theorem pays."""


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
    phase = positions.unsqueeze(-1) * _step_tensor(step, positions.device)
    return phase.to(dtype).mul_(_RADIANS)


@functools.lru_cache(maxsize=256)
def _memory(step: tuple[int, ...]) -> array.array:
    return array.array("q", step)


def _step_tensor(step: tuple[int, ...], device: torch.device) -> Int[Tensor, "pairs"]:
    """A tensor of its own at each call: a stored one could be left unfilled after meta initialisation, or traced."""
    if device.type != "cpu" or watched():
        return torch.tensor(step, dtype=torch.int64, device=device)
    return torch.frombuffer(_memory(step), dtype=torch.int64)  # a view of the numbers, for converting them takes longer


def run_start(positions: Int[Tensor, "*batch seq"]) -> int | None:
    """The first of many consecutive positions in plain memory, else None; on another device looking takes too long."""
    if watched(positions) or not positions.is_cpu or positions.dtype != torch.int64:  # first: a symbol has no length
        return None
    if positions.numel() < RUN or positions.numel() != positions.shape[-1]:
        return None
    row = positions.flatten()
    first, last = int(row[0]), int(row[-1])
    is_run = last - first == len(row) - 1 and bool((row.diff() == 1).all())
    return first if is_run else None


def factors(
    first: int, length: int, step: tuple[int, ...], dtype: torch.dtype
) -> tuple[Float[Tensor, "blocks pairs"], Float[Tensor, "blocks pairs"], Float[Tensor, "block two_pairs"]]:
    """What the tables of a run are made of: cosines and sines of its blocks' first positions, and, side by side,
    those of the positions within a block.  Exact in float64 before they are rounded to `dtype`."""
    block = 1 << (length.bit_length() + 2) // 2
    coarse = angles(torch.arange(first, first + length, block, device="cpu"), step, torch.float64)
    fine = angles(torch.arange(block, device="cpu"), step, torch.float64)
    return coarse.cos().to(dtype), coarse.sin().to(dtype), torch.cat((fine.cos(), fine.sin()), dim=-1).to(dtype)


def combine(
    cos: Float[Tensor, "seq pairs"],
    sin: Float[Tensor, "seq pairs"],
    cos_a: Float[Tensor, "blocks pairs"],
    sin_a: Float[Tensor, "blocks pairs"],
    fine: Float[Tensor, "block two_pairs"],
) -> None:
    """cos(a + b) = cos a cos b - sin a sin b and sin(a + b) = sin b cos a + cos b sin a, into `cos` and `sin`, block
    by block so that they stay in cache."""
    cos_b, sin_b = fine.chunk(2, dim=-1)
    for row, (c, s) in enumerate(zip(cos.split(len(fine)), sin.split(len(fine)), strict=True)):
        torch.mul(cos_b[: len(c)], cos_a[row], out=c)
        c.addcmul_(sin_b[: len(c)], sin_a[row], value=-1)
        torch.mul(sin_b[: len(c)], cos_a[row], out=s)
        s.addcmul_(cos_b[: len(c)], sin_a[row])

"""What a stranger's rotation does, measured with unit vectors; and what its angles may be off."""

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext

import torch

from ropewalk import phases
from ropewalk._shapes import Tensor
from ropewalk.check.adapters import Rotation
from ropewalk.check.subject import table_error
from ropewalk.check.verdict import NotApplicable

# Roundings of an angle before its cosine is taken, each of half a unit: the position as a float 1, the power 2, the
# reciprocal 1, a factor 1, a blend of two frequencies 3, the product 1.
ROUNDINGS = 9
# And those of a frequency that is read from one token's turn: of its sine and of its cosine.
MEASURING = 2
# Positions of a sequence, asked for in half precision alone: float64 angles are exact enough there.
MANY = 32


class Refused(Exception):
    """The function raised: it refuses these positions."""


@dataclass(frozen=True)
class Turns:
    """What a rotation does to its channels.

    Args:
        pairs: the channels that turn together, lower one first.
        inv_freq: radians per token of each pair, negative where it turns the other way; in (-pi, pi].
        order: where each channel comes out.
        magnitude: of each pair, at position 0.
        still: channels that do not turn.
    """

    pairs: tuple[tuple[int, int], ...]
    inv_freq: tuple[float, ...]
    order: tuple[int, ...]
    magnitude: tuple[float, ...]
    still: tuple[int, ...]

    @property
    def firsts(self) -> list[int]:
        return [a for a, _ in self.pairs]

    @property
    def seconds(self) -> list[int]:
        return [b for _, b in self.pairs]

    @property
    def backward(self) -> bool:
        """Whether all pairs turn the other way than published."""
        return len(self.inv_freq) > 0 and max(self.inv_freq) < 0

    @property
    def layout(self) -> str | None:
        """The name of this pairing, if it has one."""
        width = 2 * len(self.pairs)
        turning = sorted(self.firsts + self.seconds)
        for name in ("half", "interleaved"):
            if list(self.pairs) == paired(turning, name):
                return "either" if width == 2 else name
        return None


def paired(channels: list[int], layout: str) -> list[tuple[int, int]]:
    """The pairs of these channels in a layout."""
    half = len(channels) // 2
    if layout == "half":
        return list(zip(channels[:half], channels[half:], strict=True))
    return list(zip(channels[::2], channels[1::2], strict=True))


def asked(f, x: Tensor, positions: Tensor) -> Tensor:
    """What `f` answers, or Refused."""
    try:
        return f(x, positions)
    except Exception as error:
        raise Refused(f"{type(error).__name__}: {error}") from error


def images(target: Rotation, positions: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """What each unit vector becomes at each position, (positions, channels, head_dim)."""
    eye = torch.eye(target.head_dim, dtype=dtype)
    x = eye[None, :, None].repeat(1, 1, len(positions), 1)
    return target.f(x, torch.tensor(positions))[0].detach().transpose(0, 1)


def measured(target: Rotation) -> Turns:
    """Pairs, frequencies and order, from one token's turn; NotApplicable where channels do not turn in pairs."""
    start, turn = images(target, [0])[0].double(), images(target, [1])[0].double()
    order = placed(start)
    if order is None:
        raise NotApplicable("position 0 turns its channels")
    turn = turn[:, order]
    lengths = start.abs().amax(-1)
    pairs, still = [], []
    for channel, row in enumerate(turn / lengths[:, None]):
        support = row.nonzero().flatten().tolist()
        if support == [channel]:
            still.append(channel)
        elif len(support) == 2 and channel in support:
            pairs += [(support[0], support[1])] if channel == support[0] else []
        else:
            raise NotApplicable(NO_PAIRS)
    if sorted([*still, *(c for pair in pairs for c in pair)]) != list(range(target.head_dim)):
        raise NotApplicable(NO_PAIRS)
    inv_freq = tuple(math.atan2(float(turn[a, b]), float(turn[a, a])) for a, b in pairs)
    return Turns(tuple(pairs), inv_freq, tuple(order), tuple(float(lengths[a]) for a, _ in pairs), tuple(still))


NO_PAIRS = "its channels do not turn in pairs"


def placed(start: Tensor) -> list[int] | None:
    """Where each channel comes out at position 0, one place each; None if it is turned there."""
    found = [row.nonzero().flatten().tolist() for row in start]
    places = [row[0] for row in found if len(row) == 1]
    return places if sorted(places) == list(range(len(start))) and bool((start >= 0).all()) else None


def turned(target: Rotation, found: Turns, positions: Tensor, dtype: torch.dtype, f=None) -> Tensor:
    """Cosine and sine of each pair at each position, (2, positions, pairs), over its magnitude; or Refused."""
    x = torch.zeros(1, 1, len(positions), target.head_dim, dtype=dtype)
    x[..., found.firsts] = 1.0
    out = asked(f or target.f, x, positions)[0, 0].detach().double()[:, list(found.order)]
    size = torch.tensor(found.magnitude, dtype=torch.float64)
    return torch.stack((out[:, found.firsts], out[:, found.seconds])) / size


def stated(target: Rotation, found: Turns) -> list[Decimal] | None:
    """The frequencies that the target states, of its stated or measured width and direction."""
    sign = -1 if (found.backward and target.direction is None) or target.direction == "backward" else 1
    if target.inv_freq is not None:
        return [sign * Decimal(w) for w in target.inv_freq]
    if target.base is None:
        return None
    width = target.rotary_dim or 2 * len(found.pairs)
    return [sign * w for w in powers(target.base, width, width // 2)]


def powers(base: float, width: int, pairs: int) -> list[Decimal]:
    """base^(-2i / width) to 50 digits."""
    with localcontext(phases.DIGITS):
        return [Decimal(base) ** (Decimal(-2 * i) / width) for i in range(pairs)]


def known(target: Rotation, found: Turns) -> tuple[list[Decimal], int]:
    """The frequencies to hold the target to, and the roundings of an angle made of them: stated ones if they are
    as many as there are pairs, else measured ones."""
    given = stated(target, found)
    if given is not None:
        given = [w for w in given if w != 0]
        if len(given) == len(found.pairs):
            return given, ROUNDINGS
    return [Decimal(w) for w in found.inv_freq], ROUNDINGS + MEASURING


def exact(inv_freq: list[Decimal], positions: list[int]) -> Tensor:
    """Cosine and sine of each pair at each position, (2, positions, pairs)."""
    if len(positions) > MANY:
        w = torch.tensor([float(w) for w in inv_freq], dtype=torch.float64)
        angles = torch.tensor(positions)[:, None] * w
    else:
        with localcontext(phases.DIGITS):  # float64 has no digits left for a far angle: 50 digits reduce it
            rows = [[float(p * w % (2 * phases.PI)) for w in inv_freq] for p in positions]
        angles = torch.tensor(rows, dtype=torch.float64).view(len(positions), len(inv_freq))
    return torch.stack((angles.cos(), angles.sin()))


def angle_error(
    target: Rotation, inv_freq: list[Decimal], positions: Tensor, dtype: torch.dtype, roundings: int
) -> Tensor:
    """What the cosine or sine of each pair may be off at each position, (positions, pairs): the angle in units of
    `dtype`, to which a power of the base adds the rounding of its exponent, |ln inv_freq| half units; and the table's
    own rounding."""
    w = torch.tensor([abs(float(w)) for w in inv_freq], dtype=torch.float64)
    of_table = torch.tensor([[table_error(dtype, p)] for p in positions.tolist()], dtype=torch.float64)
    if target.exact and (target.inv_freq is not None or target.base is not None):
        rounded = any(isinstance(given, float) for given in target.inv_freq or ())
        return positions.abs()[:, None] * w * 2.0**-53 * rounded + of_table
    unit = torch.finfo(dtype).eps / 2
    return positions.abs()[:, None] * (torch.special.xlogy(w, w).abs() + roundings * w) * unit + of_table


def worst_angle(exact: bool, position: int, dtype: torch.dtype) -> float:
    """`angle_error` of a pair of any frequency up to 1 radian per token."""
    if exact:
        return table_error(dtype, position)
    # w (|ln w| + ROUNDINGS) is largest at w = 1, for it still grows there.
    return abs(position) * (ROUNDINGS + MEASURING) * torch.finfo(dtype).eps / 2 + table_error(dtype, position)

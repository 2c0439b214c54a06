"""Spectra: how fast each pair of channels turns, as plain numbers.

Every way to stretch a context is a pure function from numbers to a `Spectrum`; the encoding that uses it stays
one class.  Numbers are decimals of 50 digits and more, since a phase at position 10^9 multiplies their error.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

from ropewalk import phases
from ropewalk.errors import require, require_count, require_number, require_type

Number = int | float | Decimal


@dataclass(frozen=True, init=False)
class Spectrum:
    """Radians per token of each pair of channels, and what the cosines and sines are multiplied by.

    Args:
        inv_freq: radians per token, fastest first, each finite and at least 0 (0 never turns).
        magnitude: dimensionless and positive; a score gains its square.

    >>> Spectrum([1.0, 0.01]).inv_freq
    (1.0, 0.01)
    """

    exact: tuple[Decimal, ...]
    magnitude: float

    def __init__(self, inv_freq: Sequence[Number], magnitude: float = 1.0):
        require_type(inv_freq, Iterable, "inv_freq", "a sequence of numbers")
        exact = tuple(Decimal(require_number(w, "inv_freq")) for w in inv_freq)
        require_number(magnitude, "magnitude")
        require(len(exact) > 0, "inv_freq", "at least one number", "none")
        for w in exact:
            require(w.is_finite() and w >= 0, "inv_freq", "finite and at least 0 throughout", float(w))
        finite = math.isfinite(magnitude) and magnitude > 0
        require(finite, "magnitude", "finite and positive", magnitude)
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "magnitude", float(magnitude))

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """Radians per token, rounded to floats."""
        return tuple(float(w) for w in self.exact)

    @property
    def wavelengths(self) -> tuple[float, ...]:
        """Tokens per turn; infinite for a pair that never turns.

        >>> [round(w, 3) for w in Spectrum([1.0, 0.01, 0.0]).wavelengths]
        [6.283, 628.319, inf]
        """
        return tuple(2 * math.pi / w if w else math.inf for w in self.inv_freq)

    @property
    def steps(self) -> tuple[int, ...]:
        """2^-64ths of a turn per token (see `phases`)."""
        return phases.steps(self.exact)

    def __repr__(self) -> str:
        first, final = self.inv_freq[0], self.inv_freq[-1]
        return f"Spectrum({len(self.exact)} pairs, {first:.6g} to {final:.6g} rad/token, magnitude={self.magnitude:g})"


@lru_cache(maxsize=256)
def powers(pairs: int, dim: int, base: Decimal) -> tuple[Decimal, ...]:
    """base^(-2i / dim) for i in [0, pairs)."""
    with localcontext(phases.DIGITS):
        rate = -2 * base.ln() / dim
        return tuple((i * rate).exp() for i in range(pairs))


def check_base(base: Number) -> Decimal:
    """`base` as an exact number, or ValueError unless finite and positive."""
    exact = Decimal(require_number(base, "base"))
    require(exact.is_finite() and exact > 0, "base", "finite and positive", base)
    return exact


def plain(rotary_dim: int, base: Number = 10_000.0) -> Spectrum:
    """inv_freq[i] = base^(-2i / rotary_dim)   (RoFormer, Su et al. 2021, arXiv:2104.09864v5, Sec. 3.2.2).

    Args:
        rotary_dim: channels that turn, even, at least 2.
        base: dimensionless, above 0.

    >>> plain(4).inv_freq
    (1.0, 0.01)
    """
    require_count(rotary_dim, "rotary_dim", at_least=2)
    require(rotary_dim % 2 == 0, "rotary_dim", "even", rotary_dim, hint="channels turn in pairs")
    return Spectrum(powers(rotary_dim // 2, rotary_dim, check_base(base)))


def _stretch(stretch: Number) -> Decimal:
    exact = Decimal(require_number(stretch, "stretch"))
    require(exact.is_finite() and exact >= 1, "stretch", "at least 1 (eval_len / train_len)", stretch)
    return exact


def linear(rotary_dim: int, base: Number = 10_000.0, *, stretch: Number) -> Spectrum:
    """Position interpolation: inv_freq / stretch   (Chen et al. 2023, arXiv:2306.15595v2, Eq. 4).

    >>> linear(4, stretch=4).inv_freq
    (0.25, 0.0025)
    """
    factor = _stretch(stretch)
    with localcontext(phases.DIGITS):
        return Spectrum([w / factor for w in plain(rotary_dim, base).exact])


def ntk(rotary_dim: int, base: Number = 10_000.0, *, stretch: Number) -> Spectrum:
    """A larger base, stretch^(d / (d - 2)) times: the first pair keeps its frequency, the last is stretched in
    full   (YaRN, Peng et al. 2023, arXiv:2309.00071v2, Sec. 3.1, Eq. 16).

    >>> ntk(128, stretch=4).inv_freq[0]
    1.0
    """
    require_count(rotary_dim, "rotary_dim", at_least=4)
    with localcontext(phases.DIGITS):
        return plain(rotary_dim, check_base(base) * _stretch(stretch) ** (Decimal(rotary_dim) / (rotary_dim - 2)))


def yarn(
    rotary_dim: int,
    base: Number = 10_000.0,
    *,
    stretch: Number,
    train_len: int,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    magnitude: float | None = None,
) -> Spectrum:
    """Pairs that turn often within `train_len` stay, slow ones are interpolated, with a ramp between
    (YaRN, Peng et al. 2023, arXiv:2309.00071v2, Sec. 3.2 and 3.4).

    Args:
        stretch: eval_len / train_len, at least 1.
        train_len: tokens seen in training.
        beta_fast: turns within `train_len` above which a pair stays as it is.
        beta_slow: turns below which it is stretched in full; less than `beta_fast`.
        truncate: round the ramp's ends outwards to whole pairs, as the released code does.
        magnitude: what the tables are multiplied by; by default 0.1 ln(stretch) + 1.

    >>> s = yarn(64, stretch=4, train_len=4096)
    >>> s.inv_freq[0], round(s.inv_freq[31], 9)
    (1.0, 3.3338e-05)
    """
    factor = _stretch(stretch)
    require_count(train_len, "train_len")
    ends = math.isfinite(require_number(beta_fast, "beta_fast")) and 0 < require_number(beta_slow, "beta_slow")
    require(ends and beta_slow < beta_fast, "beta_slow", f"positive and below beta_fast ({beta_fast})", beta_slow)
    require(check_base(base) > 1, "base", "above 1", base)
    original = plain(rotary_dim, base).exact

    def pair_that_turns(turns: float) -> float:
        return rotary_dim * math.log(train_len / (turns * 2 * math.pi)) / (2 * math.log(float(base)))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low = max(low, 0)
    high = max(min(high, rotary_dim - 1), low)
    width = (high - low) or 0.001  # the released code's guard against a ramp of no width
    ramp = [Decimal(min(max((i - low) / width, 0.0), 1.0)) for i in range(rotary_dim // 2)]
    with localcontext(phases.DIGITS):
        mixed = [w / factor * r + w * (1 - r) for w, r in zip(original, ramp, strict=True)]
    if magnitude is None:
        magnitude = 0.1 * math.log(float(factor)) + 1.0
    return Spectrum(mixed, magnitude)

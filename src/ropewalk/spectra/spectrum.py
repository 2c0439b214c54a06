"""A spectrum: radians per token of each pair of channels, and what made it.

Numbers are decimals of 50 digits and more, since a phase at position 10^9 multiplies their error.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any, ParamSpec

from ropewalk import phases
from ropewalk.errors import require, require_count, require_number, require_type

Number = int | float | Decimal
Recipe = tuple[str, tuple[tuple[str, Any], ...]]
P = ParamSpec("P")


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
    recipe: Recipe | None = field(compare=False)
    """The function in `ropewalk.spectra` that made it, with its arguments; None for numbers given by hand."""

    def __init__(self, inv_freq: Sequence[Number], magnitude: float | int = 1.0):
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
        object.__setattr__(self, "recipe", None)

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

    @property
    def depends_on_length(self) -> bool:
        """Whether another length of the sequence may need another spectrum (`spectra.for_length`)."""
        return self.recipe is not None and any(name == "length" for name, _ in self.recipe[1])

    def __repr__(self) -> str:
        first, final = self.inv_freq[0], self.inv_freq[-1]
        return f"Spectrum({len(self.exact)} pairs, {first:.6g} to {final:.6g} rad/token, magnitude={self.magnitude:g})"


def published(function: Callable[P, Spectrum]) -> Callable[P, Spectrum]:
    """Spectra remember the rule that made them, so that it can be written down, or asked for another length."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Spectrum:
        spectrum = function(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        numbers = ((name, tuple(v) if isinstance(v, list) else v) for name, v in bound.arguments.items())
        object.__setattr__(spectrum, "recipe", (function.__name__, tuple(numbers)))
        return spectrum

    return made


@functools.lru_cache(maxsize=256)
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


def check_stretch(stretch: Number) -> Decimal:
    """`stretch` as an exact number, or ValueError unless finite and at least 1."""
    exact = Decimal(require_number(stretch, "stretch"))
    require(exact.is_finite() and exact >= 1, "stretch", "at least 1 (eval_len / train_len)", stretch)
    return exact


@published
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

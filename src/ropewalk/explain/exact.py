"""Angles of any position in decimals, so that every printed digit of their cosines is right."""

import math
from collections.abc import Sequence
from decimal import Decimal, localcontext

from ropewalk.encodings import Rotary
from ropewalk.phases import DIGITS, PI
from ropewalk.spectra import Spectrum

ROUNDING = 1e-15
"""A sum of terms that cancel down to this share of them is the rounding of float64."""


def angles(spectrum: Spectrum, position: int) -> list[Decimal]:
    """position x inv_freq of each pair, radians, not reduced."""
    with localcontext(DIGITS):
        return [position * w for w in spectrum.exact]


def tables(spectrum: Spectrum, position: int) -> tuple[list[float], list[float]]:
    """Cosines and sines of `angles`, which are reduced to one turn before they become floats."""
    with localcontext(DIGITS):
        reduced = [float(angle % (2 * PI)) for angle in angles(spectrum, position)]
    return [math.cos(a) for a in reduced], [math.sin(a) for a in reduced]


def pairs(width: int, layout: str) -> list[list[int]]:
    """The channels of each pair: 2i and 2i + 1, or i and i + width / 2."""
    half = width // 2
    return [[i, i + half] if layout == "half" else [2 * i, 2 * i + 1] for i in range(half)]


def turned(rope: Rotary, x: Sequence[float], position: int) -> list[float]:
    """One vector turned to one position."""
    result = [0.0] * len(x)
    for (a, b), c, s in zip(pairs(len(x), rope.layout), *tables(rope.spectrum, position), strict=True):
        result[a], result[b] = x[a] * c - x[b] * s, x[a] * s + x[b] * c
    return result


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The product of two vectors; what is only the rounding of terms that cancel is 0."""
    terms = [x * y for x, y in zip(a, b, strict=True)]
    total = math.fsum(terms)
    return total if abs(total) > ROUNDING * math.fsum(map(abs, terms)) else 0.0

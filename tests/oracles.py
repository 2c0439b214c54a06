"""Slow, plain oracles: python loops, `math` and 50-digit mpmath. Nothing in this file touches ropewalk."""

import functools
import math
from collections.abc import Callable, Sequence

import mpmath

mpmath.mp.dps = 50


@functools.cache
def exact_angle(position: int, pair: int, rotary_dim: int, base: float) -> mpmath.mpf:
    """Radians by which `pair` is turned at `position`: position * base^(-2 pair / rotary_dim)."""
    return mpmath.mpf(position) * mpmath.mpf(base) ** (mpmath.mpf(-2 * pair) / rotary_dim)


@functools.cache
def exact_cos_sin(position: int, pair: int, rotary_dim: int, base: float = 10_000.0) -> tuple[float, float]:
    angle = exact_angle(position, pair, rotary_dim, base)
    return float(mpmath.cos(angle)), float(mpmath.sin(angle))


def partners(pair: int, rotary_dim: int, layout: str) -> tuple[int, int]:
    """The two channels that one angle turns."""
    return (pair, pair + rotary_dim // 2) if layout == "half" else (2 * pair, 2 * pair + 1)


def rotated(
    vector: Sequence[float],
    position: int,
    *,
    layout: str = "half",
    rotary_dim: int | None = None,
    base: float = 10_000.0,
) -> list[float]:
    """RoPE of one vector, pair by pair: (a, b) -> (a cos - b sin, a sin + b cos)."""
    width = len(vector) if rotary_dim is None else rotary_dim
    out = [float(value) for value in vector]
    for pair in range(width // 2):
        cos, sin = exact_cos_sin(position, pair, width, base)
        first, second = partners(pair, width, layout)
        a, b = float(vector[first]), float(vector[second])
        out[first], out[second] = a * cos - b * sin, a * sin + b * cos
    return out


def sinusoidal(position: int, model_dim: int, base: float = 10_000.0) -> list[float]:
    """sin on even channels, cos on odd ones, both of channel pair i at frequency base^(-2i / model_dim)."""
    row = []
    for channel in range(model_dim):
        cos, sin = exact_cos_sin(position, channel // 2, model_dim, base)
        row.append(sin if channel % 2 == 0 else cos)
    return row


def slopes(num_heads: int) -> list[float]:
    """The published rule: geometric for powers of two, else filled up from every second of the double."""
    if num_heads & (num_heads - 1) == 0:
        return [math.pow(2.0, -8.0 * (head + 1) / num_heads) for head in range(num_heads)]
    lower = 2 ** math.floor(math.log2(num_heads))
    return slopes(lower) + slopes(2 * lower)[::2][: num_heads - lower]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def attention(
    query: Sequence[Sequence[float]],
    key: Sequence[Sequence[float]],
    value: Sequence[Sequence[float]],
    *,
    allowed: Callable[[int, int], bool],
    bias: Callable[[int, int], float] = lambda row, column: 0.0,
    scale: float | None = None,
) -> list[list[float]]:
    """softmax(scale * q.k + bias) v of one head by loops; a row that may attend to nothing is 0."""
    scale = 1.0 / math.sqrt(len(query[0])) if scale is None else scale
    out = []
    for row, q in enumerate(query):
        columns = [column for column in range(len(key)) if allowed(row, column)]
        scores = {column: scale * dot(q, key[column]) + bias(row, column) for column in columns}
        top = max(scores.values(), default=0.0)
        weights = {column: math.exp(score - top) for column, score in scores.items()}
        total = math.fsum(weights.values())
        channels = range(len(value[0]))
        summed = [math.fsum(weights[j] * value[j][channel] for j in columns) for channel in channels]
        out.append([number / total if columns else 0.0 for number in summed])
    return out

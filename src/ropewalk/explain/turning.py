"""RoPE and sinusoids, step by step, in float64."""

import math
from collections.abc import Sequence

from ropewalk.encodings import Rotary
from ropewalk.errors import require, require_count, require_number
from ropewalk.explain import exact
from ropewalk.explain.exact import turned
from ropewalk.explain.text import Explanation, Section, number, section, table, tokens, vector
from ropewalk.spectra import Spectrum

OTHER = {"half": "interleaved", "interleaved": "half"}
APART = 3
"""The distance at which scores are compared, tokens."""
SHIFTS = (0, 10, 1_000_000)
LARGEST = 1e150
"""Of a channel: a float64 holds the product of two of them."""


def rotary(
    vector: Sequence[float],
    position: int = 1,
    *,
    key: Sequence[float] | None = None,
    base: float = 10_000.0,
    layout: str = "interleaved",
) -> Explanation:
    """How RoPE turns one vector (Su et al. 2021, arXiv:2104.09864v5, Eq. 16 and 34).

    Args:
        vector: a head's channels, an even number of them.
        position: of the vector, tokens.
        key: the vector it is scored with; by default the same one.
        base: dimensionless.
        layout: "interleaved", channels 2i and 2i + 1 form a pair (the paper), or "half", i and i + head_dim / 2.

    >>> explanation = rotary([0.2, 0.1, -0.3, 0.7], 1)
    >>> [round(x, 4) for x in explanation.numbers["result"]["interleaved"]]
    [0.0239, 0.2223, -0.307, 0.697]
    """
    x, position = _checked("vector", vector), _position(position)
    k = x if key is None else _checked("key", key)
    require(len(k) == len(x), "key", f"as long as vector ({len(x)})", len(k))
    rope = Rotary(len(x), base=base, layout=layout)
    other = Rotary(len(x), base=base, layout=OTHER[layout])
    result = {layout: turned(rope, x, position), other.layout: turned(other, x, position)}
    cos, sin = exact.tables(rope.spectrum, position)
    pairs = exact.pairs(len(x), layout)
    angles = exact.angles(rope.spectrum, position)
    scores = _scores(rope, x, k, position)
    numbers = {"vector": x, "key": k, "position": position, "base": float(base), "layout": layout, "pairs": pairs,
               "inv_freq": list(rope.inv_freq), "wavelengths": list(rope.spectrum.wavelengths),
               "angles": list(map(float, angles)), "cos": cos, "sin": sin,
               "products": _products(x, pairs, cos, sin), "result": result,
               "scores": scores, "complex": _complex(x, pairs, cos, sin)}  # fmt: skip
    head = f"RoPE turns {_plain(x)} to position {position}: each pair of channels by the angle position x inv_freq"
    return Explanation(head, tuple(_steps(numbers, list(map(number, angles)))), numbers)


def _checked(name: str, values: Sequence[float]) -> list[float]:
    numbers = [float(require_number(v, name)) for v in values]
    even = len(numbers) >= 2 and len(numbers) % 2 == 0
    require(even, name, "an even number of channels, at least 2", len(numbers), hint="channels turn in pairs")
    require(all(map(math.isfinite, numbers)), name, "finite throughout", numbers)
    largest = max(map(abs, numbers))
    require(largest <= LARGEST, name, f"at most {LARGEST:g} in each channel, so that products stay finite", largest)
    return numbers


def _position(position: int) -> int:
    position = require_count(position, "position", at_least=-(1 << 63))
    require(position < 1 << 63, "position", "below 2^63, an integer of 64 bits", position)
    return position


def _plain(x: Sequence[float]) -> str:
    return f"[{', '.join(f'{v:g}' for v in x)}]"


def _products(x: list[float], pairs: list[list[int]], cos: list[float], sin: list[float]) -> list[list[float]]:
    """a cos, b sin, a sin, b cos of each pair (a, b)."""
    both = zip(pairs, cos, sin, strict=True)
    return [[x[a] * c, x[b] * s, x[a] * s, x[b] * c] for (a, b), c, s in both]


def _complex(x: list[float], pairs: list[list[int]], cos: list[float], sin: list[float]) -> list[list[float]]:
    """(a + bi) e^(i angle), by complex arithmetic."""
    products = [complex(x[a], x[b]) * complex(c, s) for (a, b), c, s in zip(pairs, cos, sin, strict=True)]
    return [[z.real, z.imag] for z in products]


def _scores(rope: Rotary, q: list[float], k: list[float], position: int) -> list[dict[str, float | int]]:
    """Scores of the same two vectors: one distance at several positions, then other distances."""
    places = [(position + shift + APART, position + shift) for shift in SHIFTS]
    places += [(position + APART + 1, position), (position, position)]
    made = ((m, n, exact.dot(turned(rope, q, m), turned(rope, k, n)) / math.sqrt(len(q))) for m, n in places)
    return [{"q_pos": m, "k_pos": n, "distance": m - n, "score": score} for m, n, score in made]


def _steps(n: dict, angles: list[str]) -> list[Section]:
    x, layout, pairs, position = n["vector"], n["layout"], n["pairs"], n["position"]
    named = [f"({a}, {b})" for a, b in pairs]
    how = "channels 2i and 2i + 1" if layout == "interleaved" else "channels i and i + head_dim / 2"
    rows = zip(named, ([x[a], x[b]] for a, b in pairs), strict=True)
    return [
        section(f"Pairs: {how} ({layout})", (f"channels {name}: {_plain(pair)}" for name, pair in rows)),
        section(
            f"Frequencies: inv_freq[i] = base^(-2i / {len(x)}), base {n['base']:g}; wavelength = 2 pi / inv_freq",
            table(
                ("pair", "inv_freq, radians/token", "wavelength, tokens"),
                zip(named, map(number, n["inv_freq"]), map(tokens, n["wavelengths"]), strict=True),
            ),
        ),
        section(
            f"Angles: position x inv_freq, position {position}; their cosines and sines",
            table(
                ("pair", "angle, radians", "cos", "sin"),
                zip(named, angles, *(map(number, n[name]) for name in ("cos", "sin")), strict=True),
            ),
        ),
        _formula(n, named),
        section(
            "The result in both layouts",
            *(f"{name:<11} {vector(n['result'][name])}" for name in (layout, OTHER[layout])),
            *_reordered(n),
            "A checkpoint is right with one of them only (`ropewalk convert --detect`).",
            f"The length stays: {number(math.hypot(*x))} before, {number(math.hypot(*n['result'][layout]))} after.",
        ),
        _distance(n),
        _as_complex(n, named, angles),
    ]


def _reordered(n: dict) -> list[str]:
    """Both layouts do the same once the input is reordered too, shown with numbers."""
    other, pairs = OTHER[n["layout"]], n["pairs"]
    order = [a for a, _ in pairs] + [b for _, b in pairs] if other == "half" else [c for pair in pairs for c in pair]
    x = [n["vector"][c] for c in order]
    rope = Rotary(len(x), base=n["base"], layout=other)
    return [
        "Each layout pairs other channels, so one vector turns to different numbers.  They agree, reordered, if the",
        f"input is reordered as well: {other} turns {_plain(x)} to",
        f"{'':<11} {vector(turned(rope, x, n['position']))}",
    ]


def _formula(n: dict, named: list[str]) -> Section:
    turned_by_90 = [0.0] * len(n["vector"])
    wide_cos, wide_sin = list(turned_by_90), list(turned_by_90)
    for (a, b), c, s in zip(n["pairs"], n["cos"], n["sin"], strict=True):
        turned_by_90[a], turned_by_90[b] = -n["vector"][b], n["vector"][a]
        wide_cos[a] = wide_cos[b] = c
        wide_sin[a] = wide_sin[b] = s
    rows = [[name, *map(number, products)] for name, products in zip(named, n["products"], strict=True)]
    return section(
        "The four terms: a' = a cos - b sin,  b' = a sin + b cos",
        table(("pair", "a cos", "b sin", "a sin", "b cos"), rows),
        "All channels at once (Eq. 34): x * cos + y * sin, where y is x with each pair turned by 90 degrees",
        f"x    {vector(n['vector'])}",
        f"cos  {vector(wide_cos)}",
        f"y    {vector(turned_by_90)}",
        f"sin  {vector(wide_sin)}",
        f"sum  {vector(n['result'][n['layout']])}",
    )


def _distance(n: dict) -> Section:
    columns = ("q_pos", "k_pos", "distance")
    rows = [[*(str(row[name]) for name in columns), number(row["score"])] for row in n["scores"]]
    same = "the same vector as key" if n["key"] == n["vector"] else f"with key {_plain(n['key'])}"
    return section(
        "Why the score depends on the distance only",
        "Turning q by m and k by n turns both by n, which changes no dot product, and then q by m - n alone:",
        "(R_m q) . (R_n k) = q . R_(n-m) k.",
        f"Scores q . k / sqrt(head_dim), {same}: equal distances give equal scores, wherever they are.",
        table((*columns, "score"), rows),
    )


def _as_complex(n: dict, named: list[str], angles: list[str]) -> Section:
    lines = []
    for name, (a, b), angle, z in zip(named, n["pairs"], angles, n["complex"], strict=True):
        before = f"({n['vector'][a]:g} {'-' if n['vector'][b] < 0 else '+'} {abs(n['vector'][b]):g}i)"
        after = f"{number(z[0])} {'-' if z[1] < 0 else '+'} {number(abs(z[1]))}i"
        lines.append(f"channels {name}: {before} e^({angle} i) = {after}")
    return section(
        "The complex form: a pair (a, b) is a + bi, and turning is a product with e^(i angle)",
        lines,
        "A pair's part of the score is Re(q conj(k) e^(i (m - n) inv_freq)): positions enter as m - n.",
    )


def sinusoidal(model_dim: int, position: int = 1, *, base: float = 10_000.0) -> Explanation:
    """What sinusoids add to an embedding, and how they move with it (Vaswani et al. 2017, arXiv:1706.03762v7, 3.5).

    Args:
        model_dim: channels of the embedding, even.
        position: tokens.
        base: dimensionless.

    >>> sinusoidal(4, 1).numbers["added"][2]
    0.009999833334166664
    """
    require_count(model_dim, "model_dim", at_least=2)
    require(model_dim % 2 == 0, "model_dim", "even", model_dim, hint="channels come as sine and cosine")
    position = _position(position)
    rope = Rotary(model_dim, base=base, layout="interleaved")
    rows = {p: _row(rope.spectrum, p) for p in (position, position + APART, 0, APART, APART + 1)}
    dots = [[a, b, exact.dot(rows[a], rows[b])] for a, b in ((position, position + APART), (0, APART), (0, APART + 1))]
    angles = exact.angles(rope.spectrum, position)
    numbers = {"model_dim": model_dim, "position": position, "base": float(base), "inv_freq": list(rope.inv_freq),
               "wavelengths": list(rope.spectrum.wavelengths), "angles": list(map(float, angles)),
               "added": rows[position], "products": dots}  # fmt: skip
    shown = range(model_dim // 2) if model_dim <= 32 else (*range(4), *range(model_dim // 2 - 4, model_dim // 2))
    columns = [[str(i), number(rope.inv_freq[i]), tokens(numbers["wavelengths"][i]), number(angles[i]),
                number(rows[position][2 * i]), number(rows[position][2 * i + 1])] for i in shown]  # fmt: skip
    left = "" if len(shown) == model_dim // 2 else "The first and last 4 pairs; --json has all of them."
    return Explanation(
        f"Sinusoids added to an embedding of {model_dim} channels at position {position}",
        (
            section(
                f"Channel 2i gains sin(p inv_freq[i]), 2i + 1 the cosine; inv_freq[i] = base^(-2i / {model_dim})",
                table(("i", "inv_freq", "wavelength", "angle", "sin", "cos"), columns),
                *([left] if left else []),
            ),
            section(
                "A shift of k tokens turns each pair by k inv_freq[i], so products of two rows depend on distance only",
                (f"row {a} . row {b} = {number(dot)}   (distance {abs(b - a)})" for a, b, dot in dots),
                "RoPE does this to queries and keys themselves; added to embeddings it reaches the score mixed with",
                "content and projections, so the score of a model does not depend on distance only.",
            ),
        ),
        numbers,
    )


def _row(spectrum: Spectrum, position: int) -> list[float]:
    cos, sin = exact.tables(spectrum, position)
    return [value for pair in zip(sin, cos, strict=True) for value in pair]

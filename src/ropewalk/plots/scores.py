"""What positions alone do to a score: how it falls with distance under RoPE, and the bias of each head."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk import naming, phases
from ropewalk import spectra as rules
from ropewalk.encodings import Encoding
from ropewalk.errors import message, require, require_count
from ropewalk.plots import style
from ropewalk.plots.style import Axes, SymLogNorm

BASES = (500.0, 10_000.0, 500_000.0)
SHOWN = 6
MOST_POINTS = 8192
MOST_PIXELS = 256
INTERVALS = 160
DENSE = 12


def decay_numbers(
    bases: Sequence[float | int] = BASES, *, rotary_dim: int = 64, max_distance: int = 4096, bound: bool = False
) -> dict[str, Any]:
    """The numbers of `decay`: the curve of each base, and up to which distance it stays above 0.

    Every distance is computed; of more than 8192, that many are kept, evenly on a logarithmic axis.
    Far out, where a figure cannot show each, `band` has the least, mean and greatest value of each interval [from, to).
    """
    require(len(bases) > 0, "bases", "at least one", "none")
    places = torch.arange(require_count(max_distance, "max_distance", at_least=2) + 1)
    kept = places
    if len(places) > MOST_POINTS:
        even = torch.logspace(0, math.log10(max_distance), MOST_POINTS, dtype=torch.float64)
        kept = torch.cat((places[:1], even.round().long().clamp(max=max_distance).unique()))
    edges = _edges(max_distance)
    rows = []
    for base in bases:
        steps = rules.plain(rotary_dim, base).steps
        values = torch.cat([_curve(some, steps, bound) for some in places.split(2**14)])
        negative = (values < 0).nonzero()
        end = int(negative[0]) - 1 if len(negative) else max_distance
        rows.append({"base": float(base), "values": values[kept].tolist(), "above_0_up_to": end,
                     "band": _band(values, edges)})  # fmt: skip
    places = kept
    unit = "mean |S_i|, S_i the sum of the first i turns exp(1j n inv_freq)" if bound else "score at distance 0"
    return {"unit": unit, "bound": bound, "rotary_dim": rotary_dim, "distances": places.tolist(), "bases": rows}


def _curve(places: Tensor, steps: tuple[int, ...], bound: bool) -> Tensor:
    """The mean cosine, or the mean |S_i|, at these distances."""
    angles = phases.angles(places, steps, torch.float64)
    if bound:
        return torch.polar(torch.ones_like(angles), angles).cumsum(-1).abs().mean(-1)
    return angles.cos().mean(-1)


def _edges(max_distance: int) -> list[int]:
    """The ends of intervals, even on a logarithmic axis, from where on each holds `DENSE` distances or more."""
    width = math.log(max_distance) / INTERVALS
    first = DENSE / width
    if first * math.exp(width) > max_distance:
        return []
    count = math.floor(math.log(max_distance / first) / width)
    return [*(round(max_distance * math.exp(-width * k)) for k in range(count, 0, -1)), max_distance + 1]


def _band(values: Tensor, edges: list[int]) -> dict[str, list]:
    """The least, mean and greatest value from each edge to the next."""
    parts = [values[low:high] for low, high in itertools.pairwise(edges)]
    found = {"low": [p.min() for p in parts], "mean": [p.mean() for p in parts], "high": [p.max() for p in parts]}
    return {"from": edges[:-1], "to": edges[1:], **{name: [float(v) for v in rows] for name, rows in found.items()}}


def draw_decay(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw `decay_numbers`: each distance near by, and far out the mean in a band from the least to the greatest."""
    distances = numbers["distances"][1:]
    for index, row in enumerate(numbers["bases"]):
        label = f"base {style.tokens(row['base'])}"
        if not numbers["bound"]:
            end = row["above_0_up_to"]
            label += f", above 0 up to {style.tokens(end)}" if end < distances[-1] else ", above 0 throughout"
        look: dict[str, Any] = style.line(index) | {"linewidth": 1.2}
        band = row["band"]
        middles = [math.sqrt(low * high) for low, high in zip(band["from"], band["to"], strict=True)]
        near = sum(n < band["from"][0] for n in distances) if middles else len(distances)
        axes.plot(distances[:near] + middles, row["values"][1 : near + 1] + band["mean"], label=label, **look)
        if middles:
            axes.fill_between(middles, band["low"], band["high"], color=look["color"], alpha=0.2, linewidth=0)
    style.token_ticks(axes, 1, distances[-1])
    axes.set_xlim(1, distances[-1])
    axes.set_xlabel("distance, tokens")
    if numbers["bound"]:
        axes.set_ylabel("bound: mean |partial sum|")
        axes.set_ylim(bottom=0)
    else:
        axes.set_ylabel("expected score, 1 at distance 0")
        style.mark(axes.axhline(0))
    style.legend(axes, columns=2 if numbers["bound"] else 1)


def decay(
    bases: Sequence[float | int] = BASES,
    *,
    rotary_dim: int = 64,
    max_distance: int = 4096,
    bound: bool = False,
    axes: Axes | None = None,
) -> Axes:
    """The expected score of a key like its query over their distance n, relative to distance 0:
    (2/d) sum_i cos(n base^(-2i/d))   (Men et al. 2024, arXiv:2405.14591v1, Theorem 1, there as the sum).

    For a query of independent channels with mean 0 and variance s, and a key equal to it but for noise of mean 0,
    E[q . R_n k] = s sum_i 2 cos(n inv_freq[i]), since R_n turns each pair and its two channels do not correlate.
    Where the curve falls below 0, such a key scores less than an unrelated one.

    Args:
        bases: dimensionless.
        rotary_dim: d, channels that turn.
        max_distance: tokens.
        bound: the bound of any score instead, (2/d) sum_i |S_i| with S_i the sum of exp(1j n inv_freq[k]) over
            k < i, i = 1 ... d/2   (Su et al. 2021, arXiv:2104.09864v5, Sec. 3.4.3).
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, distance in tokens to the right (logarithmic, from 1), a line for each base.  Far out, where distances
        lie too close, the line is their mean and a band reaches from the least to the greatest value.
    """
    numbers = decay_numbers(bases, rotary_dim=rotary_dim, max_distance=max_distance, bound=bound)
    with style.drawing(axes) as own:
        draw_decay(numbers, own)
    return own


def _with_bias(encoding: Encoding | str, num_heads: int, head_dim: int) -> tuple[Encoding, int]:
    """An encoding that adds a bias, and its number of heads."""
    made = encoding
    if isinstance(made, str):
        sizes = {"head_dim": head_dim, "num_heads": require_count(num_heads, "num_heads")}
        made = naming.build(made, **sizes, model_dim=num_heads * head_dim, num_positions=1)
    if not made.has_bias:
        name = repr(encoding) if isinstance(encoding, str) else type(encoding).__name__
        raise ValueError(message("encoding", "one that adds a bias (alibi, hybrid, rotary+alibi)", name))
    own = [part.num_heads for part in made.modules() if hasattr(part, "num_heads")]
    return made, int(own[0]) if own else num_heads  # pyright: ignore[reportArgumentType] (a count)


def chosen(heads: Sequence[int] | None, num_heads: int, most: int = SHOWN) -> list[int]:
    """The heads to show: those asked for, or `most` of all, evenly spread, the first and the last among them.

    >>> chosen(None, 12), chosen([3], 4)
    ([0, 2, 4, 7, 9, 11], [3])
    """
    if heads is None:
        count = min(num_heads, most)
        return [round(k * (num_heads - 1) / max(count - 1, 1)) for k in range(count)]
    require(len(heads) > 0, "heads", "at least one", "none")
    for head in heads:
        require(0 <= require_count(head, "heads", 0) < num_heads, "heads", f"below num_heads ({num_heads})", head)
    return list(heads)


def bias_numbers(
    encoding: Encoding | str = "alibi",
    *,
    num_heads: int = 8,
    head_dim: int = 64,
    heads: Sequence[int] | None = None,
    seq_len: int = 64,
    symmetric: bool = False,
) -> dict[str, Any]:
    """The numbers of `bias` and `bias_matrix`: score units by head over distance (from a query in the middle where
    the future is seen, from the last one else), and of at most 256 queries and keys, evenly spread."""
    made, count = _with_bias(encoding, num_heads, head_dim)
    shown = chosen(heads, count)
    k_pos = torch.arange(require_count(seq_len, "seq_len", at_least=2))
    middle = seq_len // 2 if symmetric else seq_len - 1
    distances = (middle - k_pos).flip(0)
    row = _evaluated(made, shown, k_pos[middle], k_pos).flip(-1)
    places = k_pos[:: -(-seq_len // MOST_PIXELS)]
    return {
        "unit": "score units", "num_heads": count, "heads": shown, "slopes": _slopes(row, distances),
        "symmetric": symmetric, "seq_len": seq_len, "distances": distances.tolist(), "over_distance": row.tolist(),
        "positions": places.tolist(), "matrix": _evaluated(made, shown, places[:, None], places).tolist(),
    }  # fmt: skip


@torch.no_grad()
def _evaluated(encoding: Encoding, heads: list[int], q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The bias of some heads between these positions, as large as they are."""
    pairs = torch.broadcast_shapes(q_pos.shape, k_pos.shape)
    head = torch.tensor(heads).view(-1, *(1 for _ in pairs))
    found = encoding.bias(head, q_pos, k_pos)
    assert found is not None  # has_bias
    return found.expand(len(heads), *pairs)


def _slopes(rows: Tensor, distances: Tensor) -> list[float | None]:
    """m of each row that is -m |distance|, None for one that is not."""
    far = distances.abs().double()
    slopes = 0.0 - (rows.double() @ far) / (far @ far)
    straight = (rows + slopes[:, None] * far).abs().amax(-1) <= 1e-5 * rows.abs().amax(-1)
    return [m if ok else None for m, ok in zip(slopes.tolist(), straight.tolist(), strict=True)]


def _said(slope: float | None) -> str:
    """A slope as one writes it: 1/256 where it is one over a whole number."""
    if slope is None:
        return ""
    inverse = 1 / slope if slope else 0.0
    whole = inverse > 1.5 and abs(inverse - round(inverse)) < 1e-4 * inverse
    return f", slope 1/{round(inverse)}" if whole else f", slope {slope:.3g}"


def draw_bias(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw the bias over distance from `bias_numbers`."""
    distances = numbers["distances"]
    rows = zip(numbers["heads"], numbers["slopes"], numbers["over_distance"], strict=True)
    for index, (head, slope, row) in enumerate(rows):
        axes.plot(distances, row, label=f"head {head}{_said(slope)}", **style.line(index))
    said = "tokens (negative: the future)" if numbers["symmetric"] else "tokens"
    axes.set_xlabel(f"distance, {said}")
    axes.set_ylabel("bias, score units")
    axes.set_xlim(distances[0], distances[-1])
    style.legend(axes)


def bias(
    encoding: Encoding | str = "alibi",
    *,
    num_heads: int = 8,
    head_dim: int = 64,
    heads: Sequence[int] | None = None,
    seq_len: int = 64,
    symmetric: bool = False,
    axes: Axes | None = None,
) -> Axes:
    """What an encoding adds to the scaled score of each head, over distance; ALiBi: -m_h * distance
    (Press et al. 2022, arXiv:2108.12409v2, Sec. 3).

    Args:
        encoding: one that adds a bias, or its name.
        num_heads, head_dim: of the model, where `encoding` is a name.
        heads: which to show; six of them by default.
        seq_len: tokens.
        symmetric: the future too, as attention without causality sees it.
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, distance in tokens to the right, score units upward, a line for each head.
    """
    numbers = bias_numbers(
        encoding, num_heads=num_heads, head_dim=head_dim, heads=heads, seq_len=seq_len, symmetric=symmetric
    )
    with style.drawing(axes) as own:
        draw_bias(numbers, own)
    return own


def draw_bias_matrix(numbers: dict[str, Any], panels: Sequence[Axes], most: int | None = None) -> None:
    """Draw the bias of query and key from `bias_numbers`, one panel for each head."""
    values = torch.tensor(numbers["matrix"])
    if not numbers["symmetric"]:
        future = torch.ones(values.shape[1:], dtype=torch.bool).triu(1)
        values = values.masked_fill(future, math.nan)
    norm = _signed_log(values[~values.isnan()])
    picked = chosen(None, len(numbers["heads"]), most or len(panels))
    places = numbers["positions"]
    low, high = -places[1] / 2, places[-1] + places[1] / 2
    look: dict[str, Any] = {"cmap": style.MAP, "norm": norm, "interpolation": "nearest"}
    image = None
    for axes, index in zip(panels, picked, strict=True):
        image = axes.imshow(values[index].numpy(), extent=(low, high, high, low), **look)
        square(axes, numbers["seq_len"], f"head {numbers['heads'][index]}", first=axes is panels[0])
    style.colour_bar(image, panels, "score units", {tick: style.plain(tick) for tick in _signed_ticks(norm)}, 12)


def _signed_log(values: Tensor) -> SymLogNorm:
    """A colour scale that is logarithmic to both sides of 0, so that gentle heads show beside steep ones."""
    sizes = values[values != 0].abs()
    least, most = (float(sizes.min()), float(sizes.max())) if len(sizes) else (1.0, 1.0)
    near = max(least, most * 1e-4)
    low, high = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    return SymLogNorm(near, vmin=low, vmax=high if high > low else low + near)


def _signed_ticks(norm: SymLogNorm) -> list[float]:
    powers = [10.0**k for k in range(-9, 10) if 10.0**k >= norm.linthresh]
    low, high = norm.vmin or 0.0, norm.vmax or 0.0
    return [*(-p for p in reversed(powers) if -p >= low), 0.0, *(p for p in powers if p <= high)]


def square(axes: Axes, seq_len: int, title: str, *, first: bool = True, last: bool = True) -> None:
    """The frame of a map of queries (down) and keys (right)."""
    axes.grid(False)
    axes.set_title(title, fontsize=style.SMALL)
    ticks = [0, seq_len // 2]
    axes.set_xticks(ticks, labels=[str(t) for t in ticks] if last else ["", ""])
    axes.set_yticks(ticks, labels=[str(t) for t in ticks] if first else ["", ""])
    if last:
        axes.set_xlabel("key, tokens", fontsize=style.SMALL)
    if first:
        axes.set_ylabel("query, tokens", fontsize=style.SMALL)


def bias_matrix(
    encoding: Encoding | str = "alibi",
    *,
    num_heads: int = 8,
    head_dim: int = 64,
    heads: Sequence[int] | None = None,
    seq_len: int = 64,
    symmetric: bool = False,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    """The bias of every query and key, a panel for each head, all on one scale; arguments as in `bias`.

    Args:
        axes: as many as heads are shown; a figure of its own by default.

    Returns:
        The axes, one for each head; what lies ahead of a query stays unpainted unless `symmetric`.
    """
    if axes is None and heads is None:
        heads = chosen(None, _with_bias(encoding, num_heads, head_dim)[1], 4)
    numbers = bias_numbers(
        encoding, num_heads=num_heads, head_dim=head_dim, heads=heads, seq_len=seq_len, symmetric=symmetric
    )
    if axes is not None:
        count = len(numbers["heads"])
        require(len(axes) == count, "axes", f"one for each head shown ({count})", len(axes))
        draw_bias_matrix(numbers, axes)
        return list(axes)
    with style.looks():
        figure = style.page((1.5 + 1.5 * len(numbers["heads"]), 2.3))
        panels = list(figure.subplots(1, len(numbers["heads"]), squeeze=False)[0])
        draw_bias_matrix(numbers, panels)
        figure.draw_without_rendering()
    return panels


def bias_page_size(numbers: dict[str, Any]) -> tuple[float, float]:
    """Inches, for one head or more."""
    return (5.2, 2.6 if len(numbers["heads"]) == 1 else 5.0)


def draw_bias_page(numbers: dict[str, Any], figure: Any) -> None:
    """Both views on one page: over distance above, matrices of some heads below."""
    count = min(len(numbers["heads"]), 3)
    if count == 1:  # beside one another, for a single matrix cannot fill the width
        over_distance, matrix = figure.subplots(1, 2)
        draw_bias(numbers, over_distance)
        return draw_bias_matrix(numbers, [matrix])
    grid = figure.add_gridspec(2, count, height_ratios=(1.25, 1))
    draw_bias(numbers, figure.add_subplot(grid[0, :]))
    draw_bias_matrix(numbers, [figure.add_subplot(grid[1, k]) for k in range(count)], count)

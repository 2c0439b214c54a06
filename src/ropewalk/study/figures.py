"""The study's figures as SVG text: deterministic, readable in colour and without, each with its words.

matplotlib is imported when the first figure is drawn; nothing here touches a display.
"""

import io
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ropewalk.errors import message
from ropewalk.study import statistics
from ropewalk.study.evidence import Study
from ropewalk.study.findings import accuracy
from ropewalk.study.statistics import Number
from ropewalk.study.verdicts import label

# Okabe and Ito's colours, told apart with any of the common colour blindnesses; markers carry them in grey
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f", "#8c6d1f")
INK, FAINT = "#24272b", "#d9dadc"
# what each colour of a light page becomes on a dark one
DARK = dict(
    zip(COLOURS, ("#56b4e9", "#ff8a3d", "#2fd6a3", "#e79ac5", "#f0c24b", "#a5d8f7", "#b0b0b0", "#c9a95a"), strict=True)
) | {INK: "#e8e6e1", FAINT: "#4a4d52"}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SIZE = (6.6, 4.2)


@dataclass(frozen=True)
class Figure:
    """One figure: its SVG on a light and on a dark page, its caption, and its content in words."""

    name: str
    light: str
    dark: str
    caption: str
    alt: str


@contextmanager
def _page() -> Iterator[Any]:
    """matplotlib with this module's looks, and every figure closed afterwards."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        hint = "pip install 'ropewalk[study]'"
        raise ModuleNotFoundError(message("matplotlib", "installed to draw figures", "no module", hint)) from error
    from matplotlib.figure import Figure as Canvas

    looks: dict[Any, Any] = {
        "svg.hashsalt": "ropewalk",
        "svg.fonttype": "path",
        "font.size": 12,
        "axes.titlesize": 12,
        "text.color": INK,
        "axes.labelcolor": INK,
        "axes.edgecolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
        "grid.color": FAINT,
        "axes.grid": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "savefig.facecolor": "none",
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "lines.markersize": 7,
        "font.family": "DejaVu Sans",
        "axes.axisbelow": True,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **looks, "backend": "agg"}):
        yield Canvas


def _svg(draw: Callable[[Any], None], size: tuple[Number, Number]) -> str:
    with _page() as canvas:
        figure = canvas(figsize=size, layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": "ropewalk"})
    return file.getvalue()


def make(name: str, draw: Callable[[Any], None], caption: str, alt: str, size: tuple[Number, Number] = SIZE) -> Figure:
    """Draw once; the dark page's figure is the same one with other colours."""
    light = _svg(draw, size)
    return Figure(name, light, re.sub("|".join(DARK), lambda found: DARK[found[0]], light), caption, alt)


def look(index: int) -> dict[str, Any]:
    """Colour and marker of the encoding at this place of the study's list."""
    return {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}


def token_axis(axes: Any, ticks: Sequence[int], train_len: int | None, name: str) -> None:
    """A log2 axis in tokens with plain numbers, the training length marked, and the legend above the axes."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(ticks), labels=[str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel(name)
    if train_len is not None:
        axes.axvline(train_len, color="#888888", linestyle="--", linewidth=1.3, zorder=1, label="training length")
    handles, names = axes.get_legend_handles_labels()
    order = sorted(range(len(names)), key=lambda k: names[k] == "training length")
    columns = 2 if len(names) in (2, 4) else 3
    axes.figure.legend(
        [handles[k] for k in order], [names[k] for k in order], loc="outside upper center", ncols=columns, fontsize=11
    )


def plain_log(axes: Any, values: Sequence[Number]) -> None:
    """A log axis whose labels are few plain numbers; a linear one where values differ by little."""
    low, high = min(values), max(values)
    if high < 2 * low:
        return
    axes.set_yscale("log")
    steps = ((1, 1.5, 2, 3, 4, 5, 7), (1, 2, 5), (1,))
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    choices = [
        [s * 10.0**p for p in decades for s in some if low * 0.95 <= s * 10.0**p <= high * 1.05] for some in steps
    ]
    ticks = next((choice for choice in choices if len(choice) <= 8), choices[-1])
    axes.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _spread(study: Study, encoding: str, eval_len: int) -> tuple[float, float, float]:
    """Perplexity with the ends of its bar: one sd over seeds, or the interval over documents for one seed."""
    values = study.perplexities(encoding, "windows", eval_len)
    mean, sd = statistics.mean_and_sd(values)
    if sd is not None:
        return mean, mean - sd, mean + sd
    interval = statistics.perplexity_interval(study.documents(encoding, "windows", eval_len))
    return mean, mean if interval.low is None else interval.low, mean if interval.high is None else interval.high


def perplexity(study: Study) -> Figure | None:
    """Perplexity over evaluation length: the headline."""
    lengths = study.lengths("windows")
    rows: dict[str, dict[int, tuple[float, float, float]]] = {}
    for name in study.encodings:
        found = {n: _spread(study, name, n) for n in lengths if study.perplexities(name, "windows", n)}
        if found and all(math.isfinite(value[0]) for value in found.values()):
            rows[name] = found
    if not rows:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for index, (name, row) in enumerate(rows.items()):
            means, lows, highs = zip(*row.values(), strict=True)
            ends = [
                [max(0.0, m - low) for m, low in zip(means, lows, strict=True)],
                [max(0.0, high - m) for m, high in zip(means, highs, strict=True)],
            ]
            axes.errorbar(list(row), means, yerr=ends, label=label(name), capsize=3, elinewidth=1.2, **look(index))
        plain_log(axes, [v for row in rows.values() for value in row.values() for v in value])
        token_axis(axes, lengths, study.train_len, "evaluation length, tokens")
        axes.set_ylabel("perplexity per token")

    bars = "one standard deviation over seeds" if len(study.seeds) > 1 else "95 % intervals over documents (unpaired)"
    caption = f"Perplexity over evaluation length, separate windows, {_seeds(study)}. Bars: {bars}."
    alt = " ".join(f"{label(name)}: {_series(row)}." for name, row in rows.items())
    return make(
        "perplexity", draw, caption, f"Perplexity at {_list(lengths)} tokens, trained at {study.train_len}. {alt}"
    )


def _seeds(study: Study) -> str:
    count = len(study.seeds)
    return f"{count} seed{'s' if count > 1 else ''}"


def _list(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _series(row: dict[int, tuple[float, float, float]]) -> str:
    return ", ".join(f"{value[0]:.2f} at {eval_len}" for eval_len, value in row.items())


def position(study: Study) -> Figure | None:
    """Loss by position, relative to the best encoding on the same tokens."""
    lengths = [n for n in study.lengths("windows") if any(study.by_position(e, n) for e in study.encodings)]
    if not lengths or lengths[-1] <= study.train_len:
        return None
    eval_len = lengths[-1]
    found = {name: row for name in study.encodings if (row := study.by_position(name, eval_len))}
    edges = next(iter(found.values()))[0]
    ratios = relative_to_best({name: means for name, (_, means) in found.items()})
    centres = [math.sqrt(low * high) if low else high / 2 for low, high in pairwise(edges)]
    shown = [k for k in range(len(centres)) if all(row[k] is not None for row in ratios.values())]
    if not shown:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for index, (name, row) in enumerate(ratios.items()):
            axes.plot([centres[k] for k in shown], [row[k] for k in shown], label=label(name), **look(index))
        plain_log(axes, [value for row in ratios.values() for value in row if value is not None])
        ticks = [2**k for k in range(4, 30) if edges[1] / 2 <= 2**k <= edges[-1]]
        token_axis(axes, ticks[::2] if len(ticks) > 7 else ticks, study.train_len, "position in the window, tokens")
        axes.set_ylabel("perplexity / best one there")

    last = edges[shown[-1]], edges[shown[-1] + 1]
    words = [
        f"{label(name)} {_number(row[shown[0]])} at the start and {_number(row[shown[-1]])} in the last"
        for name, row in ratios.items()
    ]
    caption = (
        f"Perplexity by position in windows of {eval_len} tokens, divided by the best encoding's on the same"
        f" tokens (1 = best). The text's difficulty cancels. {_seeds(study)}."
    )
    alt = f"Perplexity relative to the best encoding, by position; last bucket {last[0]} to {last[1]}. "
    return make("position", draw, caption, alt + "; ".join(words) + ".")


def relative_to_best(losses: dict[str, list[float | None]]) -> dict[str, list[float | None]]:
    """exp(loss - lowest loss) in each bucket; None where an encoding has no number.

    >>> relative_to_best({"a": [1.0, 2.0], "b": [1.0, None]})
    {'a': [1.0, 1.0], 'b': [1.0, None]}
    """
    columns = list(zip(*losses.values(), strict=True))
    best = [min((value for value in column if value is not None), default=None) for column in columns]
    return {
        name: [
            None if value is None or low is None else statistics.exp(value - low)
            for value, low in zip(row, best, strict=True)
        ]
        for name, row in losses.items()
    }


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"


def use_of_context(study: Study) -> Figure | None:
    """What the context beyond the training length adds to the loss, with its interval over documents."""
    lengths = study.lengths("context")
    rows = {name: {n: gap for n in lengths if (gap := study.added(name, n))} for name in study.encodings}
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axhline(0, color="#888888", linewidth=1.3, zorder=1)
        for index, (name, row) in enumerate(rows.items()):
            # saved is the negative of added, so the ends of the interval change places
            ends = [
                [0.0 if g.high is None else max(0.0, g.high - g.estimate) for g in row.values()],
                [0.0 if g.low is None else max(0.0, g.estimate - g.low) for g in row.values()],
            ]
            saved = [-gap.estimate for gap in row.values()]
            axes.errorbar(list(row), saved, yerr=ends, label=label(name), capsize=3, elinewidth=1.2, **look(index))
        axes.set_yscale("symlog", linthresh=0.05)
        _symlog_ticks(axes)
        token_axis(axes, lengths, study.train_len, "evaluation length, tokens")
        axes.set_ylabel("loss saved, nats per token")

    caption = (
        f"What context beyond {study.train_len} tokens saves the tokens that have it (above 0: it is used;"
        " below: it does harm). The axis is linear within ±0.05 and logarithmic outside. Bars: 95 % paired intervals."
    )
    words = [
        f"{label(name)}: " + ", ".join(f"{-gap.estimate:+.3f} at {n}" for n, gap in row.items())
        for name, row in rows.items()
    ]
    return make("context", draw, caption, "Nats per token saved by far context. " + "; ".join(words) + ".")


def _symlog_ticks(axes: Any) -> None:
    low, high = axes.get_ylim()
    values = (-3, -1, -0.3, -0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3)
    ticks = [value for value in values if low <= value <= high]
    axes.set_yticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def copying(study: Study) -> Figure | None:
    """Copy accuracy over distance."""
    distances = study.lengths("copy")
    rows = {name: {d: score for d in distances if (score := accuracy(study, name, d))} for name in study.encodings}
    rows = {name: row for name, row in rows.items() if row}
    if not rows:
        return None

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for index, (name, row) in enumerate(rows.items()):
            ends = [
                [100 * (s.estimate - s.low) for s in row.values()],
                [100 * (s.high - s.estimate) for s in row.values()],
            ]
            axes.errorbar(
                list(row),
                [100 * s.estimate for s in row.values()],
                yerr=ends,
                label=label(name),
                capsize=3,
                elinewidth=1.2,
                **look(index),
            )
        axes.set_ylim(0, 104)
        token_axis(axes, distances, study.train_len, "distance to the first copy, tokens")
        axes.set_ylabel("copied right, %")

    caption = (
        f"Accuracy in copying a repeated span over the distance between the copies, {_seeds(study)}."
        " Bars: 95 % score intervals, taking trials as independent."
    )
    words = [
        f"{label(name)}: " + ", ".join(f"{100 * s.estimate:.0f} % at {d}" for d, s in row.items())
        for name, row in rows.items()
    ]
    return make("copy", draw, caption, "Copy accuracy over distance. " + "; ".join(words) + ".")

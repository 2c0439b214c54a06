"""The common look of all figures: told apart by colour and by line style, legible when small, the same bytes each time.

Okabe and Ito's colours; a figure is 5.2 inches wide with letters of 10 and 11 points, so that they are 11 pixels
high where a page shows it 400 pixels wide.
"""

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from ropewalk.errors import message
from ropewalk.study.figures import COLOURS, FAINT, INK

try:
    import matplotlib
    from matplotlib.axes import Axes
    from matplotlib.colors import LogNorm, Normalize, SymLogNorm
    from matplotlib.figure import Figure
    from matplotlib.textpath import TextPath
except ModuleNotFoundError as error:
    _HINT = "pip install 'ropewalk[plot]'"
    raise ModuleNotFoundError(message("matplotlib", "installed to draw figures", "no module", _HINT)) from error

__all__ = ["Axes", "Figure", "LogNorm", "Normalize", "SymLogNorm"]

Number = int | float
SIZE = (5.2, 3.6)
LARGE, SMALL = 11, 10
GREY = "#6b6f76"
MINUS = "\N{MINUS SIGN}"
MAP = "magma_r"
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (9, 2)), (0, (1, 1)), (0, (3, 3, 1, 3)))
_LOOKS: dict[Any, Any] = {
    "svg.hashsalt": "ropewalk",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": LARGE,
    "axes.titlesize": LARGE,
    "axes.labelsize": LARGE,
    "xtick.labelsize": SMALL,
    "ytick.labelsize": SMALL,
    "legend.fontsize": SMALL,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.handlelength": 2.8,
    "lines.linewidth": 1.8,
    "figure.dpi": 100,
    "savefig.dpi": 200,
}
_own: "weakref.WeakSet[Figure]" = weakref.WeakSet()


@contextlib.contextmanager
def looks() -> Iterator[None]:
    """matplotlib with these looks and no user's settings."""
    defaults: dict[Any, Any] = {name: value for name, value in matplotlib.rcParamsDefault.items() if name != "backend"}
    with matplotlib.rc_context({**defaults, **_LOOKS}):
        yield


def page(size: tuple[Number, Number], figure: Figure | None = None) -> Figure:
    """A figure of our own, or a window's figure made into one; to be called under `looks`."""
    figure = Figure(figsize=size, layout="constrained") if figure is None else figure
    _own.add(figure)
    return figure


@contextlib.contextmanager
def drawing(axes: Axes | None, size: tuple[Number, Number] = SIZE) -> Iterator[Axes]:
    """The axes to draw into: the caller's as they are, or new ones in our looks."""
    if axes is not None:
        yield axes
        return
    with looks():
        made = page(size).add_subplot()
        yield made
        made.figure.draw_without_rendering()  # pyright: ignore[reportAttributeAccessIssue] (ticks take their looks now)


def line(index: int) -> dict[str, Any]:
    """Colour and dashes of the line at this place of a list: dashes carry it where colours cannot."""
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": _DASHES[index % len(_DASHES)]}


def ours(axes: Axes) -> bool:
    """Whether these axes lie in a figure of ours."""
    return axes.figure in _own


def legend(axes: Axes, columns: int = 2, inside: Literal["best", "upper right"] = "best") -> None:
    """The legend: above the axes in a figure of ours; within a caller's axes, at the place `inside`."""
    handles, names = axes.get_legend_handles_labels()
    if not handles:
        return
    order = sorted(range(len(names)), key=lambda k: getattr(handles[k], "zorder", 2) < 2)
    handles, names = [handles[k] for k in order], [names[k] for k in order]
    figure = axes.figure
    if ours(axes):
        width = 72 * figure.get_figure(root=True).get_figwidth()
        columns = next(c for c in range(min(columns, len(names)), 0, -1) if c == 1 or _width(names, c) <= width)
        figure.legend(handles, names, loc="outside upper center", ncols=columns, columnspacing=1.2)
    else:
        axes.legend(loc=inside, fontsize="small", ncols=1 if inside == "best" else 2)


def _width(names: Sequence[str], columns: int) -> float:
    """How wide a legend of so many columns is, points: its columns are filled one after another."""
    widths = iter([TextPath((0, 0), name, size=SMALL).get_extents().width for name in names])
    rows, longer = divmod(len(names), columns)
    longest = [max(itertools.islice(widths, rows + (column < longer))) for column in range(columns)]
    return sum(longest) + SMALL * (columns * 3.6 + (columns - 1) * 1.2 + 1.8)  # handles, gaps and borders


def colour_bar(image: Any, panels: Sequence[Axes], label: str, ticks: dict[Any, str] | None, aspect: int) -> None:
    """The scale beside maps that share it."""
    bar: Any = panels[0].figure.colorbar(image, ax=list(panels), shrink=0.9, pad=0.02, aspect=aspect)
    bar.set_label(label, fontsize=SMALL)
    bar.outline.set_visible(False)
    if ticks is not None:
        bar.set_ticks(list(ticks), labels=list(ticks.values()))
        bar.ax.minorticks_off()


def mark(drawn: Any) -> None:
    """Put a line that marks a length behind the others, in grey, and last in the legend."""
    drawn.set(color=GREY, linewidth=1.4, zorder=1)


def tokens(count: Number) -> str:
    """A count of tokens, legible however large.

    >>> tokens(4096), tokens(1e6), tokens(0.5), tokens(-5)
    ('4096', '1 000 000', '0.5', '−5')
    """
    if count != int(count):
        return plain(count)
    text = f"{int(count):,}".replace(",", " ") if abs(count) >= 10_000 else str(int(count))
    return text.replace("-", MINUS)


def plain(value: Number) -> str:
    """A number as matplotlib's own ticks write it, with a minus sign and no hyphen."""
    return f"{value:g}".replace("-", MINUS)


def token_ticks(axes: Axes, low: Number, high: Number) -> None:
    """A log2 axis of tokens from `low` to `high` with at most eight plain numbers."""
    axes.set_xscale("log", base=2)
    powers = [2**k for k in range(60) if low <= 2**k <= high]
    ticks = powers[:: -(-len(powers) // 8)] if powers else [low, high]
    axes.set_xticks(ticks, labels=[tokens(tick) for tick in ticks])
    axes.minorticks_off()


def log_ticks(axes: Axes, values: Sequence[Number]) -> None:
    """A log axis upward whose labels are plain powers of ten where they are short."""
    axes.set_yscale("log")
    if 1e-3 <= min(values) and max(values) < 1e6:
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")

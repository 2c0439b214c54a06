"""From numbers to a file, a window or JSON: what `ropewalk plot` does with each kind of figure."""

import io
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ropewalk.errors import message, require, require_type
from ropewalk.plots import heads, reach, scores, studies, style, turning
from ropewalk.plots.style import Axes, Figure
from ropewalk.study import files

SUFFIXES = (".svg", ".png")
PATIENCE = 2.0  # seconds


def _quiet(_: str) -> None:
    pass


class Kind(NamedTuple):
    """A kind of figure: its numbers, how a page is filled with them, the page's size in inches, and whether the
    numbers take `tell`, for progress."""

    title: str
    numbers: Callable[..., dict[str, Any]]
    fill: Callable[[dict[str, Any], Figure], None]
    size: Callable[[dict[str, Any]], tuple[float, float]] = lambda _: style.SIZE
    tells: bool = False


def _alone(draw: Callable[[dict[str, Any], Axes], None]) -> Callable[[dict[str, Any], Figure], None]:
    return lambda numbers, figure: draw(numbers, figure.add_subplot())


def _fill_attention(numbers: dict[str, Any], figure: Figure) -> None:
    heads.draw_attention(numbers, heads.page_axes(numbers, figure))


KINDS = {
    "angles": Kind("Rotation angles", turning.angle_numbers, _alone(turning.draw_angles)),
    "wavelengths": Kind("Wavelengths", turning.wavelength_numbers, _alone(turning.draw_wavelengths)),
    "decay": Kind("Expected score over distance", scores.decay_numbers, _alone(scores.draw_decay)),
    "bias": Kind("Bias of each head", scores.bias_numbers, scores.draw_bias_page, scores.bias_page_size),
    "attention": Kind("Attention maps", heads.attention_numbers, _fill_attention, heads.page_size),
    "lengths": Kind("Perplexity over length", studies.length_numbers, _alone(studies.draw_lengths)),
    "receptive": Kind("How far gradients reach", reach.receptive_numbers, _alone(reach.draw_receptive), tells=True),
    "spectra": Kind("Ways to stretch, compared", turning.spectra_numbers, _alone(turning.draw_spectra)),
}


def check_path(path: str | pathlib.Path) -> pathlib.Path:
    """A path that a figure can be written to, or an error that names it."""
    path = pathlib.Path(path)
    require(path.suffix.lower() in SUFFIXES, "out", "a file that ends in .svg or .png", repr(str(path)))
    require(not path.is_dir(), "out", "a file", f"{path}, a folder")
    require(path.parent.is_dir(), "out", "in a folder that exists", repr(str(path)))
    return path


def save(figure: Figure | Axes, path: str | pathlib.Path, title: str = "") -> pathlib.Path:
    """Write a figure, or the figure of some axes, as .svg or .png: the same bytes each time, and all of them or none.

    Args:
        path: an existing file is replaced once the new one is complete.
        title: kept in the file for those who cannot see it.

    Raises:
        ValueError: the suffix is neither, or the folder does not exist.  OSError: the file cannot be written.
    """
    path = check_path(path)
    drawn = figure.get_figure(root=True) if isinstance(figure, Axes) else figure
    require_type(drawn, Figure, "figure", "a matplotlib figure or axes")
    assert isinstance(drawn, Figure)
    content = _content(drawn, path.suffix.lower()[1:], title)
    try:
        files.write_bytes(path, content)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(message("out", "a file that can be written", f"{str(path)!r} ({reason})")) from error
    return path


def _content(figure: Figure, form: str, title: str) -> bytes:
    """The file: nothing in it depends on the clock, the user's settings or chance."""
    named = {"Title": title} if title else {}
    metadata = {"Date": None, "Creator": "ropewalk"} if form == "svg" else {"Software": "ropewalk"}
    file = io.BytesIO()
    with style.looks():
        figure.savefig(file, format=form, metadata={**metadata, **named})
    return file.getvalue()


def make(
    kind: str, given: dict[str, Any], out: str | None, show: bool, as_json: bool, tell: Callable[[str], None] = _quiet
) -> dict[str, Any]:
    """Draw one kind of figure into a file and a window, and return its numbers.

    Args:
        kind: a name in `KINDS`.
        given: arguments of the kind's numbers; None stands for the default.
        tell: gets lines of progress, once two seconds have passed.
        out: the file; needed unless the figure is shown or only its numbers are wanted.

    Raises:
        ValueError, OSError: an argument, the file or the display does not allow it; nothing has been written.
    """
    if out is None and not show and not as_json:
        raise ValueError(message("--out", "given", None, hint=f"--out {kind}.svg, or --show, or --json for numbers"))
    path = None if out is None else check_path(out)
    if show:
        check_display()
    plan = KINDS[kind]
    numbers = _computed(kind, {name: value for name, value in given.items() if value is not None}, tell)
    if path is not None:
        with style.looks():
            figure = style.page(plan.size(numbers))
            plan.fill(numbers, figure)
        save(figure, path, plan.title)
    if show:
        show_window(plan, numbers)
    return numbers


def _computed(kind: str, given: dict[str, Any], tell: Callable[[str], None]) -> dict[str, Any]:
    """The numbers of a kind; what takes longer than two seconds says so."""
    plan, began = KINDS[kind], time.monotonic()

    def late(line: str) -> None:
        if time.monotonic() - began >= PATIENCE:
            tell(f"{kind}: {line}")

    timer = threading.Timer(PATIENCE, tell, [f"{kind}: computing"])
    timer.daemon = True
    timer.start()
    try:
        return plan.numbers(**given, **({"tell": late} if plan.tells else {}))
    finally:
        timer.cancel()


def check_display() -> None:
    """ValueError unless matplotlib can open a window here."""
    import matplotlib

    somewhere = sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    hint = "--out figure.png writes a file instead"
    require(bool(somewhere), "--show", "used where a display exists", "neither DISPLAY nor WAYLAND_DISPLAY", hint=hint)
    from matplotlib import pyplot
    from matplotlib.backends.registry import BackendFilter, backend_registry

    pyplot.close(pyplot.figure())  # decides on a backend, if nobody has
    backend = matplotlib.get_backend().lower()
    windows = backend in {name.lower() for name in backend_registry.list_builtin(BackendFilter.INTERACTIVE)}
    require(windows, "--show", "used where matplotlib can open windows (tkinter or Qt)", f"the backend {backend}",
            hint=hint)  # fmt: skip


def show_window(plan: Kind, numbers: dict[str, Any]) -> None:
    """Draw into a window and wait until it is closed."""
    from matplotlib import pyplot

    with style.looks():
        figure = pyplot.figure(figsize=plan.size(numbers), layout="constrained", num=plan.title)
        plan.fill(numbers, style.page(plan.size(numbers), figure))
        pyplot.show()

"""Figures of what position encodings do, each from numbers that this library computes.

Every function draws into the matplotlib axes that it is given, or into a figure of its own in the library's look,
and returns the axes; `save` writes a figure as SVG or PNG, the same bytes each time.  Names are imported when they
are first used, and need matplotlib: pip install 'ropewalk[plot]'.
"""

from typing import TYPE_CHECKING

from ropewalk import _lazy

if TYPE_CHECKING:
    from ropewalk.plots.heads import attention as attention
    from ropewalk.plots.output import save as save
    from ropewalk.plots.reach import receptive as receptive
    from ropewalk.plots.scores import bias as bias
    from ropewalk.plots.scores import bias_matrix as bias_matrix
    from ropewalk.plots.scores import decay as decay
    from ropewalk.plots.studies import lengths as lengths
    from ropewalk.plots.turning import angles as angles
    from ropewalk.plots.turning import spectra as spectra
    from ropewalk.plots.turning import wavelengths as wavelengths

_HOME = {
    "heads": ("attention",),
    "output": ("save",),
    "reach": ("receptive",),
    "scores": ("bias", "bias_matrix", "decay"),
    "studies": ("lengths",),
    "turning": ("angles", "spectra", "wavelengths"),
}

__all__ = [name for names in _HOME.values() for name in names]  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__, __dir__ = _lazy.attach(__name__, _HOME)

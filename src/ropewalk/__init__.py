"""Ropewalk: position encodings for transformers, exact at any position and alike in every runtime.

Names are imported when they are first used, so that `ropewalk --help` need not wait for torch.
"""

from typing import TYPE_CHECKING

from . import _lazy
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from . import advise as advise
    from . import checkpoints as checkpoints
    from . import compat as compat
    from . import explain as explain
    from . import hf as hf
    from . import kernels as kernels
    from . import layouts as layouts
    from . import phases as phases
    from . import plots as plots
    from . import positions as positions
    from . import spectra as spectra
    from .attention import Attention as Attention
    from .attention import KVCache as KVCache
    from .attention import attend as attend
    from .check import check as check
    from .encodings import ALiBi as ALiBi
    from .encodings import Axial as Axial
    from .encodings import Compose as Compose
    from .encodings import Encoding as Encoding
    from .encodings import Hybrid as Hybrid
    from .encodings import Learned as Learned
    from .encodings import MRoPE as MRoPE
    from .encodings import NoPE as NoPE
    from .encodings import Placement as Placement
    from .encodings import Rotary as Rotary
    from .encodings import Sinusoidal as Sinusoidal
    from .encodings import Temperature as Temperature
    from .encodings import Trailing as Trailing
    from .encodings import grid as grid
    from .encodings import reposition as reposition
    from .encodings import rotate as rotate
    from .encodings import rotate_ as rotate_
    from .model import Transformer as Transformer
    from .naming import build as build
    from .spectra import Spectrum as Spectrum

_MODULES = (
    *("advise", "check", "checkpoints", "compat", "explain", "hf"),
    *("kernels", "layouts", "phases", "plots", "positions", "spectra"),
)
_HOME = {
    "attention": ("Attention", "KVCache", "attend"),
    "naming": ("build",),
    "encodings": (
        *("ALiBi", "Axial", "Compose", "Encoding", "Hybrid", "Learned", "MRoPE", "NoPE", "Placement", "Rotary"),
        *("Sinusoidal", "Temperature", "Trailing", "grid", "reposition", "rotate", "rotate_"),
    ),
    "model": ("Transformer",),
    "spectra": ("Spectrum",),
}

__all__ = [*_MODULES, *(name for names in _HOME.values() for name in names)]  # pyright: ignore[reportUnsupportedDunderAll]

__getattr__, __dir__ = _lazy.attach(__name__, _HOME, _MODULES)

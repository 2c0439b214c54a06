"""Ropewalk: position encodings for transformers, exact at any position and alike in every runtime."""

from . import layouts as layouts
from . import positions as positions
from . import spectra as spectra
from ._version import __version__ as __version__
from .attention import Attention as Attention
from .attention import KVCache as KVCache
from .attention import attend as attend
from .build import build as build
from .encodings import ALiBi as ALiBi
from .encodings import Compose as Compose
from .encodings import Encoding as Encoding
from .encodings import Hybrid as Hybrid
from .encodings import Learned as Learned
from .encodings import NoPE as NoPE
from .encodings import Placement as Placement
from .encodings import Rotary as Rotary
from .encodings import Sinusoidal as Sinusoidal
from .encodings import reposition as reposition
from .encodings import rotate as rotate
from .encodings import rotate_ as rotate_
from .model import Transformer as Transformer
from .spectra import Spectrum as Spectrum

_LAZY = ("compat",)


def __getattr__(name: str):
    if name in _LAZY:
        import importlib

        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module 'ropewalk' has no attribute {name!r}")

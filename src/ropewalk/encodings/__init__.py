"""Position encodings, one file each.  An export line below is all the registration there is."""

from ropewalk.encodings.alibi import ALiBi, alibi_slope
from ropewalk.encodings.axial import Axial, grid
from ropewalk.encodings.base import Encoding, Placement
from ropewalk.encodings.compose import Compose
from ropewalk.encodings.hybrid import Hybrid
from ropewalk.encodings.learned import Learned
from ropewalk.encodings.mrope import MRoPE
from ropewalk.encodings.nope import NoPE
from ropewalk.encodings.rotary import Rotary, reposition, rotate, rotate_
from ropewalk.encodings.sinusoidal import Sinusoidal
from ropewalk.encodings.temperature import Temperature
from ropewalk.encodings.trailing import Trailing

__all__ = [
    "ALiBi",
    "Axial",
    "Compose",
    "Encoding",
    "Hybrid",
    "Learned",
    "MRoPE",
    "NoPE",
    "Placement",
    "Rotary",
    "Sinusoidal",
    "Temperature",
    "Trailing",
    "alibi_slope",
    "grid",
    "reposition",
    "rotate",
    "rotate_",
]

"""Position encodings, one file each.  An export line below is all the registration there is."""

from ropewalk.encodings.alibi import ALiBi, alibi_slope
from ropewalk.encodings.base import Encoding, Placement
from ropewalk.encodings.compose import Compose
from ropewalk.encodings.hybrid import Hybrid
from ropewalk.encodings.learned import Learned
from ropewalk.encodings.nope import NoPE
from ropewalk.encodings.rotary import Rotary, reposition, rotate, rotate_
from ropewalk.encodings.sinusoidal import Sinusoidal

__all__ = [
    "ALiBi",
    "Compose",
    "Encoding",
    "Hybrid",
    "Learned",
    "NoPE",
    "Placement",
    "Rotary",
    "Sinusoidal",
    "alibi_slope",
    "reposition",
    "rotate",
    "rotate_",
]

"""Position encodings, one file each.  An export line below is all the registration there is."""

from .alibi import ALiBi, alibi_slope
from .base import Encoding, Placement
from .compose import Compose
from .hybrid import Hybrid
from .learned import Learned
from .nope import NoPE
from .rotary import Rotary, reposition, rotate, rotate_
from .sinusoidal import Sinusoidal

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

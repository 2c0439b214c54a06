"""How an encoding arrives at its numbers, step by step, and what a model's config says about positions.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ropewalk import _lazy

if TYPE_CHECKING:
    from ropewalk.explain.biases import alibi as alibi
    from ropewalk.explain.biases import hybrid as hybrid
    from ropewalk.explain.models import config as config
    from ropewalk.explain.names import explained as explained
    from ropewalk.explain.text import Explanation as Explanation
    from ropewalk.explain.text import Section as Section
    from ropewalk.explain.turning import rotary as rotary
    from ropewalk.explain.turning import sinusoidal as sinusoidal

_HOME = {
    "biases": ("alibi", "hybrid"),
    "models": ("config",),
    "names": ("explained",),
    "text": ("Explanation", "Section"),
    "turning": ("rotary", "sinusoidal"),
}

__all__ = [name for names in _HOME.values() for name in names]  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__, __dir__ = _lazy.attach(__name__, _HOME)

"""How an encoding arrives at its numbers, step by step, and what a model's config says about positions.

Names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

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
_NAMES = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'ropewalk.explain' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"ropewalk.explain.{_NAMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

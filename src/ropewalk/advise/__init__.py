"""Which encoding, or which stretch of existing weights: rules with their sources, applied to a question.

Names are imported when they are first used.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.advise.measured import shipped as shipped
    from ropewalk.advise.question import Question as Question
    from ropewalk.advise.question import ask as ask
    from ropewalk.advise.rules import RULES as RULES
    from ropewalk.advise.rules import Rule as Rule
    from ropewalk.advise.rules import rule_for as rule_for
    from ropewalk.advise.run import Advice as Advice
    from ropewalk.advise.run import advise as advise

_HOME = {
    "measured": ("shipped",),
    "question": ("Question", "ask"),
    "rules": ("RULES", "Rule", "rule_for"),
    "run": ("Advice", "advise"),
}
_NAMES = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_NAMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in _NAMES:
        raise AttributeError(f"module 'ropewalk.advise' has no attribute {name!r}")
    found = getattr(importlib.import_module(f"ropewalk.advise.{_NAMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

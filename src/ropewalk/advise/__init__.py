"""Which encoding, or which stretch of existing weights: rules with their sources, applied to a question.

Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ropewalk import _lazy

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

__all__ = [name for names in _HOME.values() for name in names]  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__, __dir__ = _lazy.attach(__name__, _HOME)

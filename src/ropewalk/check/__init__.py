"""Does this encoding, this function, this model keep the laws of positions?  `check(target)` says, by behaviour alone.

The module is callable: `ropewalk.check(target)` is `ropewalk.check.check(target)`.  Names are imported when they are
first used.
"""

import sys
import types
from typing import TYPE_CHECKING, Any

from ropewalk import _lazy

if TYPE_CHECKING:
    from ropewalk.check import render as render
    from ropewalk.check.adapters import AttentionFunction as AttentionFunction
    from ropewalk.check.adapters import Bias as Bias
    from ropewalk.check.adapters import Rotation as Rotation
    from ropewalk.check.kinds import KINDS as KINDS
    from ropewalk.check.kinds import Kind as Kind
    from ropewalk.check.laws import LAWS as LAWS
    from ropewalk.check.laws import broken as broken
    from ropewalk.check.laws import law_named as law_named
    from ropewalk.check.libraries import adapt as adapt
    from ropewalk.check.libraries import flash_attn_rotary as flash_attn_rotary
    from ropewalk.check.libraries import rotary_embedding_torch as rotary_embedding_torch
    from ropewalk.check.libraries import transformers_rotary as transformers_rotary
    from ropewalk.check.libraries import x_transformers_alibi as x_transformers_alibi
    from ropewalk.check.libraries import x_transformers_relative as x_transformers_relative
    from ropewalk.check.libraries import x_transformers_rotary as x_transformers_rotary
    from ropewalk.check.run import BoundLaw as BoundLaw
    from ropewalk.check.run import check as check
    from ropewalk.check.run import laws_for as laws_for
    from ropewalk.check.subject import Parts as Parts
    from ropewalk.check.subject import Subject as Subject
    from ropewalk.check.verdict import Finding as Finding
    from ropewalk.check.verdict import Law as Law
    from ropewalk.check.verdict import NotApplicable as NotApplicable
    from ropewalk.check.verdict import Report as Report
    from ropewalk.check.verdict import Verdict as Verdict

_HOME = {
    "adapters": (
        "AttentionFunction",
        "Bias",
        "Rotation",
    ),
    "kinds": (
        "KINDS",
        "Kind",
    ),
    "laws": (
        "LAWS",
        "broken",
        "law_named",
    ),
    "libraries": (
        "adapt",
        "flash_attn_rotary",
        "rotary_embedding_torch",
        "transformers_rotary",
        "x_transformers_alibi",
        "x_transformers_relative",
        "x_transformers_rotary",
    ),
    "run": (
        "BoundLaw",
        "check",
        "laws_for",
    ),
    "subject": (
        "Parts",
        "Subject",
    ),
    "verdict": (
        "Finding",
        "Law",
        "NotApplicable",
        "Report",
        "Verdict",
    ),
}

__all__ = ["render", *(name for names in _HOME.values() for name in names)]  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__, __dir__ = _lazy.attach(__name__, _HOME, ("render",))


class _Callable(types.ModuleType):
    def __call__(self, target: Any, **options: Any):
        """`check(target, ...)`."""
        from ropewalk.check.run import check

        return check(target, **options)


sys.modules[__name__].__class__ = _Callable

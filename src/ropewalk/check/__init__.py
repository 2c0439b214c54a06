"""Does this encoding, this function, this model keep the laws of positions?  `check(target)` says, by behaviour alone.

The module is callable: `ropewalk.check(target)` is `ropewalk.check.check(target)`.
"""

import sys
import types
from typing import Any

from ropewalk.check import render
from ropewalk.check.adapters import AttentionFunction, Bias, Rotation
from ropewalk.check.kinds import KINDS, Kind
from ropewalk.check.laws import LAWS, broken, law_named
from ropewalk.check.libraries import (
    adapt,
    flash_attn_rotary,
    rotary_embedding_torch,
    transformers_rotary,
    x_transformers_alibi,
    x_transformers_relative,
    x_transformers_rotary,
)
from ropewalk.check.run import BoundLaw, check, laws_for
from ropewalk.check.subject import Parts, Subject
from ropewalk.check.verdict import Finding, Law, NotApplicable, Report, Verdict

__all__ = [
    "KINDS",
    "LAWS",
    "AttentionFunction",
    "Bias",
    "BoundLaw",
    "Finding",
    "Kind",
    "Law",
    "NotApplicable",
    "Parts",
    "Report",
    "Rotation",
    "Subject",
    "Verdict",
    "adapt",
    "broken",
    "check",
    "flash_attn_rotary",
    "law_named",
    "laws_for",
    "render",
    "rotary_embedding_torch",
    "transformers_rotary",
    "x_transformers_alibi",
    "x_transformers_relative",
    "x_transformers_rotary",
]


class _Callable(types.ModuleType):
    def __call__(self, target: Any, **options: Any) -> Report:
        return check(target, **options)


sys.modules[__name__].__class__ = _Callable

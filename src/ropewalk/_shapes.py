"""Shapes in signatures: jaxtyping's names under its import hook, plain `Tensor` for everybody else.

The core depends on torch alone.  The tests import jaxtyping first, so there each shape is checked at every
call; elsewhere the annotations cost nothing and nothing is imported.
"""

import sys
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING or "jaxtyping" in sys.modules:
    from jaxtyping import Bool, Float, Shaped
    from jaxtyping import Integer as Int  # signed or not
else:

    class _Shaped:
        def __class_getitem__(cls, item):
            return item[0]

    Bool = Float = Int = Shaped = _Shaped

__all__ = ["Bool", "Float", "Int", "Shaped", "Tensor"]

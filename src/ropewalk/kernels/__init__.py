"""The rotation itself: one formula, and the ways to run it."""

from ropewalk.kernels.eager import turn, turn_

__all__ = ["turn", "turn_"]

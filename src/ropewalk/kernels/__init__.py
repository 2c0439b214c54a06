"""The rotation itself: one formula, and the ways to run it."""

from ropewalk.kernels.addition import tables
from ropewalk.kernels.dispatch import Found, available, path, turn, turn_, using

__all__ = ["Found", "available", "path", "tables", "turn", "turn_", "using"]

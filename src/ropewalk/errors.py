"""How Ropewalk says no: `<name> must be <condition>, got <value>`, and a hint where one call repairs it."""

import operator
from typing import Any


def message(name: str, condition: str, got: Any, hint: str = "") -> str:
    """The one form of every error.

    >>> print(message("num_heads", "at least 1", 0, hint="one head is the smallest attention"))
    num_heads must be at least 1, got 0
    hint: one head is the smallest attention
    """
    text = f"{name} must be {condition}, got {got}"
    return f"{text}\nhint: {hint}" if hint else text


def require(holds: bool, name: str, condition: str, got: Any, *values: Any, hint: str = "") -> None:
    """Raise ValueError unless `holds`.

    `condition` may have fields {0}, {1}, ... for `values`.  They are filled in on failure only: a length that is
    a symbol while compiling becomes a constant when it is printed.
    """
    if not holds:
        raise ValueError(message(name, condition.format(*values) if values else condition, got, hint))


def require_count(value: Any, name: str, at_least: int = 1) -> int:
    """An integer of at least `at_least`, or TypeError / ValueError."""
    try:
        count = operator.index(value)
    except TypeError:
        count = None
    if count is None or isinstance(value, bool):
        raise TypeError(message(name, "an integer", f"{value!r} ({type(value).__name__})"))
    require(count >= at_least, name, f"at least {at_least}", count)
    return count

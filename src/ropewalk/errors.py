"""How Ropewalk says no: `<name> must be <condition>, got <value>`, and a hint where one call repairs it."""

import operator
from decimal import Decimal
from typing import Any


def message(name: str, condition: str, got: Any, hint: str = "") -> str:
    """The one form of every error.

    >>> print(message("num_heads", "at least 1", 0, hint="one head is the smallest attention"))
    num_heads must be at least 1, got 0
    hint: one head is the smallest attention
    """
    text = f"{name} must be {condition}, got {got}"
    return f"{text}\nhint: {hint}" if hint else text


def shown(value: Any) -> str:
    """A value and its type, short: a tensor by its shape."""
    if hasattr(value, "shape"):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def require_number(value: Any, name: str) -> Any:
    """An int, float or Decimal (not a bool), or TypeError."""
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise TypeError(message(name, "a number", shown(value)))
    return value


def require_device(value: str) -> str:
    """A device that studies and benchmarks run on, or ValueError."""
    known = value == "cpu" or value == "cuda" or (value.startswith("cuda:") and value[5:].isdecimal())
    require(known, "device", "cpu, cuda or cuda:N", repr(value))
    return value


def require_type(value: Any, kind: type, name: str, condition: str, hint: str = "") -> None:
    """TypeError unless `value` is an instance of `kind`."""
    if not isinstance(value, kind):
        got = value.__name__ if isinstance(value, type) else shown(value)
        raise TypeError(message(name, condition, got, hint))


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
        raise TypeError(message(name, "an integer", shown(value)))
    require(count >= at_least, name, f"at least {at_least}", count)
    return count

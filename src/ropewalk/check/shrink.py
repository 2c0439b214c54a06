"""The smallest input that still shows a fault."""

from collections.abc import Callable


def smallest(fails: Callable[[int], bool], low: int, high: int) -> int | None:
    """A value from `low` to `high` that fails while the one before it, if any was tried, passes; None if none fails.

    Steps double from `low`, then the gap between the last that passes and the first that fails is halved, so that
    about 2 log2(high - low) values are tried; of faults that come and go, one is found.

    >>> smallest(lambda length: length >= 300, 1, 4096)
    300
    """
    passes, step, value = low - 1, 1, low
    while not fails(value):
        if value == high:
            return None
        passes, value, step = value, min(value + step, high), 2 * step
    while value - passes > 1:
        middle = (passes + value) // 2
        passes, value = (passes, middle) if fails(middle) else (middle, value)
    return value

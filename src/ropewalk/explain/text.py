"""What an explanation is: titled lines for a terminal, and the same numbers for a program."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

SMALL = 1e-4
"""Below, eight decimals show fewer than five digits."""
FLOAT_DECIMALS_END = 1e7
"""From here on, eight decimals ask for more than the 15 digits that a float holds."""


@dataclass(frozen=True)
class Section:
    """One step: a title and its lines."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Steps in words, and every number that they show.

    Args:
        subject: what is explained.
        sections: the steps, in order; `str` shows them numbered.
        numbers: JSON-like; lengths in tokens, angles in radians.
    """

    subject: str
    sections: tuple[Section, ...]
    numbers: dict[str, Any]

    def __str__(self) -> str:
        parts = [self.subject]
        for i, section in enumerate(self.sections, 1):
            parts.append("\n".join((f"{i}. {section.title}", *(f"   {line}".rstrip() for line in section.lines))))
        return "\n\n".join(parts)


def section(title: str, *lines: str | Iterable[str]) -> Section:
    """A section of lines and of lists of lines."""
    flat = [one for line in lines for one in ((line,) if isinstance(line, str) else line)]
    return Section(title, tuple(flat))


def number(value: float | Decimal) -> str:
    """Eight decimals; eight significant digits where these would be lost, or where a float has no more decimals.

    >>> number(0.5), number(-0.0), number(1.25e-9), number(1e300)
    ('0.50000000', '0.00000000', '1.25e-09', '1e+300')
    """
    if value == 0:
        return f"{0.0:.8f}"
    float_ends = isinstance(value, float) and abs(value) >= FLOAT_DECIMALS_END
    return f"{value:.8g}" if abs(value) < SMALL or float_ends else f"{value:.8f}"


def vector(values: Iterable[float]) -> str:
    """Numbers in brackets."""
    return f"[{', '.join(map(number, values))}]"


def tokens(value: float) -> str:
    """A length, with as many digits as tell it apart: short ones with decimals."""
    if math.isinf(value):
        return "never"
    return f"{value:.2f}" if value < 1000 else f"{value:,.0f}".replace(",", " ")


def plural(count: int, noun: str) -> str:
    """A count with its noun.

    >>> plural(1, "head"), plural(12, "head")
    ('1 head', '12 heads')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Columns aligned to the right, the head first."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]


def spans(indices: Sequence[int]) -> str:
    """Increasing indices, runs shortened.

    >>> spans([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for i in indices:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)

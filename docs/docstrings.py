"""Docstrings and pages as this project writes them, made ready for Sphinx.

Docstrings are plain text: single backticks are code, stars and bars are arithmetic, an indented block is a formula.
"""

import re
from typing import Any

SECTIONS = [("Differs from the paper", "params_style"), ("Differs from the code", "params_style")]
CODE = re.compile(r"(``?[^`]+``?)")
SPECIAL = re.compile(r"([\\*|]|(?<=\w)_(?!\w))")
COLON = "\ue000"
"""Stands for a colon that is one, while napoleon looks for those that end a type."""


def escaped(line: str) -> str:
    """A line whose stars, bars and trailing underscores are not markup, and whose backticks are code."""
    parts = CODE.split(line)
    return "".join(f"``{part.strip('`')}``" if part.startswith("`") else SPECIAL.sub(r"\\\1", part) for part in parts)


def convert(lines: list[str], prose: bool) -> list[str]:
    """All lines but those of examples escaped; in prose, and in what is returned, no colon ends a type."""
    made, example, returns = [], False, False
    for line in lines:
        example = line.lstrip().startswith(">>>") or (example and bool(line.strip()))
        if line and not line.startswith(" "):
            returns = line == "Returns:"
        text = line if example else escaped(line)
        made.append(text.replace(": ", COLON + " ") if (prose or returns) and not example else text)
    return made


def process(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Before napoleon reads the sections."""
    lines[:] = convert(lines, what in ("attribute", "data", "property"))


def finish(_app: Any, _what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """After it."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def trim(_app: Any, _name: str, source: list[str]) -> None:
    """The empty line that ends an example in a page is for doctest, not for readers."""
    source[0] = source[0].replace("\n\n```\n", "\n```\n")


def setup(app: Any) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", process, priority=400)
    app.connect("autodoc-process-docstring", finish, priority=600)
    app.connect("source-read", trim)
    return {"parallel_read_safe": True}

"""Results as text for the terminal and as one page for readers; nothing in either is written by hand."""

import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from ropewalk.bench.variants import MODES

HEAD = """# What rotation, attention and decoding cost

Made by `ropewalk bench page` from the JSON files in this folder; `make bench` measures all of it anew.

- A figure is the median of ratios that were taken within one round of an interleaved run, with the middle half of the
  rounds in brackets. The row that is 1 is what the others are measured by.
- Memory is what the allocator hands out at once beyond what is given.
- Before anything is timed, its values and its gradients are compared with exact ones. What is too far off, or raises,
  has no figure and is named below its table. Errors of rotations and tables are the largest difference from float64
  for unit-normal input, those of attention the root mean square of the difference relative to its own.
- Memory that was handed back to the system costs time when it is asked for again. Unless the command says
  `--default-allocator`, the C library was told to keep it, so that a new tensor costs no fresh pages; how dear one is
  stands beside each command. With glibc's defaults a large new tensor is several times dearer, and what works in
  place is not.
"""
PASSES = {"forward": "forward", "training": "forward + backward"}


def time_of(seconds: float) -> str:
    """Three digits with their unit.

    >>> time_of(0.0000123), time_of(0.1234), time_of(12.3)
    ('12.3 µs', '123 ms', '12.3 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size or unit == "µs":
            value = seconds / size
            digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{digits}f} {unit}"
    raise AssertionError


def mebibytes(size: int) -> str:
    """Bytes as MiB.

    >>> mebibytes(0), mebibytes(1000), mebibytes(3 << 19), mebibytes(123 << 20)
    ('0', '< 0.1', '1.5', '123')
    """
    value = size / 2**20
    if value == 0:
        return "0"
    return "< 0.1" if value < 0.1 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def _ratio(part: dict[str, float]) -> str:
    return f"{part['ratio']:.2f} [{part['low']:.2f}, {part['high']:.2f}]"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def _notes(result: dict[str, Any]) -> list[str]:
    """What has no figures, and why."""
    lines = [f"{name}: no figures, it {reason}" for name, reason in result.get("refused", {}).items()]
    lines += [f"{seq_len} tokens: left out, {reason}" for seq_len, reason in result.get("skipped", {}).items()]
    return lines + [f"{name}: absent, {reason}" for name, reason in result.get("absent", {}).items()]


def _setting(result: dict[str, Any]) -> str:
    """Clock, machine, and what a new tensor costs."""
    return (
        f"{result['clock']} time on {result['machine']}; a new tensor costs {result['fresh']:.2f} of one that is there"
    )


def _section(section: dict[str, Any]) -> list[list[str]]:
    """Head and rows of one section."""
    extra = [key for key in ("beyond", "path") if any(row.get(key) for row in section["rows"])]
    head = [section["title"], f"relative to {section['unit']}", "time", "memory, MiB", "error"]
    rows = [head + [{"beyond": "beyond it", "path": "kernel"}[key] for key in extra]]
    for row in section["rows"]:
        cells = [row["name"], _ratio(row["time"]), time_of(row["time"]["seconds"]), mebibytes(row["bytes"])]
        cells.append(_error(row["error"]))
        if "beyond" in extra:
            cells.append(time_of(row["beyond"]["median"]))
        if "path" in extra:
            cells.append(row.get("path") or "")
        rows.append(cells)
    return rows


def _by_length(result: dict[str, Any]) -> Iterable[list[list[str]]]:
    """Tables of attention: time in each mode, memory and error, over length."""
    modes = [mode for mode in MODES if mode in result["settings"]["modes"]]
    lengths = sorted({row["seq_len"] for row in result["rows"]})
    found = {(row["name"], row["seq_len"]): row for row in result["rows"]}
    tables = [(PASSES[mode], lambda row, mode=mode: _ratio(row[mode])) for mode in modes]
    tables += [
        (f"memory, MiB, {PASSES[mode]}", lambda row, mode=mode: mebibytes(row[f"{mode}_memory"]["bytes"]))
        for mode in modes
    ]
    said = {"forward": "error of the values", "training": "error of the gradients"}
    tables += [(said[mode], lambda row, mode=mode: _error(row["error"].get(mode))) for mode in modes]
    for title, cell in tables:
        rows = [[title, *map(str, lengths)]]
        for name in dict.fromkeys(row["name"] for row in result["rows"]):
            cells = [cell(found[name, n]) if (name, n) in found else "" for n in lengths]
            rows.append([name, *cells])
        yield rows


def _study(result: dict[str, Any]) -> list[list[str]]:
    head = ["training steps of the study's model", "speed relative to plain PyTorch", "tokens/s"]
    rows = []
    for row in result["rows"]:
        speed = {"ratio": row["speed"], "low": row["low"], "high": row["high"]}
        rows.append([row["name"], _ratio(speed), str(row["tokens_per_second"])])
    return [head, *rows]


def _plain(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|---" * len(rows[0]) + "|", *lines[1:]]


def text(result: dict[str, Any]) -> str:
    """A result with sections as plain text."""
    lines = []
    for section in result["sections"]:
        lines += [*_plain(_section(section)), *_notes(section), ""]
    return "\n".join([*lines, *_notes(result), _setting(result)])


def _part(name: str, result: dict[str, Any]) -> list[str]:
    """One file's part of the page."""
    lines = [f"## {name}", "", f"`{result['command']}`: {_setting(result)}.", ""]
    if result["what"] == "study":
        tables = [(_study(result), [])]
    elif result["what"] == "attention":
        tables = [(rows, []) for rows in _by_length(result)] if result["rows"] else []
    else:
        tables = [(_section(section), _notes(section)) for section in result["sections"]]
    for rows, notes in tables:
        lines += [*_markdown(rows), "", *(f"- {note}" for note in notes), *([""] if notes else [])]
    notes = _notes(result)
    return [*lines, *(f"- {note}" for note in notes), *([""] if notes else [])]


def page(folder: pathlib.Path) -> str:
    """The page of all results in a folder."""
    lines = [HEAD]
    for path in sorted(folder.glob("*.json")):
        lines += _part(path.stem, json.loads(path.read_text()))
    return "\n".join(lines).rstrip() + "\n"

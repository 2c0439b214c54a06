"""safetensors files, read and written in pieces: 8 bytes of length, a JSON header, the tensors one after another.

Works on bytes, so every dtype stays what it is, and what is not reordered stays the same bytes, header included.
"""

import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import IO, Any, NamedTuple

import torch

from ropewalk._shapes import Tensor
from ropewalk.checkpoints.turns import Turn
from ropewalk.errors import message, require
from ropewalk.layouts import LAYOUTS, channel_order

PIECE = 4 * 2**20
"""Bytes in memory at a time, or one head if that is larger."""
RECORD = "ropewalk.layout"
"""Metadata key that names the layout of a file whose config would say the other one."""
DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2},
}
"""Dtypes whose values can be read as numbers, to measure them."""


class Entry(NamedTuple):
    """One tensor of a file; `begin` and `end` count bytes after the header."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Shard:
    """One safetensors file, its header read and checked."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        size = self.size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            require(8 + length <= size, str(path), "a whole safetensors file", f"{size} bytes")
            self.header = file.read(length)
        self.start = 8 + length
        self.metadata, self.entries = _parsed(self.header, str(path))
        end = max((entry.end for entry in self.entries.values()), default=0)
        whole = self.start + end
        require(whole == size, str(path), f"a whole safetensors file of {whole} bytes", f"{size} bytes")

    @property
    def out_name(self) -> str:
        """The file keeps its name in a folder."""
        return self.path.name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def measurable(self, name: str) -> bool:
        """Whether the numbers of a tensor are its values: not packed, and no scales beside it."""
        scaled = any(other.startswith(name.removesuffix("weight")) and "scale" in other for other in self.entries)
        return self.entries[name].dtype in DTYPES and not scaled

    def numbers(self, name: str, first: int, last: int, rows: int) -> Tensor:
        """Rows [first, last) of a tensor of `rows` rows, (last - first, columns), in float32."""
        entry = self.entries[name]
        row = (entry.end - entry.begin) // rows
        with open(self.path, "rb") as file:
            file.seek(self.start + entry.begin + first * row)
            data = _read(file, (last - first) * row)
        return torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(last - first, -1).float()

    def write(
        self, out: pathlib.Path, turns: Mapping[str, Turn], to: str, record: str | None, told: Callable[[int], None]
    ) -> None:
        """This file in the layout `to`, under another name, flushed to the disk.

        Args:
            turns: the tensors that change.
            record: the layout to note in the metadata; None: the config says it already.
            told: called with the bytes written since the last call.
        """
        header = recorded(self.header, record)
        with open(self.path, "rb") as source, open(out, "wb") as sink:
            sink.write(len(header).to_bytes(8, "little") + header)
            source.seek(self.start)
            for name, entry in _stored(self.entries):
                if name in turns:
                    _write_turned(source, sink, entry.end - entry.begin, turns[name], to, told)
                else:
                    _copy(source, sink, entry.end - entry.begin, told)
            sink.flush()
            os.fsync(sink.fileno())


def header_of(entries: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """A header for tensors (dtype, shape, bytes) written in this order, padded to 8 bytes."""
    table: dict[str, Any] = {"__metadata__": metadata}
    begin = 0
    for name, (dtype, shape, size) in entries.items():
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def recorded(header: bytes, layout: str | None) -> bytes:
    """The header with `layout` noted, or with the note taken out; whoever wrote the rest finds it byte for byte.

    The note is a multiple of 8 bytes long, so the padding stays as it is too.
    """
    for alone in (True, False):
        for comma in (True, False):
            for noted in LAYOUTS:
                header = header.replace(_note(noted, alone, comma), b"", 1)
    metadata, entries = _parsed(header, "header")
    if metadata.pop(RECORD, None) is not None:  # somebody wrote the header anew
        header = header_of({name: (e.dtype, e.shape, e.end - e.begin) for name, e in _stored(entries)}, metadata)
    if layout is None:
        return header
    found = re.search(rb'"__metadata__"\s*:\s*\{', header)
    at = header.index(b"{") + 1 if found is None else found.end()
    note = _note(layout, found is None, bool(entries if found is None else metadata))
    return header[:at] + note + header[at:]


def _note(layout: str, alone: bool, comma: bool) -> bytes:
    """What is put behind a brace: an entry of the metadata, or metadata of their own; padded by 1 to 8 spaces."""
    text = f'"{RECORD}":"{layout}"'
    text = (f'"__metadata__":{{{text}}}' if alone else text) + "," * comma
    return text.encode() + b" " * (8 - len(text) % 8)


def _stored(entries: Mapping[str, Entry]) -> list[tuple[str, Entry]]:
    """In the order of the bytes."""
    return sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end))


def _parsed(header: bytes, name: str) -> tuple[dict[str, str], dict[str, Entry]]:
    try:
        table = json.loads(header)
        metadata = table.pop("__metadata__", {})
        entries = {key: Entry(e["dtype"], tuple(e["shape"]), *e["data_offsets"]) for key, e in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(message(name, "a safetensors file with a readable header", error)) from error
    end = 0
    for key, entry in _stored(entries):
        require(entry.begin == end <= entry.end, f"{name}: {key}", f"stored from byte {end} on", entry.begin)
        width = DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else None
        sound = width is None or math.prod(entry.shape) * width == entry.end - entry.begin
        require(sound, f"{name}: {key}", f"{entry.dtype} of shape {entry.shape}", f"{entry.end - entry.begin} bytes")
        end = entry.end
    return metadata, entries


def _read(file: IO[bytes], size: int) -> bytearray:
    data = bytearray(size)
    if file.readinto(data) != size:  # type: ignore[attr-defined]
        raise OSError(message(file.name, "readable to its end", "a file that was cut while it was read"))
    return data


def _copy(source: IO[bytes], sink: IO[bytes], size: int, told: Callable[[int], None]) -> None:
    while size > 0:
        data = _read(source, min(size, PIECE))
        sink.write(data)
        told(len(data))
        size -= len(data)


def _write_turned(
    source: IO[bytes], sink: IO[bytes], size: int, turn: Turn, to: str, told: Callable[[int], None]
) -> None:
    """A tensor with its turning heads reordered; a few heads are in memory at a time."""
    order = channel_order(turn.head_dim, turn.rotary_dim, to)
    head = size // len(turn.turning)
    together = max(1, PIECE // max(head, 1))
    for first in range(0, len(turn.turning), together):
        turning = torch.tensor(turn.turning[first : first + together])
        data = _read(source, len(turning) * head)
        heads = torch.frombuffer(data, dtype=torch.uint8).view(len(turning), turn.head_dim, -1)
        heads[turning] = heads[turning][:, order]
        sink.write(data)
        told(len(data))

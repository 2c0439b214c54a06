"""What rotation, attention and decoding cost in time and memory, each relative to a limit measured in the same run.

`run` measures attention with each encoding, `rotate.run` the rotation by itself, `decode.run` one step over a cache.
No path gets a figure before its numbers have been compared with exact ones.
"""

from ropewalk.bench.attention import Length, for_study, run, table
from ropewalk.bench.timing import ROUNDS, Race, clock, machine, medians, peak_bytes, seconds
from ropewalk.bench.variants import (
    ENCODINGS,
    LENGTHS,
    MODES,
    TOLERANCE,
    Inputs,
    Plan,
    Variant,
    disagreement,
    encoded,
    plain,
    refusals,
)

__all__ = [
    "ENCODINGS",
    "LENGTHS",
    "MODES",
    "ROUNDS",
    "TOLERANCE",
    "Inputs",
    "Length",
    "Plan",
    "Race",
    "Variant",
    "clock",
    "disagreement",
    "encoded",
    "for_study",
    "machine",
    "medians",
    "peak_bytes",
    "plain",
    "refusals",
    "run",
    "seconds",
    "table",
]

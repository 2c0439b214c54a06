"""Wrong versions on purpose, each with a fault that some software has shipped.  Each must break the law it names.

A mutant is an encoding, or one function around it, with a single mistake; the kind is that of the bug reports
from which the laws were made.
"""

import dataclasses
from collections.abc import Callable

import torch

import ropewalk as rw
from ropewalk.check import Parts, Subject
from ropewalk.encodings import Placement


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    law: str
    subject: Subject


MUTANTS: list[Mutant] = []


def encoding(kind: str, law: str, make: Callable | None = None, **subject):
    """Registers an encoding class as a mutant; `make` builds it, by default for 16 channels."""

    def register(cls):
        build = make or (lambda c=cls: c(16))
        wrong = Subject((lambda b=build, c=cls: b(c)) if make else build, **subject)
        MUTANTS.append(Mutant(cls.__name__, kind, law, wrong))
        return cls

    return register


def part(kind: str, law: str, slot: str, make: Callable = lambda: rw.Rotary(16) + rw.ALiBi(8), **sizes):
    """Registers a function, or a cache class, that takes the place of one of `Parts`."""

    def register(wrong):
        subject = Subject(make, parts=dataclasses.replace(Parts(), **{slot: wrong}), **sizes)
        MUTANTS.append(Mutant(wrong.__name__, kind, law, subject))
        return wrong

    return register


def table(rope: rw.Rotary, where, dtype=torch.float32, inv_freq=None, positions_dtype=None) -> Placement:
    inv_freq = torch.tensor(rope.spectrum.inv_freq, dtype=torch.float64).to(dtype) if inv_freq is None else inv_freq
    angles = where.to(positions_dtype or dtype).unsqueeze(-1) * inv_freq
    return Placement(where, angles.cos(), angles.sin())

"""What `ropewalk extend` computes: methods, lengths, windows of a text, and how much work each is."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.errors import require, require_count, require_device
from ropewalk.extension.source import Model, digest
from ropewalk.hf.config import Reading
from ropewalk.hf.extend_config import METHODS, Stretch, stretch
from ropewalk.study.scoring import slide

UNCHANGED, WINDOW = "unchanged", "window"
DEFAULT_METHODS = ("linear", "ntk", "yarn")
_WITH_LISTS = ("longrope",)
_FORMAT = 1


@dataclass(frozen=True)
class Settings:
    """What is asked of a model; `stretches` has the config of each method."""

    model: Model
    stretches: Mapping[str, Stretch]
    train_len: int
    to: int
    lengths: tuple[int, ...]
    sliding: bool
    windows: int
    dtype: str
    device: str

    @property
    def rows(self) -> tuple[str, ...]:
        """The unchanged model, the window control where it differs, and the methods."""
        beyond = (WINDOW,) if self.lengths[-1] > self.train_len else ()
        return (UNCHANGED, *beyond, *self.stretches)


@dataclass(frozen=True)
class Text:
    """The first tokens of a text, one more than is read, since each is scored on what follows it.

    `begin` is put in the first place of every window, where the model's tokenizer begins each text with a mark.
    """

    name: str
    tokens: Tensor
    begin: int | None = None


@dataclass(frozen=True)
class Unit:
    """One window under one row: what is computed, and remembered, at once.

    Args:
        row: a method, "unchanged" or "window".
        start: of the window, in tokens of the text; tokens from `first` on are scored.
        work: floating-point operations, about.
    """

    row: str
    length: int
    text: Text
    start: int
    first: int
    work: float
    key: str

    @property
    def inputs(self) -> Tensor:
        """What the model reads."""
        tokens = self.text.tokens[self.start : self.start + self.length].clone()
        if self.text.begin is not None:
            tokens[0] = self.text.begin
        return tokens

    @property
    def targets(self) -> Tensor:
        """What follows each of them."""
        return self.text.tokens[self.start + 1 : self.start + self.length + 1]


def settings_for(
    model: Model,
    *,
    to: int,
    methods: Sequence[str] = DEFAULT_METHODS,
    lengths: Sequence[int] | None = None,
    train_len: int | None = None,
    windows: int = 1,
    sliding: bool = False,
    dtype: str = "auto",
    device: str = "cpu",
) -> Settings:
    """What a user asked for, checked, and before any weight is read.

    Raises:
        ValueError, TypeError: naming the argument or the key of the config.
    """
    require(len(set(methods)) == len(methods) > 0, "methods", "at least one, all different", list(methods))
    for name in methods:
        known = name in METHODS and name not in _WITH_LISTS
        choices = ", ".join(method for method in METHODS if method not in _WITH_LISTS)
        hint = "ropewalk.hf.extend takes the lists that it needs" if name in _WITH_LISTS else ""
        require(known, "methods", f"among {choices}", repr(name), hint=hint)
    made = {name: stretch(model.config, to=to, method=name, train_len=train_len) for name in methods}
    trained = made[methods[0]].train_len
    require(dtype in ("auto", "float32", "bfloat16"), "dtype", "auto, float32 or bfloat16", repr(dtype))
    require_device(device)
    require_count(windows, "windows")
    asked = default_lengths(trained, to) if lengths is None else tuple(sorted(set(lengths)))
    for length in asked:
        require_count(length, "lengths", at_least=2)
        require(length <= to, "lengths", f"at most --to ({to})", length)
        hint = "so that every length scores the same tokens"
        require(asked[-1] % length == 0, "lengths", f"divisors of the longest ({asked[-1]})", length, hint=hint)
    return Settings(model, made, trained, to, asked, sliding, windows, dtype, device)


def default_lengths(train_len: int, to: int) -> tuple[int, ...]:
    """Halves of `to`, down to half of the trained length.

    >>> default_lengths(8192, 16384)
    (4096, 8192, 16384)
    """
    lengths = [to]
    while lengths[0] > train_len // 2 and lengths[0] % 2 == 0 and lengths[0] >= 4:
        lengths.insert(0, lengths[0] // 2)
    return tuple(lengths)


def needed_tokens(settings: Settings) -> int:
    """Of each text."""
    return settings.windows * settings.lengths[-1] + 1


def texts_of(settings: Settings, tokens: Mapping[str, Sequence[int]], begin: int | None = None) -> tuple[Text, ...]:
    """The part of each text that is read.

    Raises:
        ValueError: naming a text that is too short.
    """
    needed = needed_tokens(settings)
    found = []
    for name, numbers in tokens.items():
        hint = f"a longer --text, or --lengths up to {max(len(numbers) - 1, 0) // settings.windows}"
        long_enough = len(numbers) >= needed
        require(long_enough, "--text", f"at least {needed} tokens long", f"{len(numbers)} in {name}", hint=hint)
        found.append(Text(name, torch.tensor(numbers[:needed]), begin))
    return tuple(found)


def is_unchanged(settings: Settings, row: str, length: int) -> bool:
    """Whether a row gives what the unchanged model gives, by construction, so that nothing is computed."""
    return row in (WINDOW, "dynamic") and length <= settings.train_len


def units(settings: Settings, texts: tuple[Text, ...]) -> list[Unit]:
    """All that is computed, in order."""
    return [
        _unit(settings, row, length, text, start, first)
        for row in settings.rows
        for length in settings.lengths
        if not is_unchanged(settings, row, length)
        for text in texts
        for start, first in places(settings, length)
    ]


def places(settings: Settings, length: int) -> list[tuple[int, int]]:
    """(start, first scored token) of each window of a text; sliding windows overlap by three quarters."""
    total = settings.windows * settings.lengths[-1]
    return slide(length, total, max(1, length // 4) if settings.sliding else length)


def _unit(settings: Settings, row: str, length: int, text: Text, start: int, first: int) -> Unit:
    rule: Any = settings.stretches[row].block if row in settings.stretches else None
    window = text.tokens[start : start + length + 1]
    said = {
        "format": _FORMAT,
        "model": settings.model.fingerprint,
        "rule": settings.train_len if row == WINDOW else rule,
        "length": length,
        "first": first,
        "tokens": digest(window.numpy().tobytes()),
        "begin": text.begin,
        "dtype": settings.dtype,
        "device": settings.device.partition(":")[0],
        "torch": torch.__version__,
        "transformers": metadata.version("transformers"),
    }
    key = digest(json.dumps(said, sort_keys=True).encode())
    return Unit(row, length, text, start, first, work(settings, row, length), key)


def work(settings: Settings, row: str, length: int) -> float:
    """Operations of one window: two for each weight and token, four for each channel, query and key in sight."""
    return 2.0 * settings.model.parameters * length + attention_work(settings, row, length)


def attention_work(settings: Settings, row: str, length: int) -> float:
    """The part of `work` that grows with the square of the length."""
    window = min(length, settings.train_len) if row == WINDOW else length
    pairs = length * window - window * (window - 1) / 2
    readings: Sequence[Reading] = next(iter(settings.stretches.values())).readings
    return sum(4.0 * pairs * r.head_dim * (r.num_heads or 1) for r in readings)

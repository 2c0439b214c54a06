"""A transformers model stretched to a longer context: `extend(model, to=...)`, per instance, undoable.

Tables, attention scaling and config change together, so what `save_pretrained` writes loads to the same logits.
"""

import contextlib
import copy
import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ropewalk.errors import message, require
from ropewalk.hf.config import Reading
from ropewalk.hf.config_write import turning
from ropewalk.hf.extend_config import Stretch, stretch
from ropewalk.spectra import for_length

_TABLE = "inv_freq"
_ABSENT = object()
_KEPT = ("training", "forward", "_is_hf_initialized")
_TOLERANCE = 1e-5
"""Of float32 frequencies that a model computes, relative to exact ones."""


@dataclass(frozen=True, eq=False)
class _Mark:
    """Stands for an extension, without keeping its model alive."""

    text: str

    def __str__(self) -> str:
        return self.text


_LAST: weakref.WeakKeyDictionary[nn.Module, _Mark] = weakref.WeakKeyDictionary()
"""The extension that each rotary module had last."""


class Extension:
    """What `extend` did; call it, or leave the `with` block, to undo."""

    def __init__(self, made: Stretch, tables: "dict[nn.Module, dict[str, Any]]", config: Any, before: dict[str, Any],
                 earlier: "_Mark | None"):  # fmt: skip
        self.method, self.train_len, self.eval_len, self.factor = (
            made.method, made.train_len, made.eval_len, made.factor)  # fmt: skip
        self.config_block = copy.deepcopy(made.block)
        self._tables, self._config, self._before, self._earlier = tables, config, before, earlier
        self._mark = _Mark(repr(self))

    def __repr__(self) -> str:
        return f"Extension({self.method!r}, {self.train_len} to {self.eval_len} tokens, factor {self.factor:g})"

    def __call__(self) -> None:
        """The model and its config as they were; a second call does nothing."""
        for module in self._tables:  # what is put back must be the state before this, not before a later one
            last = _LAST.get(module, self._mark)
            hint = f"undo {last} first"
            require(last is self._mark, "extension", "the last one made of its model", self, hint=hint)
        for module in self._tables:
            _LAST.pop(module, None)
            if self._earlier is not None:
                _LAST[module] = self._earlier
        for module, state in self._tables.items():
            module.__dict__.clear()
            module.__dict__.update(state)
        for name, value in self._before.items():
            if value is _ABSENT:
                delattr(self._config, name)
            else:
                setattr(self._config, name, value)
        self._tables, self._before = {}, {}

    def __enter__(self) -> "Extension":
        return self

    def __exit__(self, *_: object) -> None:
        self()


def extend(model: nn.Module, *, to: int, method: str = "yarn", **options: Any) -> Extension:
    """Stretches the context of this one model; arguments and errors as in `ropewalk.hf.extend_config.stretch`.

    A cache that was filled before holds keys of the old frequencies, and is of no use afterwards.

    Returns:
        Call it to undo, or use it in a `with` statement.

    Raises:
        ValueError: the model does not compute its frequencies from its config, so that a stretch would not show.
    """
    outer: Any = getattr(model, "config", None)
    require(outer is not None, "model", "a model of transformers", type(model).__name__)
    made = stretch(outer, to=to, method=method, **options)
    config = outer.get_text_config()
    modules = _tables(model, config)
    before = {name: copy.deepcopy(getattr(config, name)) if hasattr(config, name) else _ABSENT for name in made.block}
    for name, value in made.block.items():
        setattr(config, name, copy.deepcopy(value))
    kept: dict[nn.Module, dict[str, Any]] = {}
    undo = Extension(made, kept, config, before, _LAST.get(modules[0]))
    try:
        for module in modules:
            fresh = _made(module, config, made.method)
            _check(fresh, made)
            kept[module] = _adopt(module, fresh)
            _LAST[module] = undo._mark
        _check_holds(config, made)
    except Exception:
        undo()
        raise
    return undo


def _check_holds(config: Any, made: Stretch) -> None:
    """ValueError unless transformers would load the new config: some families allow few types."""
    try:
        type(config).from_dict({**config.to_dict(), **copy.deepcopy(made.block)})
    except Exception as error:  # it has validators of many kinds
        why = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[-1].strip()
        raise ValueError(
            message("method", f"one that a {type(config).__name__} can hold ({why})", made.method)
        ) from error


def _made(module: nn.Module, config: Any, method: str) -> nn.Module:
    """The module that transformers would make of the config."""
    try:
        fresh = type(module)(config)
        with contextlib.suppress(RuntimeError, TypeError, IndexError):  # positions of other shapes
            fresh(torch.zeros(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))  # some ask for keys only now
        return type(module)(config)
    except (KeyError, TypeError, ValueError) as error:
        condition = f"one that {type(module).__name__} can compute ({type(error).__name__}: {error})"
        raise ValueError(message("method", condition, repr(method))) from error


def _tables(model: nn.Module, config: Any) -> list[nn.Module]:
    """The modules that make the tables of the text model."""
    found = [m for m in model.modules() if getattr(m, "config", None) is config and _names(m)]
    if not found:
        known = "one whose rotary module computes its frequencies from the config"
        raise ValueError(message("model", known, type(model).__name__))
    return found


def _names(module: nn.Module) -> list[str]:
    """Names of its frequencies: `inv_freq`, or one for each type of layer."""
    return [name for name, _ in module.named_buffers(recurse=False)
            if name.endswith(_TABLE) and not name.endswith("original_" + _TABLE)]  # fmt: skip


def _check(fresh: nn.Module, made: Stretch) -> None:
    """ValueError unless the module computes the frequencies that are wanted."""
    for name in _names(fresh):
        layer_type = name.removesuffix(_TABLE).removesuffix("_") or None
        reading = next((r for r in made.readings if _belongs(r, layer_type)), None)
        turn = turning(reading.encoding) if reading is not None else None
        if turn is None:
            continue
        prefix = f"{layer_type}_" if layer_type else ""
        scaling = getattr(fresh, f"{prefix}attention_scaling", 1.0)
        expected = turn.spectrum
        if expected.depends_on_length:  # tables are made for the trained length, and again when a text is longer
            expected = for_length(expected, made.train_len)
        pairs = len(expected.inv_freq)
        got = getattr(fresh, name).double().flatten()[:pairs].tolist()
        close = len(got) == pairs and all(
            math.isclose(a, b, rel_tol=_TOLERANCE, abs_tol=1e-30) for a, b in zip(got, expected.inv_freq, strict=True)
        )
        same = close and math.isclose(scaling, expected.magnitude, rel_tol=_TOLERANCE)
        require(same, "method", f"one that {type(fresh).__name__} computes as published", repr(made.method))


def _belongs(reading: Reading, layer_type: str | None) -> bool:
    return turning(reading.encoding) is not None and layer_type in (None, reading.layer_type)


def _adopt(module: nn.Module, fresh: nn.Module) -> dict[str, Any]:
    """`module` with the numbers of `fresh`, on its own device; returns what it held before.  Hooks stay."""
    device = getattr(module, _names(module)[0]).device
    before = {name: copy.copy(value) if name == "_buffers" else value for name, value in module.__dict__.items()}
    fresh.to(device)
    own = {name: value for name, value in fresh.__dict__.items() if name not in _KEPT and "hooks" not in name}
    stale = [name for name in module.__dict__ if name.endswith(_TABLE) and name not in own]
    module.__dict__.update(own)
    for name in stale:  # a table that a longer text had left behind
        del module.__dict__[name]
    return before

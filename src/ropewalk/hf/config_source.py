"""Where a config comes from, and which of its keys have been read."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from ropewalk.errors import message, require, shown

ABSENT = object()
MOST = 2**24


class Source:
    """The keys of a config, or of a block inside it.  Each is remembered once it is read, so that what nobody
    asked for can be named; None counts as absent, as it does where these configs are written.

    Args:
        keys: name to value; never changed.
        path: where the block lies, for messages ("rope_parameters.").
    """

    def __init__(self, keys: Mapping[str, Any], path: str = ""):
        self.keys, self.path = keys, path
        self.read: set[str] = set()

    def given(self, *names: str) -> dict[str, Any]:
        """Those of `names` that hold a value."""
        self.read.update(names)
        return {name: self.keys[name] for name in names if self.keys.get(name) is not None}

    def get(self, *names: str, default: Any = None) -> Any:
        """The value under any of several spellings of one thing, or ValueError if two of them disagree."""
        found = self.given(*names)
        return agreed({self.path + name: value for name, value in found.items()}, default)

    def number(self, *names: str, default: Any = None, at_least: float | int = -math.inf) -> Any:
        """A finite number, not a string or bool that looks like one."""
        value = self.get(*names, default=default)
        return value if value is None else number(value, self.path + names[0], at_least)

    def count(self, *names: str, default: int | None = None) -> int | None:
        """An integer of at least 1, and small enough to be a count of layers, heads, channels or tokens."""
        value = self.number(*names, default=default, at_least=1)
        sound = value is None or (value == int(value) and value <= MOST)
        require(sound, self.path + names[0], f"an integer of at most {MOST}", value)
        return None if value is None else int(value)

    def flag(self, *names: str, default: bool = False) -> bool:
        value = self.get(*names, default=default)
        require(isinstance(value, bool), self.path + names[0], "true or false", shown(value))
        return value

    def block(self, name: str) -> "Source | None":
        """The block under `name`, None if it is absent or empty."""
        value = self.get(name)
        if value is None:
            return None
        require(isinstance(value, Mapping), self.path + name, "a block of keys", shown(value))
        return Source(value, f"{self.path}{name}.") if value else None

    def unread(self) -> dict[str, Any]:
        """What holds a value and was never asked for."""
        return {k: v for k, v in self.keys.items() if k not in self.read and v is not None}


def number(value: Any, name: str, at_least: float | int = -math.inf) -> Any:
    """`value` if it is a finite number, else an error that names the key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(message(name, "a number", shown(value)))
    condition = "finite" if at_least == -math.inf else f"finite and at least {at_least:g}"
    finite = abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)
    require(finite and value >= at_least, name, condition, value)
    return value


def agreed(found: Mapping[str, Any], default: Any = None) -> Any:
    """The one value of several keys that mean the same, or ValueError that names them."""
    values = list(found.items())
    for name, value in values[1:]:
        first_name, first = values[0]
        require(value == first, name, f"the same as {first_name} ({first!r})", repr(value), hint="delete one of them")
    return values[0][1] if values else default


def load(config: Any) -> Mapping[str, Any]:
    """The keys of a dict, of a folder's config.json, of that file, or of a PretrainedConfig."""
    if isinstance(config, Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        path = pathlib.Path(config)
        path = path / "config.json" if path.is_dir() else path
        try:
            keys = json.loads(path.read_text())
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ValueError(
                message("config", "a folder with a config.json, or such a file", f"{path} ({error})")
            ) from error
        require(isinstance(keys, dict), "config", "a JSON object", f"{path}: {type(keys).__name__}")
        return keys
    as_dict = getattr(config, "to_dict", None)  # a PretrainedConfig; transformers itself is not needed
    if as_dict is None or isinstance(config, type):
        raise TypeError(message("config", "a dict, a path or a PretrainedConfig", shown(config)))
    return {**as_dict(), "model_type": config.model_type}

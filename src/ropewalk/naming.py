"""Encodings by name: `rotary`, `rotary+alibi`, `my_module:MyEncoding`."""

import importlib
import inspect

from ropewalk import encodings
from ropewalk.encodings import ALiBi, Compose, Encoding, Hybrid, Rotary
from ropewalk.errors import message, require, require_type


def names() -> tuple[str, ...]:
    """The names that `build` knows by itself, one per encoding file that stands alone."""
    return tuple(sorted(_classes()))


def _classes() -> dict[str, type[Encoding]]:
    found = (getattr(encodings, name) for name in encodings.__all__)
    classes = (c for c in found if isinstance(c, type) and issubclass(c, Encoding))
    return {c.__module__.rpartition(".")[2]: c for c in classes if c not in (Encoding, Compose)}


def _class(name: str) -> type[Encoding]:
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            found = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(message("encoding", "importable as module:Class", f"{name!r} ({error})")) from error
        if not (isinstance(found, type) and issubclass(found, Encoding)):
            raise TypeError(message("encoding", "a subclass of ropewalk.Encoding", f"{name!r}"))
        return found
    known = _classes()
    if name not in known:
        choices = f"one of {', '.join(sorted(known))}, a sum like rotary+alibi, or module:Class"
        raise ValueError(message("encoding", choices, repr(name)))
    return known[name]


def build(name: str, **dims: int) -> Encoding:
    """The encoding called `name`, its constructor handed whichever of `dims` it names.

    Args:
        name: a file's name in `ropewalk.encodings`, several joined by "+", or "module:Class".
        dims: head_dim, num_heads, model_dim, num_positions.

    >>> build("rotary+alibi", head_dim=64, num_heads=8)
    Compose(
      (encodings): ModuleList(
        (0): Rotary(64, base=10000, layout='half')
        (1): ALiBi(8)
      )
    )
    """
    require_type(name, str, "encoding", "a name", hint="rotary+alibi")
    kinds = [_class(part) for part in name.split("+")]
    wanted = {"head_dim", "num_heads", "model_dim", "num_positions"}
    wanted |= {parameter for kind in kinds for parameter in inspect.signature(kind).parameters}
    unknown = sorted(set(dims) - wanted)
    require(not unknown, "dims", f"among {', '.join(sorted(wanted))}", ", ".join(unknown))
    parts = [_one(part, dims) for part in name.split("+")]
    return parts[0] if len(parts) == 1 else Compose(*parts)


def _one(name: str, dims: dict[str, int]) -> Encoding:
    kind = _class(name)
    if kind is Hybrid:
        rotary, alibi = _one("rotary", dims), _one("alibi", dims)
        assert isinstance(rotary, Rotary) and isinstance(alibi, ALiBi)
        return Hybrid(rotary, alibi)
    wanted = inspect.signature(kind).parameters
    missing = [
        p.name
        for p in wanted.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.name not in dims
    ]
    if missing:
        raise ValueError(message("dims", f"given for {name}: {', '.join(missing)}", sorted(dims)))
    return kind(**{dim: value for dim, value in dims.items() if dim in wanted})

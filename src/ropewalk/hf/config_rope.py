"""A block of rope parameters as a spectrum: the types of Hugging Face, their keys and their defaults."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from ropewalk import spectra
from ropewalk.errors import message, require, shown
from ropewalk.hf.config_source import Source, agreed, number
from ropewalk.spectra import Spectrum

_ALIASES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic", "deepseek_yarn": "yarn"}
_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_NEUTRAL = {"factor": 1, "extrapolation_factor": 1, "attn_factor": 1, "alpha": None}
_IGNORED = {"finetuned"}  # says how a checkpoint came to be
_NAMES = {
    "stretch": "factor",
    "train_len": "original_max_position_embeddings",
    "short_factors": "short_factor",
    "long_factors": "long_factor",
    "magnitude": "attention_factor",
    "base": "rope_theta",
    "rotary_dim": "width (head_dim, or the share of it that turns)",
}


@dataclass(frozen=True)
class Shape:
    """What a spectrum needs to know besides its block."""

    head_dim: int
    rotary_dim: int
    base: float
    max_len: int | None
    train_len: int | None
    length: int | None


def rope_type(block: Source | None, model_type: str | None = None) -> str:
    """The type of a block, in its present name."""
    if block is None:
        return "default"
    aliases = {**_ALIASES, "yarn": "longrope"} if model_type == "phi3" else _ALIASES
    found = {}
    for key, value in block.given("rope_type", "type").items():
        if not isinstance(value, str):
            raise TypeError(message(block.path + key, f"one of {', '.join(_TYPES)}", shown(value)))
        found[block.path + key] = aliases.get(value, value)
    kind = agreed(found, "default")
    fixed = kind == "dynamic" and (model_type or "").startswith("hunyuan") and block.keys.get("alpha")
    return "ntk_alpha" if fixed else kind


def spectrum(kind: str, block: Source, shape: Shape) -> Spectrum:
    """The spectrum of a block of type `kind`.

    Raises:
        ValueError, TypeError: a key is missing, unknown to this type or impossible; the message names it.
    """
    require(kind in _TYPES, block.path + "rope_type", f"one of {', '.join(_TYPES)}", repr(kind))
    try:
        made = _TYPES[kind](block, shape)
    except (ValueError, TypeError) as error:
        raise type(error)(_renamed(str(error), block.path)) from error
    check_unread(block, kind)
    return made


def _renamed(text: str, path: str) -> str:
    """A message of `spectra` in the words of the config."""
    for ours, theirs in _NAMES.items():
        text = re.sub(rf"\b{ours}\b", f"{path}{theirs}" if text.startswith(ours) else theirs, text)
    return text


def check_unread(block: Source, kind: str) -> None:
    """ValueError that names a key which this type does not know and which is not neutral."""
    block.read.update(_COMMON | _IGNORED)
    for key, value in block.unread().items():
        if key in _NEUTRAL and value == _NEUTRAL[key]:
            continue
        raise ValueError(message(block.path + key, f"absent from rope of type {kind!r}", repr(value)))


def train_len(block: Source | None, outer: Source) -> int | None:
    """The original length, wherever it stands."""
    name = "original_max_position_embeddings"
    found = {outer.path + k: v for k, v in outer.given(name).items()}
    if block is not None:
        found |= {block.path + k: v for k, v in block.given(name).items()}
    value = agreed(found)
    if value is None:
        return None
    require(number(value, name, 1) == int(value), name, "an integer", value)
    return int(value)


def _required(block: Source, name: str, at_least: float | int = 0):
    value = block.number(name, at_least=at_least)
    if value is None:
        raise ValueError(message(block.path + name, "given", None))
    return value


def _original(block: Source, shape: Shape) -> int:
    if shape.train_len is None:
        hint = "the length before stretching; max_position_embeddings may be that after it"
        raise ValueError(message(block.path + "original_max_position_embeddings", "given", None, hint))
    return shape.train_len


def _length(block: Source, shape: Shape, kind: str) -> int:
    if shape.length is None:
        hint = "length=... : tokens of the whole sequence, those still to come included"
        raise ValueError(message("length", f"given for rope of type {kind!r}", None, hint))
    return shape.length


def _factor(block: Source, shape: Shape) -> float | int:
    """The given stretch, or the one that two lengths imply."""
    given = block.number("factor", at_least=1)
    if given is not None:
        return given
    if shape.max_len is None:
        raise ValueError(message(block.path + "factor", "given", None))
    return number(shape.max_len / _original(block, shape), "max_position_embeddings / original length", 1)


def _default(block: Source, shape: Shape) -> Spectrum:
    return spectra.plain(shape.rotary_dim, shape.base)


def _linear(block: Source, shape: Shape) -> Spectrum:
    return spectra.linear(shape.rotary_dim, shape.base, stretch=_required(block, "factor", 1))


def _dynamic(block: Source, shape: Shape) -> Spectrum:
    stretch, train_len = _required(block, "factor", 1), shape.max_len
    if train_len is None:
        raise ValueError(message("max_position_embeddings", "given for rope of type 'dynamic'", None))
    original = shape.train_len
    same = original is None or original == train_len
    require(same, "original_max_position_embeddings", f"max_position_embeddings ({train_len})", original)
    length = _length(block, shape, "dynamic")
    return spectra.dynamic_ntk(shape.rotary_dim, shape.base, stretch=stretch, train_len=train_len, length=length)


def _ntk_alpha(block: Source, shape: Shape) -> Spectrum:
    """Hunyuan: a fixed stretch under the name of a dynamic one, beside keys that its code never reads."""
    block.given("factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    return spectra.ntk(shape.rotary_dim, shape.base, stretch=_required(block, "alpha", 1))


def _yarn(block: Source, shape: Shape) -> Spectrum:
    factor, magnitude = _factor(block, shape), block.number("attention_factor")
    mscale, all_dim = (block.number(name, at_least=0) for name in ("mscale", "mscale_all_dim"))
    if magnitude is None:
        magnitude = spectra.yarn_magnitude(factor, mscale, all_dim)
    return spectra.yarn(
        shape.rotary_dim,
        shape.base,
        stretch=factor,
        train_len=_original(block, shape),
        beta_fast=block.number("beta_fast") or 32,
        beta_slow=block.number("beta_slow") or 1,
        truncate=block.flag("truncate", default=True),
        magnitude=magnitude,
    )


def _longrope(block: Source, shape: Shape) -> Spectrum:
    train_len, length = _original(block, shape), _length(block, shape, "longrope")
    lists = {}
    for name in ("short_factor", "long_factor"):
        given = block.get(name)
        require(isinstance(given, list | tuple), block.path + name, "a list of numbers, one for each pair", given)
        lists[name + "s"] = [number(f, block.path + name) for f in given]
    magnitude = block.number("attention_factor")
    by_length = block.number("long_mscale" if length > train_len else "short_mscale")
    block.given("long_mscale", "short_mscale")
    magnitude = by_length if magnitude is None else magnitude
    return spectra.longrope(
        shape.rotary_dim,
        shape.base,
        **lists,
        train_len=train_len,
        length=length,
        stretch=None if magnitude is not None else _factor(block, shape),
        magnitude=magnitude,
    )


def _llama3(block: Source, shape: Shape) -> Spectrum:
    return spectra.llama3(
        shape.rotary_dim,
        shape.base,
        stretch=_required(block, "factor", 1),
        train_len=_original(block, shape),
        low_freq_factor=_required(block, "low_freq_factor"),
        high_freq_factor=_required(block, "high_freq_factor"),
    )


def _proportional(block: Source, shape: Shape) -> Spectrum:
    stretch = block.number("factor", default=1, at_least=1)
    return spectra.proportional(shape.head_dim, shape.base, rotary_dim=shape.rotary_dim, stretch=stretch)


_TYPES: dict[str, Callable[[Source, Shape], Spectrum]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk_alpha": _ntk_alpha,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}

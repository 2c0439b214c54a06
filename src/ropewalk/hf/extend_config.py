"""A config for a longer context: which layers are stretched, by which rule, and what is refused before any weight
is read.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk import spectra
from ropewalk.encodings import ALiBi, Compose, Encoding, Learned, MRoPE, Rotary, Sinusoidal, Temperature, Trailing
from ropewalk.errors import message, require, require_count, require_number
from ropewalk.hf.config import Reading, describe
from ropewalk.hf.config_families import FAMILIES
from ropewalk.hf.config_layers import SLIDING
from ropewalk.hf.config_source import load
from ropewalk.hf.config_write import equal, parts, to_config, turning
from ropewalk.spectra import Spectrum

_MAX_LEN = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
_ORIGINAL = "original_max_position_embeddings"
_FIXED_TABLE = ("gptj", "codegen")
_LOCAL = (SLIDING, "chunked_attention")
_ALL_SLIDE = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
_OPTIONS: dict[str, tuple[str, ...]] = {
    "linear": (),
    "ntk": (),
    "dynamic": (),
    "yarn": ("beta_fast", "beta_slow", "truncate", "magnitude"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factors", "long_factors", "magnitude"),
}
METHODS = tuple(_OPTIONS)


@dataclass(frozen=True)
class Stretch:
    """A config for `eval_len` tokens, and how it differs from the one it was made of.

    Args:
        config: the new config; `block`: those of its keys that changed; `dropped`: old keys that it does without.
        readings: of the new config, one for each layer; spectra that depend on length are those of `eval_len`.
        train_len: tokens seen in training.  `factor`: what frequencies are stretched by.
        stretched: the layers whose frequencies change; the others see no farther than a window, or do not turn.
    """

    method: str
    config: dict[str, Any]
    block: dict[str, Any]
    dropped: tuple[str, ...]
    readings: tuple[Reading, ...]
    train_len: int
    eval_len: int
    factor: float
    stretched: tuple[int, ...]


def extended_config(config: Any, *, to: int, method: str = "yarn", **options: Any) -> dict[str, Any]:
    """A copy of `config` for `to` tokens; arguments and errors as in `stretch`.

    >>> trained = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
    >>> longer = extended_config(trained, to=8192, method="linear")
    >>> longer["max_position_embeddings"], longer["rope_parameters"]["factor"]
    (8192, 2.0)
    """
    return stretch(config, to=to, method=method, **options).config


def stretch(
    config: Any,
    *,
    to: int,
    method: str = "yarn",
    train_len: int | None = None,
    factor: float | int | None = None,
    **options: Any,
) -> Stretch:
    """How a model is to turn beyond its trained length.

    A config that is stretched already is stretched anew from its original length.  Where layers that see everything
    have a base of their own, sliding layers stay as they are.  With "dynamic", `max_position_embeddings` remains the
    trained length, which is what transformers computes with.

    Args:
        config: a dict, a folder or config.json, or a PretrainedConfig; never changed.
        to: tokens, at least the trained length.
        method: one of `METHODS`: those of `ropewalk.spectra`; "dynamic" is `dynamic_ntk`.
        train_len: the trained length, where the config does not tell it or tells another.
        factor: by default to / train_len, and at least that.
        options: of the function in `ropewalk.spectra`.

    Raises:
        ValueError, TypeError: naming the argument, or the key of the config, that does not allow it.
    """
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", repr(method))
    for name in options:
        require(name in _OPTIONS[method], name, f"absent with method {method!r}", repr(options[name]))
    require_count(to, "to")
    own = load(config)
    readings = describe(own, length=to)
    chosen = _layers_to_stretch(own, readings, to)
    trained = _train_len(own, readings[chosen[0]], train_len)
    require(to >= trained, "to", f"at least the trained length ({trained})", to)
    least = to / trained
    factor = least if factor is None else _checked_factor(factor, least)
    make = _maker(method, factor, trained, to, options)
    wanted = [_stretched(r.encoding, make) if r.layer in chosen else r.encoding for r in readings]
    try:
        new = to_config(wanted, own)
        changed = _set_lengths(new, own, method, trained, to)
        after = describe(new, length=to)
    except (ValueError, TypeError) as error:  # the family reads such a block in its own way
        condition = f"one that {readings[0].model_type or 'the model'} can hold ({str(error).splitlines()[0]})"
        raise ValueError(message("method", condition, repr(method))) from error
    for reading, encoding in zip(after, wanted, strict=True):
        if not equal(reading.encoding, encoding):
            raise ValueError(message("config", f"one that can hold {method!r}", f"{reading.encoding} of {encoding}"))
    kept = text_part(new)
    dropped = tuple(k for k, value in text_part(own).items() if value is not None and k not in kept)
    return Stretch(method, new, changed, dropped, after, trained, to, float(factor), tuple(chosen))


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the text model, which may lie inside those of a model of text and images."""
    inner = config.get("text_config")
    outside = any(config.get(name) is not None for name in ("num_attention_heads", "n_head", "hidden_size"))
    return inner if isinstance(inner, Mapping) and not outside else config


def _layers_to_stretch(own: Mapping[str, Any], readings: tuple[Reading, ...], to: int) -> list[int]:
    """Layers that turn and see farther than a window; ValueError if a stretch could do nothing."""
    family = readings[0].model_type
    for kind, why in ((ALiBi, "ALiBi, which runs at any length as it is"),
                      (Learned, "a learned table, which has no positions to stretch"),
                      (Sinusoidal, "sinusoids added to embeddings, which are not stretched")):  # fmt: skip
        found = any(isinstance(part, kind) for r in readings for part in parts(r.encoding))
        require(not found, "model", "one whose queries and keys turn", f"{family or 'a model'} with {why}")
    require(family not in _FIXED_TABLE, "model_type", "one whose config can hold a stretch", repr(family))
    turns = [r.layer for r in readings if turning(r.encoding) is not None]
    require(bool(turns), "model", "one whose queries and keys turn", f"{family or 'a model'} without rotation")
    for reading in readings:
        scaled = any(isinstance(p, Temperature) and p.rule == "constant" for p in parts(reading.encoding))
        require(
            not scaled, "mscale_all_dim", "absent: it is part of the attention modules' softmax scale", "its factor"
        )
    text = text_part(own)
    apart = _separate_bases(text, family)
    chosen = [i for i in turns if not (apart and readings[i].layer_type in _LOCAL)]
    key, window = _window(text)
    local = [i for i in chosen if readings[i].layer_type in _LOCAL or family in _ALL_SLIDE]
    if window is not None and window < to and local == chosen:
        hint = "layers that see no farther than a window need no stretch, however long the text"
        raise ValueError(message(key, f"absent or at least {to} on some layer that turns", window, hint))
    require(bool(chosen), "model", "one whose layers turn and see everything", f"{family} without such layers")
    return chosen


def _window(text: Mapping[str, Any]) -> tuple[str, int | None]:
    """What layers see that do not see everything, tokens, and the key that says so."""
    key = "sliding_window" if text.get("sliding_window") else "attention_chunk_size"
    given = text.get(key)
    used = isinstance(given, int) and text.get("use_sliding_window") is not False
    return key, given if used else None


def _separate_bases(text: Mapping[str, Any], family: str | None) -> bool:
    """Whether sliding layers have a block of rope parameters of their own."""
    block = text.get("rope_parameters")
    nested = isinstance(block, Mapping) and any(isinstance(value, Mapping) for value in block.values())
    return nested or (family in FAMILIES and FAMILIES[family].local_base is not None)


def _train_len(own: Mapping[str, Any], reading: Reading, given: int | None) -> int:
    """The trained length: the argument, or what the config says without doubt."""
    if given is not None:
        return require_count(given, "train_len")
    turn = turning(reading.encoding)
    recipe = turn.spectrum.recipe if turn is not None else None
    raised = recipe is not None and recipe[0] not in ("plain", "dynamic_ntk") and dict(recipe[1]).get("stretch", 1) != 1
    if raised and not _holds(own, _ORIGINAL):
        hint = "train_len=... : tokens seen in training; max_position_embeddings may be raised already"
        raise ValueError(message(_ORIGINAL, f"given where rope of type {reading.rope_type!r} stretches", None, hint))
    based = recipe is not None and recipe[0] == "plain" and _holds(own, _ORIGINAL)
    if based and reading.train_len != reading.max_len:
        hint = "train_len=... takes the base as it is"
        condition = f"max_position_embeddings ({reading.max_len}) where rope_theta may be raised already"
        raise ValueError(message(_ORIGINAL, condition, reading.train_len, hint))
    if reading.train_len is None:
        raise ValueError(message("max_position_embeddings", "given", None, "train_len=... : tokens seen in training"))
    return reading.train_len


def _holds(keys: Mapping[Any, Any], name: str) -> bool:
    inner = (value for value in keys.values() if isinstance(value, Mapping))
    return keys.get(name) is not None or any(_holds(block, name) for block in inner)


def _checked_factor(factor: Any, least: float) -> float | int:
    require(math.isfinite(require_number(factor, "factor")), "factor", "finite", factor)
    require(factor >= least, "factor", f"at least to / trained length ({least:g})", factor)
    return factor


Maker = Callable[[int, Any], Spectrum]


def _maker(method: str, factor: float | int, train_len: int, to: int, options: dict[str, Any]) -> Maker:
    """(rotary_dim, base) -> the spectrum of `method`."""
    if method == "longrope":
        for name in ("short_factors", "long_factors"):
            require(name in options, name, "given with method 'longrope'", None)
    numbers: dict[str, Any] = {"stretch": factor, **options}
    if method in ("yarn", "llama3", "longrope", "dynamic"):
        numbers["train_len"] = train_len
    if method in ("longrope", "dynamic"):
        numbers["length"] = to
    if method == "longrope" and options.get("magnitude") is not None:
        del numbers["stretch"]
    function = getattr(spectra, "dynamic_ntk" if method == "dynamic" else method)
    return lambda rotary_dim, base: function(rotary_dim, base, **numbers)


def _stretched(encoding: Encoding, make: Maker) -> Encoding:
    """The encoding with another spectrum, everything else as it was."""
    if isinstance(encoding, Compose):
        return Compose(*(_stretched(part, make) for part in encoding.parts))
    if not isinstance(encoding, Rotary | Trailing | MRoPE):
        return encoding
    name, numbers = encoding.spectrum.recipe or ("plain", (("base", getattr(encoding, "base", None)),))
    require(name != "proportional", "rope_type", "one that turns every pair of its width", "'proportional'")
    common: dict[str, Any] = {"layout": encoding.layout, "rotary_dim": encoding.rotary_dim}
    common["spectrum"] = make(encoding.rotary_dim, dict(numbers)["base"])
    if isinstance(encoding, Trailing):
        return Trailing(encoding.head_dim, deinterleave=encoding.deinterleave, **common)
    if isinstance(encoding, MRoPE):
        return MRoPE(encoding.head_dim, sections=encoding.sections, order=encoding.order, **common)
    return Rotary(encoding.head_dim, **common)


def _set_lengths(new: dict[str, Any], own: Mapping[str, Any], method: str, train_len: int, to: int) -> dict[str, Any]:
    """The lengths of the new config; returns the keys that differ from the old."""
    text, before = text_part(new), text_part(own)
    assert isinstance(text, dict)
    key = next((name for name in _MAX_LEN if text.get(name) is not None), _MAX_LEN[0])
    text[key] = train_len if method == "dynamic" else to
    blocks = text["rope_parameters"]
    for block in [b for b in blocks.values() if isinstance(b, dict)] or [blocks]:
        if block.get("rope_type") in ("default", "linear"):  # not read by transformers; said for whoever comes next
            block.pop(_ORIGINAL, None)
    if method in ("linear", "ntk") or _ORIGINAL in text:
        text[_ORIGINAL] = train_len
    return {name: value for name, value in text.items() if before.get(name) != value}

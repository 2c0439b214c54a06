"""Where a spectrum to draw comes from: an encoding, a rule with its numbers, or a model's config."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ropewalk import naming
from ropewalk import spectra as rules
from ropewalk.encodings import Encoding, Rotary
from ropewalk.errors import message, require, require_count, require_number
from ropewalk.spectra import Spectrum

METHODS = ("plain", "linear", "ntk", "dynamic_ntk", "yarn", "llama3")
NAMES = {
    "plain": "plain",
    "linear": "linear",
    "ntk": "NTK",
    "dynamic_ntk": "dynamic NTK",
    "yarn": "YaRN",
    "llama3": "Llama 3",
}


class Found(NamedTuple):
    """Spectra by label, with the tokens seen in training and asked for, where known."""

    spectra: dict[str, Spectrum]
    train_len: int | None = None
    eval_len: int | None = None

    def alone(self) -> Spectrum:
        """The only spectrum, or ValueError."""
        if len(self.spectra) > 1:
            raise ValueError(message("--layer", "given where layers turn differently", None, ", ".join(self.spectra)))
        return next(iter(self.spectra.values()))


def of_encoding(encoding: Any) -> Spectrum:
    """The one spectrum of a rotary encoding, however deep it lies; a Spectrum is its own."""
    if isinstance(encoding, Spectrum):
        return encoding
    parts = encoding.modules() if isinstance(encoding, Encoding) else ()
    spectra = (getattr(part, "spectrum", None) for part in parts)
    found = [spectrum for spectrum in spectra if isinstance(spectrum, Spectrum)]
    if not found:
        got = type(encoding).__name__ if isinstance(encoding, Encoding) else repr(encoding)
        raise ValueError(message("encoding", "one that turns channels (rotary, hybrid, rotary+alibi)", got))
    require(all(s == found[0] for s in found), "encoding", "one with one spectrum", encoding)
    return found[0]


def by_label(spectra: Any) -> dict[str, Spectrum]:
    """Spectra by label, from a mapping, or from one spectrum or encoding."""
    if isinstance(spectra, Mapping):
        require(len(spectra) > 0, "spectra", "at least one", "none")
        return {str(name): of_encoding(value) for name, value in spectra.items()}
    return {"": of_encoding(spectra)}


def named(name: str, head_dim: int) -> Spectrum:
    """The spectrum of the encoding called `name`; 8 heads where it wants heads, for they change no angle."""
    dims = {"head_dim": head_dim, "num_heads": 8, "model_dim": 8 * head_dim, "num_positions": 1}
    return of_encoding(naming.build(name, **dims))


def stretched(
    method: str,
    rotary_dim: int,
    base: float | int = 10_000.0,
    *,
    stretch: float | int = 1.0,
    train_len: int | None = None,
) -> Spectrum:
    """The spectrum of a method at a stretch, with its published defaults; dynamic NTK at stretch * train_len tokens."""
    require(method in METHODS, "method", f"one of {', '.join(METHODS)}", repr(method))
    if method == "plain":
        return rules.plain(rotary_dim, base)
    require_number(stretch, "stretch")
    if method in ("linear", "ntk"):
        return getattr(rules, method)(rotary_dim, base, stretch=stretch)
    if train_len is None:
        raise ValueError(message("train_len", f"given for {method}", None))
    more: dict[str, Any] = {"stretch": stretch, "train_len": require_count(train_len, "train_len")}
    if method == "dynamic_ntk":
        require(math.isfinite(stretch), "stretch", "finite", stretch)
        more["length"] = math.ceil(stretch * train_len)
    return getattr(rules, method)(rotary_dim, base, **more)


def of_config(config: Any, length: int | None = None, layer: int | None = None) -> Found:
    """The spectra of a Hugging Face config, one for all layers that share it.

    Args:
        config: a dict, a folder or config.json, or a PretrainedConfig.
        length: tokens of the whole sequence, where a rope type depends on it.
        layer: of this layer alone.
    """
    from ropewalk import hf

    readings = list(hf.describe(config, length=length))
    if layer is not None:
        require(0 <= require_count(layer, "layer", 0) < len(readings), "layer", f"below {len(readings)}", layer)
        readings = [readings[layer]]
    readings = [reading for reading in readings if reading.rope_type is not None]
    if not readings:
        raise ValueError(message("config", "of a model or layer that turns channels", "one that turns none"))
    layers: dict[Spectrum, list[int]] = {}
    for reading in readings:
        layers.setdefault(of_encoding(reading.encoding), []).append(reading.layer)
    alone = len(layers) == 1
    labelled = {"" if alone else _named_layers(numbers): spectrum for spectrum, numbers in layers.items()}
    return Found(labelled, readings[0].train_len, length or readings[0].max_len)


def asked(
    *,
    config: str | None = None,
    layer: int | None = None,
    encoding: str | None = None,
    head_dim: int | None = None,
    base: float | int | None = None,
    method: str | None = None,
    methods: tuple[str, ...] | None = None,
    stretch: float | int | None = None,
    train_len: int | None = None,
    eval_len: int | None = None,
) -> Found:
    """The spectra that a command line names: a config's, an encoding's, or those of stretch methods.

    Raises:
        ValueError: two of the three are named, or one of them with what it does not take.
    """
    stretching = {"method": method, "methods": methods and ",".join(methods), "stretch": stretch}
    if config is not None:
        _only("--config", encoding=encoding, head_dim=head_dim, base=base, **stretching)
        found = _of_config(config, eval_len, layer)
        return found if train_len is None else found._replace(train_len=train_len)
    _only("an encoding without --config", layer=layer)
    head_dim = 64 if head_dim is None else head_dim
    if encoding is not None:
        _only("--encoding", base=base, **stretching)
        return Found({"": named(encoding, head_dim)}, train_len, eval_len)
    base = 10_000.0 if base is None else base
    methods = methods if method is None else (method,)
    if methods is None:
        require(stretch is None, "a method", "given with --stretch", None, hint="yarn, or another of its kind")
        return Found({"": Rotary(head_dim, base=base).spectrum}, train_len, eval_len)
    if stretch is None and train_len and eval_len:
        stretch = eval_len / train_len
    if stretch is None and set(methods) != {"plain"}:
        raise ValueError(message("--stretch", "given for a method", None, "or --train-length and --eval-length"))
    how: dict[str, Any] = {"stretch": 1 if stretch is None else stretch, "train_len": train_len}
    return Found({NAMES.get(m, m): stretched(m, head_dim, base, **how) for m in methods}, train_len, eval_len)


def _of_config(config: str, length: int | None, layer: int | None) -> Found:
    """`of_config`, where a missing length is asked for by its option."""
    try:
        return of_config(config, length, layer)
    except ValueError as error:
        if str(error).startswith("length must be given"):
            raise ValueError(message("--eval-length", "given for a spectrum that depends on it", None)) from error
        raise


def _only(where: str, **given: Any) -> None:
    """ValueError if one of these options is given."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(message(f"--{name.replace('_', '-')}", f"absent with {where}", repr(value)))


def _named_layers(numbers: list[int]) -> str:
    return f"{'layer' if len(numbers) == 1 else 'layers'} {_runs(numbers)}"


def _runs(numbers: list[int], most: int = 3) -> str:
    """Layer numbers, short.

    >>> _runs([0, 1, 2, 4]), _runs([0, 2, 4, 6, 8])
    ('0-2, 4', '0, 2, 4, ... (5)')
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    said = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    return ", ".join(said) if len(said) <= most else f"{', '.join(said[:most])}, ... ({len(numbers)})"

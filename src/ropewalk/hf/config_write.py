"""Encodings back into a config, in the keys that transformers 5 writes."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.encodings import Compose, Encoding, MRoPE, Rotary, Temperature, Trailing
from ropewalk.errors import message, require, require_type
from ropewalk.hf.config import Reading, describe
from ropewalk.hf.config_layers import NO_ATTENTION
from ropewalk.hf.config_source import load
from ropewalk.spectra import Spectrum, yarn_magnitude

_REPLACED = ("rope_parameters", "rope_scaling", "rope_theta", "rotary_emb_base", "global_rope_theta",
             "local_rope_theta",
             "rope_local_base_freq", "partial_rotary_factor", "rotary_pct", "rope_pct", "rotary_dim")  # fmt: skip


def to_config(encoding: Encoding | Sequence[Encoding], config: Any = None) -> dict[str, Any]:
    """A copy of `config` that `from_config` reads as `encoding`.

    Args:
        encoding: for all layers, or a list with one for each, as `layers` gives them.
        config: of the model that is to use it: a dict, a path or a PretrainedConfig; without one, the bare keys of
            a rotary encoding in halves.

    Returns:
        JSON-like keys.  Lengths stay, but for "dynamic" rope, whose trained length is `max_position_embeddings`.

    Raises:
        ValueError: the family's config cannot say this.  What is returned has been read back and compared.

    >>> from ropewalk import spectra
    >>> to_config(Rotary(8, spectrum=spectra.linear(8, stretch=4)))
    {'head_dim': 8, 'rope_parameters': {'rope_type': 'linear', 'rope_theta': 10000.0, 'factor': 4.0}}
    """
    own = {} if config is None else _copied(load(config))
    inner = own.get("text_config")
    text = inner if isinstance(inner, dict) and "num_attention_heads" not in own else own
    wanted = _of_layers(encoding, own, text)
    before = describe(own, length=_length(wanted)) if config is not None else ()
    _write(text, wanted, before)
    _check(own, wanted)
    return own


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _copied(v) for k, v in value.items()}
    return [_copied(v) for v in value] if isinstance(value, list | tuple) else value


def _of_layers(encoding: Encoding | Sequence[Encoding], own: dict, text: dict) -> list[Encoding]:
    if isinstance(encoding, Encoding):
        count = text.get("num_hidden_layers") or text.get("n_layer") or text.get("n_layers") or 1
        return [encoding] * count
    require_type(encoding, Sequence, "encoding", "an Encoding, or a list with one for each layer")
    for one in encoding:
        require_type(one, Encoding, "encoding", "an Encoding, or a list with one for each layer")
    return list(encoding)


def parts(encoding: Encoding) -> tuple[Encoding, ...]:
    """What an encoding is composed of."""
    return encoding.parts if isinstance(encoding, Compose) else (encoding,)


def turning(encoding: Encoding) -> Rotary | Trailing | MRoPE | None:
    """The part that turns queries and keys."""
    return next((p for p in parts(encoding) if isinstance(p, Rotary | Trailing | MRoPE)), None)


def _length(wanted: list[Encoding]) -> int:
    """The length that spectra were made for, of those that depend on it; any other would do for the rest."""
    for encoding in wanted:
        turn = turning(encoding)
        if turn is not None and turn.spectrum.depends_on_length and turn.spectrum.recipe is not None:
            return dict(turn.spectrum.recipe[1])["length"]
    return 1


def _write(text: dict, wanted: list[Encoding], before: tuple[Reading, ...]) -> None:
    """The keys of `wanted` into `text`."""
    if before:
        require(len(wanted) == len(before), "encoding", f"one for each of {len(before)} layers", len(wanted))
    turns = [turning(e) for e in wanted]
    if not any(turns):
        return
    rotary_dim = text.get("rotary_dim")
    nested = _is_nested(text)
    was = text.get("rope_parameters")
    whole = isinstance(was, Mapping) and was.get("partial_rotary_factor") == 1
    for key in _REPLACED:
        text.pop(key, None)
    blocks: dict[str | None, Any] = {}
    for i, (encoding, turn) in enumerate(zip(wanted, turns, strict=True)):
        layer_type = before[i].layer_type if before else None
        if turn is None or layer_type in NO_ATTENTION:
            continue
        block = _block(encoding, turn)
        known = blocks.setdefault(layer_type, block)
        require(known == block, "encoding", f"the same on all layers of type {layer_type!r}", f"another on layer {i}")
        _write_sizes(text, turn, block)
    distinct = [b for i, b in enumerate(blocks.values()) if b not in list(blocks.values())[:i]]
    if len(distinct) > 1 or nested:
        text["rope_parameters"] = blocks
    else:
        text["rope_parameters"] = distinct[0]
        if whole:  # said before, and some families' own checks ask for it
            text["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    if rotary_dim is not None and len(distinct) == 1 and text.get("model_type") in ("gptj", "codegen"):
        _name_width(text, turns)
    if "no_rope_layers" in text:
        text["no_rope_layers"] = [int(turn is not None) for turn in turns]


def _is_nested(text: dict) -> bool:
    block = text.get("rope_parameters")
    nested = isinstance(block, Mapping) and any(isinstance(v, Mapping) for v in block.values())
    return nested or text.get("model_type") in ("gemma3_text", "gemma3", "modernbert", "modernbert-decoder", "olmo3")


def _name_width(text: dict, turns: list) -> None:
    """GPT-J and CodeGen name a width and know neither bases nor stretches."""
    text["rotary_dim"] = next(t.rotary_dim for t in turns if t is not None)
    block = text.pop("rope_parameters")
    require(block["rope_type"] == "default", "encoding", "without a stretch in this family", block["rope_type"])


def _write_sizes(text: dict, turn: Rotary | Trailing | MRoPE, block: dict) -> None:
    """head_dim where it has to be said, and lengths that a type takes from outside its block."""
    latent = isinstance(turn, Trailing)
    hidden, heads = (
        text.get(a) or text.get(b) for a, b in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))
    )
    if not latent and ("head_dim" in text or not (hidden and heads and hidden // heads == turn.head_dim)):
        text["head_dim"] = turn.head_dim
    if block["rope_type"] == "dynamic":
        text["max_position_embeddings"] = dict(_recipe(turn.spectrum)[1])["train_len"]
    original = block.get("original_max_position_embeddings")
    if original is not None and "original_max_position_embeddings" in text:
        text["original_max_position_embeddings"] = original


def _recipe(spectrum: Spectrum):
    if spectrum.recipe is None:
        hint = "rw.spectra.yarn(...) and its like can be written down"
        raise ValueError(message("spectrum", "made by a function of ropewalk.spectra", "numbers given by hand", hint))
    return spectrum.recipe


def _block(encoding: Encoding, turn: Rotary | Trailing | MRoPE) -> dict[str, Any]:
    name, arguments = _recipe(turn.spectrum)
    given = {k: v for k, v in arguments if v is not None}
    block = _BLOCKS[name](given, turn)
    base = given["base"]
    block = {"rope_type": block.pop("rope_type"), "rope_theta": block.pop("rope_theta", float(base)), **block}
    if name != "proportional" and not isinstance(turn, Trailing) and turn.rotary_dim != turn.head_dim:
        block["partial_rotary_factor"] = _share(turn.rotary_dim, turn.head_dim)
    if isinstance(turn, MRoPE):
        block["mrope_section"] = _written_sections(turn)
    for part in parts(encoding):
        if isinstance(part, Temperature) and part.rule == "constant":
            block["mscale_all_dim"] = (math.sqrt(part.factor) - 1) / (0.1 * math.log(float(given["stretch"])))
            block.setdefault("attention_factor", turn.spectrum.magnitude)
        if isinstance(part, Temperature) and part.rule == "steps":
            block["llama_4_scaling_beta"] = part.strength
    return block


def _share(width: int, head_dim: int) -> float:
    """A number whose product with `head_dim`, cut to an integer, is `width`."""
    share = width / head_dim
    return share if int(head_dim * share) == width else math.nextafter(share, 2.0)


def _written_sections(turn: MRoPE) -> list[int]:
    sections = list(turn.sections)
    return [sections[1], sections[2], sections[0]] if turn.order == "alternating" else sections


def _plain(given: dict, turn) -> dict:
    return {"rope_type": "default"}


def _linear(given: dict, turn) -> dict:
    return {"rope_type": "linear", "factor": float(given["stretch"])}


def _ntk(given: dict, turn) -> dict:
    """A larger base is all that it is."""
    dim = given["rotary_dim"]
    return {"rope_type": "default", "rope_theta": float(given["base"]) * float(given["stretch"]) ** (dim / (dim - 2))}


def _dynamic(given: dict, turn) -> dict:
    return {"rope_type": "dynamic", "factor": float(given["stretch"])}


def _yarn(given: dict, turn) -> dict:
    block = {
        "rope_type": "yarn",
        "factor": float(given["stretch"]),
        "original_max_position_embeddings": given["train_len"],
    }
    block |= {name: float(given[name]) for name in ("beta_fast", "beta_slow")}
    if not given["truncate"]:
        block["truncate"] = False
    if turn.spectrum.magnitude != yarn_magnitude(given["stretch"]):
        block["attention_factor"] = turn.spectrum.magnitude
    return block


def _longrope(given: dict, turn) -> dict:
    lists = {name: [float(f) for f in given[name + "s"]] for name in ("short_factor", "long_factor")}
    block = {"rope_type": "longrope", **lists, "original_max_position_embeddings": given["train_len"]}
    return {**block, "attention_factor": turn.spectrum.magnitude}


def _llama3(given: dict, turn) -> dict:
    block = {"rope_type": "llama3", "factor": float(given["stretch"])}
    block["original_max_position_embeddings"] = given["train_len"]
    return {**block, **{name: float(given[name]) for name in ("low_freq_factor", "high_freq_factor")}}


def _proportional(given: dict, turn) -> dict:
    block: dict[str, Any] = {
        "rope_type": "proportional",
        "partial_rotary_factor": given["rotary_dim"] / given["head_dim"],
    }
    return block if given["stretch"] == 1 else {**block, "factor": float(given["stretch"])}


_BLOCKS = {
    "plain": _plain,
    "linear": _linear,
    "ntk": _ntk,
    "dynamic_ntk": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def _check(own: dict, wanted: list[Encoding]) -> None:
    """ValueError unless the config reads as what was wanted."""
    hint = "another family's config may hold it; to_config(encoding) without one gives the bare keys"
    readings = describe(own, length=_length(wanted))
    for i, (reading, encoding) in enumerate(zip(readings, wanted, strict=True)):
        if not equal(reading.encoding, encoding):
            family = reading.model_type or "a config without model_type"
            raise ValueError(message("encoding", f"one that {family} can hold on layer {i}", encoding, hint))


def equal(a: Encoding, b: Encoding) -> bool:
    """Whether two encodings are made of the same parts and numbers, but for the rounding of floats on their way."""
    ours, theirs = ([_numbers(m) for m in e.modules() if isinstance(m, Encoding)] for e in (a, b))
    return len(ours) == len(theirs) and all(_close(x, y) for x, y in zip(ours, theirs, strict=True))


def _numbers(encoding: Encoding) -> dict[str, Any]:
    kept = {k: v for k, v in vars(encoding).items() if not k.startswith("_") and k not in ("base", "training")}
    spectrum = getattr(encoding, "spectrum", None)
    if spectrum is not None:
        kept |= {"inv_freq": spectrum.inv_freq, "magnitude": spectrum.magnitude}
    return {"kind": type(encoding).__name__, **{k: v for k, v in kept.items() if not isinstance(v, Encoding)}}


def _close(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_close(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(_close, a, b))
    if isinstance(a, float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=1e-12)
    return bool(a == b)

"""What a Hugging Face config says about positions, as encodings: nothing is guessed, nothing passed over in silence.

A key that would change the result and is not understood raises, and so does a contradiction; both name the key.
Not in the config, and so not here: the softmax scale of families that have one of their own, sliding windows and
masks, the weights of learned tables.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.encodings import ALiBi, Compose, Encoding, Learned, MRoPE, NoPE, Rotary, Sinusoidal, Temperature, Trailing
from ropewalk.errors import message, require, require_count
from ropewalk.hf.config_families import FAMILIES, GENERIC, Family
from ropewalk.hf.config_layers import NO_ATTENTION, Rope, layer_kinds, rope_of
from ropewalk.hf.config_source import Source, load

_KINDS = {"rotary": Rotary, "trailing": Trailing, "mrope": MRoPE, "temperature": Temperature, "none": NoPE,
          "alibi": ALiBi, "learned": Learned, "sinusoidal": Sinusoidal}  # fmt: skip
_ABOUT_POSITIONS = re.compile(r"rope|rotary|alibi|position_embedding|sinusoidal|yarn|ntk_|relative_attention")
_NOT_POSITIONS = {"max_position_embeddings", "original_max_position_embeddings"}


@dataclass(frozen=True)
class Reading:
    """What one layer of a model does about positions.

    Args:
        layer: its index.
        layer_type: its name in the config, if layers have names.
        encoding: shared by all layers of equal plan.
        rope_type: "default", "yarn", ...; None where nothing turns.
        head_dim, num_heads, num_kv_heads: the layer's sizes; counts are None where the config names none.
        train_len: tokens seen in training, before any stretch; None if the config does not say.
        max_len: tokens that the config allows.
        offset: rows of a learned table that come before that of position 0.
        model_type: the family.
    """

    layer: int
    layer_type: str | None
    encoding: Encoding
    rope_type: str | None
    head_dim: int
    num_heads: int | None
    num_kv_heads: int | None
    train_len: int | None
    max_len: int | None
    offset: int = 0
    model_type: str | None = None

    @property
    def depends_on_length(self) -> bool:
        """Whether a sequence of another length may need another encoding."""
        spectra = (getattr(part, "spectrum", None) for part in self.encoding.modules())
        return any(spectrum is not None and spectrum.depends_on_length for spectrum in spectra)


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model that encodings are made for."""

    hidden: int | None
    num_heads: int | None
    num_kv_heads: int | None
    head_dim: int
    num_layers: int
    max_len: int | None


def describe(config: Any, *, length: int | None = None, model_type: str | None = None,
             model_rounding: bool = False) -> tuple[Reading, ...]:  # fmt: skip
    """A reading of each layer; arguments as in `from_config`."""
    outer = Source(load(config))
    source, family_name = _text(outer, model_type)
    family = _family(family_name)
    if length is not None:
        require_count(length, "length")
    sizes = _sizes(source, family, family_name)
    if family.kind == "rotary" and not (family_name == "falcon" and source.flag("alibi")):
        readings = _rotary(source, family, family_name, sizes, length)
    else:
        readings = _fixed(source, family, family_name, sizes, model_rounding)
    _check_unread(source)
    if source is not outer:
        outer.read.add("text_config")
    return readings


def layers(config: Any, **options) -> tuple[Encoding, ...]:
    """The encoding of each layer, one object for all layers that share it; `NoPE` where nothing turns, or attends.

    Arguments as in `from_config`.

    >>> both = layers({"model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 4})
    >>> [type(e).__name__ for e in both]
    ['Rotary', 'Rotary', 'Rotary', 'NoPE']
    """
    return tuple(reading.encoding for reading in describe(config, **options))


def from_config(
    config: Any,
    layer: int | None = None,
    *,
    length: int | None = None,
    model_type: str | None = None,
    model_rounding: bool = False,
) -> Encoding:
    """The position encoding of a model, read from its config.

    Args:
        config: a dict, a folder or config.json, or a PretrainedConfig; never changed, and transformers is not needed.
        layer: which layer's, where layers differ.
        length: tokens of the whole sequence, for rope types that depend on it ("dynamic", "longrope").
        model_type: whose conventions hold, instead of those that the config names.
        model_rounding: ALiBi slopes rounded as the model's own code rounds them (Falcon: to bfloat16).

    Raises:
        ValueError, TypeError: a key is missing, contradicts another or is not understood, or the family is not
            known; layers differ and none is named.

    >>> from_config({"hidden_size": 64, "num_attention_heads": 4, "rope_theta": 500000.0})
    Rotary(16, base=500000, layout='half')
    >>> from_config({"head_dim": 8, "rope_scaling": {"type": "linear", "factor": 4}}).inv_freq[0]
    0.25
    """
    options = {"length": length, "model_type": model_type, "model_rounding": model_rounding}
    readings = describe(config, **options)
    if layer is not None:
        require(0 <= require_count(layer, "layer", 0) < len(readings), "layer", f"below {len(readings)}", layer)
        return readings[layer].encoding
    different = {id(r.encoding): r.layer for r in reversed(readings) if r.layer_type not in NO_ATTENTION}
    if len(different) > 1:
        apart = " and ".join(map(str, sorted(different.values())[:2]))
        hint = "ropewalk.hf.layers(config) gives them all"
        raise ValueError(message("layer", f"given where layers differ, as {apart} do", None, hint))
    return readings[next(iter(different.values()), 0)].encoding


def _text(outer: Source, model_type: str | None) -> tuple[Source, str | None]:
    """The part that describes the text model, and its family."""
    inner = outer.keys.get("text_config")
    source = outer
    if isinstance(inner, Mapping) and not outer.given("num_attention_heads", "n_head", "hidden_size"):
        source = Source(inner, "text_config.")
    own = source.get("model_type") or outer.get("model_type")
    return source, model_type if model_type is not None else own


def _family(name: str | None) -> Family:
    if name is None:
        return GENERIC
    hint = "model_type='llama' reads it with another family's conventions"
    require(name in FAMILIES, "model_type", "one that Ropewalk knows", repr(name), hint=hint)
    family = FAMILIES[name]
    require(family.refused is None, "model_type", f"one that Ropewalk supports ({family.refused})", repr(name))
    return family


def _sizes(source: Source, family: Family, name: str | None) -> Sizes:
    hidden = source.count("hidden_size", "n_embd", "d_model", "n_embed", "dim" if name == "distilbert" else "emb_dim")
    num_heads = source.count("num_attention_heads", "n_head", "n_heads", "num_heads")
    head_dim = source.count("head_dim", "kv_channels")
    if family.latent:
        head_dim = _latent_head(source, head_dim)
    elif head_dim is None and family.head_dim is not None:
        head_dim = family.head_dim
    if head_dim is None:
        if hidden is None or num_heads is None:
            missing = (
                "head_dim"
                if num_heads is None and hidden is None
                else "hidden_size"
                if hidden is None
                else "num_attention_heads"
            )
            raise ValueError(message(source.path + missing, "given", None))
        head_dim = hidden // num_heads
        parts = f"a multiple of num_attention_heads ({num_heads}) where head_dim is not given"
        require(head_dim > 0 and hidden % num_heads == 0, source.path + "hidden_size", parts, hidden)
    num_kv = source.count("num_key_value_heads", "num_kv_heads", "n_head_kv")
    if num_kv is not None and num_heads is not None:
        fits = num_heads % num_kv == 0
        require(fits, source.path + "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv)
    num_layers = source.count("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    max_len = source.count("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
    if num_layers is None:
        kinds = source.get("layer_types", "no_rope_layers")
        num_layers = len(kinds) if isinstance(kinds, list) and kinds else None
        alike = family.full_every is None and family.turning == "all"
        if num_layers is None and not alike:
            raise ValueError(message(source.path + "num_hidden_layers", "given where layers differ", None))
        num_layers = num_layers or 1
    return Sizes(hidden, num_heads, num_kv or num_heads, head_dim, num_layers, max_len)


def _latent_head(source: Source, head_dim: int | None) -> int:
    """All channels that a query and a key share; `head_dim` in such configs is the width that turns."""
    still, turning = (source.count(name) for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    for name, value in (("qk_nope_head_dim", still), ("qk_rope_head_dim", turning)):
        if value is None:
            raise ValueError(message(source.path + name, "given", None))
    assert still is not None and turning is not None
    whole = source.count("qk_head_dim")
    require(
        whole in (None, still + turning),
        "qk_head_dim",
        f"qk_nope_head_dim + qk_rope_head_dim ({still + turning})",
        whole,
    )
    fits = head_dim in (None, turning, still + turning)
    require(fits, "head_dim", f"qk_rope_head_dim ({turning})", head_dim)
    return still + turning


def _check_unread(source: Source) -> None:
    """ValueError for a key about positions that nothing has read and that says something."""
    for key, value in source.unread().items():
        about = _ABOUT_POSITIONS.search(key) and key not in _NOT_POSITIONS
        if about and value not in (False, 0, [], {}, "rope", "rotary"):
            hint = "no part of this family's encoding depends on it, as far as Ropewalk knows"
            raise ValueError(message(source.path + key, "absent, or understood", repr(value), hint))


# Parts: (name in _KINDS, ((argument, value), ...)), so that plans can be compared and shared.
Part = tuple[str, tuple[tuple[str, Any], ...]]


def _part(kind: str, **arguments: Any) -> Part:
    return kind, tuple(arguments.items())


def _build(plan: tuple[Part, ...]) -> Encoding:
    made = [_KINDS[kind](**dict(arguments)) for kind, arguments in plan]
    return made[0] if len(made) == 1 else Compose(*made)


def _rotary(source: Source, family: Family, name: str | None, sizes: Sizes, length: int | None) -> tuple[Reading, ...]:
    _check_named(source, family, name)
    kinds = layer_kinds(source, family, sizes.num_layers)
    built = functools.cache(_build)
    readings = []
    for layer, kind in enumerate(kinds):
        rope = rope_of(source, family, name, sizes, kind.layer_type, length) if kind.attends else None
        turning = rope is not None and kind.turns
        plan = _plan(rope, sizes) if turning and rope is not None else (_part("none"),)
        if kind.attends:
            plan = _with_temperature(plan, source, name, rope, turning)
        readings.append(Reading(
            layer, kind.layer_type, built(plan), rope.kind if turning and rope is not None else None,
            sizes.head_dim, sizes.num_heads, sizes.num_kv_heads,
            (rope.train_len if rope is not None else None) or sizes.max_len, sizes.max_len, 0, name,
        ))  # fmt: skip
    return tuple(readings)


def _check_named(source: Source, family: Family, name: str | None) -> None:
    """ValueError unless what the config calls its own encoding is what the family has."""
    called = {"rope", "rotary"} | ({"rope_gptj"} if family.layout == "interleaved" else set())
    if (name or "").startswith("modernbert"):
        called.add("absolute")  # left over from BERT, in released configs
    kind = source.get("position_embedding_type")
    require(kind is None or kind in called, source.path + "position_embedding_type", " or ".join(sorted(called)), kind)
    for key in ("rotary", "use_rope", "use_rotary_embeddings"):
        asked = source.get(key)
        require(asked in (None, True), source.path + key, "true in this family", asked)


def _plan(rope: Rope, sizes: Sizes) -> tuple[Part, ...]:
    common: dict[str, Any] = {"head_dim": sizes.head_dim, "layout": rope.layout}
    common |= {"base": rope.base} if rope.kind == "default" else {"spectrum": rope.spectrum}
    width = 2 * len(rope.spectrum.exact)
    partial = {"rotary_dim": width} if width != sizes.head_dim else {}
    if rope.latent:
        plan = [
            _part(
                "trailing", **common, rotary_dim=width, deinterleave=rope.layout == "interleaved" and rope.deinterleave
            )
        ]
    elif rope.sections is not None:
        plan = [_part("mrope", **common, **partial, sections=rope.sections, order=rope.order)]
    else:
        plan = [_part("rotary", **common, **partial)]
    if rope.softmax_factor != 1.0:
        plan.append(_part("temperature", rule="constant", factor=rope.softmax_factor))
    return tuple(plan)


def _with_temperature(
    plan: tuple[Part, ...], source: Source, name: str | None, rope: Rope | None, turning: bool
) -> tuple[Part, ...]:
    """Llama 4 sharpens the queries that do not turn, Ministral 3 all of them."""
    steps = None
    if name == "llama4_text":
        tuned = bool(source.get("attn_temperature_tuning", default=True))  # a number in released configs
        scale, strength = source.count("floor_scale", default=8192), source.number("attn_scale", default=0.1)
        if tuned and not turning:
            steps = _part("temperature", rule="steps", train_len=scale, strength=strength, offset=1)
    elif rope is not None and rope.sharpening:
        steps = _part("temperature", rule="steps", train_len=rope.train_len, strength=rope.sharpening, offset=0)
    if steps is None:
        return plan
    return (steps,) if plan == (_part("none"),) else (*plan, steps)


def _fixed(source: Source, family: Family, name: str | None, sizes: Sizes, rounded: bool) -> tuple[Reading, ...]:
    """Families whose layers are all alike: ALiBi and absolute encodings."""
    offset = 0
    if name == "falcon" or family.kind == "alibi":
        part = _alibi(source, name, sizes, rounded)
    else:
        part, offset = _absolute(source, family, name, sizes)
    encoding = _build((part,))
    return tuple(
        Reading(i, None, encoding, None, sizes.head_dim, sizes.num_heads, sizes.num_kv_heads, sizes.max_len,
                sizes.max_len, offset, name)
        for i in range(sizes.num_layers)
    )  # fmt: skip


def _alibi(source: Source, name: str | None, sizes: Sizes, rounded: bool) -> Part:
    n = sizes.num_heads
    if n is None:
        raise ValueError(message(source.path + "num_attention_heads", "given", None))
    if name == "falcon":  # (q.k + bias) / sqrt(head_dim): the bias is divided as well
        slopes = ALiBi(n).slopes
        if rounded:
            import torch

            slopes = tuple(torch.tensor(slopes, dtype=torch.float64).bfloat16().tolist())
        source.given("rope_theta", "rope_scaling", "rope_parameters")  # written by every Falcon, and then not used
        return _part("alibi", num_heads=n, slopes=tuple(m / sizes.head_dim**0.5 for m in slopes))
    if name == "mpt":
        block = source.block("attn_config")
        asked = block is None or block.flag("alibi", default=True)
        require(asked, "attn_config.alibi", "true (MPT has no other encoding in transformers)", False)
        turned = block is not None and block.flag("rope")
        require(not turned, "attn_config.rope", "false (transformers' MPT does not turn)", turned)
        most = 8 if block is None else block.number("alibi_bias_max", default=8, at_least=1)
        if most != 8:
            return _part("alibi", num_heads=n, slopes=tuple(m ** (most / 8) for m in ALiBi(n).slopes))
    return _part("alibi", num_heads=n)


def _absolute(source: Source, family: Family, name: str | None, sizes: Sizes) -> tuple[Part, int]:
    if sizes.hidden is None:
        raise ValueError(message(source.path + "hidden_size", "given", None))
    flags = [source.get(key) for key in ("sinusoidal_pos_embds", "sinusoidal_embeddings")]
    kind = source.get("position_embedding_type")
    require(kind in (None, "absolute"), "position_embedding_type", "'absolute'", repr(kind))
    if family.kind == "sinusoidal" and any(flags):
        return _part("sinusoidal", model_dim=sizes.hidden), 0
    rows = sizes.max_len
    if rows is None:
        raise ValueError(message(source.path + "max_position_embeddings", "given", None))
    offset = family.offset
    if offset == "pad":  # the table's length counts the rows before position 0
        offset = int(source.number("pad_token_id", default=1, at_least=0)) + 1
        rows -= offset
    return _part("learned", num_positions=rows, model_dim=sizes.hidden), int(offset)

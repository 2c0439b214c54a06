"""Which layer of a model turns, by which block of rope parameters, and how wide."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ropewalk import spectra
from ropewalk.errors import message, require
from ropewalk.hf import config_rope
from ropewalk.hf.config_families import Family
from ropewalk.hf.config_source import Source, agreed
from ropewalk.spectra import Spectrum

if TYPE_CHECKING:
    from ropewalk.hf.config import Sizes

NO_ATTENTION = ("linear_attention", "conv", "mamba", "recurrent")
SLIDING = "sliding_attention"
KNOWN = (
    *("full_attention", SLIDING, "chunked_attention", "window_attention", "hybrid", "hybrid_sliding", "moe"),
    *("reference_sliding_attention", "attention", *NO_ATTENTION),
)
_GLOBAL = ("rope_theta", "rotary_emb_base", "global_rope_theta")
_LOCAL = ("rope_local_base_freq", "local_rope_theta")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")


@dataclass(frozen=True)
class LayerKind:
    """A layer's name in the config, whether it attends and whether it turns."""

    layer_type: str | None
    attends: bool
    turns: bool


@dataclass(frozen=True)
class Rope:
    """One block of rope parameters, read."""

    kind: str
    spectrum: Spectrum
    base: float
    layout: str
    train_len: int | None
    latent: bool
    deinterleave: bool
    sections: tuple[int, ...] | None
    order: str | None
    softmax_factor: float
    sharpening: float | int


def layer_kinds(source: Source, family: Family, num_layers: int) -> list[LayerKind]:
    """Each layer's kind, from `layer_types`, or from the family's pattern."""
    types = _layer_types(source, family, num_layers)
    flags = _flags(source, num_layers) if family.turning == "flags" else None
    window = source.get("sliding_window")
    kinds = []
    for i, name in enumerate(types):
        turns = flags[i] if flags is not None else True
        if family.turning == "sliding":  # Cohere 2 and EXAONE 4: what sees everything does not turn
            turns = name == SLIDING or (window is None and family.layout == "half")
        kinds.append(LayerKind(name, name not in NO_ATTENTION, turns))
    return kinds


def _layer_types(source: Source, family: Family, num_layers: int) -> list[str | None]:
    given = source.get("layer_types")
    pattern = source.get("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
    if given is not None:
        require(len(given) == num_layers, "layer_types", f"one for each of {num_layers} layers", len(given))
        block = source.get("rope_parameters")
        labels = tuple(block) if isinstance(block, Mapping) else ()
        for kind in given:
            require(kind in (*KNOWN, *labels), "layer_types", f"among {', '.join(KNOWN)}", repr(kind))
        return list(given)
    if family.full_every is None:
        return [None] * num_layers
    every = family.full_every if pattern is None else pattern
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(message("sliding_window_pattern", "an integer of at least 1", repr(every)))
    first = 0 if family.full_first else 1
    return ["full_attention" if (i + first) % every == 0 else SLIDING for i in range(num_layers)]


def _flags(source: Source, num_layers: int) -> list[bool]:
    """no_rope_layers says, against its name, 1 where a layer turns."""
    given, every = source.get("no_rope_layers"), source.count("no_rope_layer_interval") or 4
    if not given:
        return [(i + 1) % every != 0 for i in range(num_layers)]
    require(len(given) == num_layers, "no_rope_layers", f"one for each of {num_layers} layers", len(given))
    require(all(flag in (0, 1) for flag in given), "no_rope_layers", "0 or 1 throughout", given)
    return [bool(flag) for flag in given]


def rope_of(
    source: Source, family: Family, name: str | None, sizes: "Sizes", layer_type: str | None, length: int | None
) -> Rope | None:
    """How a layer of `layer_type` turns; None where the config says that it does not."""
    block, nested = _block(source, family, layer_type)
    if block is None:
        return None
    kind = config_rope.rope_type(block, name)
    base = _base(source, block, family, layer_type, nested)
    width = _width(source, block, family, sizes.head_dim, kind)
    train_len = config_rope.train_len(block, source)
    sections, order = _sections(block, family, width)
    sharpening = 0.0
    if name == "ministral3":
        sharpening = block.number("llama_4_scaling_beta", default=0.0, at_least=0)
        own = block.count("max_position_embeddings")
        same = own in (None, sizes.max_len)
        require(same, block.path + "max_position_embeddings", f"that of the config ({sizes.max_len})", own)
    deinterleave = family.latent and name != "deepseek_v2"
    layout = family.layout
    if family.latent and layout == "interleaved" and not source.flag("rope_interleave", default=True):
        layout = "half"
    shape = config_rope.Shape(sizes.head_dim, width, base, sizes.max_len, train_len, length)
    factor = _softmax_factor(block, family, kind)
    made = config_rope.spectrum(kind, block, shape)
    return Rope(kind, made, base, layout, train_len, family.latent, deinterleave, sections, order, factor, sharpening)


def _block(source: Source, family: Family, layer_type: str | None) -> tuple[Source | None, bool]:
    """The block that holds for a layer, and whether it was nested under the layer's type."""
    given = source.given("rope_parameters", "rope_scaling")
    for key, value in given.items():
        require(isinstance(value, Mapping), source.path + key, "a block of keys", repr(value))
    kept = {key: value for key, value in given.items() if value}
    key = next(iter(kept), "rope_parameters")
    _check_equal(kept, source.path)
    block = kept.get(key, {})
    nested = {k: v for k, v in block.items() if isinstance(v, Mapping) or (v is None and k.endswith("attention"))}
    if nested:
        beside = {k: v for k, v in block.items() if k not in nested and v not in (None, "default")}
        for stray in beside:
            raise ValueError(message(f"{source.path}{key}.{stray}", "inside a layer type's block", repr(beside[stray])))
        if layer_type not in nested:
            names = ", ".join(nested)
            raise ValueError(message(source.path + key, f"given for layers of type {layer_type!r}", names))
        own = nested[layer_type]
        return None if own is None else Source(own, f"{source.path}{key}.{layer_type}."), True
    stretched = layer_type != SLIDING or family.local_base is None or family.scales_sliding
    return Source(block if stretched else {}, f"{source.path}{key}."), False


def _check_equal(blocks: dict[str, Any], path: str) -> None:
    """ValueError unless the old and the new block say the same."""
    if len(blocks) < 2:
        return

    def plain(block):
        return {("rope_type" if k == "type" else k): v for k, v in block.items() if v is not None and k != "rope_theta"}

    old, new = plain(blocks["rope_scaling"]), plain(blocks["rope_parameters"])
    differing = [k for k in {**old, **new} if old.get(k) != new.get(k)]
    for k in differing:
        condition = f"the same as {path}rope_parameters.{k} ({new.get(k)!r})"
        raise ValueError(message(f"{path}rope_scaling.{k}", condition, repr(old.get(k)), "delete one block"))


def _base(source: Source, block: Source, family: Family, layer_type: str | None, nested: bool) -> float:
    local = layer_type == SLIDING and (family.local_base is not None)
    names = _LOCAL if local else _GLOBAL
    others = source.given(*(_LOCAL + _GLOBAL if family.local_base is not None else names))
    found = {source.path + k: v for k, v in others.items() if k in names}
    if local and family.local_base == family.base and not found:  # OLMo 3: one base for both
        found = {source.path + k: v for k, v in others.items() if k in _GLOBAL}
    inner = {block.path + k: v for k, v in block.given("rope_theta").items()}
    scaling = source.keys.get("rope_scaling")
    if not nested and isinstance(scaling, Mapping) and scaling.get("rope_theta") is not None and not local:
        inner[source.path + "rope_scaling.rope_theta"] = scaling["rope_theta"]
    default = family.local_base if local else family.base
    base = agreed({**found, **inner}, default)
    require(config_rope.number(base, source.path + names[0]) > 1, source.path + names[0], "above 1", base)
    return float(base)


def _width(source: Source, block: Source, family: Family, head_dim: int, kind: str) -> int:
    """Channels that turn, from every spelling of it."""
    if family.latent:
        width = source.count("qk_rope_head_dim")
        assert width is not None  # read with the sizes
        block.given("partial_rotary_factor")
        return width
    found = {source.path + k: v for k, v in source.given(*_SHARES).items()}
    found |= {block.path + k: v for k, v in block.given("partial_rotary_factor").items()}
    widths = {k: _of_share(config_rope.number(v, k, 0), head_dim, kind) for k, v in found.items()}
    whole = source.count("rotary_dim")
    if whole is not None:
        widths[source.path + "rotary_dim"] = whole
    width = agreed(widths)
    if width is None:
        return _of_share(1.0 if family.share is None else family.share, head_dim, kind)
    key = next(iter(widths))
    may_be_part = family.share is not None or kind == "proportional"
    require(
        may_be_part or width == head_dim, key, "absent or 1, since this family turns whole heads", found.get(key, whole)
    )
    fits = width % 2 == 0 and 0 < width <= head_dim
    require(fits, key, f"such that an even number of at most {head_dim} channels turn", f"{width} channels")
    return width


def _of_share(share: float, head_dim: int, kind: str) -> int:
    return 2 * int(share * head_dim // 2) if kind == "proportional" else int(head_dim * share)


def _sections(block: Source, family: Family, width: int) -> tuple[tuple[int, ...] | None, str | None]:
    if family.order is None:
        return None, None
    given = block.get("mrope_section", "xdrope_section")
    interleaved = block.get("mrope_interleaved")
    same = interleaved is None or bool(interleaved) == (family.order == "interleaved")
    require(same, block.path + "mrope_interleaved", f"that of the family ({family.order})", interleaved)
    if given is None and family.sections is None:
        return None, None
    require(
        given is None or isinstance(given, list | tuple), block.path + "mrope_section", "a list of counts", repr(given)
    )
    sections = tuple(given or family.sections or ())
    if given and family.order == "alternating" and len(sections) == 3:  # written height, width, time
        sections = (sections[2], sections[0], sections[1])
    whole = all(isinstance(n, int) for n in sections) and sum(sections) == width // 2
    require(whole, block.path + "mrope_section", f"{width // 2} in sum, half of what turns", list(sections))
    return sections, family.order


def _softmax_factor(block: Source, family: Family, kind: str) -> float:
    """What latent attention multiplies its softmax scale by; elsewhere a lone mscale would be passed over."""
    mscale, all_dim = (block.number(name, at_least=0) for name in ("mscale", "mscale_all_dim"))
    if kind != "yarn":
        block.read.difference_update(() if family.latent else ("mscale", "mscale_all_dim"))
    if family.latent and kind != "default" and all_dim:
        stretch = block.number("factor", at_least=1)
        if stretch is None:
            raise ValueError(message(block.path + "factor", "given", None))
        return spectra.yarn_softmax_factor(stretch, all_dim)
    alone = bool(mscale) != bool(all_dim) and block.keys.get("attention_factor") is None
    if kind == "yarn" and alone and mscale != 1:
        present, absent = ("mscale", "mscale_all_dim") if mscale else ("mscale_all_dim", "mscale")
        hint = "alone it changes nothing; give both, or neither"
        raise ValueError(message(block.path + present, f"given together with {absent}", mscale or all_dim, hint))
    return 1.0

"""Which tensors of a checkpoint change with the layout, and how: queries, keys and what belongs to their channels."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from ropewalk.checkpoints.families import Heads
from ropewalk.errors import message, require

Shape = tuple[int, ...]


class Turn(NamedTuple):
    """A tensor whose first axis is heads of `head_dim` rows; those that are `turning` are put in the other order.

    `layer` is the attention module it belongs to; `measured`: a weight whose channels tell the layout.
    """

    turning: tuple[bool, ...]
    head_dim: int
    rotary_dim: int
    layer: str
    measured: bool = False

    @property
    def rows(self) -> int:
        """Rows of the tensor, in all heads."""
        return len(self.turning) * self.head_dim


_QUERY_NORMS = {"q_norm", "q_layernorm", "query_layernorm"}
_KEY_NORMS = {"k_norm", "k_layernorm", "key_layernorm"}
_UNTOUCHED = {
    *("v_proj", "wv", "o_proj", "wo", "out_proj", "dense", "c_proj", "g_proj", "gate_proj"),
    *("rotary_emb", "inv_freq", "sinks", "masked_bias", "attention_dropout", "attn_sub_norm", "v_norm"),
}
_SCALES = {"weight_scale", "weight_zero_point", "SCB", "scales"}
_HINT = "convert the checkpoint before it is quantised"


def plan(shapes: Mapping[str, Shape], heads: Heads, *, adapter: bool = False) -> dict[str, Turn]:
    """The tensors to reorder, by name; all others stay byte for byte.

    Args:
        shapes: every tensor of the checkpoint.
        adapter: the checkpoint holds some layers only (LoRA, one shard), so queries may come without keys.

    Raises:
        ValueError: a tensor beside the projections has an unknown role or a shape that the config does not explain.
    """
    blocks = _roles(heads)
    layers = {layer for name in shapes if (layer := _layer(name, blocks))}
    wanted = heads.family.fused or f"{heads.family.query} and {heads.family.key}"
    require(bool(layers), "checkpoint", f"one with {wanted} ({heads.model_type})", f"{len(shapes)} other tensors")
    kinds = sorted({re.sub(r"\d+", "N", layer) for layer in layers})
    require(len(kinds) == 1, "checkpoint", "of one kind of attention", " and ".join(kinds))
    if not adapter:
        _check_pairs(shapes, layers, heads)
    turns: dict[str, Turn] = {}
    for name, shape in shapes.items():
        layer = next((layer for layer in _prefixes(name) if layer in layers), None)
        if layer is None:
            _refuse_foreign(name)
            continue
        turn = _turn(name, shape, layer, blocks, heads)
        if turn is not None:
            turns[name] = turn
    return turns


def _roles(heads: Heads) -> dict[str, tuple[bool, ...]]:
    """Module names of the projections, each with its heads and which of them turn."""
    family = heads.family
    if family.fused is not None:
        return {family.fused: family.arrangement(heads.num_heads, heads.num_kv_heads)}
    return {family.query: (True,) * heads.num_heads, family.key: (True,) * heads.num_kv_heads}


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts) - 1, 0, -1)]


def _layer(name: str, blocks: Mapping[str, object]) -> str | None:
    """The attention module that a projection belongs to: all that stands before the projection's name."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part in blocks and index:
            return ".".join(parts[:index])
    return None


def _check_pairs(shapes: Mapping[str, Shape], layers: set[str], heads: Heads) -> None:
    family = heads.family
    for layer in sorted(layers):
        for part in (family.fused,) if family.fused else (family.query, family.key):
            there = any(name.startswith(f"{layer}.{part}.") for name in shapes)
            require(there, f"{layer}.{part}", "in the checkpoint, beside the rest of its layer", "no such tensor")


_FOREIGN = {"q_proj", "k_proj", "wq", "wk", "wqkv", "Wqkv", "W_pack", "qkv_proj", "query_key_value", "q_a_proj"}


def _refuse_foreign(name: str) -> None:
    """A projection outside the layers that the family explains would be left in the old layout: say so."""
    found = _FOREIGN & set(name.split("."))
    if found:
        raise ValueError(message(name, "a projection that this model_type has", f"{found.pop()} of unknown heads"))


def _turn(name: str, shape: Shape, layer: str, blocks: Mapping[str, tuple[bool, ...]], heads: Heads) -> Turn | None:
    part, *rest = name[len(layer) + 1 :].split(".")
    if part in blocks:
        return _of_projection(name, shape, rest, Turn(blocks[part], heads.head_dim, heads.rotary_dim, layer))
    if part in _QUERY_NORMS or part in _KEY_NORMS:
        count = heads.num_heads if part in _QUERY_NORMS else heads.num_kv_heads
        return _of_norm(name, shape, Turn((True,) * count, heads.head_dim, heads.rotary_dim, layer))
    known = part in _UNTOUCHED or (part == "bias" and len(shape) > 1)  # GPT-NeoX and GPT-J keep a mask as "bias"
    if not known and math.prod(shape) > 1:
        raise ValueError(message(name, "a part of attention whose channels are known", f"shape {shape}"))
    return None


def _of_projection(name: str, shape: Shape, rest: list[str], turn: Turn) -> Turn | None:
    """What a query, key or fused projection holds: weight, bias, LoRA factors, one scale per row."""
    rest = [part for part in rest if part != "base_layer"]
    if any(part in ("lora_A", "lora_embedding_A") for part in rest):
        return None  # its outputs are ranks, not channels
    scale = len(rest) == 1 and (rest[0] in _SCALES or rest[0].endswith(("_scale", "_scale_inv", "_zero_point")))
    if scale and math.prod(shape) == 1:
        return None
    low_rank = bool(rest) and rest[0] in ("lora_B", "lora_magnitude_vector")
    known = rest in (["weight"], ["bias"]) or scale or low_rank
    if not known:
        raise ValueError(message(name, "a weight, bias, LoRA factor or scale per row", f"{'.'.join(rest)!r}", _HINT))
    expected = f"of {len(turn.turning)} heads x {turn.head_dim} channels = {turn.rows} rows"
    fits = bool(shape) and shape[0] == turn.rows
    require(fits, name, expected, f"shape {shape}", hint="" if low_rank else f"if it is quantised, {_HINT}")
    return turn._replace(measured=rest == ["weight"] and len(shape) == 2)


def _of_norm(name: str, shape: Shape, turn: Turn) -> Turn | None:
    """Norms of one head shared by all, or of all heads at once, flat or as (heads, head_dim)."""
    size = math.prod(shape)
    if size == turn.head_dim:
        return turn._replace(turning=(True,), measured=False)
    require(
        size == turn.rows and shape[-1] in (turn.head_dim, turn.rows),
        name,
        f"of head_dim ({turn.head_dim}) channels, or of {turn.rows} for all heads",
        f"shape {shape}",
    )
    return turn

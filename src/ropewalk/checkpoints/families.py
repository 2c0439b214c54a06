"""What a config says about the heads of a checkpoint: how many, how wide, paired and fused in which way.

The table was checked against the modelling code of transformers 5.24, of Qwen and InternLM2 as published with their
weights, and of Meta's LLaMA.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ropewalk.errors import message, require, require_count

Arrangement = Callable[[int, int], tuple[bool, ...]]


def _each_head(num_heads: int, num_kv_heads: int) -> tuple[bool, ...]:
    """query, key, value of the first head, then of the second, ..."""
    return (True, True, False) * num_heads


def _blocks(num_heads: int, num_kv_heads: int) -> tuple[bool, ...]:
    """all queries, all keys, all values"""
    return (True,) * (num_heads + num_kv_heads) + (False,) * num_kv_heads


def _groups(num_heads: int, num_kv_heads: int) -> tuple[bool, ...]:
    """for each kv head: the queries that share it, its key, its value"""
    return ((True,) * (num_heads // num_kv_heads + 1) + (False,)) * num_kv_heads


class Family(NamedTuple):
    """How models of one type turn queries and keys.

    `width` is the part of a head that turns when the config does not say so; None: all of it, always.
    """

    layout: str = "half"
    width: float | None = None
    query: str = "q_proj"
    key: str = "k_proj"
    fused: str | None = None
    arrangement: Arrangement = _blocks


class Heads(NamedTuple):
    """Counts and widths of one checkpoint, in channels, with its family."""

    model_type: str
    family: Family
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


_WHOLE = (
    "llama mistral mixtral ministral ministral3 qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3_text olmo olmo2 "
    "olmo3 olmoe starcoder2 granite granitemoe smollm3 seed_oss hunyuan_v1_dense exaone4 arcee apertus cwm dots1 "
    "gpt_oss phimoe"
)
_PAIRED = "cohere cohere2 helium ernie4_5"
FAMILIES: dict[str, Family] = {
    **{name: Family() for name in _WHOLE.split()},
    **{name: Family("interleaved") for name in _PAIRED.split()},
    "glm": Family("interleaved", 0.5),
    "glm4": Family("interleaved", 0.5),
    "gptj": Family("interleaved", 0.0),  # its config has to give rotary_dim
    "phi": Family(width=0.5),
    "stablelm": Family(width=0.25),
    "nemotron": Family(width=0.5),
    "glm4_moe": Family(width=0.5),
    "minimax_m2": Family(width=1.0),
    "gpt_neox": Family(width=0.25, fused="query_key_value", arrangement=_each_head),
    "persimmon": Family(width=0.5, fused="query_key_value", arrangement=_each_head),
    "phi3": Family(width=1.0, fused="qkv_proj"),
    "qwen": Family(fused="c_attn"),
    "internlm2": Family(fused="wqkv", arrangement=_groups),
    "falcon": Family(fused="query_key_value"),  # its arrangement depends on the config
    "meta": Family("interleaved", query="wq", key="wk"),  # params.json, without a model_type
}
_REFUSED = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "kimi_k2", "longcat_flash", "minicpm3"),
        "latent attention (MLA) turns slices of its own projections",
    ),
    **dict.fromkeys(("gpt2", "opt", "bert", "roberta"), "its positions are embeddings: nothing turns"),
    **dict.fromkeys(("bloom", "mpt"), "it has ALiBi: nothing turns"),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "hunyuan_vl"), "its pairs turn by several axes"),
    "codegen": "its fused projection is ordered by training shards",
    "chatglm": "its config does not say how the projection is fused",
    "baichuan": "the name covers a rotary and an ALiBi model",
}
_WIDTH_KEYS = ("partial_rotary_factor", "rotary_pct", "rope_pct")
_NESTED = ("rope_parameters", "rope_scaling")


def read(config: dict[str, Any]) -> Heads:
    """The heads that a config.json (or Meta's params.json) describes.

    Raises:
        ValueError: the architecture is unknown or unsupported, a number is missing, or two keys contradict.
    """
    name, family = _family(config)
    num_heads = _number(config, "num_attention_heads", "n_head", "n_heads", "num_heads")
    if num_heads is None:
        raise ValueError(message("config", "one with num_attention_heads", "none"))
    kv_keys = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv")
    num_kv_heads = _number(config, *kv_keys) or num_heads
    if name == "falcon":
        family, num_kv_heads = _falcon(config, family, num_heads, num_kv_heads)
    even = num_heads % num_kv_heads == 0
    require(even, "num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})", num_kv_heads)
    head_dim = _head_dim(config, num_heads)
    return Heads(name, family, num_heads, num_kv_heads, head_dim, _rotary_dim(config, name, family, head_dim))


def _family(config: dict[str, Any]) -> tuple[str, Family]:
    name = config.get("model_type")
    if name is None and {"dim", "n_heads"} <= config.keys():
        name = "meta"
    hint = "known: " + ", ".join(sorted(FAMILIES.keys() - {"meta"})) + ", and Meta's params.json"
    if name in _REFUSED:
        raise ValueError(message("model_type", "one that can be converted", f"{name!r} ({_REFUSED[name]})"))
    if name not in FAMILIES:
        raise ValueError(message("model_type", "one that can be converted", repr(name), hint))
    for key in ("kv_lora_rank", "q_lora_rank"):
        require(config.get(key) is None, key, "absent (latent attention is not supported)", config.get(key))
    return str(name), FAMILIES[name]


def _falcon(config: dict[str, Any], family: Family, num_heads: int, num_kv_heads: int) -> tuple[Family, int]:
    require(not config.get("alibi"), "alibi", "false: with ALiBi nothing turns", config.get("alibi"))
    if config.get("new_decoder_architecture"):
        return family._replace(arrangement=_groups), num_kv_heads
    if config.get("multi_query", True):
        return family, 1
    return family._replace(arrangement=_each_head), num_heads


def _agreed(found: list[tuple[str, Any]]) -> Any:
    """The one value of several spellings, or ValueError naming two that contradict."""
    for (first, value), (second, other) in itertools.pairwise(found):
        require(value == other, second, f"equal to {first} ({value})", other)
    return found[0][1] if found else None


def _number(config: dict[str, Any], *names: str) -> int | None:
    given = [(name, config[name]) for name in names if config.get(name) is not None]
    return _agreed([(name, require_count(value, name)) for name, value in given])


def _head_dim(config: dict[str, Any], num_heads: int) -> int:
    head_dim = _number(config, "head_dim", "kv_channels")
    if head_dim is not None:
        return head_dim
    model_dim = _number(config, "hidden_size", "n_embd", "dim")
    if model_dim is None:
        raise ValueError(message("config", "one with head_dim or hidden_size", "neither"))
    require(model_dim % num_heads == 0, "hidden_size", f"a multiple of num_attention_heads ({num_heads})", model_dim)
    return model_dim // num_heads


def _factors(config: dict[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Every spelling of the part of a head that turns, wherever it stands."""
    for key in _WIDTH_KEYS:
        if config.get(key) is not None:
            yield path + key, config[key]
    inner = _NESTED if not path else config
    for key in inner:
        if isinstance(config.get(key), dict):
            yield from _factors(config[key], f"{path}{key}.")


def _rotary_dim(config: dict[str, Any], name: str, family: Family, head_dim: int) -> int:
    factors = list(_factors(config))
    factor, given = _agreed(factors), _number(config, "rotary_dim", "rotary_ndims")
    if family.width is None:
        whole = factor in (None, 1) and given in (None, head_dim)
        wrong = factors[0][0] if factor not in (None, 1) else "rotary_dim"
        require(whole, wrong, f"absent or the whole head ({name} turns all channels)", factor if factors else given)
        width = head_dim
    else:
        width = int(head_dim * (family.width if factor is None else factor))
    if given is not None:
        require(factor is None or width == given, "rotary_dim", f"{factors and factors[0][0]} of head_dim", given)
        width = given
    fits = width % 2 == 0 and 2 <= width <= head_dim
    require(fits, "rotary_dim", f"even, at least 2 and at most head_dim ({head_dim})", width)
    return width

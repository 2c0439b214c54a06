"""What a config does not say: the conventions of each family of models, by its `model_type`.

Defaults of each are checked against transformers 5.24 by `tests/test_hf_config_parity.py`, attention with their
encodings by `tests/test_hf_models.py`.
"""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` use positions where their config is silent.

    Args:
        kind: "rotary", "alibi", "learned", "sinusoidal".
        layout: which channels form a pair.
        base: of frequencies; `local_base`: of sliding layers, where those have one of their own.
        share: of a head that turns; None: all of it, and a config that asks for less is refused.
        head_dim: None: hidden_size / num_attention_heads.
        full_every: each so-maniest layer sees everything, the others slide; `full_first`: counted from layer 0.
        scales_sliding: a context stretch outside of per-layer blocks is meant for sliding layers too.
        turning: which layers turn: "all", "sliding", or "flags" (no_rope_layers, 1 = turns).
        sections, order: of M-RoPE.
        latent: multi-head latent attention: the last qk_rope_head_dim channels of a head turn.
        offset: rows of a learned table before that of position 0; "pad": pad_token_id + 1.
        refused: why this family is not supported.
    """

    kind: str = "rotary"
    layout: str = "half"
    base: float = 10_000.0
    local_base: float | None = None
    share: float | None = None
    head_dim: int | None = None
    full_every: int | None = None
    full_first: bool = False
    scales_sliding: bool = True
    turning: str = "all"
    sections: tuple[int, ...] | None = None
    order: str | None = None
    latent: bool = False
    offset: int | str = 0
    refused: str | None = None


def _each(names: str, family: Family, **changes) -> dict[str, Family]:
    return dict.fromkeys(names.split(), replace(family, **changes))


_WHOLE = Family()
_PART = Family(share=1.0)
_PAIRS = Family(layout="interleaved")
_LATENT = Family(latent=True, layout="interleaved")

GENERIC = _PART
"""A config without `model_type`: channels pair in halves, and each key is taken at its word."""

FAMILIES: dict[str, Family] = {
    # Whole heads turn, channels pair in halves.
    **_each("llama mistral qwen2 qwen2_moe qwen3_moe granite granitemoe olmo olmo2 olmoe starcoder2", _WHOLE),
    **_each("arcee dots1 hunyuan_v1_dense hunyuan_v1_moe hyperclovax jais2 ministral diffllama", _WHOLE),
    **_each("aria_text", _WHOLE),
    **_each("qwen3 seed_oss ministral3 internlm3", _WHOLE, head_dim=128),
    **_each("gemma gemma2 vaultgemma", _WHOLE, head_dim=256),
    **_each("mixtral phimoe lfm2 lfm2_moe", _WHOLE, base=1e6),
    "cwm": replace(_WHOLE, base=1e6, head_dim=128),
    **_each("flex_olmo bitnet mllama_text_model", _WHOLE, base=500_000.0),
    "apertus": replace(_WHOLE, base=12_000_000.0),
    "gpt_oss": replace(_WHOLE, base=150_000.0, head_dim=64),
    "smollm3": replace(_WHOLE, base=2_000_000.0, turning="flags"),
    # A share of each head turns.
    **_each("phi persimmon nemotron glm4_moe", _PART, share=0.5),
    **_each("gpt_neox stablelm", _PART, share=0.25),
    **_each("gpt_neox_japanese phi3", _PART),
    "minimax_m2": replace(_PART, base=5_000_000.0, head_dim=128),
    "bamba": replace(_PART, share=0.5),
    "solar_open": replace(_PART, base=1e6, head_dim=128),
    "qwen3_next": replace(_PART, share=0.25, head_dim=256),
    # Neighbouring channels form pairs.
    **_each("cohere", _PAIRS, base=500_000.0),
    "cohere2": replace(_PAIRS, full_every=4, turning="sliding"),
    "helium": replace(_PAIRS, base=100_000.0, head_dim=128),
    "ernie4_5": replace(_PAIRS, base=500_000.0, head_dim=128),
    "ernie4_5_moe": replace(_PAIRS, base=500_000.0),
    **_each("glm glm4", _PAIRS, share=0.5, head_dim=128),
    **_each("gptj codegen", _PAIRS, share=1.0),
    "llama4_text": replace(_PAIRS, base=500_000.0, head_dim=128, turning="flags"),
    # Sliding layers differ from those that see everything.
    **_each("gemma3_text gemma3", _WHOLE, base=1e6, local_base=1e4, head_dim=256, full_every=6, scales_sliding=False),
    **_each("modernbert modernbert-decoder", _WHOLE, base=160_000.0, local_base=1e4, full_every=3, full_first=True),
    "olmo3": replace(_WHOLE, base=500_000.0, local_base=500_000.0, full_every=4, scales_sliding=False),
    "exaone4": replace(_WHOLE, full_every=4, turning="sliding"),
    # Multi-head latent attention.
    **_each("deepseek_v2 deepseek_v3 youtu", _LATENT),
    "minicpm3": replace(_LATENT, layout="half"),
    # Several axes.
    **_each("qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text", _WHOLE, base=1e6, order="block"),
    **_each("qwen3_vl_text qwen3_vl_moe_text", _WHOLE, base=500_000.0, head_dim=128, order="interleaved",
            sections=(24, 20, 20)),
    "ernie4_5_vl_moe_text": replace(_PAIRS, base=500_000.0, order="alternating", sections=(20, 22, 22)),
    "hunyuan_vl_text": replace(_WHOLE, order="channels"),
    # Biases and absolute positions.
    "bloom": Family(kind="alibi"),
    "mpt": Family(kind="alibi"),
    "falcon": _WHOLE,
    **_each("gpt2 gpt_neo gpt_bigcode openai-gpt bert", Family(kind="learned")),
    **_each("opt biogpt", Family(kind="learned", offset=2)),
    **_each("roberta xlm-roberta camembert", Family(kind="learned", offset="pad")),
    **_each("distilbert xlm flaubert", Family(kind="sinusoidal")),
    # Known, and refused.
    **_each("t5 mt5 umt5 longt5 switch_transformers udop", Family(refused="it has a learned bias by distance")),
    **_each("deberta deberta-v2 xlnet", Family(refused="its scores depend on positions through content")),
    **_each("m2m_100 xglm ctrl fsmt speech_to_text", Family(refused="its sines stand before its cosines")),
    "nanochat": Family(refused="it turns the other way round"),
    "deepseek_v4": Family(refused="its values are turned as well"),
    **_each("gemma4_text gemma4_unified_text", Family(refused="its layers have heads of different widths")),
}  # fmt: skip

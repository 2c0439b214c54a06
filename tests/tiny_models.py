"""Tiny random models of many architectures, and the rotation of each written out for the other layout."""

import importlib

import torch

TOKENS = torch.tensor([[3, 17, 4, 44, 8, 21, 9, 30, 2, 11]])
COMMON = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"head_dim": 16}
COUNTS = ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")
ARCHITECTURES = {
    "llama": {**WIDE, "attention_bias": True},
    "mistral": WIDE,
    "mixtral": {"num_local_experts": 4},
    "ministral": WIDE,
    "ministral3": WIDE,
    "qwen2": {},
    "qwen2_moe": {**MOE, "shared_expert_intermediate_size": 32},
    "qwen3": WIDE,
    "qwen3_moe": {**MOE, **WIDE},
    "gemma": WIDE,
    "gemma2": WIDE,
    "gemma3_text": WIDE,
    "olmo": {},
    "olmo2": {},
    "olmo3": {},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "starcoder2": {},
    "granite": {},
    "granitemoe": {"num_local_experts": 4},
    "smollm3": {},
    "seed_oss": WIDE,
    "hunyuan_v1_dense": WIDE,
    "exaone4": {},
    "arcee": {},
    "apertus": {},
    "cwm": WIDE,
    "dots1": {**MOE, **WIDE, "n_routed_experts": 4, "n_shared_experts": 1},
    "gpt_oss": {**WIDE, "num_local_experts": 4},
    "phimoe": {"num_local_experts": 4},
    "cohere": {"use_qk_norm": True},
    "cohere2": {},
    "helium": {"head_dim": 8},
    "ernie4_5": WIDE,
    "glm": WIDE,
    "glm4": WIDE,
    "phi": {"qk_layernorm": True},
    "stablelm": {"qk_layernorm": True, "partial_rotary_factor": 0.5},
    "nemotron": WIDE,
    "glm4_moe": {**MOE, **WIDE, "use_qk_norm": True, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "minimax_m2": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "gpt_neox": {"rotary_pct": 0.5},
    "persimmon": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "gptj": {"rotary_dim": 4},
}


def build(name, seed=0, **changes):
    """A model whose every parameter is random, norms and biases too, in eval mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {**COMMON, **ARCHITECTURES.get(name, {}), **changes}
    if name == "gptj":
        settings |= {"n_embd": 64, "n_head": 8, "n_layer": 2, "n_positions": 64}
        settings = {key: value for key, value in settings.items() if key not in ("hidden_size", *COUNTS)}
    if name == "falcon":
        del settings["num_key_value_heads"]
    config = AutoConfig.for_model(name, **settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(spread * 0.3 if parameter.ndim > 1 else 1 + 0.5 * spread)
    return model


def logits(model):
    """Of the fixed tokens, divided by their spread."""
    with torch.no_grad():
        found = model(TOKENS).logits
    return found / found.std()


def rotate_as(model, layout, monkeypatch):
    """The model's rotation, in its module, replaced by the formula of `layout`."""
    module = importlib.import_module(type(model).__module__)
    name = model.config.model_type
    if name == "gptj":
        monkeypatch.setattr(
            module, "apply_rotary_pos_emb", lambda x, sin, cos: _turn(x, cos[:, :, None], sin[:, :, None], layout)
        )
        return

    def both(q, k, cos, sin, unsqueeze_dim=1, **_):
        cos, sin = (_per_pair(name, table).unsqueeze(unsqueeze_dim) for table in (cos, sin))
        return _turn(q, cos, sin, layout), _turn(k, cos, sin, layout)

    assert hasattr(module, "apply_rotary_pos_emb")
    monkeypatch.setattr(module, "apply_rotary_pos_emb", both)


def _per_pair(name, table):
    if name == "gpt_oss":
        return table
    return table[..., ::2] if name.startswith("cohere") else table[..., : table.shape[-1] // 2]


def _turn(x, cos, sin, layout):
    width = 2 * cos.shape[-1]
    turning, rest = x[..., :width], x[..., width:]
    if layout == "half":
        a, b = turning.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)
    a, b = turning.unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1)
    return torch.cat((turned.flatten(-2), rest), -1)

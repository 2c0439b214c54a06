"""Attention of tiny random models equals ours with the encoding that their config is read as.

Each model runs twice.  The first run records what every layer's attention is handed and gives.  The second has its
rotation replaced by none and is fed the first one's outputs, so that it hands over the same queries and keys before
they are turned.  Those go through `rw.attend` with our encoding; the transformers library decides the numbers.
"""

import contextlib

import pytest
import torch

import ropewalk as rw

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

SEQ_LEN = 24
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
EXPERTS = {"num_local_experts": 2, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LATENT = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 16,
          "num_key_value_heads": 4}  # fmt: skip
ROUTED = {"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, **EXPERTS}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 32, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "rope_theta": 500000.0}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
DEEP_YARN = {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5 + i for i in range(8)],
        "original_max_position_embeddings": 16, "rope_theta": 10000.0}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}

# name: (model_type, what is changed)
MODELS = {
    "llama": ("llama", {}),
    "llama, explicit head_dim": ("llama", {"head_dim": 32}),
    "llama, llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn": ("llama", {"rope_parameters": YARN}),
    "llama, linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
    "llama, dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
                                 "max_position_embeddings": 16}),
    "llama, longrope": ("llama", {"rope_parameters": LONG}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 16}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_next": ("qwen3_next", {**EXPERTS, "layer_types": ["full_attention"] * 2, "head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "attn_logit_softcapping": None}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "num_hidden_layers": 6, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}}),
    "granite": ("granite", {}),
    "granitemoe": ("granitemoe", EXPERTS),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": {**YARN, "rope_theta": 5e5}}}),
    "olmoe": ("olmoe", EXPERTS),
    "starcoder2": ("starcoder2", {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3, longrope": ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONG}),
    "persimmon": ("persimmon", {}),
    "stablelm": ("stablelm", {"head_dim": 16, "partial_rotary_factor": 0.5}),
    "gpt_neox": ("gpt_neox", {}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "glm4_moe": ("glm4_moe", {**ROUTED, "head_dim": 16}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"num_hidden_layers": 4}),
    "helium": ("helium", {"head_dim": 16}),
    "ernie4_5": ("ernie4_5", {"head_dim": 16}),
    "exaone4": ("exaone4", {"num_hidden_layers": 4, "sliding_window": 32, "sliding_window_pattern": 4}),
    "nemotron": ("nemotron", {}),
    "minimax_m2": ("minimax_m2", {**EXPERTS, "head_dim": 16, "rotary_dim": 8}),
    "gpt_oss": ("gpt_oss", {**EXPERTS, "head_dim": 16}),
    "apertus": ("apertus", {}),
    "arcee": ("arcee", {}),
    "seed_oss": ("seed_oss", {"head_dim": 16}),
    "lfm2": ("lfm2", {"layer_types": ["full_attention", "conv"]}),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": {
        "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0, "rope_theta": 1e4}}),
    "ministral3": ("ministral3", {"head_dim": 16, "sliding_window": None, "rope_parameters": {
        **YARN, "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0}}),
    "modernbert": ("modernbert", {"num_hidden_layers": 3, "local_attention": 128}),
    "llama4": ("llama4_text", {**EXPERTS, "head_dim": 16, "num_hidden_layers": 4, "floor_scale": 4,
                               "attention_chunk_size": 64, "intermediate_size_mlp": 32}),
    "deepseek_v2": ("deepseek_v2", {**LATENT, **ROUTED, "rope_parameters": DEEP_YARN}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, **ROUTED, "rope_parameters": DEEP_YARN}),
    "deepseek_v3, halves": ("deepseek_v3", {**LATENT, **ROUTED, "rope_interleave": False}),
    "youtu": ("youtu", LATENT),
    "minicpm3": ("minicpm3", LATENT),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**EXPERTS, "head_dim": 16, "moe_topk": 1}),
    "dots1": ("dots1", {**ROUTED, "n_shared_experts": 1}),
    "hyperclovax": ("hyperclovax", {}),
    "jais2": ("jais2", {}),
    "ministral": ("ministral", {"sliding_window": 32, "head_dim": 16}),
    "aria": ("aria_text", {"moe_num_experts": 2, "moe_topk": 1, "moe_num_shared_experts": 1}),
    "vaultgemma": ("vaultgemma", {"head_dim": 16, "attn_logit_softcapping": None}),
    "phimoe": ("phimoe", EXPERTS),
    "lfm2_moe": ("lfm2_moe", {**EXPERTS, "layer_types": ["full_attention", "conv"]}),
    "cwm": ("cwm", {"head_dim": 16}),
    "flex_olmo": ("flex_olmo", EXPERTS),
    "bitnet": ("bitnet", {}),
    "bamba": ("bamba", {"attn_layer_indices": [0, 1]}),
    "solar_open": ("solar_open", {**ROUTED, "head_dim": 16}),
    "ernie4_5_moe": ("ernie4_5_moe", {**EXPERTS, "moe_num_experts": 2, "moe_k": 1, "moe_num_shared_experts": 1}),
    "modernbert-decoder": ("modernbert-decoder", {"num_hidden_layers": 3, "local_attention": 128}),
    "internlm3": ("internlm3", {"head_dim": 16}),
    "qwen3_vl_moe": ("qwen3_vl_moe_text", {**EXPERTS, "head_dim": 16, "rope_parameters": {
        **MROPE, "mrope_section": [4, 2, 2]}}),
    "gptj": ("gptj", {"rotary_dim": 8, "num_key_value_heads": None}),
    "codegen": ("codegen", {"rotary_dim": 8, "num_key_value_heads": None}),
    "qwen2_vl": ("qwen2_vl_text", {"rope_parameters": MROPE}),
    "qwen2_5_vl": ("qwen2_5_vl_text", {"rope_parameters": MROPE}),
    "qwen3_vl": ("qwen3_vl_text", {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [4, 2, 2]}}),
    "ernie4_5_vl": ("ernie4_5_vl_moe_text", {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [3, 3, 2]}}),
    "hunyuan_vl": ("hunyuan_vl_text", {"head_dim": 16, "rope_parameters": {**MROPE, "mrope_section": [2, 2, 2, 2]}}),
}  # fmt: skip


class Recorder:
    """An attention function that computes as usual and keeps what it was handed, or gives back what it once gave."""

    def __init__(self):
        self.calls, self.replayed = [], None

    def __call__(self, module, q, k, v, mask, scaling=None, **options):
        if self.replayed is not None:
            self.calls.append((q, k, v))
            return self.replayed[len(self.calls) - 1], None
        group = q.shape[1] // k.shape[1]
        wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        score = q.double() @ wide_k.double().mT * scaling
        visible = torch.ones(score.shape[-2:], dtype=torch.bool)
        causal = getattr(module, "is_causal", True)
        visible = visible.tril() if causal else visible
        weights = score.masked_fill(~visible, -torch.inf).softmax(-1)
        out = (weights @ wide_v.double()).to(q.dtype).transpose(1, 2)
        self.calls.append((q, k, v, out, scaling, causal))
        return out, None


def build(model_type, changes, dtype=torch.float32):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    with contextlib.redirect_stderr(None):
        options = {k: v for k, v in {**SIZES, **changes}.items() if v is not None or k == "sliding_window"}
        config = CONFIG_MAPPING[model_type](**options)
        if model_type == "ernie4_5_vl_moe_text":
            from transformers.models.ernie4_5_vl_moe.modeling_ernie4_5_vl_moe import Ernie4_5_VLMoeTextModel

            model = Ernie4_5_VLMoeTextModel(config).to(dtype).eval()
        else:
            model = transformers.AutoModel.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "norm" not in name:
                parameter.normal_(0.0, 0.2)
    return config, model


def rotary_modules(model):
    return [m for n, m in model.named_modules() if "otary" in type(m).__name__ or "RoPE" in type(m).__name__]


def without_rotation(module, forward):
    def still(*args, **kwargs):
        made = forward(*args, **kwargs)
        if isinstance(made, torch.Tensor):  # complex numbers
            return torch.ones_like(made)
        if type(module).__name__ in ("GPTJRotaryEmbedding", "CodeGenRotaryEmbedding"):  # sines first
            return torch.zeros_like(made[0]), torch.ones_like(made[1])
        return torch.ones_like(made[0]), torch.zeros_like(made[1])

    module.forward = still


def without_temperature(model):
    for module in model.modules():
        if hasattr(module, "attn_temperature_tuning"):
            module.attn_temperature_tuning = False
    parameters = getattr(model.config, "rope_parameters", None) or {}
    if "llama_4_scaling_beta" in parameters:
        parameters["llama_4_scaling_beta"] = 0.0


def record(model, recorder, tokens, positions):
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("recorder", recorder)
    AttentionMaskInterface.register("recorder", eager_mask)
    model.set_attn_implementation("recorder")
    given = {} if positions is None else {"position_ids": positions}
    with torch.no_grad():
        model(tokens, **given)


def attention_of(model_type, changes, positions=None):
    """For each attention of a model: raw q, k, v and what it gave, with the model's own rotation in between."""
    config, model = build(model_type, changes)
    tokens = torch.randint(3, 60, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    first, second = Recorder(), Recorder()
    record(model, first, tokens, positions)
    kept = config.to_dict()
    for module in rotary_modules(model):
        without_rotation(module, module.forward)
    without_temperature(model)
    second.replayed = [call[3] for call in first.calls]
    record(model, second, tokens, positions)
    config = {**kept, "model_type": model_type}
    pairs = zip(first.calls, second.calls, strict=True)
    return config, [(raw, made) for made, raw in pairs]


def encoded(reading, q, k, positions):
    """Our queries and keys at `positions`, from those of the run without rotation."""
    trailing = [part for part in reading.encoding.modules() if isinstance(part, rw.Trailing) and part.deinterleave]
    for part in trailing:  # that run has put even channels first already
        still = part.head_dim - part.rotary_dim
        q, k = (torch.cat((x[..., :still], rw.layouts.to_interleaved(x[..., still:])), dim=-1) for x in (q, k))
    at = reading.encoding.at(positions)
    q, k = reading.encoding.query(q, at), reading.encoding.key(k, at)
    if getattr(reading.encoding, "order", None) == "channels":  # norms change, and this model evens them out after it
        q, k = (torch.nn.functional.rms_norm(x, x.shape[-1:], eps=1e-5) for x in (q, k))
    return q, k


def scale_without_factor(reading, scaling):
    """Latent attention keeps its factor in the softmax scale, we in the queries."""
    parts = [p for p in reading.encoding.modules() if isinstance(p, rw.Temperature) and p.rule == "constant"]
    return reading.head_dim**-0.5 if parts else scaling


def check_layer(reading, raw, made, positions):
    (q, k, v), (_, turned_k, _, expected, scaling, causal) = raw, made
    assert q.shape[1] == reading.num_heads and q.shape[-1] == reading.head_dim
    own_q, own_k = encoded(reading, q, k, positions)
    scale = scale_without_factor(reading, scaling)
    got = rw.attend(own_q, own_k, v, reading.encoding, scale=scale, causal=causal, encoded=True)
    assert (expected.transpose(1, 2) - got).abs().max() < 1e-5 * max(1.0, float(v.abs().max()))
    assert (turned_k - own_k).abs().max() < 1e-5 * max(1.0, float(k.abs().max()))
    if reading.rope_type is not None:
        assert (own_k - k).abs().max() > 1e-2, "nothing was turned, so nothing was tested"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_attention_with_the_encoding_of_a_config_is_the_models_own(name):
    config, calls = attention_of(*MODELS[name])
    readings = [r for r in rw.hf.describe(config, length=SEQ_LEN) if r.layer_type not in ("conv", "linear_attention")]
    assert len(calls) == len(readings) > 0
    for reading, (raw, made) in zip(readings, calls, strict=True):
        check_layer(reading, raw, made, torch.arange(SEQ_LEN))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "ernie4_5_vl", "hunyuan_vl"])
def test_pictures_are_placed_on_several_axes_as_the_model_does(name):
    model_type, changes = MODELS[name]
    axes = 4 if name == "hunyuan_vl" else 3
    positions = torch.randint(0, 40, (axes, 2, SEQ_LEN), generator=torch.Generator().manual_seed(2))
    config, calls = attention_of(model_type, changes, positions)
    for reading, (raw, made) in zip(rw.hf.describe(config), calls, strict=True):
        check_layer(reading, raw, made, positions)


def projections(model, fused, out):
    """What the fused projection of the first attention gives, and what its output projection is handed."""
    kept = {}
    modules = dict(model.named_modules())
    first = next(name for name in modules if name.endswith(fused))
    modules[first].register_forward_hook(lambda m, args, made: kept.update(qkv=made))
    output = first.removesuffix(fused) + out
    modules[output].register_forward_pre_hook(lambda m, args: kept.update(out=args[0]))
    return kept


ALIBI = {
    "bloom": ("bloom", {"n_head": 4, "n_layer": 1, "hidden_size": 64}, "query_key_value", "dense"),
    "bloom, 6 heads": ("bloom", {"n_head": 6, "n_layer": 1, "hidden_size": 48}, "query_key_value", "dense"),
    "mpt": ("mpt", {"n_heads": 4, "d_model": 64, "n_layers": 1, "max_seq_len": 64}, "Wqkv", "out_proj"),
    "mpt, 6 heads": ("mpt", {"n_heads": 6, "d_model": 48, "n_layers": 1, "max_seq_len": 64}, "Wqkv", "out_proj"),
    "falcon, alibi": ("falcon", {"alibi": True, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
                                 "multi_query": False, "new_decoder_architecture": False}, "query_key_value", "dense"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ALIBI)
def test_alibi_of_a_config_is_the_models_own(name):
    model_type, changes, fused, out = ALIBI[name]
    ids = {k: v for k, v in SIZES.items() if k.endswith("token_id") or k == "vocab_size"}
    # Falcon's eager attention adds its bias a second time with the mask (transformers 5.24); its SDPA path does not.
    config, model = build_with(model_type, {**ids, **changes}, "sdpa" if model_type == "falcon" else "eager")
    kept = projections(model, fused, out)
    with torch.no_grad():
        model(torch.randint(3, 60, (2, SEQ_LEN), generator=torch.Generator().manual_seed(1)))
    reading = rw.hf.describe(config)[0]
    heads, width = reading.num_heads, reading.head_dim
    if model_type == "mpt":
        q, k, v = (x.unflatten(-1, (heads, width)).transpose(1, 2) for x in kept["qkv"].chunk(3, dim=-1))
    else:
        q, k, v = kept["qkv"].unflatten(-1, (heads, 3, width)).transpose(1, 2).unbind(dim=-2)
    got = rw.attend(q, k, v, reading.encoding).transpose(1, 2).flatten(2)
    assert (kept["out"] - got).abs().max() < 1e-5 * max(1.0, float(v.abs().max()))


def build_with(model_type, options, attention="eager"):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](**options)
    model = transformers.AutoModel.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.2)
    return config, model


@pytest.mark.parametrize("most", [4, 8, 16])
@pytest.mark.parametrize("num_heads", [4, 6, 12])
def test_mpt_slopes_follow_alibi_bias_max(num_heads, most):
    """The model of transformers 5.24 passes its alibi_bias_max over; its function, and the original code, do not."""
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    config = {"model_type": "mpt", "d_model": 8 * num_heads, "n_heads": num_heads}
    encoding = rw.hf.from_config({**config, "attn_config": {"alibi": True, "alibi_bias_max": most}})
    expected = -build_mpt_alibi_tensor(num_heads, 2, most)[:, 0, 0]
    assert expected.tolist() == pytest.approx(encoding.slopes, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "table", "options"),
    [
        ("gpt2", "wpe", {"n_embd": 32, "n_head": 2, "n_layer": 1, "n_positions": 40}),
        ("opt", "decoder.embed_positions", {"hidden_size": 32, "ffn_dim": 32, "num_attention_heads": 2,
                                            "num_hidden_layers": 1, "max_position_embeddings": 40,
                                            "word_embed_proj_dim": 32}),
        ("roberta", "embeddings.position_embeddings", {"hidden_size": 32, "intermediate_size": 32,
                                                       "num_attention_heads": 2, "num_hidden_layers": 1,
                                                       "max_position_embeddings": 42, "pad_token_id": 1}),
        ("distilbert", "embeddings.position_embeddings", {"dim": 32, "n_heads": 2, "n_layers": 1, "hidden_dim": 32,
                                                          "max_position_embeddings": 40, "sinusoidal_pos_embds": True}),
    ],
)  # fmt: skip
def test_absolute_tables_begin_at_the_rows_offset(model_type, table, options):
    ids = {
        "vocab_size": 64,
        "bos_token_id": 2,
        "eos_token_id": 3,
        **({} if "pad_token_id" in options else {"pad_token_id": 0}),
    }
    config, model = build_with(model_type, {**options, **ids})
    weight = model.get_submodule(table).weight
    rows = []
    model.get_submodule(table).register_forward_hook(lambda m, args, made: rows.append(made))
    with torch.no_grad():
        model(torch.randint(4, 60, (1, SEQ_LEN), generator=torch.Generator().manual_seed(1)))
    reading = rw.hf.describe(config)[0]
    encoding = reading.encoding
    if isinstance(encoding, rw.Learned):
        assert weight.shape[0] == encoding.max_positions + reading.offset
        with torch.no_grad():
            encoding.table.copy_(weight[reading.offset :])
    else:
        from transformers.models.distilbert.modeling_distilbert import create_sinusoidal_embeddings

        create_sinusoidal_embeddings(40, 32, weight)
        rows = [weight[None, :SEQ_LEN]]
    own = encoding.embed(torch.zeros(1, SEQ_LEN, 32), encoding.at(torch.arange(SEQ_LEN)))
    assert (rows[0] - own).abs().max() < 1e-6

"""Configs as they were released, and encodings written back into a config."""

import copy
import json

import pytest

import ropewalk as rw
from test_hf_config import LLAMA, LLAMA3, LONG, YARN, numbers

RELEASED = {
    "llama 3.1": ({"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 5e5,
                   "max_position_embeddings": 131072, "pretraining_tp": 1,
                   "rope_scaling": {**LLAMA3, "factor": 8.0}}, 0, "llama3", 8192),
    "smollm2": ({"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3,
                 "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
                 "max_position_embeddings": 8192}, 0, "default", 8192),
    "qwen 3, yarn": ({"model_type": "qwen3", "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 1e6,
                      "max_position_embeddings": 40960, "rope_scaling": {
                          "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
                     0, "yarn", 32768),
    "gpt-oss": ({"model_type": "gpt_oss", "head_dim": 64, "rope_theta": 150000, "max_position_embeddings": 131072,
                 "rope_scaling": {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                                  "beta_slow": 1.0, "truncate": False}}, 0, "yarn", 4096),
    "phi 3, 128k": ({"model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32, "rope_theta": 10000.0,
                     "max_position_embeddings": 131072, "original_max_position_embeddings": 4096, "rope_scaling": {
                         "type": "su", "short_factor": [1.1] * 48, "long_factor": [2.0] * 48}}, 0, "longrope", 4096),
    "phi 2": ({"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4,
               "max_position_embeddings": 2048}, 0, "default", 2048),
    "pythia": ({"model_type": "gpt_neox", "hidden_size": 512, "num_attention_heads": 8, "rotary_pct": 0.25,
                "rotary_emb_base": 10000, "max_position_embeddings": 2048}, 0, "default", 2048),
    "gpt-j": ({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_layer": 28, "n_positions": 2048, "rotary": True,
               "rotary_dim": 64}, 0, "default", 2048),
    "modernbert": ({"model_type": "modernbert", "hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 22,
                    "position_embedding_type": "absolute", "global_attn_every_n_layers": 3, "local_rope_theta": 10000.0,
                    "global_rope_theta": 160000.0, "max_position_embeddings": 8192}, 1, "default", 8192),
    "command r7b": ({"model_type": "cohere2", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
                     "head_dim": 128, "position_embedding_type": "rope_gptj", "rope_theta": 50000, "rotary_pct": 1.0,
                     "sliding_window_pattern": 4, "max_position_embeddings": 8192}, 3, None, 8192),
    "gemma 3": ({"model_type": "gemma3", "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}, "vision_config": {}}, 5, "linear", None),
    "llama 4": ({"model_type": "llama4", "text_config": {
        "model_type": "llama4_text", "num_hidden_layers": 4, "head_dim": 128, "num_attention_heads": 40,
        "no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1,
        "max_position_embeddings": 10485760, "rope_theta": 5e5,
        "rope_scaling": {**LLAMA3, "factor": 8.0}}}, 3, None, 8192),
    "deepseek v3": ({"model_type": "deepseek_v3", "num_attention_heads": 128, "qk_nope_head_dim": 128,
                     "qk_rope_head_dim": 64, "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": {
                         **YARN, "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                         "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}}, 0, "yarn", 4096),
    "qwen2 vl": ({"model_type": "qwen2_vl", "hidden_size": 1536, "num_attention_heads": 12, "vision_config": {},
                  "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "rope_theta": 1e6,
                  "max_position_embeddings": 32768}, 0, "default", 32768),
    "mpt": ({"model_type": "mpt", "d_model": 4096, "n_heads": 32, "n_layers": 2, "max_seq_len": 2048,
             "learned_pos_emb": True, "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch",
                                                      "rope": False, "rope_theta": 10000}}, 0, None, 2048),
    "falcon 7b": ({"model_type": "falcon", "alibi": False, "hidden_size": 4544, "num_attention_heads": 71,
                   "multi_query": True, "new_decoder_architecture": False, "max_position_embeddings": 2048},
                  0, "default", 2048),
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_configs_as_they_were_released_are_read(name):
    config, layer, rope_type, train_len = RELEASED[name]
    reading = rw.hf.describe(config, length=100_000)[layer]
    assert (rope_type, train_len) == (reading.rope_type, reading.train_len)
    wide = {"gemma 3": 256, "phi 2": 80, "deepseek v3": 192, "pythia": 64, "gpt-j": 256, "falcon 7b": 64, "smollm2": 64,
            "gpt-oss": 64, "modernbert": 64, "phi 3, 128k": 96}  # fmt: skip
    assert wide.get(name, 128) == reading.head_dim


WRITTEN = {
    "plain": {},
    "linear": {"rope_scaling": {"type": "linear", "factor": 4}},
    "yarn": {"rope_parameters": {**YARN, "truncate": False, "beta_fast": 16, "attention_factor": 1.1}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "longrope": {"rope_parameters": LONG},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.25},
    "gpt_neox": {"model_type": "gpt_neox", "rotary_pct": 0.375, "rotary_emb_base": 5e4},
    "gptj": {"model_type": "gptj", "rotary_dim": 16},
    "glm": {"model_type": "glm"},
    "gemma3": {"model_type": "gemma3_text", "head_dim": 16, "num_hidden_layers": 6, "rope_theta": 1e6,
               "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8}},
    "modernbert": {"model_type": "modernbert", "num_hidden_layers": 6, "global_rope_theta": 8e4},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 8},
    "cohere2": {"model_type": "cohere2", "num_hidden_layers": 8},
    "llama4": {"model_type": "llama4_text", "num_hidden_layers": 8},
    "ministral3": {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.2}},
    "deepseek": {"model_type": "deepseek_v3", "qk_nope_head_dim": 8, "qk_rope_head_dim": 16,
                 "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 1.0}},
    "qwen2_vl": {"model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}},
    "ernie": {"model_type": "ernie4_5_vl_moe_text", "rope_scaling": {"mrope_section": [11, 11, 10]}},
    "proportional": {"rope_parameters": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}},
    "bloom": {"model_type": "bloom"},
    "falcon": {"model_type": "falcon", "alibi": True},
    "gpt2": {"model_type": "gpt2"},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_reads_as_it_was(name):
    config = {**LLAMA, **WRITTEN[name]}
    before = copy.deepcopy(config)
    encodings = rw.hf.layers(config, length=100)
    written = rw.hf.to_config(encodings, config)
    assert before == config
    again = rw.hf.layers(json.loads(json.dumps(written)), length=100)
    assert [str(e) for e in encodings] == [str(e) for e in again]
    for a, b in zip(encodings, again, strict=True):
        assert [numbers(m)[0] for m in a.modules()] == [numbers(m)[0] for m in b.modules()]
        for x, y in zip(a.modules(), b.modules(), strict=True):
            if getattr(x, "spectrum", None) is not None:
                assert x.spectrum.inv_freq == pytest.approx(y.spectrum.inv_freq, rel=1e-12)
                assert x.spectrum.magnitude == pytest.approx(y.spectrum.magnitude, rel=1e-12)
    assert written == rw.hf.to_config(again, written)


def test_a_stretch_is_written_into_a_models_config():
    stretched = rw.Rotary(64, spectrum=rw.spectra.yarn(64, stretch=8, train_len=64))
    written = rw.hf.to_config(stretched, LLAMA)
    assert {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0} == written["rope_parameters"]  # fmt: skip
    larger = rw.hf.to_config(rw.Rotary(64, spectrum=rw.spectra.ntk(64, stretch=8)), LLAMA)
    assert rw.spectra.ntk(64, stretch=8).inv_freq == pytest.approx(rw.hf.from_config(larger).inv_freq, rel=1e-12)


@pytest.mark.parametrize(
    ("encoding", "config", "text"),
    [
        (
            rw.Rotary(64, layout="interleaved"),
            LLAMA,
            r"encoding must be one that llama can hold on layer 0, got Rotary",
        ),
        (rw.Rotary(64, rotary_dim=32), LLAMA, r"partial_rotary_factor must be absent or 1"),
        (rw.ALiBi(4), LLAMA, r"encoding must be one that llama can hold on layer 0, got ALiBi"),
        (rw.Rotary(64, spectrum=rw.Spectrum([1.0] * 32)), LLAMA, r"spectrum must be made by a function of ropewalk"),
        ([rw.Rotary(64)] * 3, LLAMA, r"encoding must be one for each of 2 layers, got 3"),
        ([rw.Rotary(64), rw.Rotary(64, base=5e5)], LLAMA, r"encoding must be the same on all layers of type None"),
    ],
    ids=["layout", "width", "kind", "by hand", "count", "layers"],
)
def test_what_a_config_cannot_hold_is_refused(encoding, config, text):
    with pytest.raises(ValueError, match=text):
        rw.hf.to_config(encoding, config)

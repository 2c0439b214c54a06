"""A converted model of every supported architecture, run with the other layout's rotation, gives the same logits."""

import json

import pytest
import torch

import tiny_models
from ropewalk import checkpoints, layouts
from ropewalk.checkpoints import families

pytest.importorskip("transformers")
OTHER = {"half": "interleaved", "interleaved": "half"}
FALCONS = {
    "groups": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "one key": {"new_decoder_architecture": False, "multi_query": True},
    "each head": {"new_decoder_architecture": False, "multi_query": False, "num_kv_heads": 8},
}


def _config(model):
    """As config.json has it."""
    return json.loads(model.config.to_json_string(use_diff=False))


def _logits_with(model, state):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
    return tiny_models.logits(model)


def _check(name, monkeypatch, **changes):
    model = tiny_models.build(name, **changes)
    expected = tiny_models.logits(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    to = OTHER[families.FAMILIES[name].layout]
    converted = checkpoints.convert_state(state, _config(model), to)
    tiny_models.rotate_as(model, to, monkeypatch)
    assert float((expected - tiny_models.logits(model)).abs().max()) > 0.05
    torch.testing.assert_close(_logits_with(model, converted), expected, atol=2e-5, rtol=0.0)
    back = checkpoints.convert_state(converted, _config(model), OTHER[to])
    assert {} == {key: value for key, value in back.items() if not torch.equal(value, state[key])}


def test_every_family_of_the_installed_library_is_run_here():
    elsewhere = {"meta", "qwen", "internlm2"}  # their code does not come with transformers
    assert families.FAMILIES.keys() - elsewhere == tiny_models.ARCHITECTURES.keys()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "phi"])
def test_converted_weights_with_the_other_rotation_give_the_same_logits(name, monkeypatch):
    """B49: end to end, whole and partial width, grouped keys 8 on 2, fused and separate projections."""
    _check(name, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(tiny_models.ARCHITECTURES.keys() - {"llama", "gpt_neox", "phi"}))
def test_conversion_keeps_the_logits_of_every_family(name, monkeypatch):
    _check(name, monkeypatch)


@pytest.mark.parametrize("arrangement", FALCONS)
def test_fused_projections_are_taken_apart_as_the_config_says(arrangement, monkeypatch):
    _check("falcon", monkeypatch, **FALCONS[arrangement])


def test_keys_converted_with_the_ratio_of_the_head_counts_give_other_logits(monkeypatch):
    """B47: 8 heads on 2; the ratio, 4, is the mistake."""
    model = tiny_models.build("llama")
    expected = tiny_models.logits(model)
    state = model.state_dict()
    wrong = checkpoints.convert_state(state, _config(model), "interleaved")
    for name in (key for key in state if "k_proj" in key):
        wrong[name] = layouts.to_interleaved_weight(state[name], 8 // 2)
    tiny_models.rotate_as(model, "interleaved", monkeypatch)
    wrong = {name: value.clone() for name, value in wrong.items()}
    assert float((expected - _logits_with(model, wrong)).abs().max()) > 0.05


def test_a_config_with_other_head_counts_is_refused_by_the_name_of_the_tensor():
    model = tiny_models.build("llama")
    config = _config(model) | {"num_key_value_heads": 4}
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj.weight must be of 4 heads x 16 .* got shape"):
        checkpoints.convert_state(model.state_dict(), config, "interleaved")


@pytest.mark.parametrize(
    ("name", "arrangement"),
    [
        ("qwen", (True, True, True, True, False, False)),
        ("internlm2", (True, True, False, True, True, False)),
    ],
)
def test_fused_projections_of_models_with_code_of_their_own(name, arrangement):
    """Two heads of four channels, each with its key: as their published code splits the projection."""
    config = {"model_type": name, "hidden_size": 8, "num_attention_heads": 2}
    tensor = f"model.layers.0.attention.{families.FAMILIES[name].fused}.weight"
    rows = torch.arange(24).view(6, 4)
    expected = [rows[block][[0, 2, 1, 3] if turns else [0, 1, 2, 3]] for block, turns in enumerate(arrangement)]
    got = checkpoints.convert_state({tensor: rows.reshape(24, 1)}, config, "interleaved")[tensor]
    assert torch.cat(expected).tolist() == got.flatten().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_the_readers_of_configs_agree(name):
    """Heads, widths and pairs, as `hf.describe` reads them for running the model."""
    from ropewalk import hf

    config = _config(tiny_models.build(name))
    heads, described = families.read(config), hf.describe(config)
    assert {(heads.num_heads, heads.num_kv_heads, heads.head_dim)} == {
        (layer.num_heads, layer.num_kv_heads, layer.head_dim) for layer in described
    }
    turning = [layer.encoding for layer in described if layer.rope_type is not None]
    found = {(part.rotary_dim, part.layout) for e in turning for part in e.modules() if hasattr(part, "rotary_dim")}
    assert {(heads.rotary_dim, heads.family.layout)} == found

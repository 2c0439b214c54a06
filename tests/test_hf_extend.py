"""A stretched model computes what its new config says, loads to the same logits, and can be put back."""

import copy
import json
import math

import pytest
import torch

import tiny_models

transformers = pytest.importorskip("transformers")
from ropewalk import hf, spectra  # noqa: E402
from ropewalk.hf import extend_config  # noqa: E402

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt_neox", "phi", "cohere", "glm", "gemma2", "granite", "falcon")
METHODS = ("linear", "ntk", "dynamic", "yarn", "llama3")
TOKENS = torch.arange(160).remainder(47)[None] + 2
TRAINED = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
GEMMA = {"num_hidden_layers": 6, "sliding_window": 16}


def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits


def reloaded(model, folder):
    model.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_and_loaded_model_gives_the_same_logits(name, method, tmp_path):
    model = tiny_models.build(name)
    before = logits(model)
    hf.extend(model, to=256, method=method)
    stretched = logits(model)
    assert (stretched - before).abs().max() > 0.01 * before.std()
    torch.testing.assert_close(logits(reloaded(model, tmp_path)), stretched, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("method", METHODS)
def test_undo_brings_back_every_number_and_key(method):
    model = tiny_models.build("llama")
    logits(model)
    expected, config = logits(model), copy.deepcopy(model.config.to_dict())
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with hf.extend(model, to=256, method=method) as done:
        assert not torch.equal(expected, logits(model))
        assert config != model.config.to_dict()
        assert state.keys() == model.state_dict().keys()
    done()
    assert torch.equal(expected, logits(model))
    assert config == model.config.to_dict()


def test_only_the_one_model_is_changed():
    model, other = tiny_models.build("llama"), tiny_models.build("llama")
    expected = logits(other)
    hf.extend(model, to=128)
    assert torch.equal(expected, logits(other))
    assert torch.equal(expected, logits(tiny_models.build("llama")))


@pytest.mark.parametrize("method", METHODS)
def test_tables_are_those_of_the_published_formula(method):
    model = tiny_models.build("llama")  # heads of 16 channels, trained to 64
    hf.extend(model, to=256, method=method)
    logits(model)  # 160 tokens: dynamic frequencies are those of this length
    expected = {
        "linear": lambda: spectra.linear(16, stretch=4),
        "ntk": lambda: spectra.ntk(16, stretch=4),
        "dynamic": lambda: spectra.dynamic_ntk(16, stretch=4, train_len=64, length=160),
        "yarn": lambda: spectra.yarn(16, stretch=4, train_len=64),
        "llama3": lambda: spectra.llama3(16, 10_000.0, stretch=4, train_len=64),
    }[method]()
    tables = model.model.rotary_emb
    torch.testing.assert_close(tables.inv_freq.double(), torch.tensor(expected.inv_freq).double(), rtol=1e-5, atol=0.0)
    assert math.isclose(expected.magnitude, tables.attention_scaling, rel_tol=1e-6)


def test_longer_text_and_other_methods_leave_no_stale_table():
    model = tiny_models.build("llama")
    factors = {"short_factors": [1.0] * 8, "long_factors": [4.0] * 8}
    with hf.extend(model, to=256, method="longrope", **factors):
        logits(model)
        assert hasattr(model.model.rotary_emb, "long_inv_freq")
    assert not hasattr(model.model.rotary_emb, "long_inv_freq")
    hf.extend(model, to=256, method="longrope", **factors)
    logits(model)
    hf.extend(model, to=256, method="yarn")
    fresh = tiny_models.build("llama")
    hf.extend(fresh, to=256, method="yarn")
    assert torch.equal(logits(fresh), logits(model))
    assert not hasattr(model.model.rotary_emb, "long_inv_freq")


def test_stretched_model_is_stretched_anew_from_its_original_length():
    twice, once = tiny_models.build("llama"), tiny_models.build("llama")
    hf.extend(twice, to=128, method="yarn")
    again = hf.extend(twice, to=256, method="yarn")
    hf.extend(once, to=256, method="yarn")
    assert (64, 4.0) == (again.train_len, again.factor)
    assert torch.equal(logits(once), logits(twice))


def test_hooks_on_the_tables_stay():
    model, calls = tiny_models.build("llama"), []
    model.model.rotary_emb.register_forward_hook(lambda *_: calls.append(1))
    hf.extend(model, to=128)
    logits(model)
    assert [1] == calls


@pytest.mark.parametrize("method", ["linear", "yarn"])
@pytest.mark.parametrize("name", ["gemma3_text", "olmo3"])
def test_only_layers_that_see_everything_are_stretched(name, method, tmp_path):
    model = tiny_models.build(name, **GEMMA)
    local, whole = "sliding_attention", "full_attention"
    kept = getattr(model.model.rotary_emb, f"{local}_inv_freq").clone()
    plain = getattr(model.model.rotary_emb, f"{whole}_inv_freq").clone()
    hf.extend(model, to=256, method=method)
    assert torch.equal(kept, getattr(model.model.rotary_emb, f"{local}_inv_freq"))
    assert not torch.equal(plain, getattr(model.model.rotary_emb, f"{whole}_inv_freq"))
    assert "default" == model.config.rope_parameters[local]["rope_type"]
    assert method == model.config.rope_parameters[whole]["rope_type"]
    torch.testing.assert_close(logits(reloaded(model, tmp_path)), logits(model), atol=1e-6, rtol=0.0)


def test_config_alone_is_stretched_alike():
    model = tiny_models.build("llama")
    before = copy.deepcopy(model.config.to_dict())
    made = hf.extended_config(model.config, to=256)
    assert before == model.config.to_dict()
    hf.extend(model, to=256)
    assert made["rope_parameters"] == model.config.rope_parameters
    assert 256 == made["max_position_embeddings"] == model.config.max_position_embeddings


def test_dynamic_keeps_the_length_that_transformers_computes_with():
    made = hf.extended_config(TRAINED, to=8192, method="dynamic")
    assert (4096, "dynamic", 2.0) == (
        made["max_position_embeddings"],
        made["rope_parameters"]["rope_type"],
        made["rope_parameters"]["factor"],
    )


RAISED = {**TRAINED, "max_position_embeddings": 8192}
REFUSED = {
    "shorter than trained": (TRAINED, {"to": 2048}, r"^to must be at least the trained length \(4096\), got 2048"),
    "no integer": (TRAINED, {"to": 8192.5}, r"^to must be an integer"),
    "factor below the ratio": (TRAINED, {"to": 8192, "factor": 0.5}, r"^factor must be at least .* \(2\), got 0.5"),
    "factor is NaN": (TRAINED, {"to": 8192, "factor": math.nan}, r"^factor must be finite, got nan"),
    "unknown method": (TRAINED, {"to": 8192, "method": "spiral"}, r"^method must be one of linear, .*, got 'spiral'"),
    "strange option": (TRAINED, {"to": 8192, "beta_fst": 3}, r"^beta_fst must be absent with method 'yarn', got 3"),
    "option of another method": (TRAINED, {"to": 8192, "method": "ntk", "beta_fast": 3}, r"^beta_fast must be absent"),
    "NaN option": (TRAINED, {"to": 8192, "beta_fast": math.nan}, r"^beta_slow must be positive and below beta_fast"),
    "NaN magnitude": (TRAINED, {"to": 8192, "magnitude": math.nan}, r"^magnitude must be finite and positive"),
    "no lists": (TRAINED, {"to": 8192, "method": "longrope"}, r"^short_factors must be given"),
    "short list": (
        TRAINED,
        {"to": 8192, "method": "longrope", "short_factors": [1] * 8, "long_factors": [1] * 7},
        r"^long_factors must be one number for each of 8 pairs, got 7",
    ),
    "NaN in a list": (
        TRAINED,
        {"to": 8192, "method": "longrope", "short_factors": [math.nan] * 8, "long_factors": [1] * 8},
        r"^short_factors must be finite and positive throughout, got nan",
    ),
    "raised, original unknown": (
        {**RAISED, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"to": 16384},
        r"^original_max_position_embeddings must be given where rope of type 'linear' stretches, got None",
    ),
    "yarn, original unknown": (
        {**RAISED, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"to": 16384},
        r"original_max_position_embeddings must be given, got None",
    ),
    "base raised already": (
        {**RAISED, "original_max_position_embeddings": 4096},
        {"to": 16384},
        r"^original_max_position_embeddings must be max_position_embeddings \(8192\) where rope_theta may be raised",
    ),
    "no length": ({"head_dim": 16}, {"to": 8192}, r"^max_position_embeddings must be given, got None\nhint: train_len"),
    "factor of the old config": (
        {**RAISED, "rope_scaling": {"rope_type": "linear", "factor": 0.5}},
        {"to": 16384},
        r"rope_scaling.factor must be finite and at least 1, got 0.5",
    ),
    "ALiBi": (
        {"model_type": "bloom", "n_head": 4, "hidden_size": 64},
        {"to": 8192},
        r"^model must be .* bloom with ALiBi",
    ),
    "learned": (
        {"model_type": "gpt2", "n_head": 4, "n_embd": 64, "n_positions": 128},
        {"to": 8192},
        r"^model must be one whose queries and keys turn, got gpt2 with a learned table",
    ),
    "fixed table": (
        {"model_type": "gptj", "n_head": 4, "n_embd": 64, "n_positions": 128, "rotary_dim": 4},
        {"to": 8192},
        r"^model_type must be one whose config can hold a stretch, got 'gptj'",
    ),
    "every layer slides": (
        {**TRAINED, "model_type": "mistral", "sliding_window": 1024},
        {"to": 8192},
        r"^sliding_window must be absent or at least 8192 on some layer that turns, got 1024",
    ),
    "what sees everything does not turn": (
        {**TRAINED, "model_type": "cohere2", "sliding_window": 1024, "num_hidden_layers": 4},
        {"to": 8192},
        r"^sliding_window must be absent or at least 8192",
    ),
    "softmax factor in the modules": (
        {
            "model_type": "deepseek_v3",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 2,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "max_position_embeddings": 8192,
            "rope_scaling": {
                "type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 4096,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
        {"to": 16384},
        r"^mscale_all_dim must be absent",
    ),
}


@pytest.mark.errors
@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_anything_is_loaded(case, monkeypatch, tmp_path):
    config, options, words = REFUSED[case]
    before = copy.deepcopy(config)
    with pytest.raises((ValueError, TypeError), match=words):
        hf.extended_config(config, **options)
    assert before == config
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises((ValueError, TypeError), match=words):
        hf.extended_config(tmp_path, **options)


def test_train_len_helps_where_the_config_is_silent():
    config = {**RAISED, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    made = hf.extended_config(config, to=16384, train_len=4096)
    assert {"factor": 4.0, "original_max_position_embeddings": 4096}.items() <= made["rope_parameters"].items()


def test_keys_that_would_win_over_the_new_block_are_named():
    config = {**TRAINED, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 1.0}}
    made = extend_config.stretch(config, to=8192)
    assert ("rope_theta", "rope_scaling") == made.dropped
    assert {"rope_parameters", "max_position_embeddings"} == made.block.keys()
    pasted = {**{key: value for key, value in config.items() if key not in made.dropped}, **made.block}
    assert made.config == pasted


def test_what_was_stretched_by_base_or_linearly_says_from_where():
    for method in ("linear", "ntk"):
        assert 4096 == hf.extended_config(TRAINED, to=8192, method=method)["original_max_position_embeddings"]
    linear = hf.extended_config(TRAINED, to=8192, method="linear")
    assert 4.0 == hf.extended_config(linear, to=16384, method="linear")["rope_parameters"]["factor"]
    with pytest.raises(ValueError, match="rope_theta may be raised already"):
        hf.extended_config(hf.extended_config(TRAINED, to=8192, method="ntk"), to=16384)


def test_refused_model_is_left_as_it_was():
    model = tiny_models.build("phimoe")  # its tables ask for keys of longrope
    expected, config = logits(model), copy.deepcopy(model.config.to_dict())
    with pytest.raises(ValueError, match="method must be one that PhimoeRotaryEmbedding can compute"):
        hf.extend(model, to=256, method="yarn")
    assert torch.equal(expected, logits(model))
    assert config == model.config.to_dict()


def test_module_that_ignores_its_config_is_found_out(monkeypatch):
    model = tiny_models.build("llama")
    expected = logits(model)
    own = type(model.model.rotary_emb)

    def ignoring(self, config):
        plain = copy.deepcopy(config)
        plain.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        original(self, plain)

    original = own.__init__
    monkeypatch.setattr(own, "__init__", ignoring)
    with pytest.raises(ValueError, match="method must be one that LlamaRotaryEmbedding computes as published"):
        hf.extend(model, to=256)
    assert torch.equal(expected, logits(model))


@pytest.mark.errors
def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="model must be a model of transformers, got Linear"):
        hf.extend(torch.nn.Linear(2, 2), to=256)


def test_method_list_is_what_options_know():
    assert ("linear", "ntk", "dynamic", "yarn", "llama3", "longrope") == extend_config.METHODS


def test_extensions_are_undone_in_their_order():
    model = tiny_models.build("llama")
    before = logits(model)
    first = hf.extend(model, to=128, method="yarn")
    second = hf.extend(model, to=256, method="linear")
    with pytest.raises(ValueError, match=r"extension must be the last one made of .*\n.*undo Extension\('linear"):
        first()
    second()
    first()
    assert torch.equal(before, logits(model))
    assert "longer" != getattr(model.config, "rope_type", None)


def phi3():
    short, long = [1.0] * 4, [2.0] * 4
    block = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": short, "long_factor": long,
             "original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}  # fmt: skip
    lengths = {"original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
    return tiny_models.build("phi3", rope_parameters=block, **lengths)


def test_a_share_of_one_stays_where_it_was_said(tmp_path):
    """Phi-3's own check of its config asks for the key."""
    model = phi3()
    hf.extend(model, to=128, method="ntk")
    assert torch.equal(logits(model), logits(reloaded(model, tmp_path)))


@pytest.mark.parametrize("method", ["linear", "dynamic", "llama3", "yarn"])
def test_a_method_that_a_family_cannot_hold_is_refused_before_anything_changes(method):
    model = phi3()
    before = logits(model)
    with pytest.raises(ValueError, match=r"method must be one that"):
        hf.extend(model, to=128, method=method)
    assert torch.equal(before, logits(model))


@pytest.mark.errors
@pytest.mark.parametrize("options", [{"truncate": "x"}, {"magnitude": "x"}])
def test_options_are_checked_by_name(options):
    with pytest.raises(TypeError, match=f"{next(iter(options))} must be"):
        hf.extended_config(tiny_models.build("llama").config.to_dict(), to=128, method="yarn", **options)

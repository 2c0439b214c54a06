"""A patched model gives the logits that it gave before, alone among its kind, and can be put back."""

import copy
import io

import pytest
import torch

import tiny_models

transformers = pytest.importorskip("transformers")
from ropewalk import attention, kernels  # noqa: E402
from ropewalk.hf import patching  # noqa: E402
from ropewalk.hf.patching import patch  # noqa: E402

ROTARY = ("llama", "qwen2", "mistral", "gpt_neox", "phi", "phi3", "cohere", "glm", "gemma2", "gpt_oss", "falcon",
          "minimax_m2", "ernie4_5")  # fmt: skip
ALIBI = {
    "bloom": {"hidden_size": 48, "n_head": 6, "n_layer": 2},
    "mpt": {"d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 32},
}
TOKENS = torch.arange(2, 26).view(2, 12)


def build(name, seed=0):
    """Tiny, random in every parameter, of modest scores."""
    if name not in ALIBI:
        return tiny_models.build(name, seed)
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(name, vocab_size=50, **ALIBI[name])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def logits(model, tokens=TOKENS, **options):
    with torch.no_grad():
        found = model(tokens, **options).logits
    return found / found.std()


@pytest.fixture
def counted(monkeypatch):
    """How often the fast rotation and `attend` were called by a patched model."""
    calls = {"turn": 0, "attend": 0}

    def count(name, function):
        def counting(*args, **kwargs):
            calls[name] += 1
            return function(*args, **kwargs)

        return counting

    monkeypatch.setattr(patching.kernels, "turn", count("turn", kernels.turn))
    monkeypatch.setattr(patching, "attend", count("attend", attention.attend))
    return calls


@pytest.mark.parametrize("name", [*ROTARY, *ALIBI])
def test_logits_stay_and_come_through_ropewalk(name, counted):
    model = build(name)
    expected = logits(model)
    with patch(model) as done:
        counted.update(turn=0, attend=0)
        torch.testing.assert_close(logits(model), expected, atol=1e-5, rtol=0.0)
        assert (0, 2) == (counted["turn"], counted["attend"]) if name in ALIBI else (4, 0) == tuple(counted.values())
        assert done.modules == (3 if name in ALIBI else 2)
    counted.update(turn=0, attend=0)
    assert torch.equal(expected, logits(model))
    assert {"turn": 0, "attend": 0} == counted


@pytest.mark.parametrize("name", ["llama", "gpt_neox", *ALIBI])
def test_generation_with_a_cache_is_identical(name):
    model = build(name)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(TOKENS, **options)
    with patch(model):
        assert torch.equal(expected, model.generate(TOKENS, **options))
        assert torch.equal(expected, model.generate(TOKENS, **options, use_cache=False))


@pytest.mark.parametrize("name", ["llama", *ALIBI])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_token(name, side):
    model = build(name)
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    mask = mask if side == "left" else mask.flip(1)
    expected = logits(model, attention_mask=mask)
    with patch(model):
        got = logits(model, attention_mask=mask)
    assert not torch.equal(expected, logits(model))
    scale = expected[mask.bool()].std() / got[mask.bool()].std()
    torch.testing.assert_close(got[mask.bool()] * scale, expected[mask.bool()], atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("name", ALIBI)
def test_left_padded_generation_equals_each_row_alone(name):
    model = build(name)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = model.generate(TOKENS[1:, 4:], **options)[:, 8:]
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :4] = 0
    with patch(model):
        assert torch.equal(alone, model.generate(TOKENS, attention_mask=mask, **options)[1:, 12:])


def test_mpt_runs_beyond_the_length_it_was_built_for():
    model, longer = build("mpt"), build("mpt")
    tokens = torch.arange(100).remainder(47)[None] + 2
    with pytest.raises(RuntimeError):
        logits(model, tokens)
    longer.config.max_seq_len = 128  # what transformers would need to be told
    with patch(model):
        torch.testing.assert_close(logits(model, tokens), logits(longer, tokens), atol=1e-5, rtol=0.0)


@pytest.mark.parametrize("name", ["llama", "gpt_neox", *ALIBI])
def test_gradients_stay(name):
    model = build(name)
    model(TOKENS, labels=TOKENS).loss.backward()
    expected = {key: x.grad.clone() for key, x in model.named_parameters()}
    model.zero_grad()
    with patch(model):
        model(TOKENS, labels=TOKENS).loss.backward()
    for key, x in model.named_parameters():
        torch.testing.assert_close(
            x.grad, expected[key], atol=1e-5 * float(expected[key].abs().max()) + 1e-7, rtol=1e-4
        )


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_no_other_model_is_touched_and_files_are_the_same(name, counted, tmp_path):
    model, other = build(name), build(name, seed=1)
    before, state = logits(other), {key: x.clone() for key, x in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    with patch(model):
        counted.update(turn=0, attend=0)
        assert torch.equal(before, logits(other))
        assert torch.equal(before, logits(build(name, seed=1)))
        assert {"turn": 0, "attend": 0} == counted
        assert list(state) == list(model.state_dict())
        model.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "before").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes()


@pytest.mark.parametrize("name", ["llama", "bloom", "mpt"])
def test_copies_and_pickles_follow_their_own_weights(name):
    model = build(name)
    expected = logits(model)
    with patch(model):
        copied = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    for twin in (copied, loaded):
        torch.testing.assert_close(logits(twin), expected, atol=1e-5, rtol=0.0)


def test_what_cannot_be_patched_is_named():
    with pytest.raises(
        ValueError, match=r"model must be rotary with apply_rotary_pos_emb, BLOOM or MPT, got GPT2LMHead"
    ):
        patch(build_gpt2())
    model = build("llama")
    undo = patch(model)
    with pytest.raises(ValueError, match=r"model must be without a patch or hook on its attention, got _Forward"):
        patch(model)
    undo()
    undo()
    patch(model)()
    bloom = build("bloom")
    with patch(bloom):
        with pytest.raises(ValueError, match=r"output_attentions must be off"):
            bloom(TOKENS, output_attentions=True)
        with pytest.raises(ValueError, match=r"attention_mask must be \(batch, k_len\)"):
            bloom(TOKENS, attention_mask=torch.ones(2, 1, 12, 12))
        bloom.transformer.h[0].self_attention.attention_dropout.p = 0.5
        with pytest.raises(ValueError, match=r"attention dropout must be 0 in training"):
            bloom.train()(TOKENS)


@pytest.mark.parametrize(("name", "changes", "text"), [
    ("falcon", {"alibi": True}, "FalconForCausalLM with ALiBi"),
    ("deepseek_v3", {"rope_interleave": True}, "with apply_rotary_pos_emb_interleave"),
])  # fmt: skip
def test_a_patch_that_would_change_nothing_is_refused(name, changes, text):
    with pytest.raises(ValueError, match=f"model must be rotary .*, got .*{text}"):
        patch(tiny_models.build(name, **changes))


@pytest.mark.errors
@pytest.mark.parametrize("wrong", [None, {}, "model"])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match="model must be a model of transformers, got"):
        patch(wrong)


def build_gpt2():
    config = transformers.AutoConfig.for_model("gpt2", n_embd=32, n_head=2, n_layer=1, vocab_size=50)
    return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_patched_model_compiles_as_one_graph_to_the_same_logits(name):
    model = build(name)
    expected = logits(model)
    with patch(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(logits(compiled, use_cache=False), expected, atol=1e-5, rtol=0.0)

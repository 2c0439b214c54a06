"""Which layout a checkpoint is in, and what is refused by name because nobody can know."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkpoint_fixtures as made
from ropewalk import checkpoints
from ropewalk.checkpoints import evidence, families, turns

LAYOUTS = ("half", "interleaved")
ATTENTION = made.LAYER.format(0, "")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shards", [1, 3])
def test_norms_that_follow_the_frequency_tell_the_layout(tmp_path, layout, shards):
    folder = made.write(tmp_path / "in", made.shaped(layout=layout), shards=shards)
    found = checkpoints.detect(folder)
    assert layout == found.layout
    assert "8 layers" in found.evidence[0]
    other = LAYOUTS[LAYOUTS[0] == layout]
    done = checkpoints.convert(folder, tmp_path / "out", other)
    assert (layout, other) == (done["from"], done["to"])
    assert other == checkpoints.detect(tmp_path / "out").layout


@pytest.mark.parametrize("layers", [1, 2, 8, 24])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_random_weights_tell_nothing_and_conversion_asks(tmp_path, layers, seed):
    folder = made.write(tmp_path / "in", made.tensors(layers=layers, seed=seed))
    found = checkpoints.detect(folder)
    assert found.layout is None
    assert "not conclusive" in found.evidence[0]
    with pytest.raises(ValueError, match=r"layout must be told .*, got no conclusive evidence\nhint: --from half if"):
        checkpoints.convert(folder, tmp_path / "out", "interleaved")


def test_order_that_is_not_of_the_frequency_is_not_taken_for_a_layout(tmp_path):
    """Norms differ as much as in a trained model, but each layer has its channels in an order of its own."""
    state = made.shaped(layers=24)
    for layer in range(24):
        order = torch.randperm(16, generator=torch.Generator().manual_seed(layer))
        for part in ("q_proj", "k_proj"):
            name = made.LAYER.format(layer, part) + ".weight"
            state[name] = state[name].view(-1, 16, 64)[:, order].flatten(0, 1)
    assert checkpoints.detect(made.write(tmp_path / "in", state)).layout is None


def test_false_alarms_on_channels_in_no_order_are_rarer_than_one_in_a_hundred():
    generator = torch.Generator().manual_seed(0)
    planned = {
        f"{layer}.{part}.weight": turns.Turn((True,) * heads, 16, 16, str(layer), True)
        for layer in range(6)
        for part, heads in (("q", 2), ("k", 1))
    }

    def alarm(_):
        return evidence.measure(planned, lambda *_: torch.rand(16, 1, generator=generator) + 0.1).layout is not None

    assert sum(map(alarm, range(300))) <= 3


def test_share_explained_is_what_least_squares_explains():
    """Another route: solve for the curve, compare the residual."""
    log_norms = torch.randn(5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = evidence.explained(log_norms)
    for share, pair in zip(got, (torch.arange(32) % 16, torch.arange(32) // 2), strict=True):
        place = (pair.double() + 0.5) / 16 * torch.pi
        design = torch.stack((torch.ones_like(place), place.cos(), (2 * place).cos()), -1)
        fitted = (design @ torch.linalg.lstsq(design, log_norms.T).solution).T
        rest = (log_norms - fitted).square().sum()
        total = (log_norms - log_norms.mean(-1, keepdim=True)).square().sum()
        assert float(1 - rest / total) == pytest.approx(share, abs=1e-12)


def test_a_record_against_the_weights_is_a_contradiction(tmp_path):
    folder = made.write(tmp_path / "in", made.shaped(), metadata={"ropewalk.layout": "interleaved"})
    found = checkpoints.detect(folder)
    assert (None, "these contradict each other") == (found.layout, found.evidence[-1])


def test_shards_of_two_conversions_contradict_each_other(tmp_path):
    folder = made.write(tmp_path / "in", made.tensors(), shards=2)
    checkpoints.convert(folder, tmp_path / "out", "interleaved", layout="half")
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_bytes(
        (folder / "model-00001-of-00002.safetensors").read_bytes()
    )
    found = checkpoints.detect(tmp_path / "out")
    assert (None, "the shards contradict each other") == (found.layout, found.evidence[-1])


def test_what_is_told_wins_over_the_weights_and_is_said(tmp_path):
    folder = made.write(tmp_path / "in", made.shaped(layout="interleaved"))
    done = checkpoints.convert(folder, tmp_path / "out", "interleaved", layout="half")
    assert "the checkpoint looks interleaved; taken as half, as told" in done["notes"]


def test_there_is_nothing_to_do_in_the_layout_it_is_in(tmp_path):
    folder = made.write(tmp_path / "in", made.shaped())
    with pytest.raises(ValueError, match=r"to must be the other layout, got half, which the checkpoint is in"):
        checkpoints.convert(folder, tmp_path / "out", "half")


CONFIG = made.CONFIG


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({**CONFIG, "model_type": "deepseek_v3"}, r"model_type must be .* got 'deepseek_v3' \(latent attention"),
        ({**CONFIG, "model_type": "gpt2"}, r"got 'gpt2' \(its positions are embeddings: nothing turns"),
        ({**CONFIG, "model_type": "bloom"}, r"got 'bloom' \(it has ALiBi"),
        ({**CONFIG, "model_type": "qwen2_vl"}, r"got 'qwen2_vl' \(its pairs turn by several axes"),
        ({**CONFIG, "model_type": "unheard_of"}, r"got 'unheard_of'\nhint: known: apertus, "),
        ({"hidden_size": 64}, r"model_type must be one that can be converted, got None"),
        ({**CONFIG, "kv_lora_rank": 16}, r"kv_lora_rank must be absent"),
        ({**CONFIG, "partial_rotary_factor": 0.5}, r"partial_rotary_factor must be absent or the whole head"),
        ({**CONFIG, "rope_scaling": {"partial_rotary_factor": 0.5}}, r"rope_scaling.partial_rotary_factor must be abs"),
        ({**CONFIG, "n_head": 4}, r"n_head must be equal to num_attention_heads \(8\), got 4"),
        ({**CONFIG, "num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of num_attention_heads \(8\)"),
        ({**CONFIG, "head_dim": None, "hidden_size": 60}, r"hidden_size must be a multiple of num_attention_heads"),
        ({**CONFIG, "head_dim": 15}, r"rotary_dim must be even, .* got 15"),
        ({"model_type": "llama", "hidden_size": 64}, r"config must be one with num_attention_heads"),
        ({"model_type": "llama", "num_attention_heads": 8}, r"config must be one with head_dim or hidden_size"),
        ({**CONFIG, "model_type": "phi", "partial_rotary_factor": 0.4, "rotary_pct": 0.5}, r"rotary_pct must be equal"),
        ({**CONFIG, "model_type": "gptj"}, r"rotary_dim must be even, at least 2"),
        ({**CONFIG, "model_type": "falcon", "alibi": True}, r"alibi must be false: with ALiBi nothing turns"),
    ],
)
def test_configs_that_cannot_be_followed_are_refused_by_key(config, match):
    with pytest.raises(ValueError, match=match):
        families.read(config)


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"model_type": "phi"}, 8),
        ({"model_type": "phi", "partial_rotary_factor": 0.25}, 4),
        ({"model_type": "phi", "rope_parameters": {"partial_rotary_factor": 0.25, "rope_type": "default"}}, 4),
        ({"model_type": "phi", "rope_scaling": {"full": {"partial_rotary_factor": 0.25}}}, 4),
        ({"model_type": "gpt_neox"}, 4),
        ({"model_type": "gpt_neox", "rotary_pct": 1.0}, 16),
        ({"model_type": "stablelm", "rope_pct": 0.5}, 8),
        ({"model_type": "minimax_m2", "rotary_dim": 8}, 8),
        ({"model_type": "glm"}, 8),
        ({"model_type": "llama", "partial_rotary_factor": 1.0}, 16),
    ],
)
def test_every_spelling_of_the_width_is_read(config, width):
    """B52, B54: with the family's own default where the key is absent."""
    assert width == families.read({**CONFIG, **config}).rotary_dim


@pytest.mark.parametrize(
    ("name", "shape", "match"),
    [
        ("q_proj.qweight", (8, 128), r"self_attn.q_proj.qweight must be a weight, .*got 'qweight'"),
        ("q_proj.weight.absmax", (16,), r"q_proj.weight.absmax must be a weight, bias, LoRA factor"),
        ("q_proj.weight_scale_inv", (1, 1, 2), r"q_proj.weight_scale_inv must be of 8 heads x 16 .* = 128 rows"),
        ("k_proj.lora_B.weight", (31, 4), r"k_proj.lora_B.weight must be of 2 heads"),
        ("q_norm.weight", (24,), r"q_norm.weight must be of head_dim \(16\) channels, or of 128 for all heads"),
        ("q_rope_proj.weight", (64, 64), r"q_rope_proj.weight must be a part of attention whose channels are known"),
        ("query_key_value.weight", (192, 64), r"query_key_value.weight must be a part of attention"),
    ],
)
def test_tensors_nobody_can_explain_are_refused_by_name(name, shape, match):
    state = made.tensors() | {ATTENTION + name: torch.zeros(shape)}
    with pytest.raises(ValueError, match=match):
        checkpoints.convert_state(state, CONFIG, "interleaved")


def test_packed_weights_other_towers_and_lost_halves_are_refused_by_name(tmp_path):
    state = made.tensors()
    packed = state | {ATTENTION + "q_proj.weight": torch.zeros(4096, 1, dtype=torch.uint8)}
    with pytest.raises(ValueError, match=r"q_proj.weight must be of 8 heads .*\nhint: if it is quantised, convert"):
        checkpoints.convert_state(packed, CONFIG, "interleaved")
    tower = state | {"vision.layers.0.attn.q_proj.weight": torch.zeros(128, 64)}
    with pytest.raises(ValueError, match=r"checkpoint must be of one kind of attention, got .* and vision.layers.N"):
        checkpoints.convert_state(tower, CONFIG, "interleaved")
    fused = state | {"vision.layers.0.attn.qkv_proj.weight": torch.zeros(192, 64)}
    with pytest.raises(ValueError, match=r"vision.layers.0.attn.qkv_proj.weight must be a projection that this model"):
        checkpoints.convert_state(fused, CONFIG, "interleaved")
    with pytest.raises(
        ValueError, match=r"checkpoint must be one with q_proj and k_proj \(llama\), got 1 other tensors"
    ):
        checkpoints.convert_state({"x": torch.zeros(2)}, CONFIG, "interleaved")
    lost = {name: x for name, x in state.items() if name != ATTENTION + "k_proj.weight"}
    del lost[ATTENTION + "k_proj.bias"]
    with pytest.raises(ValueError, match=r"layers.0.self_attn.k_proj must be in the checkpoint"):
        checkpoints.detect(made.write(tmp_path / "in", lost))


def test_words_that_are_no_layout_and_paths_that_are_nothing_are_refused(tmp_path):
    folder = made.write(tmp_path / "in", made.tensors())
    for options, match in (
        ({"to": "neox"}, r"to must be half or interleaved, got 'neox'"),
        ({"to": "half", "layout": "gptj"}, r"from must be half or interleaved, got 'gptj'"),
    ):
        with pytest.raises(ValueError, match=match):
            checkpoints.convert(folder, tmp_path / "out", **options)
    with pytest.raises(ValueError, match=r"IN must be an existing file or folder"):
        checkpoints.detect(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"IN must be a .safetensors or .gguf file, or a folder"):
        checkpoints.detect(folder / "config.json")


def test_numbers_that_are_not_values_are_not_measured(tmp_path):
    """Integers with scales: the weights say nothing; the layout has to be given."""
    state = made.shaped()
    for name in [key for key in state if key.endswith(("q_proj.weight", "k_proj.weight"))]:
        state[name] = state[name].clamp(-100, 100).to(torch.int8)
        state[name + "_scale"] = torch.rand(len(state[name]), 1)
    found = checkpoints.detect(made.write(tmp_path / "in", state))
    assert (None, "weights: none that can be measured") == (found.layout, found.evidence[0])


@pytest.mark.parametrize("as_json", [False, True])
def test_command_converts_tells_and_detects(tmp_path, monkeypatch, capsys, as_json):
    from ropewalk import cli

    folder, out = made.write(tmp_path / "in", made.shaped()), tmp_path / "out"

    def call(*arguments):
        extra = ["--json"] if as_json else []
        monkeypatch.setattr("sys.argv", ["ropewalk", "convert", *map(str, arguments), *extra])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, *capsys.readouterr()

    code, said, err = call(folder, out, "--to", "interleaved")
    assert (0, "") == (code, err)
    if as_json:
        assert {"from": "half", "to": "interleaved", "tensors": 32}.items() <= json.loads(said).items()
    else:
        assert f"{out}: half -> interleaved, 32 tensors reordered" in said
        assert "note: readers that know the model by its config expect half" in said
    assert load_file(out / "model.safetensors").keys() == made.shaped().keys()
    code, said, err = call(out, "--detect")
    assert (0, "") == (code, err)
    assert "interleaved" == (json.loads(said)["layout"] if as_json else said.splitlines()[0].removeprefix("layout: "))
    save_file(made.tensors(), folder / "model.safetensors")
    assert 1 == call(folder, "--detect")[0]
    assert (2, "", "error: --to must be given, got none\n") == call(folder, out)
    assert (2, "", "error: OUT must be given, got none\n") == call(folder, "--to", "half")
    code, said, err = call(folder, out, "--to", "half", "--from", "interleaved")
    assert (2, "", f"error: OUT must be absent, got {out}, which exists\nhint: --force replaces it\n") == (
        code,
        said,
        err,
    )

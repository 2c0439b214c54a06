"""Spectra of configs against the functions and modules of transformers, type by type and family by family."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import ropewalk as rw
from ropewalk.hf.config_families import FAMILIES

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

MAX_LEN, ORIGINAL = 16384, 4096
ROUNDING = 2e-6  # theirs: powers in float32
TYPES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "yarn, not truncated": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
                            "truncate": False, "beta_fast": 16, "beta_slow": 2},
    "yarn, weights": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": ORIGINAL,
                      "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, no factor": {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": ORIGINAL},
    "yarn, magnitude": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL,
                        "attention_factor": 0.9},
    "llama3": {"factor": 8.0, "original_max_position_embeddings": ORIGINAL, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "longrope, no factor": {"rope_type": "longrope", "original_max_position_embeddings": ORIGINAL},
    "proportional": {},
    "proportional, factor": {"rope_type": "proportional", "factor": 2.0},
}  # fmt: skip


def block_of(name, base, share, head_dim):
    block = {"rope_type": name, "rope_theta": base, "partial_rotary_factor": share, **TYPES[name]}
    if block["rope_type"] == "longrope":
        pairs = int(head_dim * share) // 2
        block |= {"short_factor": [1.0 + i / 7 for i in range(pairs)], "long_factor": [2.0 + i for i in range(pairs)]}
    return block


LENGTHS = (None, ORIGINAL, ORIGINAL + 1, MAX_LEN, 3 * MAX_LEN)
CASES = [(name, n) for name in TYPES for n in LENGTHS if n is None or name.startswith(("dynamic", "longrope"))]


@pytest.mark.parametrize(("name", "length"), CASES)
def test_every_type_is_that_of_transformers(name, length):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for head_dim in (2, 4, 64, 80, 96, 128, 256):
        for base in (1e2, 1e4, 5e5, 1e6, 1e7):
            for share in (1.0, 0.5, 0.25, 0.4):
                width = int(head_dim * share)
                if width < 2 or width % 2 or (name == "dynamic" and width == 2):
                    continue
                block = block_of(name, base, share, head_dim)
                theirs = SimpleNamespace(
                    **{"head_dim": head_dim, "hidden_size": 1, "num_attention_heads": 1},
                    max_position_embeddings=MAX_LEN,
                    rope_parameters=block,
                    standardize_rope_params=list,
                )
                expected, magnitude = ROPE_INIT_FUNCTIONS[block["rope_type"]](theirs, "cpu", seq_len=length)
                config = {"head_dim": head_dim, "max_position_embeddings": MAX_LEN, "rope_parameters": block}
                spectrum = rw.hf.from_config(config, length=length or 1).spectrum
                assert expected.double().tolist() == pytest.approx(spectrum.inv_freq, rel=ROUNDING)
                assert magnitude == pytest.approx(spectrum.magnitude, rel=1e-12)


SIZES = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 6, "vocab_size": 16,
         "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LATENT = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 32}
WIDE = {"head_dim": 128}  # for which their default sections are made
NEEDED = {name: LATENT if family.latent else WIDE if family.sections else {} for name, family in FAMILIES.items()}
ROTARY = [name for name, family in FAMILIES.items() if family.kind == "rotary" and family.refused is None]
OUTER = {"qwen2_vl", "qwen2_5_vl", "gemma3"}  # whose text part is a family of its own


def rotary_module(config):
    """The module of transformers that makes this config's tables."""
    home = type(config).__module__.replace("configuration", "modeling")
    try:
        module = importlib.import_module(home)
    except ModuleNotFoundError:  # a config of its own, and another family's model
        module = importlib.import_module("transformers.models.llama.modeling_llama")
    home = module.__name__
    made_here = (c for c in vars(module).values() if isinstance(c, type) and c.__module__ == home)
    classes = [c for c in made_here if "RotaryEmbedding" in c.__name__ and not any(
        word in c.__name__ for word in ("Vision", "Audio", "Dynamic"))]  # fmt: skip
    return classes[0](config)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ROTARY) - OUTER))
def test_what_a_config_leaves_out_is_what_its_family_takes(name):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    bare = {**SIZES, **NEEDED[name]}
    theirs = CONFIG_MAPPING[name](**bare)
    module = rotary_module(theirs)
    readings = rw.hf.describe({"model_type": name, **bare, **_written_by_the_class(theirs)}, length=32)
    tables = {n.removesuffix("_inv_freq"): b for n, b in module.named_buffers() if n.endswith("inv_freq")}
    assert any("original" not in n for n in tables) or hasattr(module, "embed_positions")
    for reading in readings:
        turning = next((p for p in reading.encoding.modules() if getattr(p, "spectrum", None) is not None), None)
        if turning is None:
            continue
        table = tables.get(reading.layer_type, tables.get("inv_freq"))
        if table is None:  # GPT-J: sines, then cosines, of each position
            table = torch.asin(module.embed_positions[1, : turning.rotary_dim // 2])
            assert table.double().tolist() == pytest.approx(turning.inv_freq, rel=1e-5)
            continue
        inv_freq = sorted(turning.inv_freq, reverse=True)
        assert sorted(table.double().tolist(), reverse=True) == pytest.approx(inv_freq, rel=ROUNDING)


def _written_by_the_class(theirs):
    """Scaling is part of what some classes write by default; the rest has to come from the table of families."""
    block = theirs.rope_parameters if hasattr(theirs, "rope_parameters") else None
    scaled = isinstance(block, dict) and block.get("rope_type", "default") != "default"
    return {"rope_parameters": block} if scaled else {}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(ROTARY) - OUTER))
def test_a_config_object_reads_as_its_own_dict(name):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    counts = {"num_key_value_heads": SIZES["num_attention_heads"]}  # some default to more than there are heads here
    theirs = CONFIG_MAPPING[name](**{**counts, **SIZES, **NEEDED[name]})
    before = theirs.to_dict()
    ours, from_dict = (rw.hf.layers(c, length=32) for c in (theirs, {**before, "model_type": name}))
    assert [str(e) for e in from_dict] == [str(e) for e in ours]
    assert before == theirs.to_dict()


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "gemma3_text"])
def test_saved_configs_are_read_and_written(name, tmp_path):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    CONFIG_MAPPING[name](**SIZES).save_pretrained(tmp_path)
    encodings = rw.hf.layers(tmp_path)
    written = rw.hf.to_config(encodings, tmp_path)
    theirs = CONFIG_MAPPING[name].from_dict(written)
    assert [str(e) for e in encodings] == [str(e) for e in rw.hf.layers(theirs)]

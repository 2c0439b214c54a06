"""Configs as they are found: every spelling, every contradiction, and nothing passed over in silence."""

import copy
import json
import math

import pytest
import torch

import ropewalk as rw

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 2,
         "max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0}  # fmt: skip
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip


def read(*blocks, **changes):
    config = {**LLAMA, **changes}
    return rw.hf.from_config({**config, "rope_parameters": blocks[0]} if blocks else config)


def numbers(encoding):
    """What two encodings have to share to be equal."""
    spectrum = getattr(encoding, "spectrum", None)
    kind = (type(encoding).__name__, getattr(encoding, "layout", None), getattr(encoding, "head_dim", None))
    return kind, None if spectrum is None else (spectrum.exact, spectrum.magnitude)


SPELLINGS = {
    "B73: type": [{"rope_scaling": {"type": "linear", "factor": 4}},
                  {"rope_scaling": {"rope_type": "linear", "factor": 4}},
                  {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
                  {"rope_parameters": {"type": "linear", "rope_type": "linear", "factor": 4}}],
    "B74: base": [{"rope_theta": 5e5}, {"rope_parameters": {"rope_theta": 5e5}}, {"rope_scaling": {"rope_theta": 5e5}},
                  {"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500_000, "rope_type": "default"}},
                  {"rope_theta": 500_000, "rope_scaling": None}],
    "yarn": [{"rope_scaling": {**YARN, "type": "yarn"}}, {"rope_parameters": {**YARN, "beta_fast": None}},
             {"rope_parameters": {**YARN, "beta_fast": 32, "beta_slow": 1, "truncate": True}},
             {"rope_parameters": {**YARN, "beta_fast": 0, "mscale": 0, "mscale_all_dim": 0, "finetuned": True}},
             {"rope_parameters": {**YARN, "factor": None}},
             {"rope_scaling": {k: v for k, v in YARN.items() if "original" not in k},
              "original_max_position_embeddings": 16}],
    "B55: head_dim": [{"head_dim": 64}, {}, {"head_dim": None}],
}  # fmt: skip


@pytest.mark.parametrize("name", SPELLINGS)
def test_equivalent_spellings_give_equal_encodings(name):
    first, *others = (numbers(read(**changes)) for changes in SPELLINGS[name])
    assert all(first == other for other in others)


def test_widths_in_every_spelling():
    """B52, B54, B55, B50: a width, a share of the head, or the family's own; the same on all layers."""
    bare = {"head_dim": 128}
    assert rw.hf.from_config({**bare, "rotary_dim": 64}).rotary_dim == 64
    for share in (
        {"rotary_pct": 0.25},
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"partial_rotary_factor": 0.25}},
    ):
        assert rw.hf.from_config({**bare, **share}).rotary_dim == 32
    sizes = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 4}
    glm = rw.hf.layers({"model_type": "glm", **sizes})
    assert [64] * 4 == [e.rotary_dim for e in glm] and glm[0].head_dim == 128
    assert rw.hf.from_config({"model_type": "gpt_neox", **sizes}).rotary_dim == 32
    llama = {"model_type": "llama", "hidden_size": 5120, "num_attention_heads": 32, "head_dim": 128}
    assert rw.hf.from_config(llama).head_dim == 128
    assert rw.hf.from_config({**llama, "head_dim": None}).head_dim == 160


def test_width_of_a_share_uses_the_rotated_channels_in_the_exponent():
    """B51: head 128, rotated 64; the variant with the head's exponent is a type of its own."""
    inv_freq = rw.hf.from_config({"head_dim": 128, "rotary_dim": 64}).inv_freq
    assert [0.7498942093, 1.3335214e-4] == pytest.approx([inv_freq[1], inv_freq[31]], rel=1e-7)
    block = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e4}
    proportional = rw.hf.from_config({"head_dim": 128, "rope_parameters": block})
    assert [0.8659643234, 1.1547820e-2, 0.0] == pytest.approx([proportional.inv_freq[i] for i in (1, 31, 32)], rel=1e-7)


def test_llama3_block_is_applied():
    """B63: dim 64, base 5e5, factor 32."""
    plain, scaled = read(rope_theta=5e5), read({**LLAMA3, "rope_theta": 5e5})
    ratios = [s / p for s, p in zip(scaled.inv_freq, plain.inv_freq, strict=True)]
    assert [1.0, 0.6055727545, 0.3037425238, 0.1034476090, 1 / 32] == pytest.approx(ratios[14:19], rel=1e-9)


@pytest.mark.parametrize(("length", "first"), [(15, 1.0), (16, 1.0), (17, 0.5), (64, 0.5)])
def test_longrope_takes_its_list_by_the_length(length, first):
    """B21, B22, B23: one list for all rows, chosen by a length that the caller names."""
    encoding = rw.hf.from_config({**LLAMA, "rope_parameters": LONG}, length=length)
    assert encoding.inv_freq[0] == first
    assert encoding.spectrum.magnitude == pytest.approx(1.2247448714, rel=1e-10)
    assert rw.hf.describe({**LLAMA, "rope_parameters": LONG}, length=length)[0].depends_on_length


def test_types_that_depend_on_length_take_it_by_name():
    """B15, B17: from M = 64 on the base grows, and 32 tokens are as before."""
    config = {**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    with pytest.raises(ValueError, match=r"length must be given for rope of type 'dynamic', got None\nhint: length="):
        rw.hf.from_config(config)
    made = [rw.hf.from_config(config, length=n).inv_freq for n in (32, 64, 128, 32)]
    assert made[0] == made[1] == made[3] == rw.spectra.plain(64).inv_freq
    assert made[2] == rw.spectra.dynamic_ntk(64, stretch=2, train_len=64, length=128).inv_freq


@pytest.mark.parametrize(
    ("block", "table", "softmax"),
    [
        ({}, 1.2772588722, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0, 1.6313903),
        ({"mscale": 0.707, "mscale_all_dim": 1.0}, 0.9363975062, 1.6313903),
        ({"attention_factor": 1.0}, 1.0, 1.0),
    ],
)
def test_yarn_factors_of_latent_attention(block, table, softmax):
    """B67 to B71: factor 16; the table's factor and the softmax's are two numbers."""
    sizes = {"qk_nope_head_dim": 8, "qk_rope_head_dim": 16, "num_attention_heads": 4}
    config = {"model_type": "deepseek_v3", **sizes, "rope_scaling": {**YARN, "factor": 16.0, **block}}
    encoding = rw.hf.from_config(config)
    trailing, *rest = encoding.parts if isinstance(encoding, rw.Compose) else [encoding]
    assert table == pytest.approx(trailing.spectrum.magnitude, rel=1e-9)
    assert softmax == pytest.approx(rest[0].factor if rest else 1.0, rel=1e-6)


def test_one_pattern_of_local_and_global_layers():
    """B79, B75: layer 5 of 6 turns by p / 8 with base 1e6, the others by p with 1e4, however it is written."""
    sizes = {"model_type": "gemma3_text", "num_hidden_layers": 6, "head_dim": 16, "num_attention_heads": 2}
    old = {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    new = {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                               "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}  # fmt: skip
    for spelling in (old, new, {**new, "rope_theta": 1e6, "rope_local_base_freq": 1e4}):
        encodings = rw.hf.layers({**sizes, **spelling})
        assert [rw.spectra.plain(16, 1e4)] * 5 == [e.spectrum for e in encodings[:5]]
        assert rw.spectra.linear(16, 1e6, stretch=8) == encodings[5].spectrum
        assert len({id(e) for e in encodings}) == 2
        with pytest.raises(
            ValueError, match=r"layer must be given where layers differ, as 0 and 5 do, got None\nhint: "
        ):
            rw.hf.from_config({**sizes, **spelling})
        assert rw.hf.from_config({**sizes, **spelling}, layer=5) is not None


def test_no_rotation_on_each_fourth_layer():
    """B80: 36 layers, interval 4; on the others a permutation of positions changes scores, on these it does not."""
    config = {"model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 36}
    still = [i for i, e in enumerate(rw.hf.layers(config)) if isinstance(e, rw.NoPE)]
    assert list(range(3, 36, 4)) == still
    assert still == [i for i, e in enumerate(rw.hf.layers({**config, "no_rope_layers": [1, 1, 1, 0] * 9}))
                     if isinstance(e, rw.NoPE)]  # fmt: skip
    q = torch.randn(1, 4, 5, 16, generator=torch.Generator().manual_seed(0))
    for layer, moves in ((3, False), (2, True)):
        encoding = rw.hf.from_config(config, layer)
        there, here = (encoding.query(q, encoding.at(p)) for p in (torch.arange(5).flip(0), torch.arange(5)))
        assert moves == (not torch.equal(there, here))


def test_full_attention_without_rotation():
    config = {"model_type": "cohere2", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8}
    kinds = [type(e).__name__ for e in rw.hf.layers(config)]
    assert ["Rotary", "Rotary", "Rotary", "NoPE"] * 2 == kinds


def test_reading_names_what_a_patch_needs():
    config = {**LLAMA, "num_key_value_heads": 2, "rope_parameters": YARN}
    reading = rw.hf.describe(config)[1]
    assert (1, None, "yarn", 64, 4, 2, 16, 64, "llama") == (
        reading.layer, reading.layer_type, reading.rope_type, reading.head_dim, reading.num_heads,
        reading.num_kv_heads, reading.train_len, reading.max_len, reading.model_type,
    )  # fmt: skip
    assert not reading.depends_on_length
    assert rw.hf.describe(LLAMA)[0].train_len == 64
    with pytest.raises(AttributeError):
        reading.head_dim = 3


def test_learned_tables_begin_at_the_offset_of_their_family():
    """B140: OPT's table has two rows before that of position 0, RoBERTa's as many as its padding index plus 1."""
    opt = {"model_type": "opt", "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 512}
    assert (512, 2) == (rw.hf.from_config(opt).max_positions, rw.hf.describe(opt)[0].offset)
    roberta = {"model_type": "roberta", "hidden_size": 8, "num_attention_heads": 2, "max_position_embeddings": 514}
    assert (512, 2) == (rw.hf.from_config(roberta).max_positions, rw.hf.describe(roberta)[0].offset)


def test_falcon_divides_its_bias_and_rounds_on_request():
    config = {"model_type": "falcon", "alibi": True, "hidden_size": 192, "num_attention_heads": 12}
    exact, rounded = (rw.hf.from_config(config, model_rounding=flag).slopes for flag in (False, True))
    assert [m / 4 for m in rw.ALiBi(12).slopes] == pytest.approx(exact, rel=1e-12)
    assert torch.tensor(rw.ALiBi(12).slopes).bfloat16().div(4).tolist() == pytest.approx(rounded, rel=1e-12)
    assert exact != rounded
    assert isinstance(rw.hf.from_config({**config, "alibi": False}), rw.Rotary)


def test_the_config_is_never_changed_and_paths_are_read(tmp_path):
    config = {**LLAMA, "rope_scaling": {**YARN, "type": "yarn"}}
    before = copy.deepcopy(config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = [numbers(rw.hf.from_config(c)) for c in (config, tmp_path, str(tmp_path / "config.json"))]
    assert made[0] == made[1] == made[2]
    assert before == config


def test_a_config_edited_later_changes_nothing():
    """B77: an encoding is numbers, fixed when it is made."""
    block = {"rope_type": "linear", "factor": 2.0}
    config = {**LLAMA, "rope_parameters": block}
    encoding = rw.hf.from_config(config)
    block["factor"] = 8.0
    assert encoding.inv_freq[0] == 0.5
    with pytest.raises(AttributeError):
        encoding.spectrum = rw.spectra.plain(64)


def test_text_part_of_a_model_of_pictures():
    outer = {"model_type": "llava", "text_config": {**LLAMA, "rope_theta": 5e5}, "vision_config": {}}
    assert numbers(rw.hf.from_config(outer)) == numbers(read(rope_theta=5e5))


MROPE = {"rope_type": "default", "mrope_section": [8, 12, 12]}
REFUSED = [
    ("B73: two types", {"rope_parameters": {"type": "yarn", "rope_type": "linear", "factor": 4}},
     r"rope_parameters.type must be the same as rope_parameters.rope_type \('linear'\), got 'yarn'"),
    ("B74: two bases", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
     r"rope_parameters.rope_theta must be the same as rope_theta \(10000.0\), got 500000.0"),
    ("two blocks", {"rope_parameters": {"rope_type": "linear", "factor": 2},
                    "rope_scaling": {"type": "linear", "factor": 4}},
     r"rope_scaling.factor must be the same as rope_parameters.factor \(2\), got 4"),
    ("two widths", {"model_type": "phi", "rotary_dim": 32, "partial_rotary_factor": 0.25},
     r"rotary_dim must be the same as partial_rotary_factor \(16\), got 32"),
    ("two lengths", {"original_max_position_embeddings": 8, "rope_parameters": YARN},
     r"rope_parameters.original_max_position_embeddings must be the same as original_max.* \(8\), got 16"),
    ("share of a whole head", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor must be absent or 1.*got 0.5"),
    ("misspelt key", {"rope_parameters": {**YARN, "beta_fst": 16}}, r"rope_parameters.beta_fst must be absent.*got 16"),
    ("factor of nothing", {"rope_parameters": {"rope_type": "default", "factor": 4.0}},
     r"rope_parameters.factor must be absent from rope of type 'default', got 4.0"),
    ("B82: alibi of a llama", {"alibi": True}, r"alibi must be absent, or understood, got True"),
    ("unknown key", {"rope_ratio": 16}, r"rope_ratio must be absent, or understood, got 16"),
    ("local base of a llama", {"rope_local_base_freq": 1e4}, r"rope_local_base_freq must be absent, or understood"),
    ("unknown family", {"model_type": "nobody"}, r"model_type must be one that Ropewalk knows, got 'nobody'\nhint: "),
    ("family that is refused", {"model_type": "t5"}, r"model_type must be one that Ropewalk supports \(it has a le"),
    ("unknown type", {"rope_parameters": {"rope_type": "ntk", "factor": 2}}, r"rope_parameters.rope_type must be one "),
    ("su of a llama", {"rope_scaling": {"type": "su", "factor": 2}}, r"original_max_position_embeddings must be given"),
    ("no original length", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
     r"rope_parameters.original_max_position_embeddings must be given, got None\nhint: "),
    ("no factor", {"rope_parameters": {"rope_type": "linear"}}, r"rope_parameters.factor must be given, got None"),
    ("factor below 1", {"rope_parameters": {**YARN, "factor": 0.5}}, r"rope_parameters.factor must be finite and at l"),
    ("factor nan", {"rope_parameters": {**YARN, "factor": math.nan}}, r"rope_parameters.factor must be finite.*got na"),
    ("factor of text", {"rope_parameters": {**YARN, "factor": "4"}}, r"rope_parameters.factor must be a number, got '"),
    ("B61: betas", {"rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 32}}, r"beta_slow must be positive and b"),
    ("B71: magnitude 0", {"rope_parameters": {**YARN, "attention_factor": 0.0}}, r"attention_factor must be finite an"),
    ("B71: magnitude", {"rope_parameters": {**YARN, "attention_factor": -1}}, r"attention_factor must be finite and p"),
    ("lone mscale", {"rope_parameters": {**YARN, "mscale": 0.707}}, r"rope_parameters.mscale must be given together w"),
    ("lone mscale_all_dim", {"rope_parameters": {**YARN, "mscale_all_dim": 1.0}}, r"mscale_all_dim must be given toge"),
    ("list of 31", {"rope_parameters": {**LONG, "long_factor": [1.0] * 31}}, r"rope_parameters.long_factor must be on"),
    ("no list", {"rope_parameters": {**LONG, "short_factor": 3}}, r"rope_parameters.short_factor must be a list"),
    ("llama3 bounds", {"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, r"low_freq_factor must be at least 0 a"),
    ("llama3 without bounds", {"rope_parameters": {k: v for k, v in LLAMA3.items() if "low" not in k}},
     r"rope_parameters.low_freq_factor must be given, got None"),
    ("B57: odd width", {"model_type": "phi", "head_dim": 33, "rotary_dim": 33}, r"rotary_dim must be such that an eve"),
    ("base of text", {"rope_theta": "1e4"}, r"rope_theta must be a number, got '1e4'"),
    ("dynamic and another length", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0,
                                                        "original_max_position_embeddings": 32}},
     r"original_max_position_embeddings must be max_position_embeddings \(64\), got 32"),
    ("layer types too few", {"layer_types": ["full_attention"]}, r"layer_types must be one for each of 2 layers, got "),
    ("block of another layer", {"layer_types": ["full_attention"] * 2, "rope_parameters": {"sliding_attention": {}}},
     r"rope_parameters must be given for layers of type 'full_attention', got sliding_attention"),
    ("B87: sections", {"model_type": "qwen2_vl", "rope_parameters": {**MROPE, "mrope_section": [8, 12, 11]}},
     r"rope_parameters.mrope_section must be 32 in sum.*got \[8, 12, 11\]"),
    ("sections of a llama", {"rope_parameters": MROPE}, r"rope_parameters.mrope_section must be absent"),
    ("another encoding", {"position_embedding_type": "alibi"}, r"position_embedding_type must be rope or rotary"),
    ("no rotation asked", {"use_rope": False}, r"use_rope must be true in this family, got False"),
    ("no count of layers", {"model_type": "smollm3", "num_hidden_layers": None}, r"num_hidden_layers must be given"),
    ("mpt that turns", {"model_type": "mpt", "attn_config": {"rope": True}}, r"attn_config.rope must be false"),
    ("mpt without alibi", {"model_type": "mpt", "attn_config": {"alibi": False}}, r"attn_config.alibi must be true"),
    ("key heads that divide no head", {"num_key_value_heads": 3}, r"num_key_value_heads must be a divisor of num_att"),
    ("width that heads do not share", {"hidden_size": 65, "head_dim": None}, r"hidden_size must be a multiple of num_"),
    ("base that never slows", {"rope_theta": 1}, r"rope_theta must be above 1, got 1"),
    ("base beyond numbers", {"rope_theta": 10**400}, r"rope_theta must be finite"),
    ("layers beyond counts", {"num_hidden_layers": 10**9}, r"num_hidden_layers must be an integer of at most 16777216"),
    ("layer of no known type", {"layer_types": ["full_attention", "foo"]}, r"layer_types must be among .*, got 'foo'"),
    ("type that is no name", {"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_parameters.rope_type must be one of"),
    ("truncate of text", {"rope_parameters": {**YARN, "truncate": "x"}}, r"rope_parameters.truncate must be"),
    ("mpt with flat slopes", {"model_type": "mpt", "attn_config": {"alibi_bias_max": 0}}, r"alibi_bias_max must be "),
    ("no sizes", {"hidden_size": None}, r"hidden_size must be given, got None"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_contradictions_and_unknown_keys_are_refused_by_name(changes, text):
    with pytest.raises((ValueError, TypeError), match=text):
        rw.hf.from_config({**LLAMA, **changes}, length=100)


@pytest.mark.errors
@pytest.mark.parametrize(
    ("config", "text"),
    [
        (7, r"config must be a dict, a path or a PretrainedConfig, got 7"),
        ("/nowhere/at/all", r"config must be a folder with a config.json, or such a file, got /nowhere"),
    ],
)
def test_what_is_no_config_is_refused(config, text):
    with pytest.raises((ValueError, TypeError), match=text):
        rw.hf.from_config(config)
    with pytest.raises(ValueError, match=r"layer must be below 2, got 2"):
        rw.hf.from_config(LLAMA, 2)

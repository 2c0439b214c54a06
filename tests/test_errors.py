"""Every bad input gets `<name> must be <condition>, got <value>`, and a hint where one call repairs it."""

import math

import pytest
import torch

import ropewalk as rw
from ropewalk import compat, layouts, positions, spectra
from samples import attention, encoding, model, normal, tokens

FLOATS = torch.tensor([0.0, 1.0, 2.0])


def names(rows):
    return [row[0] for row in rows]


CONSTRUCTION = [
    ("odd rotary width", lambda: rw.Rotary(33), ValueError, r"rotary_dim must be even, got 33\nhint: "),
    ("odd partial width", lambda: rw.Rotary(64, rotary_dim=31), ValueError, r"rotary_dim must be even, got 31"),
    ("too wide", lambda: rw.Rotary(8, rotary_dim=10), ValueError, r"rotary_dim must be at most head_dim \(8\), got 10"),
    ("rotary of nothing", lambda: rw.Rotary(0), ValueError, r"head_dim must be at least 2, got 0"),
    ("negative head_dim", lambda: rw.Rotary(-8), ValueError, r"head_dim must be at least 2, got -8"),
    ("unknown layout", lambda: rw.Rotary(8, layout="neox"), ValueError, r"layout must be 'half' or .*, got 'neox'"),
    ("base of zero", lambda: rw.Rotary(8, base=0.0), ValueError, r"base must be finite and positive, got 0"),
    ("negative base", lambda: rw.Rotary(8, base=-1e4), ValueError, r"base must be finite and positive, got -10000"),
    ("endless base", lambda: rw.Rotary(8, base=math.inf), ValueError, r"base must be finite and positive, got inf"),
    ("base not a number", lambda: rw.Rotary(8, base=math.nan), ValueError, r"base must be .* positive, got nan"),
    (
        "spectrum of another width",
        lambda: rw.Rotary(8, rotary_dim=8, spectrum=rw.Spectrum((1.0,))),
        ValueError,
        r"spectrum must be of 4 pairs.*, got 1",
    ),
    ("no head", lambda: rw.ALiBi(0), ValueError, r"num_heads must be at least 1, got 0"),
    ("negative heads", lambda: rw.ALiBi(-2), ValueError, r"num_heads must be at least 1, got -2"),
    ("too few slopes", lambda: rw.ALiBi(4, slopes=(0.5, 0.25)), ValueError, r"slopes must be one .*\(4\), got 2"),
    ("negative slope", lambda: rw.ALiBi(2, slopes=(0.5, -1.0)), ValueError, r"slopes must be .*at least 0.*, got -1"),
    ("slope nan", lambda: rw.ALiBi(1, slopes=(math.nan,)), ValueError, r"slopes must be finite.*, got nan"),
    ("learned zero slope", lambda: rw.ALiBi(1, slopes=(0.0,), learned=True), ValueError, r"slopes must be positive"),
    ("empty table", lambda: rw.Learned(0, 8), ValueError, r"num_positions must be at least 1, got 0"),
    ("learned width", lambda: rw.Learned(8, 0), ValueError, r"model_dim must be at least 1, got 0"),
    ("sinusoidal width", lambda: rw.Sinusoidal(0), ValueError, r"model_dim must be at least 1, got 0"),
    ("alpha", lambda: rw.Hybrid(rw.Rotary(8), rw.ALiBi(2), alpha=1.5), ValueError, r"alpha must be .*, got 1.5"),
    ("nothing composed", lambda: rw.Compose(), ValueError, r"encodings must be at least one encoding, got none"),
    ("no frequency", lambda: rw.Spectrum(()), ValueError, r"inv_freq must be at least one number, got none"),
    ("frequency nan", lambda: rw.Spectrum((math.nan,)), ValueError, r"inv_freq must be finite .*, got nan"),
    ("negative frequency", lambda: rw.Spectrum((-1.0,)), ValueError, r"inv_freq must be .*at least 0.*, got -1"),
    ("magnitude", lambda: rw.Spectrum((1.0,), magnitude=0.0), ValueError, r"magnitude must be .*positive, got 0"),
    ("shrinking", lambda: spectra.linear(8, stretch=0.5), ValueError, r"stretch must be at least 1 .*, got 0.5"),
    ("ntk of one pair", lambda: spectra.ntk(2, stretch=2.0), ValueError, r"rotary_dim must be at least 4, got 2"),
    (
        "betas swapped",
        lambda: spectra.yarn(64, stretch=4.0, train_len=4096, beta_fast=1.0, beta_slow=32.0),
        ValueError,
        r"beta_slow must be positive and below beta_fast \(1.0\), got 32",
    ),
    ("no training", lambda: spectra.yarn(8, stretch=2.0, train_len=0), ValueError, r"train_len must be at least 1"),
    ("unknown name", lambda: rw.build("rope", head_dim=8), ValueError, r"encoding must be one of .*rotary.*'rope'"),
    ("no dims", lambda: rw.build("alibi", head_dim=8), ValueError, r"dims must be .*num_heads, got \['head_dim'\]"),
    ("no such module", lambda: rw.build("nowhere:It"), ValueError, r"encoding must be importable .*, got 'nowhere:It'"),
    ("not an encoding", lambda: rw.build("math:pi"), TypeError, r"encoding must be a subclass .*, got 'math:pi'"),
    (
        "heads do not divide the width",
        lambda: rw.Attention(30, 4, rw.NoPE()),
        ValueError,
        r"model_dim must be a multiple of num_heads \(4\), got 30",
    ),
    (
        "kv heads do not divide heads",
        lambda: rw.Attention(32, 4, rw.NoPE(), num_kv_heads=3),
        ValueError,
        r"num_kv_heads must be a divisor of num_heads \(4\), got 3",
    ),
    ("attention of none", lambda: rw.Attention(32, 0, rw.NoPE()), ValueError, r"num_heads must be at least 1, got 0"),
    ("no layer", lambda: rw.Transformer(9, rw.NoPE(), num_layers=0), ValueError, r"num_layers must be at least 1"),
    ("no token", lambda: rw.Transformer(0, rw.NoPE()), ValueError, r"vocab_size must be at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "error", "text"), [row[1:] for row in CONSTRUCTION], ids=names(CONSTRUCTION))
def test_a_construction_that_cannot_be_right_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


def heads(num_heads=4, seq_len=3, head_dim=8, **options):
    return normal(1, num_heads, seq_len, head_dim, **options)


Q = heads()
THREE = torch.arange(3)

CALLS = [
    ("unknown backend", lambda: rw.attend(Q, Q, Q, backend="flash"), ValueError, r"backend must be .*, got 'flash'"),
    ("unknown layout", lambda: rw.rotate(Q, rw.Rotary(8).at(THREE), "neox"), ValueError, r"layout must be .*'neox'"),
    (
        "more positions than tokens",
        lambda: rw.Rotary(8).query(Q, rw.Rotary(8).at(torch.arange(4))),
        ValueError,
        r"x must be as long as its positions \(4\), got 3",
    ),
    (
        "one position for three tokens",
        lambda: rw.Rotary(8).query(Q, rw.Rotary(8).at(torch.arange(1))),
        ValueError,
        r"x must be as long as its positions \(1\), got 3",
    ),
    (
        "positions of two rows for one",
        lambda: rw.Rotary(8).query(Q, rw.Rotary(8).at(torch.zeros(2, 3, dtype=torch.long))),
        ValueError,
        r"positions must be of 1 rows, or of one for all, got 2",
    ),
    (
        "heads of another width",
        lambda: rw.Rotary(16).query(Q, rw.Rotary(16).at(THREE)),
        ValueError,
        r"must be head_dim \(16\), got 8",
    ),
    ("not rotary", lambda: rw.rotate(Q, rw.NoPE().at(THREE)), TypeError, r"at must be a rotary placement, got one wi"),
    (
        "too narrow to turn",
        lambda: rw.rotate(heads(head_dim=4), rw.Rotary(8).at(THREE)),
        ValueError,
        r"x must be at least 8 channels wide, got 4",
    ),
    (
        "float32 tables for float64 input",
        lambda: rw.rotate(Q.double(), rw.Rotary(8).at(THREE)),
        TypeError,
        r"at must be of float64 for float64 input, got torch.float32\nhint: .*float64",
    ),
    ("beyond the table", lambda: rw.Learned(3, 8).at(torch.arange(4)), ValueError, r"must be in \[0, 3\), got 0 to 3"),
    ("before it", lambda: rw.Learned(3, 8).at(torch.tensor([-1])), ValueError, r"must be in \[0, 3\), got -1 to"),
    (
        "alibi for fewer heads",
        lambda: rw.attend(Q, Q, Q, rw.ALiBi(2)),
        ValueError,
        r"q's heads must be the 2 of ALiBi\(2\), got 4\nhint: a shard names",
    ),
    (
        "a mask too small",
        lambda: rw.attend(Q, Q, Q, mask=torch.ones(2, 3, dtype=torch.bool)),
        ValueError,
        r"mask must be broadcastable to \(1, 4, 3, 3\), got \(2, 3\)",
    ),
    ("an empty cache read", lambda: rw.KVCache().k, ValueError, r"cache must be filled before it is read, got an"),
    ("eviction unknown", lambda: filled_cache().evict(1, 1), ValueError, r"encoding must be given .*, got None\nhint"),
    ("crop of more", lambda: filled_cache().crop(9), ValueError, r"length must be at most the cache's \(3\), got 9"),
    ("negative crop", lambda: filled_cache().crop(-1), ValueError, r"length must be at least 0, got -1"),
    (
        "another shape in the cache",
        lambda: filled_cache().append(heads(2), heads(2), THREE),
        ValueError,
        r"k must be of the cache's batch, heads and width \(1, 4, 8\), got \(1, 2, 8\)",
    ),
    (
        "another dtype in the cache",
        lambda: filled_cache().append(Q.double(), Q.double(), THREE),
        TypeError,
        r"k must be of the cache's dtype \(torch.float32\), got torch.float64",
    ),
    ("rank beyond", lambda: positions.shard(8, 2, 2), ValueError, r"rank must be in \[0, 2\), got 2"),
    ("no such order", lambda: positions.shard(8, 0, 2, "spiral"), ValueError, r"order must be .*, got 'spiral'"),
    ("uneven shards", lambda: positions.shard(10, 0, 2, "zigzag"), ValueError, r"seq_len must be .* of 4, got 10"),
    ("empty document", lambda: positions.from_lengths([3, 0]), ValueError, r"each length must be at least 1, got 0"),
    ("uneven heads", lambda: layouts.to_half_weight(Q[0, 0], 2), ValueError, r"weight must be .*, got 3 rows"),
    ("odd conversion", lambda: layouts.to_half(Q, rotary_dim=5), ValueError, r"rotary_dim must be even .*, got 5"),
    ("no heads in conversion", lambda: layouts.to_half_weight(Q[0, 0], 0), ValueError, r"num_heads must be at least 1"),
    ("tutorial slopes", lambda: compat.get_slopes(0), ValueError, r"n_heads must be at least 1, got 0"),
    (
        "tutorial rows beyond the table",
        lambda: compat.apply_rotary_pos_emb(Q, Q, *tables(2), THREE[None]),
        ValueError,
        r"position_ids must be in \[0, 2\), rows of cos, got .*\nhint: ",
    ),
    (
        "padding mask without the cache",
        lambda: attention("nope")(normal(1, 3, 32), key_padding_mask=torch.ones(1, 2, dtype=torch.bool)),
        ValueError,
        r"key_padding_mask must be of shape \(batch, 3\), the cache included, got \(1, 2\)",
    ),
    ("too cold", lambda: model("nope").generate(tokens(1, 3), 1, temperature=-1.0), ValueError, r"temperature must be"),
    ("no prompt", lambda: model("nope").generate(tokens(1, 0), 1), ValueError, r"tokens must be at least one"),
    ("negative count", lambda: model("nope").generate(tokens(1, 3), -1), ValueError, r"max_new_tokens must be at"),
    ("text beyond the table", lambda: model("learned")(tokens(1, 65)), ValueError, r"must be in \[0, 64\), got"),
]


def filled_cache():
    cache = rw.KVCache()
    cache.append(Q, Q, THREE)
    return cache


def tables(seq_len):
    return compat.LlamaRotaryEmbedding(8)(Q, seq_len=seq_len)


@pytest.mark.parametrize(("call", "error", "text"), [row[1:] for row in CALLS], ids=names(CALLS))
def test_a_call_that_cannot_be_right_is_refused(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", ["rotary", "alibi", "rotary+alibi", "hybrid", "nope", "sinusoidal", "learned"])
def test_positions_that_are_no_integers_are_refused(name):
    made = encoding(name)
    for wrong in (FLOATS, FLOATS.bfloat16(), FLOATS.bool(), FLOATS.to(torch.complex64)):
        with pytest.raises(TypeError, match=r"positions must be an integer tensor, got dtype torch\.\w+\nhint: "):
            made.at(wrong)
    for keyword in ("q_positions", "k_positions"):
        with pytest.raises(TypeError, match=rf"{keyword} must be an integer tensor, got dtype torch.float32"):
            rw.attend(Q, Q, Q, made, **{keyword: FLOATS})
    with pytest.raises(ValueError, match=r"positions must be of shape \(seq,\) or \(batch, seq\), got \(1, 1, 3\)"):
        made.at(THREE.reshape(1, 1, 3))


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_an_absolute_encoding_refuses_another_number_of_positions(name, count):
    made = encoding(name)
    with pytest.raises(ValueError, match=rf"must be as long as its positions \({count}\), got 3"):
        made.embed(normal(1, 3, 32), made.at(torch.arange(count)))


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_an_absolute_encoding_refuses_another_width(name):
    made = encoding(name)
    for width in (16, 33):
        with pytest.raises(ValueError, match=rf"must be .*32.*, got {width}"):
            made.embed(normal(1, 3, width), made.at(THREE))


@pytest.mark.parametrize("wrong", [[0, 1, 2, 4], [-1, 0, 1, 2]])
def test_global_heads_outside_the_encoding_are_refused(wrong):
    with pytest.raises(ValueError, match=r"heads must be in \[0, 4\)"):
        rw.attend(Q, Q, Q, rw.ALiBi(4), heads=torch.tensor(wrong))


@pytest.mark.errors
@pytest.mark.parametrize("wrong", [2.9, "3", None, True])
def test_lengths_that_are_no_integers_are_refused(wrong):
    with pytest.raises(TypeError, match=r"each length must be an integer, got"):
        positions.from_lengths([2, wrong])


WRONG_TYPES = [
    ("head_dim as float", lambda: rw.Rotary(8.0), r"head_dim must be an integer, got 8\.0 \(float\)"),
    ("head count as bool", lambda: rw.ALiBi(True), r"num_heads must be an integer, got True \(bool\)"),
    ("head count as text", lambda: rw.ALiBi("8"), r"num_heads must be an integer, got '8' \(str\)"),
    (
        "positions as list",
        lambda: rw.Rotary(8).at([0, 1, 2]),
        r"positions must be an integer tensor, got \[0, 1, 2\] \(list\)\nhint: torch.arange",
    ),
    ("hybrid of anything", lambda: rw.Hybrid(rw.NoPE(), rw.ALiBi(2)), r"rotary must be a Rotary, got NoPE"),
    ("composed with a number", lambda: rw.Compose(rw.NoPE(), 3), r"encodings must be .*, got 3 \(int\)"),
    ("encoding in a call", lambda: rw.attend(Q, Q, Q, "rotary"), r"encoding must be an Encoding, got 'rotary'.*\nhint"),
    (
        "additive padding",
        lambda: positions.from_mask(torch.zeros(1, 3)),
        r"mask must be bool, .*\nhint: True marks a real",
    ),
    (
        "additive key padding",
        lambda: layer(key_padding_mask=torch.zeros(1, 3)),
        r"key_padding_mask must be bool, .*\nhint",
    ),
    ("fractional heads", lambda: rw.attend(Q, Q, Q, heads=torch.arange(4.0)), r"heads must be an integer tensor, got"),
    ("scale as text", lambda: rw.attend(Q, Q, Q, scale="1"), r"scale must be a number, got '1' \(str\)"),
    ("spectrum as list", lambda: rw.Rotary(8, spectrum=[1.0]), r"spectrum must be a Spectrum, got \[1.0\].*\nhint"),
    ("slopes as number", lambda: rw.ALiBi(2, slopes=3), r"slopes must be a sequence of 2 numbers, got 3 \(int\)"),
    ("base as text", lambda: rw.Rotary(8, base="10000"), r"base must be a number, got '10000' \(str\)"),
    ("base True", lambda: rw.spectra.ntk(8, True, stretch=2), r"base must be a number, got True \(bool\)"),
    ("stretch None", lambda: rw.spectra.linear(8, stretch=None), r"stretch must be a number, got None"),
    ("frequencies as text", lambda: rw.Spectrum(["a"]), r"inv_freq must be a number, got 'a' \(str\)"),
    ("alpha as text", lambda: rw.Hybrid(rw.Rotary(8), rw.ALiBi(2), alpha="x"), r"alpha must be a number, got 'x'"),
    (
        "one cache for all",
        lambda: tiny()(TOKENS, cache=rw.KVCache()),
        r"cache must be a list, .*\nhint: model.new_cache",
    ),
    ("float tokens", lambda: tiny()(TOKENS.float()), r"tokens must be an integer tensor, got dtype torch.float32"),
    ("model without encoding", lambda: rw.Transformer(9, None), r"encoding must be an Encoding, got None.*\nhint"),
    (
        "lengths as a number",
        lambda: positions.from_lengths([2, 2.9]),
        r"each length must be an integer, got 2.9 \(float\)",
    ),
    ("unsigned", lambda: rw.Rotary(8).at(THREE.to(torch.uint64)), r"positions must be a tensor of at most 63 bits"),
    (
        "encoding by name",
        lambda: rw.Attention(32, 4, "rotary"),
        r"encoding must be an Encoding, got 'rotary' \(str\)\nhint",
    ),
    ("additive mask", lambda: rw.attend(Q, Q, Q, mask=torch.zeros(3, 3)), r"mask must be bool .*, got dtype"),
    ("integer values", lambda: rw.attend(Q, Q, Q.long()), r"v must be a floating-point tensor, got dtype torch.int64"),
    ("mixed dtypes", lambda: rw.attend(Q, Q.double(), Q), r"q, k and v must be of one dtype, got"),
    ("integers turned", lambda: rw.rotate(Q.long(), rw.Rotary(8).at(THREE)), r"x must be a floating-point tensor, got"),
]


@pytest.mark.errors
@pytest.mark.parametrize(("call", "text"), [row[1:] for row in WRONG_TYPES], ids=names(WRONG_TYPES))
def test_a_value_of_the_wrong_type_is_refused(call, text):
    with pytest.raises(TypeError, match=text):
        call()


WRONG_SHAPES = [
    ("3 for 4", lambda: rw.attend(Q, heads(3), heads(3)), r"q's heads must be a multiple of k's heads \(3\), got 4"),
    ("none", lambda: rw.attend(Q, heads(0), heads(0)), r"q's heads must be a multiple of k's heads \(0\), got 4"),
    ("widths differ", lambda: rw.attend(Q, heads(head_dim=4), Q), r"k must be of q's head_dim \(8\), got 4"),
    ("batches differ", lambda: rw.attend(Q, *[Q.repeat(2, 1, 1, 1)] * 2), r"k must be of q's batch size \(1\), got 2"),
    ("values too short", lambda: rw.attend(Q, Q, heads(seq_len=2)), r"v must be of k's shape .*, got \(1, 4, 2\)"),
    ("no batch axis", lambda: rw.attend(Q[0], Q[0], Q[0]), r"q must be of shape \(batch, heads, seq, head_dim\), got"),
    (
        "heads too few",
        lambda: rw.attend(Q, Q, Q, heads=torch.arange(2)),
        r"heads must be of shape \(4,\), .*, got \(2,\)",
    ),
    ("no cache for a layer", lambda: tiny()(TOKENS, cache=[]), r"cache must be one KVCache per layer \(2\), got 0"),
    ("no MLP", lambda: rw.Transformer(9, rw.NoPE(), mlp_dim=0), r"mlp_dim must be at least 1, got 0"),
    ("scale nan", lambda: rw.attend(Q, Q, Q, scale=float("nan")), r"scale must be finite, got nan"),
    ("documents of a model", lambda: tiny()(TOKENS, documents=THREE[:2]), r"documents must be one id per key \(3\)"),
    ("rows of positions", lambda: embedded_rows(), r"positions must be of 1 rows, or of one for all, got 4"),
    ("heads of another width", lambda: compat.apply_rotary_emb(Q, Q, narrow()), r"freqs_cis must be of shape \(4, 4\)"),
    ("a word for a dim", lambda: rw.build("alibi", num_head=4), r"dims must be among .*, got num_head"),
    ("few k_positions", lambda: rw.attend(Q, Q, Q, k_positions=torch.arange(2)), r"k_positions must be of shape"),
    ("q_positions too long", lambda: rw.attend(Q, Q, Q, q_positions=torch.arange(4)), r"q_positions must be of shape"),
    ("documents too short", lambda: rw.attend(Q, Q, Q, documents=torch.arange(2)), r"documents must be of shape"),
    ("cache rows", lambda: rw.KVCache().append(Q, heads(seq_len=2), THREE), r"v must be of k's shape \(1, 4, 3\), got"),
    (
        "in a cache",
        lambda: rw.KVCache().append(Q, Q, torch.arange(2)),
        r"positions must be one per token, \(3,\) or \(1, 3\), got",
    ),
    (
        "flat mask",
        lambda: positions.from_mask(torch.ones(3).long()),
        r"mask must be of shape \(batch, seq\), got \(3,\)",
    ),
    (
        "tutorial rows",
        lambda: compat.apply_rotary_emb(Q, Q, tutorial(2)),
        r"freqs_cis must be of shape \(4, 4\), got \(2, 4\)",
    ),
]


TOKENS = torch.zeros(1, 3, dtype=torch.long)


def tiny():
    return rw.Transformer(9, rw.NoPE(), model_dim=8, num_layers=2, num_heads=2)


def layer(**options):
    return rw.Attention(8, 2, rw.NoPE())(torch.zeros(1, 3, 8), **options)


def embedded_rows():
    encoding = rw.Learned(9, 8)
    return encoding.embed(torch.zeros(1, 3, 8), encoding.at(THREE.expand(4, -1)))


def narrow():
    return compat.precompute_freqs_cis(4, 4)


def tutorial(rows):
    return compat.precompute_freqs_cis(8, rows)


@pytest.mark.errors
@pytest.mark.parametrize(("call", "text"), [row[1:] for row in WRONG_SHAPES], ids=names(WRONG_SHAPES))
def test_mismatched_shapes_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_an_error_leaves_the_cache_as_it_was():
    cache = filled_cache()
    with pytest.raises(TypeError, match="dtype"):
        cache.append(Q.double(), Q.double(), THREE)
    assert len(cache) == 3
    assert torch.equal(Q, cache.k)

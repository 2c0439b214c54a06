"""Several axes, trailing channels and query temperature: what the laws, which place text, do not see."""

import math

import pytest
import torch

import ropewalk as rw

HEAD = 16
MROPES = {
    "block": lambda: rw.MRoPE(HEAD, [2, 3, 3]),
    "interleaved": lambda: rw.MRoPE(HEAD, [4, 2, 2], order="interleaved"),
    "alternating": lambda: rw.MRoPE(HEAD, [2, 3, 3], order="alternating"),
    "interleaved layout": lambda: rw.MRoPE(HEAD, [2, 3, 3], layout="interleaved"),
    "yarn": lambda: rw.MRoPE(HEAD, spectrum=rw.spectra.yarn(HEAD, stretch=4, train_len=64)),
    "axial": lambda: rw.Axial(HEAD),
    "axial alternating": lambda: rw.Axial(HEAD, order="alternating", layout="interleaved"),
    "axial 3": lambda: rw.Axial(HEAD, 3),
}
CHANNELS = {"channels": lambda: rw.MRoPE(HEAD, [2, 2, 2, 2], order="channels")}


def heads(seq_len, dtype=torch.float64, seed=0):
    return torch.randn(1, 2, seq_len, HEAD, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def places(axes, seq_len, seed=1):
    return torch.randint(0, 50, (axes, 1, seq_len), generator=torch.Generator().manual_seed(seed))


def turned(x, encoding, where):
    """By the definition: channel by channel, each pair by its own axis, with math.cos."""
    out = x.clone()
    pairs = encoding.rotary_dim // 2
    for row in range(x.shape[-2]):
        for i in range(pairs):
            a, b = (i, i + pairs) if encoding.layout == "half" else (2 * i, 2 * i + 1)
            angle = int(where[encoding.axis_of_pair[i], 0, row]) * encoding.inv_freq[i]
            first, second = x[..., row, a], x[..., row, b]
            out[..., row, a] = encoding.spectrum.magnitude * (first * math.cos(angle) - second * math.sin(angle))
            out[..., row, b] = encoding.spectrum.magnitude * (second * math.cos(angle) + first * math.sin(angle))
    return out


@pytest.mark.parametrize("name", MROPES)
def test_each_pair_turns_by_the_position_on_its_axis(name):
    encoding = MROPES[name]()
    x, where = heads(7), places(encoding.axes, 7)
    got = encoding.query(x, encoding.at(where, torch.float64))
    assert (turned(x, encoding, where) - got).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [*MROPES, *CHANNELS])
def test_text_is_turned_as_by_one_axis_bit_for_bit(name, dtype):
    """B83: text has one number on all axes, given once or as many times."""
    encoding = {**MROPES, **CHANNELS}[name]()
    rope = rw.Rotary(HEAD, rotary_dim=encoding.rotary_dim, spectrum=encoding.spectrum, layout=encoding.layout)
    where, x = torch.arange(40) * 97, heads(40, dtype)
    expected = rope.query(x, rope.at(where, dtype))
    assert torch.equal(expected, encoding.query(x, encoding.at(where, dtype)))
    on_all = where.expand(encoding.axes, 1, -1)
    assert torch.equal(expected, encoding.query(x, encoding.at(on_all, dtype)))


@pytest.mark.parametrize("name", MROPES)
def test_scores_depend_on_the_distance_along_each_axis(name):
    encoding = MROPES[name]()
    q, k, where = heads(9), heads(9, seed=3), places(encoding.axes, 9)
    shift = torch.arange(1, encoding.axes + 1).view(-1, 1, 1) * 1_000_003

    def scores(places):
        at = encoding.at(places, torch.float64)
        return encoding.query(q, at) @ encoding.key(k, at).mT

    assert (scores(where) - scores(where + shift)).abs().max() < 1e-9
    other = where.clone()
    other[-1] += torch.arange(9)
    assert (scores(where) - scores(other)).abs().max() > 1e-3, "the last axis is not looked at"


@pytest.mark.parametrize("name", MROPES)
def test_keys_move_along_each_axis(name):
    encoding = MROPES[name]()
    k, old, new = heads(5), places(encoding.axes, 5), places(encoding.axes, 5, seed=8)
    there, here = (encoding.key(k, encoding.at(p, torch.float64)) for p in (new, old))
    assert (there - encoding.moved(here, old, new)).abs().max() < 1e-12


def test_axes_of_pairs_in_each_order():
    """B87: [16, 24, 24] in blocks; [24, 20, 20] interleaved is THW twenty times, then T four times."""
    assert [0] * 16 + [1] * 24 + [2] * 24 == list(rw.MRoPE(128, [16, 24, 24]).axis_of_pair)
    assert list(rw.MRoPE(128).sections) == [16, 24, 24]
    interleaved = rw.MRoPE(128, [24, 20, 20], order="interleaved")
    assert [0, 1, 2] * 20 + [0] * 4 == list(interleaved.axis_of_pair)
    alternating = rw.MRoPE(128, [20, 22, 22], order="alternating")
    assert [1, 2] * 22 + [0] * 20 == list(alternating.axis_of_pair)


def test_channels_of_a_pair_follow_two_axes():
    """Hunyuan-VL: 16 channels in four blocks, so that pair 0 has its first channel on axis 0, its second on axis 2."""
    encoding = CHANNELS["channels"]()
    x, where = heads(1), torch.tensor([3, 0, 5, 0]).view(4, 1, 1)
    got = encoding.query(x, encoding.at(where, torch.float64))[0, 0, 0]
    a, b = x[0, 0, 0, 0], x[0, 0, 0, 8]
    assert math.cos(3) * a - math.sin(3) * b == pytest.approx(got[0].item(), abs=1e-12)
    assert math.cos(5) * b + math.sin(5) * a == pytest.approx(got[8].item(), abs=1e-12)
    with pytest.raises(ValueError, match=r"positions must be one for all axes where keys are moved"):
        encoding.moved(x, where, where)


def test_after_a_picture_text_goes_on_on_all_axes():
    """B84, B86: nothing is remembered from a call to the next, whatever its batch."""
    encoding = rw.MRoPE(HEAD, [2, 3, 3])
    fresh = encoding.query(heads(2), encoding.at(torch.tensor([4, 5]), torch.float64))
    encoding.at(torch.randint(0, 9, (3, 8, 6)))
    assert torch.equal(
        fresh, encoding.query(heads(2), encoding.at(torch.tensor([[4, 5]]).expand(3, 1, 2), torch.float64))
    )


def test_a_grid_counts_rows_then_columns():
    """B89: 2 x 3, row-major; a picture on its side swaps the two halves of the axes, and no square hides it."""
    assert [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]] == rw.grid(2, 3)[:, 0].tolist()
    assert (3, 1, 24) == tuple(rw.grid(2, 3, 4).shape)
    encoding = rw.Axial(HEAD)
    q, k = heads(6), heads(6, seed=4)
    upright, aside = rw.grid(2, 3), rw.grid(3, 2)
    order = [r * 2 + c for c in range(2) for r in range(3)]  # where each upright cell lies on its side
    halves = [*range(4, 8), *range(4), *range(12, 16), *range(8, 12)]  # channels of the other axis
    score = (
        encoding.query(q, encoding.at(upright, torch.float64)) @ encoding.key(k, encoding.at(upright, torch.float64)).mT
    )
    at = encoding.at(aside[:, :, order], torch.float64)
    swapped = encoding.query(q[..., halves], at) @ encoding.key(k[..., halves], at).mT
    assert (score - swapped).abs().max() < 1e-12


def test_trailing_channels_turn_and_the_others_stay():
    encoding, rope = rw.Trailing(HEAD, 6, layout="interleaved"), rw.Rotary(6, layout="interleaved")
    x, where = heads(4), torch.tensor([0, 3, 500, 10**9])
    got = encoding.query(x, encoding.at(where, torch.float64))
    assert torch.equal(x[..., :10], got[..., :10])
    assert (rope.query(x[..., 10:], rope.at(where, torch.float64)) - got[..., 10:]).abs().max() == 0


def test_deinterleaving_changes_the_order_of_channels_and_no_score():
    """At angle 0 the channels come out as 0, 2, 4, 6, 1, 3, 5, 7."""
    plain, ordered = (rw.Trailing(8, 8, layout="interleaved", deinterleave=flag) for flag in (False, True))
    x = torch.arange(8.0).view(1, 1, 1, 8)
    assert [0, 2, 4, 6, 1, 3, 5, 7] == ordered.query(x, ordered.at(torch.tensor([0]))).flatten().tolist()
    q, k, where = heads(6)[..., :8], heads(6, seed=2)[..., :8], torch.arange(6)
    scores = [
        e.query(q, e.at(where, torch.float64)) @ e.key(k, e.at(where, torch.float64)).mT for e in (plain, ordered)
    ]
    assert (scores[0] - scores[1]).abs().max() < 1e-12


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        (rw.Temperature(train_len=10), [1.0, 1.0, math.log(100) / math.log(10), math.log(10**6 + 1) / math.log(10)]),
        (rw.Temperature("steps"), [1.0, 1.0, 1.0, 1 + 0.1 * math.log1p((10**6 + 1) // 8192)]),
        (rw.Temperature("steps", train_len=16, strength=0.2, offset=0),
         [1.0, 1.0, 1 + 0.2 * math.log(7), 1 + 0.2 * math.log1p(10**6 // 16)]),
        (rw.Temperature("constant", factor=1.25), [1.25] * 4),
    ],
    ids=["log", "llama 4", "ministral 3", "constant"],
)  # fmt: skip
def test_temperature_of_queries(encoding, expected):
    where = torch.tensor([0, 9, 99, 10**6])
    q = torch.ones(1, 1, 4, 2, dtype=torch.float64)
    got = encoding.query(q, encoding.at(where, torch.float64))[0, 0, :, 0]
    assert expected == pytest.approx(got.tolist(), rel=1e-12)
    assert torch.equal(q, encoding.key(q, encoding.at(where)))
    low = encoding.query(q.float(), encoding.at(where))[0, 0, :, 0]
    assert expected == pytest.approx(low.tolist(), rel=1e-6)


@pytest.mark.parametrize("first", [8191, 8192])
def test_llama_4_steps_where_the_count_reaches_the_floor(first):
    encoding = rw.Temperature("steps", train_len=8192, strength=0.1, offset=1)
    at = encoding.at(torch.tensor([8190, first]))
    got = encoding.query(torch.ones(1, 1, 2, 1), at).flatten().tolist()
    assert [1.0, 1 + 0.1 * math.log(2)] == pytest.approx(got, rel=1e-6)


@pytest.mark.parametrize(
    "make", [MROPES["block"], MROPES["axial"], lambda: rw.Trailing(HEAD, 8)], ids=["mrope", "axial", "trailing"]
)
def test_tables_of_old_checkpoints_are_checked_and_dropped(make):
    """K19: nothing is stored; what others stored is accepted if it holds these frequencies."""
    encoding = make()
    assert {} == dict(encoding.state_dict())
    encoding.load_state_dict({"inv_freq": torch.tensor(encoding.inv_freq)})
    encoding.load_state_dict({})
    with pytest.raises((ValueError, RuntimeError), match=r"inv_freq must be the frequencies of this encoding"):
        encoding.load_state_dict({"inv_freq": torch.tensor(encoding.inv_freq) * 2})


REFUSED = [
    ("sections", lambda: rw.MRoPE(128, [16, 24, 23]), r"sections must be 64 in sum, half of .*\[16, 24, 23\]"),
    ("clipped slots", lambda: rw.MRoPE(128, [20, 22, 22], order="interleaved"), r"sections must be such that pairs"),
    ("uneven", lambda: rw.MRoPE(16, [2, 2, 4], order="alternating"), r"sections must be equal for height and width"),
    ("two axes", lambda: rw.MRoPE(16, [4, 4], order="interleaved"), r"sections must be three where pairs alternate"),
    ("order", lambda: rw.MRoPE(16, order="thw"), r"order must be one of 'block'.*, got 'thw'"),
    ("layout", lambda: rw.MRoPE(16, [4, 4], order="channels", layout="interleaved"), r"layout must be 'half' where"),
    ("wide", lambda: rw.MRoPE(16, rotary_dim=18), r"rotary_dim must be even and at most head_dim \(16\), got 18"),
    ("pairs", lambda: rw.MRoPE(16, spectrum=rw.Spectrum([1.0])), r"spectrum must be of 8 pairs.*got 1 pairs"),
    ("axes", lambda: rw.MRoPE(16).at(torch.zeros(2, 1, 3).long()), r"positions must be of shape \(3, batch, seq\)"),
    ("axial width", lambda: rw.Axial(16, rotary_dim=6), r"rotary_dim must be a multiple of 2 axes \(4\) and at most"),
    ("axial head", lambda: rw.Axial(4, 3), r"head_dim must be at least 6, got 4"),
    ("axial order", lambda: rw.Axial(16, order="rows"), r"order must be 'block' or 'alternating', got 'rows'"),
    ("empty grid", lambda: rw.grid(), r"sizes must be at least one, got none"),
    ("deinterleaved halves", lambda: rw.Trailing(16, 8, deinterleave=True), r"deinterleave must be False unless"),
    ("trailing width", lambda: rw.Trailing(16, 18), r"rotary_dim must be at most head_dim \(16\), got 18"),
    ("rule", lambda: rw.Temperature("sqrt"), r"rule must be one of 'log', 'steps', 'constant', got 'sqrt'"),
    ("train_len", lambda: rw.Temperature(train_len=1), r"train_len must be at least 2, got 1"),
    ("factor", lambda: rw.Temperature("constant", factor=0.0), r"factor must be positive, got 0.0"),
    ("strength", lambda: rw.Temperature("steps", strength=-1.0), r"strength must be finite and at least 0, got -1"),
    ("offset", lambda: rw.Temperature("steps", offset=2), r"offset must be 0 or 1, got 2"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_axes_that_cannot_be_right_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()

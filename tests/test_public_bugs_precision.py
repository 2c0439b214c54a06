"""Laws behind public bug reports on precision, dtypes and history (K01, K02, K03)."""

import itertools

import pytest
import torch

import oracles
import ropewalk as rw
from samples import NAMES, encoding, leaves, normal, peak_extra_bytes

HALF_DTYPES = (torch.bfloat16, torch.float16)


def turn(x, positions, made):
    """x (seq, head_dim) through the query hook."""
    return made.query(x[None, None], made.at(torch.as_tensor(positions)))[0, 0]


def cosines(made, positions, dtype=torch.float32):
    """The cosine of every pair at every position, as the encoding applies them (half layout)."""
    pairs = made.rotary_dim // 2
    x = torch.cat([torch.ones(len(positions), pairs), torch.zeros(len(positions), pairs)], dim=-1)
    return turn(x.to(dtype), positions, made)[:, :pairs]


def test_phase_is_exact_at_the_reported_place():
    """B01: dim 32, position 1857, pair 1: angle 1044.2678408785; float16 arithmetic gives -0.40816."""
    assert float(oracles.exact_angle(1857, 1, 32, 1e4)) == pytest.approx(1044.2678408785, abs=1e-9)
    assert pytest.approx(0.3066928098, abs=3e-7) == cosines(rw.Rotary(32), [1857])[0, 1].item()


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("cast", ["before", "after", "never"])
def test_phase_is_exact_after_any_cast(dtype, cast):
    """B01, B02, B08: over all positions below 2048 a half-precision result is the exact one, rounded once."""
    made = rw.Rotary(32)
    if cast == "before":
        made = made.to(dtype)
    elif cast == "after":
        made.at(torch.tensor([7]))
        made = made.to(dtype)
    positions = [*range(0, 2048, 7), 1857, 2008]
    got = cosines(made, positions, dtype)
    assert dtype == got.dtype
    unit = torch.finfo(dtype).eps / 2
    for row, position in enumerate(positions):
        for pair in range(16):
            exact = oracles.exact_cos_sin(position, pair, 32)[0]
            assert abs(exact - got[row, pair].item()) <= 3e-7 + unit * abs(exact)


def test_cast_module_still_answers_the_reported_place():
    """B02: after `.to(bfloat16)` cos[1] at 1857 is 0.3066928 rounded to bfloat16."""
    made = rw.Rotary(32).to(torch.bfloat16)
    assert cosines(made, [1857], torch.bfloat16)[0, 1].item() == 0.306640625


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_a_longer_input_leaves_earlier_rows_identical(dtype):
    """B03, B101: rows 0..15 are the same bits whether 16 or 17 positions are asked for."""
    made = rw.Rotary(32).to(dtype)
    x = normal(17, 32).to(dtype)
    first = turn(x[:16], list(range(16)), made)
    second = turn(x, list(range(17)), made)
    assert torch.equal(first, second[:16])
    assert torch.equal(turn(x, list(range(17)), rw.Rotary(32)), second)


@pytest.mark.parametrize("name", NAMES)
def test_autocast_does_not_touch_positions(name):
    """B04, B06: tables made inside autocast equal those made outside."""
    made = encoding(name, num_positions=8192)
    positions = torch.tensor([0, 1, 257, 4095])
    outside = made.at(positions)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = made.at(positions)
    for before, after in zip(leaves(outside), leaves(inside), strict=True):
        assert before.dtype == after.dtype
        assert torch.equal(before, after)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_4096_positions_stay_4096_distinct_rows(dtype):
    """B06: from 257 (bfloat16) or 2049 (float16) on, cast integers are no longer distinct; 4096 rows must be."""
    made = rw.Rotary(64).to(dtype)
    placement = made.at(torch.arange(4096))
    rows = torch.stack([placement.cos, placement.sin], dim=-1).reshape(4096, -1)
    assert len(torch.unique(rows, dim=0)) == 4096
    assert len(torch.unique(torch.arange(4096).to(dtype))) < 4096


def test_phase_error_does_not_grow_with_position():
    """B08: dim 128: at most 5e-4 at 4096 (float32 angles reach 1.4e-4; ours do not depend on position)."""
    made = rw.Rotary(128)
    for position in (512, 2048, 4096, 2**22):
        got = cosines(made, [position])[0]
        exact = [oracles.exact_cos_sin(position, pair, 128)[0] for pair in range(64)]
        assert exact == pytest.approx(got.tolist(), abs=5e-7)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
def test_tables_are_never_stored_in_half_precision(dtype):
    """B09: a table asked for in half precision is widened."""
    placement = rw.Rotary(32).at(torch.tensor([1857]), dtype=dtype)
    assert torch.float32 == placement.cos.dtype
    assert oracles.exact_cos_sin(1857, 1, 32)[0] == pytest.approx(placement.cos.flatten()[1].item(), abs=3e-7)


@pytest.mark.parametrize("shift", [0, 1000, 131_072, 2**24])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_distance_at_any_length(shift, layout):
    """B10: the score of a pair shifted by 2^24 moves by at most 1e-6 times the norms."""
    q, k = normal(2, 64, seed=2)
    made = rw.Rotary(64, layout=layout)
    reference = oracles.dot(
        oracles.rotated(q.tolist(), 37, layout=layout), oracles.rotated(k.tolist(), 11, layout=layout)
    )
    turned_q = turn(q[None].double(), [37 + shift], made)[0]
    turned_k = turn(k[None].double(), [11 + shift], made)[0]
    norms = float(q.norm() * k.norm())
    assert reference == pytest.approx(float(turned_q @ turned_k), abs=1e-6 * norms)
    turned_q, turned_k = turn(q[None], [37 + shift], made)[0], turn(k[None], [11 + shift], made)[0]
    assert reference == pytest.approx(float(turned_q.double() @ turned_k.double()), abs=1e-6 * norms)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_counting_a_mask_keeps_every_token(dtype):
    """B11: a bfloat16 running sum of 300 ones has 278 distinct values; positions need 300."""
    positions = rw.positions.from_mask(torch.ones(1, 300, dtype=dtype))
    assert positions[0].tolist() == list(range(300))
    assert len(torch.unique(torch.ones(300, dtype=torch.bfloat16).cumsum(0))) < 300


@pytest.mark.parametrize("order", [(torch.float16, torch.bfloat16), (torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("name", NAMES)
def test_dtype_of_a_second_instance_is_its_own(name, order):
    """B12, B14: equal encodings used with two dtypes in one process each return their own."""
    fresh = {}
    for dtype in order:
        made = encoding(name).to(dtype)
        q, k, v = (normal(1, 4, 6, 8, seed=seed).to(dtype) for seed in range(3))
        at = made.at(torch.arange(6))
        assert dtype == made.query(q, at).dtype
        assert dtype == made.key(k, at).dtype
        assert dtype == made.embed(normal(1, 6, 32).to(dtype), at).dtype
        fresh[dtype] = rw.attend(q, k, v, made)
        assert dtype == fresh[dtype].dtype
    torch.testing.assert_close(*(out.float() for out in fresh.values()), atol=0.05, rtol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_way_through_attention_returns_one_dtype_under_autocast(name):
    """B04, B12: which backend runs, or whether the logarithm is asked for, does not decide the dtype."""
    q, k, v = (normal(1, 4, 6, 8, seed=seed) for seed in range(3))
    made = encoding(name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = [rw.attend(q, k, v, made, backend=backend) for backend in ("reference", "sdpa", "auto")]
        outputs.append(rw.attend(q, k, v, made, return_lse=True)[0])
    assert len({out.dtype for out in outputs}) == 1
    for out in outputs:
        torch.testing.assert_close(out.float(), rw.attend(q, k, v, made), atol=0.03, rtol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_float64_in_gives_float64_accuracy(name):
    """B12: a float64 run differs from loops in Python's own floats by rounding only."""
    made = encoding(name).double()
    q, k, v = (normal(1, 4, 5, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    got = rw.attend(q, k, v, made)
    assert torch.float64 == got.dtype
    rotates, biased = "rotary" in name or name == "hybrid", "alibi" in name or name == "hybrid"
    for head, slope in enumerate(oracles.slopes(4)):
        queries, keys = q[0, head].tolist(), k[0, head].tolist()
        if rotates:
            queries = [oracles.rotated(row, position) for position, row in enumerate(queries)]
            keys = [oracles.rotated(row, position) for position, row in enumerate(keys)]
        expected = oracles.attention(
            queries,
            keys,
            v[0, head].tolist(),
            allowed=lambda i, j: j <= i,
            bias=lambda i, j, slope=slope: -slope * abs(i - j) if biased else 0.0,
        )
        for row in range(5):
            assert expected[row] == pytest.approx(got[0, head, row].tolist(), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_turning_needs_little_memory_beside_its_result(layout, dtype):
    """B14: peak extra memory of the rotation is at most twice the input, the result included."""
    x = normal(1, 16, 1024, 64).to(dtype)
    made = rw.Rotary(64, layout=layout)
    at = made.at(torch.arange(1024), dtype=dtype)
    made.query(x, at)
    size = x.numel() * x.element_size()
    peak = peak_extra_bytes(lambda: made.query(x, at))
    assert size <= peak <= 2 * size


@pytest.mark.parametrize("name", NAMES)
def test_results_depend_on_arguments_alone(name):
    """B15, B17: lengths 16, 48, 16: first and third answers are the same bits; so are a fresh encoding's."""
    made = encoding(name)
    q, k, v = (normal(1, 4, 48, 8, seed=seed) for seed in range(3))
    short = [x[:, :, :16] for x in (q, k, v)]
    first = rw.attend(*short, made)
    rw.attend(q, k, v, made)
    rw.attend(q.double(), k.double(), v.double(), made)
    rw.attend(*(x.to(torch.bfloat16) for x in (q, k, v)), made)
    third = rw.attend(*short, made)
    assert torch.equal(first, third)
    assert torch.equal(first, rw.attend(*short, encoding(name)))


def test_stretched_spectra_carry_no_history():
    """B15, B17: a spectrum is frozen numbers; making a stretched one leaves the plain one's answers alone."""
    x = normal(16, 128)
    plain = rw.Rotary(128)
    before = turn(x, list(range(16)), plain)
    stretched = rw.Rotary(128, spectrum=rw.spectra.ntk(128, stretch=4.0))
    assert not torch.equal(before, turn(x, list(range(16)), stretched))
    assert torch.equal(before, turn(x, list(range(16)), plain))
    with pytest.raises((AttributeError, TypeError)):
        plain.spectrum.magnitude = 2.0


@pytest.mark.parametrize("stretched", ["linear", "ntk", "yarn"])
def test_positions_around_the_trained_length_all_answer(stretched):
    """B19: M, M + 1 and factor * M - 1 answer, in prefill and in one decode step alike (B16)."""
    train_len, stretch = 64, 4
    options = {"train_len": train_len} if stretched == "yarn" else {}
    made = rw.Rotary(32, spectrum=getattr(rw.spectra, stretched)(32, stretch=stretch, **options))
    positions = list(range(stretch * train_len))
    x = normal(len(positions), 32)
    whole = turn(x, positions, made)
    assert torch.isfinite(whole).all()
    for position in (train_len, train_len + 1, stretch * train_len - 1):
        assert torch.equal(whole[position], turn(x[position : position + 1], [position], made)[0])


@pytest.mark.parametrize("stretched", ["linear", "ntk", "yarn"])
def test_stretch_of_one_is_identity_and_larger_ones_are_not(stretched):
    """B17, B61, B63: factor 1 gives the plain frequencies, every other factor changes the output."""
    options = {"train_len": 4096} if stretched == "yarn" else {}
    make = getattr(rw.spectra, stretched)
    plain = rw.spectra.plain(64)
    same = make(64, stretch=1, **options)
    assert list(plain.inv_freq) == pytest.approx(list(same.inv_freq), rel=1e-14)
    assert same.magnitude == 1.0
    ratios = [s / p for s, p in zip(make(64, stretch=4, **options).inv_freq, plain.inv_freq, strict=True)]
    assert all(0.0 < ratio <= 1.0 for ratio in ratios)
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(ratios))
    assert pytest.approx(0.25, rel=1e-12) == ratios[-1]

"""Angles against a 50-digit oracle, at small and enormous positions, whatever casts and defaults do."""

import contextlib

import mpmath
import pytest
import torch

import oracles
import ropewalk as rw
from ropewalk import kernels, phases

POSITIONS = (0, 1, 1857, 131_071, 2**24 + 1, 10**9 + 7, 2**40 + 3)
BASES = (1e4, 5e5, 1e7)
WIDTHS = (64, 128)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def cos_sin(encoding, positions, dtype=torch.float32):
    """What the encoding makes of the vector (1, ..., 1, 0, ..., 0): the cosines, then the sines."""
    pairs = encoding.rotary_dim // 2
    ones = torch.ones(len(positions), pairs, dtype=dtype)
    ones = torch.cat([ones, torch.zeros_like(ones)], dim=-1)
    at = encoding.at(torch.tensor(positions, dtype=torch.int64), dtype=dtype)
    turned = encoding.query(ones[None, None], at)[0, 0]
    return turned[:, :pairs], turned[:, pairs:]


def phase_error(encoding, positions, base, dtype=torch.float32):
    """The largest angle, in radians, between the turn that was made and the exact one."""
    cos, sin = cos_sin(encoding, positions, dtype)
    worst = 0.0
    for row, position in enumerate(positions):
        for pair in range(encoding.rotary_dim // 2):
            exact = oracles.exact_angle(position, pair, encoding.rotary_dim, base)
            made = mpmath.atan2(float(sin[row, pair]), float(cos[row, pair]))
            error = mpmath.fmod(made - exact, 2 * mpmath.pi)
            error = min(abs(error), 2 * mpmath.pi - abs(error))
            worst = max(worst, float(error))
    return worst


def plain(width, base):
    return rw.Rotary(width, base=base), contextlib.nullcontext()


def after_bfloat16_cast(width, base):
    return rw.Rotary(width, base=base).to(torch.bfloat16), contextlib.nullcontext()


def after_half_of_a_parent(width, base):
    parent = torch.nn.ModuleDict({"encoding": rw.Rotary(width, base=base)}).half()
    return parent["encoding"], contextlib.nullcontext()


def under_autocast(width, base):
    return rw.Rotary(width, base=base), torch.autocast("cpu", dtype=torch.bfloat16)


def under_bfloat16_default(width, base):
    with default_dtype(torch.bfloat16):
        encoding = rw.Rotary(width, base=base)
    return encoding, default_dtype(torch.bfloat16)


SITUATIONS = (plain, after_bfloat16_cast, after_half_of_a_parent, under_autocast, under_bfloat16_default)


@pytest.mark.parametrize("situation", SITUATIONS, ids=lambda made: made.__name__)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_phase_is_within_5e_7_of_50_digits_at_any_position(width, base, situation):
    encoding, context = situation(width, base)
    with context:
        error = phase_error(encoding, POSITIONS, base)
    assert error < 5e-7


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("width", WIDTHS)
def test_phase_is_within_1e_9_in_float64_up_to_a_billion(width, base):
    positions = [position for position in POSITIONS if position <= 10**9] + [10**9]
    error = phase_error(rw.Rotary(width, base=base), positions, base, torch.float64)
    assert error < 1e-9


def test_phase_is_exact_at_negative_positions():
    positions = [-position for position in POSITIONS]
    assert phase_error(rw.Rotary(64), positions, 1e4) < 5e-7


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_both_layouts_turn_by_the_same_exact_angle(layout):
    position, width = 131_071, 64
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(width, generator=generator)
    encoding = rw.Rotary(width, layout=layout)
    got = encoding.query(x[None, None, None], encoding.at(torch.tensor([position])))[0, 0, 0]
    assert oracles.rotated(x.tolist(), position, layout=layout) == pytest.approx(got.tolist(), abs=2e-6)


def test_phase_of_given_frequencies_is_exact_for_the_numbers_given():
    given = (1.0, 0.123456789, 3.3e-7)
    encoding = rw.Rotary(6, spectrum=rw.Spectrum(given))
    cos, sin = cos_sin(encoding, POSITIONS)
    for row, position in enumerate(POSITIONS):
        for pair, frequency in enumerate(given):
            angle = mpmath.mpf(position) * mpmath.mpf(frequency)
            assert float(mpmath.cos(angle)) == pytest.approx(float(cos[row, pair]), abs=5e-7)
            assert float(mpmath.sin(angle)) == pytest.approx(float(sin[row, pair]), abs=5e-7)


def test_steps_are_the_nearest_64_bit_fractions_of_a_turn():
    for width, base in ((64, 1e4), (128, 5e5)):
        steps = rw.spectra.plain(width, base).steps
        for pair, step in enumerate(steps):
            exact = oracles.exact_angle(1, pair, width, base) / (2 * mpmath.pi) * mpmath.mpf(2) ** 64
            assert abs(exact - (step % 2**64)) <= 0.5 + 1e-6


def test_phase_is_exact_for_a_hundred_seeded_positions_below_a_trillion():
    generator = torch.Generator().manual_seed(11)
    positions = torch.randint(0, 10**12, (100,), generator=generator).tolist()
    assert phase_error(rw.Rotary(8), positions, 1e4) < 5e-7


def test_sinusoidal_is_exact_at_any_position():
    encoding = rw.Sinusoidal(16)
    positions = torch.tensor(POSITIONS)
    made = encoding.embed(torch.zeros(1, len(POSITIONS), 16), encoding.at(positions))[0]
    for row, position in enumerate(POSITIONS):
        assert oracles.sinusoidal(position, 16) == pytest.approx(made[row].tolist(), abs=5e-7)


# Long runs of consecutive positions: the addition theorem


def run_errors(first, length, width, dtype, rows):
    """The largest errors of cosines and sines at some rows of the table of a run."""
    at = rw.Rotary(width).at(torch.arange(first, first + length), dtype)
    worst = 0.0
    for row in rows:
        for pair in range(width // 2):
            angle = oracles.exact_angle(first + row, pair, width, 1e4)
            worst = max(worst, abs(float(mpmath.cos(angle) - mpmath.mpf(float(at.cos[row, pair])))))
            worst = max(worst, abs(float(mpmath.sin(angle) - mpmath.mpf(float(at.sin[row, pair])))))
    return worst


@pytest.mark.parametrize("way", ["auto", "eager"])
@pytest.mark.parametrize("first", [0, 131_071, 10**9 + 7, 10**12, -(10**12), -6000])
def test_a_run_of_positions_is_within_5e_7_of_50_digits(first, way):
    length = 3 * phases.RUN + 17  # ends within a block
    with kernels.using(way):
        assert run_errors(first, length, 16, torch.float32, (0, 1, 255, 256, 4095, 6001, length - 2, length - 1)) < 5e-7


@pytest.mark.parametrize("way", ["auto", "eager"])
def test_a_run_in_float64_is_within_1e_9(way):
    with kernels.using(way):
        assert run_errors(10**9 - 5000, 5000, 16, torch.float64, (0, 127, 128, 4998, 4999)) < 1e-9


@pytest.mark.parametrize("first", [-3, 10**12, 2**63 - 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_row_of_a_run_equals_its_position_alone(dtype, first):
    positions, step = torch.arange(first, first + 9000), rw.Rotary(32).spectrum.steps
    expected = phases.angles(positions, step, dtype)
    tolerance = 5e-7 if dtype == torch.float32 else 1e-12
    for way in ("auto", "eager"):
        with kernels.using(way):
            cos, sin = kernels.tables(positions, step, dtype)
        assert cos.is_contiguous()
        assert sin.is_contiguous()
        torch.testing.assert_close(cos, expected.cos(), rtol=0, atol=tolerance)
        torch.testing.assert_close(sin, expected.sin(), rtol=0, atol=tolerance)


def test_only_consecutive_positions_are_a_run():
    run = torch.arange(7, 7 + phases.RUN)
    jump, twice, swapped = run.clone(), run.clone(), run.clone()
    jump[-1] += 1
    twice[5] = twice[4]
    swapped[[8, 9]] = swapped[[9, 8]]
    assert phases.run_start(run) == 7
    assert phases.run_start(run[None]) == 7
    rows = torch.stack((run, run))
    for other in (jump, twice, swapped, run.flip(0), 2 * run, run[1:], rows, rows.mT, run.int(), run.to("meta")):
        assert phases.run_start(other) is None
    step = rw.Rotary(8).spectrum.steps
    for positions in (jump, twice, swapped, run.flip(0), run[None], rows):
        cos, sin = kernels.tables(positions, step)
        expected = phases.angles(positions, step)
        torch.testing.assert_close(cos, expected.cos(), rtol=0, atol=5e-7)
        torch.testing.assert_close(sin, expected.sin(), rtol=0, atol=5e-7)


def test_a_run_is_the_same_in_inference_mode_and_trains_after_it():
    rope, positions = rw.Rotary(16), torch.arange(5000)
    with torch.inference_mode():
        inside = rope.at(positions)
        one = rope.at(positions[:1])
    outside = rope.at(positions)
    assert torch.equal(inside.cos, outside.cos)
    assert torch.equal(one.sin, rope.at(positions[:1]).sin)
    x = torch.ones(1, 1, 5000, 16, requires_grad=True)
    rw.rotate(x, outside).sum().backward()
    assert x.grad is not None


def test_a_changed_table_changes_no_later_table():
    rope = rw.Rotary(16)
    first = rope.at(torch.tensor([3]))
    first.cos.zero_(), first.sin.zero_()
    assert rope.at(torch.tensor([3])).cos[0, 0] == pytest.approx(float(mpmath.cos(3)), abs=5e-7)


@pytest.mark.compiled
def test_one_graph_holds_for_short_and_long_runs():
    rope, length = rw.Rotary(16), torch.export.Dim("length", min=2, max=3 * phases.RUN)

    class Tables(torch.nn.Module):
        def forward(self, positions):
            at = rope.at(positions)
            return at.cos, at.sin

    exported = torch.export.export(Tables(), (torch.arange(9),), dynamic_shapes=({0: length},)).module()
    compiled = torch.compile(Tables(), fullgraph=True, backend="aot_eager", dynamic=True)
    for first, count in ((0, 9), (10**12, 2 * phases.RUN)):
        positions = torch.arange(first, first + count)
        for graph in (exported, compiled):
            for expected, got in zip(Tables()(positions), graph(positions), strict=True):
                torch.testing.assert_close(got, expected, rtol=0, atol=5e-7)


def test_tables_lie_where_their_positions_do_whatever_the_default_device_is():
    import ropewalk as rw

    positions = torch.arange(5000)
    expected = rw.Rotary(8).at(positions)
    with torch.device("meta"):
        got = rw.Rotary(8).at(positions)
    assert torch.equal(expected.cos, got.cos)
    assert torch.equal(expected.sin, got.sin)

"""Angles, wavelengths and stretched frequencies: the lines of their figures against formulas by another route."""

import math

import pytest
from matplotlib.figure import Figure
from mpmath import mp

import ropewalk as rw
from ropewalk import plots
from ropewalk.plots import turning
from test_plots import GREY, lines


def marks(axes):
    return {line.get_label(): line.get_ydata()[0] for line in axes.get_lines() if line.get_color() == GREY}


def inv_freq(pair, dim=64, base=10_000):
    return float(mp.mpf(base) ** (-mp.mpf(2 * pair) / dim))


def test_angles_are_position_times_frequency():
    drawn = lines(plots.angles())
    assert {"position 0", "position 10", "position 100", "position 200", "position 500"} == set(drawn)
    for position in (0, 10, 100, 200, 500):
        x, y = drawn[f"position {position}"]
        assert list(range(32)) == x
        assert [position * inv_freq(i) for i in range(32)] == pytest.approx(y, rel=1e-14)


def test_wrapped_angles_have_the_cosines_of_the_exact_ones():
    far = 10**12 + 1
    [(_, y)] = lines(plots.angles([far], wrapped=True)).values()
    with mp.workdps(60):
        exact = [mp.mpf(10_000) ** (-mp.mpf(2 * i) / 64) for i in range(32)]
        assert [float(mp.cos(far * w)) for w in exact] == pytest.approx([math.cos(a) for a in y], abs=1e-14)
    assert all(-math.pi <= angle < math.pi for angle in y)


def test_negative_positions_turn_the_other_way():
    forth, back = turning.angle_numbers([5, -5])["angles"]
    assert [-a for a in forth] == back
    wrapped = turning.angle_numbers([-(2**63)], wrapped=True)["angles"][0]
    with mp.workdps(60):
        exact = [mp.cos(2**63 * mp.mpf(10_000) ** (-mp.mpf(2 * i) / 64)) for i in range(32)]
        assert [float(c) for c in exact] == pytest.approx([math.cos(a) for a in wrapped], abs=1e-14)
    assert all(-math.pi <= angle < math.pi for angle in wrapped)


@pytest.mark.errors
@pytest.mark.parametrize(
    ("positions", "got"), [(rw.ALiBi(8), "ALiBi"), (rw.spectra.plain(8), "Spectrum"), (5, r"5 \(int\)")]
)
def test_positions_of_another_type_are_named(positions, got):
    with pytest.raises(TypeError, match=f"positions must be integers in a list or tuple, got {got}"):
        plots.angles(positions)


def test_a_callers_legend_covers_no_line():
    axes = Figure(figsize=(5, 4)).add_subplot()
    plots.angles(axes=axes)
    axes.figure.draw_without_rendering()
    box = axes.get_legend().get_window_extent()
    for line in axes.get_lines():
        if line.get_color() != GREY:
            points = axes.transData.transform(line.get_xydata())
            assert not box.count_contains(points)


def test_angles_of_an_encoding_are_those_of_its_spectrum():
    encoding = rw.Hybrid(rw.Rotary(16, base=500), rw.ALiBi(4))
    [(_, y)] = lines(plots.angles([7], spectrum=encoding)).values()
    assert [7 * inv_freq(i, 16, 500) for i in range(8)] == pytest.approx(y, rel=1e-14)


def test_wavelengths_are_tokens_per_turn_with_both_lengths_marked():
    axes = plots.wavelengths(rw.Rotary(128), train_len=4096, eval_len=32_768)
    [(_, y)] = lines(axes).values()
    assert [2 * math.pi * 10_000 ** (2 * i / 128) for i in range(64)] == pytest.approx(y, rel=1e-12)
    turns = {n: sum(2 * math.pi * 10_000 ** (2 * i / 128) <= n for i in range(64)) for n in (4096, 32_768)}
    assert {
        f"trained on 4096 tokens, {turns[4096]} of 64 pairs complete a turn": 4096,
        f"to be read: 32 768 tokens, {turns[32_768]} of 64 pairs complete a turn": 32_768,
    } == marks(axes)


def test_several_spectra_are_told_apart_by_dashes_that_no_dot_hides():
    axes = plots.wavelengths({"plain": rw.spectra.plain(64), "NTK": rw.spectra.ntk(64, stretch=8)})
    assert ["None", "None"] == [line.get_marker() for line in axes.get_lines()]
    assert 2 == len({line.get_linestyle() for line in axes.get_lines()})
    assert "." == plots.wavelengths(rw.Rotary(64)).get_lines()[0].get_marker()


def test_pairs_that_never_turn_are_counted_not_drawn():
    axes = plots.wavelengths({"Gemma": rw.spectra.proportional(8, rotary_dim=4)})
    [(label, (_, y))] = lines(axes).items()
    assert "Gemma: 2 of 4 pairs never turn" == label
    assert [True, True, False, False] == [math.isfinite(v) for v in y]


def test_each_stretch_method_is_drawn_relative_to_plain():
    drawn = lines(plots.spectra(rotary_dim=64, stretch=8, train_len=4096))
    assert [1.0] * 32 == drawn["plain"][1]
    assert [1 / 8] * 32 == drawn["linear"][1]
    ntk = [8 ** (-2 * i / 62) for i in range(32)]  # base grows 8^(64/62) times
    assert ntk == pytest.approx(drawn["NTK"][1], rel=1e-12)
    dynamic = [(8 * 8 - 7) ** (-2 * i / 62) for i in range(32)]
    assert dynamic == pytest.approx(drawn["dynamic NTK"][1], rel=1e-12)
    magnitude = f"YaRN, tables × {0.1 * math.log(8) + 1:.3g}"
    assert (1.0, 1 / 8) == pytest.approx((drawn[magnitude][1][0], drawn[magnitude][1][-1]))
    assert (1.0, 1 / 8) == pytest.approx((drawn["Llama 3"][1][0], drawn["Llama 3"][1][-1]))

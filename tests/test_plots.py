"""Figures show what the formulas say: lines and maps read back from the axes, against numbers by another route."""

import json
import math

import pytest
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

import ropewalk as rw
from ropewalk import plots
from ropewalk.plots import heads, output, reach, scores, sources, studies, style
from ropewalk.study import attention as study_attention
from ropewalk.study import run
from study_fixtures import tiny

GREY = style.GREY


def lines(axes):
    """The data lines of some axes by label: (x, y); those that mark a length are left out."""
    drawn = [line for line in axes.get_lines() if line.get_color() != GREY]
    return {line.get_label(): tuple(map(list, line.get_data())) for line in drawn}


def images(panels):
    return [torch.as_tensor(axes.get_images()[0].get_array().filled(math.nan)) for axes in panels]


def test_decay_is_the_mean_cosine():
    [(_, (x, y))] = lines(plots.decay([500], rotary_dim=16, max_distance=300)).items()
    assert list(range(1, 301)) == x
    exact = [sum(math.cos(n * 500 ** (-2 * i / 16)) for i in range(8)) / 8 for n in range(1, 301)]
    assert exact == pytest.approx(y, abs=1e-9)


def test_decay_is_the_expected_score_of_a_key_like_its_query():
    generator = torch.Generator().manual_seed(0)
    rope, distance = rw.Rotary(16), 5
    q = torch.randn(1, 1, 1, 16, generator=generator).expand(1, 1, 40_000, 16).clone().normal_(generator=generator)
    turned = rope.query(q, rope.at(torch.full((40_000,), distance)))
    mean = (turned * q).sum(-1).mean() / q.square().sum(-1).mean()
    [row] = scores.decay_numbers([10_000], rotary_dim=16, max_distance=distance)["bases"]
    assert row["values"][distance] == pytest.approx(float(mean), abs=0.01)


def test_decay_says_up_to_where_it_stays_above_0():
    numbers = scores.decay_numbers([500, 500_000], rotary_dim=128, max_distance=1000)
    first, second = numbers["bases"]
    end = first["above_0_up_to"]
    assert min(first["values"][: end + 1]) >= 0 > first["values"][end + 1]
    assert 1000 == second["above_0_up_to"]


def test_far_distances_are_thinned_but_none_is_overlooked():
    numbers = scores.decay_numbers([10_000], rotary_dim=8, max_distance=20_000)
    distances, [row] = numbers["distances"], numbers["bases"]
    assert len(distances) == len(row["values"]) <= scores.MOST_POINTS + 1
    assert [0, 1, 2, 3] == distances[:4]
    assert 20_000 == distances[-1]
    exact = [sum(math.cos(n * 10_000 ** (-2 * i / 8)) for i in range(4)) / 4 for n in range(20_001)]
    assert [exact[n] for n in distances] == pytest.approx(row["values"], abs=1e-8)
    assert next(n for n, value in enumerate(exact) if value < 0) - 1 == row["above_0_up_to"]


def test_far_out_a_band_holds_every_distance():
    numbers = scores.decay_numbers([500], rotary_dim=8, max_distance=20_000)
    exact = [sum(math.cos(n * 500 ** (-2 * i / 8)) for i in range(4)) / 4 for n in range(20_001)]
    band = numbers["bases"][0]["band"]
    assert 20_001 == band["to"][-1]
    assert band["from"][1:] == band["to"][:-1]
    for k in (0, len(band["from"]) - 1):
        held = exact[band["from"][k] : band["to"][k]]
        assert scores.DENSE - 1 <= len(held)
        drawn = (band["low"][k], band["mean"][k], band["high"][k])
        assert (min(held), sum(held) / len(held), max(held)) == pytest.approx(drawn, abs=1e-8)
    assert [] == scores.decay_numbers([500], rotary_dim=8, max_distance=50)["bases"][0]["band"]["from"]


def test_near_by_each_distance_is_drawn_and_far_out_the_means():
    axes = plots.decay([500], rotary_dim=8, max_distance=4096)
    [(_, (x, y))] = lines(axes).items()
    [row] = scores.decay_numbers([500], rotary_dim=8, max_distance=4096)["bases"]
    first = row["band"]["from"][0]
    assert list(range(1, first)) == x[: first - 1]
    assert row["values"][1:first] + row["band"]["mean"] == y
    assert 1 == len(axes.collections)


def test_bound_is_the_papers_sum_and_no_score_exceeds_it():
    [row] = scores.decay_numbers([10_000], rotary_dim=8, max_distance=40, bound=True)["bases"]
    frequencies = [10_000 ** (-2 * i / 8) for i in range(4)]
    for n in (0, 1, 40):
        sums = [abs(sum(complex(math.cos(n * w), math.sin(n * w)) for w in frequencies[:i])) for i in (1, 2, 3, 4)]
        assert sum(sums) / 4 == pytest.approx(row["values"][n], rel=1e-12)


def test_bias_lines_fall_by_the_published_slopes():
    drawn = lines(plots.bias("alibi", num_heads=8, heads=[0, 7], seq_len=10))
    assert {"head 0, slope 1/2": [-n / 2 for n in range(10)], "head 7, slope 1/256": [-n / 256 for n in range(10)]} == {
        label: y for label, (_, y) in drawn.items()
    }


def test_symmetric_bias_sees_the_future():
    [(x, y)] = lines(plots.bias(rw.ALiBi(1), seq_len=9, symmetric=True)).values()
    assert list(range(-4, 5)) == x
    assert [-abs(n) / 256 for n in range(-4, 5)] == y


def test_bias_matrix_holds_every_query_and_key():
    panels = plots.bias_matrix("alibi", num_heads=4, heads=[0, 3], seq_len=5)
    assert ["head 0", "head 3"] == [axes.get_title() for axes in panels]
    for slope, drawn in zip((1 / 4, 1 / 256), images(panels), strict=True):
        exact = torch.tensor([[-slope * (q - k) if k <= q else math.nan for k in range(5)] for q in range(5)])
        torch.testing.assert_close(exact, drawn.float(), equal_nan=True)


def test_colour_bars_write_minus_as_axes_do():
    panels = plots.bias_matrix("alibi", heads=[0], seq_len=64)
    bar = panels[0].figure.axes[-1]
    assert "−10" in [tick.get_text() for tick in bar.get_yticklabels()]
    assert "−π" in [t.get_text() for t in plots.angles([1], wrapped=True).get_yticklabels()]


def test_the_page_of_one_head_is_filled_from_side_to_side():
    plan = output.KINDS["bias"]
    numbers = plan.numbers(num_heads=1)
    with style.looks():
        figure = style.page(plan.size(numbers))
        plan.fill(numbers, figure)
        figure.draw_without_rendering()
    over_distance, matrix = (axes.get_window_extent() for axes in figure.axes[:2])
    assert over_distance.x1 < matrix.x0
    assert over_distance.x0 < figure.bbox.width / 4


def test_a_large_bias_matrix_is_sampled_and_keeps_its_scale():
    [axes] = plots.bias_matrix(rw.ALiBi(1), seq_len=1000)
    [drawn] = images([axes])
    assert (250, 250) == drawn.shape
    assert -4 * 249 / 256 == pytest.approx(float(drawn[249, 0]))
    assert (-2, 998) == axes.get_xlim()


def test_hybrid_bias_is_weighted_by_1_minus_alpha():
    encoding = rw.Hybrid(rw.Rotary(8), rw.ALiBi(8), alpha=0.25)
    [(_, y)] = lines(plots.bias(encoding, heads=[0], seq_len=4)).values()
    assert [-0.75 * n / 2 for n in range(4)] == pytest.approx(y)


def _weights(name, head, seq_len=12):
    """Softmax weights of the random heads by `attend`, whose values are unit vectors."""
    layer, x = heads._random(name, 4, 8, seq_len, 0)
    q, k = (m(x).unflatten(-1, (4, 8)).transpose(1, 2) for m in (layer.q_proj, layer.k_proj))
    unit = torch.eye(seq_len).expand(1, 4, seq_len, seq_len)
    return rw.attend(q, k, unit, layer.encoding, backend="reference")[0, head].detach()


def test_attention_maps_are_the_weights_that_attend_uses():
    names = ("rotary", "alibi", "hybrid", "sinusoidal")
    panels = plots.attention(names, heads=[0, 3], seq_len=12, num_heads=4, head_dim=8)
    drawn = images(panels)
    for row, head in enumerate((0, 3)):
        for column, name in enumerate(names):
            exact = _weights(name, head).clamp(min=heads.FLOOR)
            exact[torch.ones(12, 12, dtype=torch.bool).triu(1)] = math.nan
            torch.testing.assert_close(exact, drawn[4 * row + column].float(), equal_nan=True, atol=1e-5, rtol=1e-4)


def test_attention_panels_share_one_scale_and_say_how_far_back_they_look():
    panels = plots.attention(seq_len=12, num_heads=4, head_dim=8)
    assert 6 == len(panels)
    assert 1 == len({axes.get_images()[0].get_clim() for axes in panels})
    weights, places = _weights("alibi", 3).double(), torch.arange(12)
    back = (weights * (places[:, None] - places)).sum() / 12
    assert f"head 3\n{back:.1f} back" == panels[4].texts[0].get_text()


def test_scores_of_random_heads_have_deviation_1_without_an_encoding():
    [panel] = heads.attention_numbers(["nope"], of="scores", heads=[0], seq_len=128)["panels"]
    values = torch.tensor([v for row in panel["values"] for v in row if v is not None])
    assert float(values.std()) == pytest.approx(1, abs=0.15)


def test_one_encoding_has_its_heads_side_by_side():
    numbers = heads.attention_numbers(["alibi"], heads=[0, 1, 2], seq_len=4, num_heads=4, head_dim=4)
    assert (1, 3) == heads.grid_of(numbers)


def test_receptive_norms_are_those_of_the_jacobian():
    model = reach._fresh(["rotary"], 2, 2, 4, 6, 0)["rotary"]
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1))

    def last(one):
        y, at = one[None], model.encoding.at(torch.arange(6))
        for block in model.blocks:
            y = block(y, at=at)
        return model.norm(y)[0, -1]

    each = [torch.autograd.functional.jacobian(last, row).double().norm(dim=(0, 2)) for row in x]
    torch.testing.assert_close(torch.stack(each).mean(0), reach.jacobian_norms(model, x), rtol=1e-4, atol=1e-6)


def test_receptive_starts_at_the_last_token_and_says_how_far_its_share_lies():
    axes = plots.receptive(["alibi"], num_layers=1, seq_len=24, num_heads=2, head_dim=4, share=0.9)
    [(label, (x, y))] = lines(axes).items()
    assert list(range(24)) == x
    within = next(n for n in range(24) if sum(y[: n + 1]) >= 0.9 * sum(y))
    assert f"ALiBi: 90 % within {within}" == label


def test_alibi_reaches_less_far_than_rotary():
    numbers = reach.receptive_numbers(["rotary", "alibi"], num_layers=1, seq_len=128, num_heads=4, head_dim=8)
    rotary, alibi = (row["reach"] for row in numbers["encodings"])
    assert alibi < rotary


ROWS = [
    {"encoding": name, "seed": seed, "protocol": how, "eval_len": n, "perplexity": value, "ci_low": 1, "ci_high": 9}
    for name, seed, how, n, value in [
        ("rotary", 0, "windows", 256, 4.0), ("rotary", 1, "windows", 256, 6.0), ("rotary", 0, "windows", 512, 8.0),
        ("rotary", 1, "windows", 512, None), ("alibi", 0, "windows", 512, 3.0), ("alibi", 0, "sliding", 512, 7.0),
    ]
]  # fmt: skip


def test_lengths_are_means_over_seeds_with_one_deviation():
    axes = plots.lengths(ROWS, train_len=256)
    drawn = {c.get_label(): tuple(map(list, c.lines[0].get_data())) for c in axes.containers}
    assert {"RoPE": ([256, 512], [5.0, 8.0]), "ALiBi": ([512], [3.0])} == drawn
    points = studies.length_numbers(ROWS)["series"][0]["points"]
    sd = math.sqrt(2.0)  # of 4 and 6
    assert (5 - sd, 5 + sd) == pytest.approx((points[0]["low"], points[0]["high"]))
    assert (1, 9) == (points[1]["low"], points[1]["high"])


@pytest.mark.parametrize(("tokenizer", "per"), [("byte", "byte"), ("words", "token")])
def test_lengths_say_what_a_perplexity_is_per(tokenizer, per, tmp_path):
    (tmp_path / "results.json").write_text(json.dumps(ROWS))
    (tmp_path / "study.json").write_text(json.dumps({"settings": {"tokenizer": tokenizer}}))
    assert f"perplexity per {per}" == plots.lengths(tmp_path).get_ylabel()


def test_lengths_show_the_protocol_that_was_asked_for():
    [container] = plots.lengths(ROWS, protocol="sliding").containers
    assert [7.0] == list(container.lines[0].get_ydata())


def test_spectra_of_a_config_are_grouped_by_layers():
    config = {"model_type": "gemma3_text", "hidden_size": 64, "num_attention_heads": 4, "head_dim": 16,
              "num_hidden_layers": 6, "max_position_embeddings": 512, "sliding_window": 64, "rope_theta": 1e6,
              "rope_local_base_freq": 10_000.0}  # fmt: skip
    found = sources.of_config(config)
    assert ["layers 0-4", "layer 5"] == list(found.spectra)
    assert [rw.spectra.plain(16), rw.spectra.plain(16, 1e6)] == list(found.spectra.values())
    assert {"": rw.spectra.plain(16, 1e6)} == sources.of_config(config, layer=5).spectra


DRAWS = {
    "angles": lambda axes: plots.angles([3], axes=axes),
    "wavelengths": lambda axes: plots.wavelengths(rw.Rotary(8), train_len=10, axes=axes),
    "spectra": lambda axes: plots.spectra(["linear"], axes=axes),
    "decay": lambda axes: plots.decay([100], rotary_dim=8, max_distance=10, axes=axes),
    "bias": lambda axes: plots.bias(seq_len=4, axes=axes),
    "lengths": lambda axes: plots.lengths(ROWS, axes=axes),
    "receptive": lambda axes: plots.receptive(["nope"], seq_len=4, num_layers=1, num_heads=1, axes=axes),
}


@pytest.mark.parametrize("name", DRAWS)
def test_callers_axes_are_drawn_into_and_their_settings_stay(name):
    before = dict(pyplot.rcParams)
    axes = Figure().add_subplot()
    assert axes is DRAWS[name](axes)
    assert axes.get_lines() or axes.containers
    assert before == dict(pyplot.rcParams)
    assert [] == axes.figure.legends  # a caller's figure gets its legend inside the axes


def test_callers_panels_are_drawn_into():
    panels = list(Figure().subplots(1, 4))
    assert panels == plots.bias_matrix(heads=[0, 1, 2, 3], seq_len=4, axes=panels)
    assert panels == plots.attention(["nope", "rotary"], heads=[0, 1], seq_len=4, axes=panels)
    with pytest.raises(ValueError, match=r"axes must be one for each panel \(4\), got 3"):
        plots.attention(["nope", "rotary"], heads=[0, 1], seq_len=4, axes=panels[:3])


def test_drawing_opens_no_window():
    plots.angles()
    plots.bias_matrix(seq_len=4)
    assert [] == pyplot.get_fignums()


@pytest.mark.parametrize("kind", sorted(set(output.KINDS) - {"lengths", "wavelengths", "receptive"}))
def test_nothing_is_clipped_and_letters_are_legible_at_400_pixels(kind):
    plan = output.KINDS[kind]
    numbers = plan.numbers()
    with style.looks():
        figure = style.page(plan.size(numbers))
        plan.fill(numbers, figure)
        figure.draw_without_rendering()
    whole = figure.bbox
    for axes in figure.axes:
        box = axes.get_tightbbox()
        assert whole.x0 - 1 <= box.x0
        assert whole.y0 - 1 <= box.y0
        assert box.x1 <= whole.x1 + 1
        assert box.y1 <= whole.y1 + 1
    for legend in figure.legends:
        box = legend.get_window_extent()
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1
    smallest = min(t.get_fontsize() for t in figure.findobj(match=lambda a: hasattr(a, "get_fontsize")) if t.get_text())
    assert 9.5 <= smallest * 400 / (72 * figure.get_figwidth())  # pixels where the page shows it 400 wide


@pytest.mark.slow
def test_trained_heads_and_models_of_a_study(tmp_path):
    settings, corpus = tiny(tmp_path / "text", encodings=("rotary", "alibi"), steps=4)
    run.run(settings, tmp_path / "study", jobs=1, quiet=True)
    numbers = heads.attention_numbers(study=tmp_path / "study", heads=[1], seq_len=20)
    assert [("rotary", 1), ("alibi", 1)] == [(p["encoding"], p["head"]) for p in numbers["panels"]]
    models, tokens, _ = studies.trained(tmp_path / "study", None, None)
    assert torch.equal(corpus.held_out[0].tokens, tokens)
    [weights] = study_attention.attention_weights(models["alibi"], tokens[None, :20], [0])
    drawn = torch.tensor([[v or 0.0 for v in row] for row in numbers["panels"][1]["values"]])
    torch.testing.assert_close(weights[1], drawn, rtol=1e-4, atol=1e-6)

    reached = reach.receptive_numbers(study=tmp_path / "study", seq_len=12)
    assert ("trained", ["rotary", "alibi"]) == (reached["origin"], [row["encoding"] for row in reached["encodings"]])
    drawn = plots.lengths(tmp_path / "study")
    assert {"RoPE", "ALiBi"} == {c.get_label() for c in drawn.containers}
    assert 16 == drawn.get_lines()[-1].get_xdata()[0]  # the training length

    (tmp_path / "text" / "text0.txt").write_bytes(b"other letters" * 40)
    with pytest.raises(ValueError, match="the study's text must be as it was"):
        studies.trained(tmp_path / "study", None, None)

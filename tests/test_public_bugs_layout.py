"""Laws behind public bug reports on rotation layouts, conversion and rotary width (K07, K08)."""

import pytest
import torch

import oracles
import ropewalk as rw
from samples import HEAD_DIM, MODEL_DIM, NUM_HEADS, VOCABULARY, normal, tokens

LAYOUTS = ("half", "interleaved")


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("half", [-1.9841106486, 1.9599006675, 2.4623779024, 4.0197996683]),
        ("interleaved", [-1.1426396638, 1.9220755965, 2.9598506679, 4.0297995017]),
    ],
)
def test_layout_decides_which_channels_turn_together(layout, expected):
    """B44: dim 4, position 1, x = (1, 2, 3, 4)."""
    made = rw.Rotary(4, layout=layout)
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[None, None, None]
    at = made.at(torch.tensor([1]), dtype=torch.float64)
    assert expected == pytest.approx(made.query(x, at)[0, 0, 0].tolist(), abs=1e-10)
    assert expected == pytest.approx(rw.rotate(x, at, layout)[0, 0, 0].tolist(), abs=1e-10)


@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
def test_every_backend_reads_the_layout(backend, layout, num_kv_heads):
    """B45, B46: both layouts, with grouped keys too, equal loops on every backend."""
    made = rw.Rotary(8, layout=layout)
    q = normal(1, 8, 5, 8, seed=1, dtype=torch.float64)
    k, v = (normal(1, num_kv_heads, 5, 8, seed=seed, dtype=torch.float64) for seed in (2, 3))
    got = rw.attend(q, k, v, made, backend=backend)
    for head in range(8):
        group = head // (8 // num_kv_heads)
        expected = oracles.attention(
            [oracles.rotated(row, i, layout=layout) for i, row in enumerate(q[0, head].tolist())],
            [oracles.rotated(row, i, layout=layout) for i, row in enumerate(k[0, group].tolist())],
            v[0, group].tolist(),
            allowed=lambda i, j: j <= i,
        )
        for row in range(5):
            assert expected[row] == pytest.approx(got[0, head, row].tolist(), abs=1e-12)


def test_layouts_give_different_results_without_conversion():
    """B44, B45: a swapped layout can be seen."""
    x = normal(1, 1, 4, 8)
    at = rw.Rotary(8).at(torch.arange(4))
    assert (rw.rotate(x, at, "half") - rw.rotate(x, at, "interleaved")).abs().max() > 0.1


@pytest.mark.parametrize("rotary_dim", [None, 8, 4])
def test_conversion_is_an_exact_involution_pair_and_keeps_rotated_vectors(rotary_dim):
    """B44, K07: to_half then to_interleaved gives the same bits; turning commutes with converting."""
    x = normal(2, 3, 5, 12)
    half = rw.layouts.to_half(x, rotary_dim=rotary_dim)
    assert torch.equal(x, rw.layouts.to_interleaved(half, rotary_dim=rotary_dim))
    interleaved = rw.layouts.to_interleaved(x, rotary_dim=rotary_dim)
    assert torch.equal(x, rw.layouts.to_half(interleaved, rotary_dim=rotary_dim))
    interleaved_rotary = rw.Rotary(12, rotary_dim=rotary_dim, layout="interleaved")
    half_rotary = rw.Rotary(12, rotary_dim=rotary_dim, layout="half")
    at = half_rotary.at(torch.arange(5))
    expected = rw.layouts.to_half(interleaved_rotary.query(x, at), rotary_dim=rotary_dim)
    torch.testing.assert_close(half_rotary.query(half, at), expected, atol=1e-6, rtol=0.0)


def test_conversion_moves_neighbours_to_halves():
    """B44: channels 0 1 2 3 4 5 (three pairs) become 0 2 4 1 3 5, the untouched ones stay behind."""
    x = torch.arange(8.0)
    assert rw.layouts.to_half(x, rotary_dim=6).tolist() == [0.0, 2.0, 4.0, 1.0, 3.0, 5.0, 6.0, 7.0]
    assert rw.layouts.to_interleaved(x, rotary_dim=6).tolist() == [0.0, 3.0, 1.0, 4.0, 2.0, 5.0, 6.0, 7.0]


def projected_scores(x, query_weight, key_weight, num_heads, num_kv_heads, layout):
    """Scores of every query head against its key head, from projection weights."""
    seq_len = x.shape[0]
    made = rw.Rotary(4, layout=layout)
    at = made.at(torch.arange(seq_len), dtype=torch.float64)
    q = (x @ query_weight.T).reshape(1, seq_len, num_heads, 4).transpose(1, 2)
    k = (x @ key_weight.T).reshape(1, seq_len, num_kv_heads, 4).transpose(1, 2)
    q, k = made.query(q, at), made.key(k, at)
    return q @ k.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(-1, -2)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (8, 1), (6, 3), (4, 4)])
def test_converted_projections_keep_every_score(num_heads, num_kv_heads):
    """B47: key rows are permuted with the number of key heads; (8, 2) sees a wrong count, (4, 2) does not."""
    x = normal(6, 16, dtype=torch.float64)
    query_weight = normal(num_heads * 4, 16, seed=1, dtype=torch.float64)
    key_weight = normal(num_kv_heads * 4, 16, seed=2, dtype=torch.float64)
    expected = projected_scores(x, query_weight, key_weight, num_heads, num_kv_heads, "interleaved")
    converted_query = rw.layouts.to_half_weight(query_weight, num_heads)
    converted_key = rw.layouts.to_half_weight(key_weight, num_kv_heads)
    got = projected_scores(x, converted_query, converted_key, num_heads, num_kv_heads, "half")
    torch.testing.assert_close(got, expected, atol=1e-12, rtol=0.0)
    assert torch.equal(query_weight, rw.layouts.to_interleaved_weight(converted_query, num_heads))
    assert torch.equal(key_weight, rw.layouts.to_interleaved_weight(converted_key, num_kv_heads))


def test_a_wrong_head_count_in_conversion_can_be_seen():
    """B47: with n_head / n_kv = 4 in place of n_kv = 2 the scores are far off."""
    x = normal(6, 16, dtype=torch.float64)
    query_weight = normal(32, 16, seed=1, dtype=torch.float64)
    key_weight = normal(8, 16, seed=2, dtype=torch.float64)
    expected = projected_scores(x, query_weight, key_weight, 8, 2, "interleaved")
    wrong = rw.layouts.to_half_weight(key_weight, 4)
    got = projected_scores(x, rw.layouts.to_half_weight(query_weight, 8), wrong, 8, 2, "half")
    assert (got - expected).abs().max() > 1.0


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_converted_model_gives_the_same_logits(source):
    """B49: end to end, from each layout to the other."""
    target = "half" if source == "interleaved" else "interleaved"
    convert = rw.layouts.to_half_weight if target == "half" else rw.layouts.to_interleaved_weight
    models = []
    for layout in (source, target):
        torch.manual_seed(1)
        encoding = rw.Rotary(HEAD_DIM, layout=layout)
        widths = {"model_dim": MODEL_DIM, "num_heads": NUM_HEADS, "num_kv_heads": 2}
        models.append(rw.Transformer(VOCABULARY, encoding, num_layers=2, **widths))
    original, converted = (made.double().eval() for made in models)
    text = tokens(1, 9)
    with torch.inference_mode():
        expected = original(text)
        assert (converted(text) - expected).abs().max() > 1e-6
        for module in converted.modules():
            if isinstance(module, rw.Attention):
                module.q_proj.weight.copy_(convert(module.q_proj.weight, NUM_HEADS))
                module.k_proj.weight.copy_(convert(module.k_proj.weight, 2))
        torch.testing.assert_close(converted(text), expected, atol=1e-10, rtol=0.0)


def test_width_is_the_same_in_every_layer():
    """B50: four layers made with one encoding all turn 64 of 128 channels."""
    encoding = rw.Rotary(128, rotary_dim=64)
    layers = [rw.Attention(256, 2, encoding) for _ in range(4)]
    assert [layer.encoding.rotary_dim for layer in layers] == [64, 64, 64, 64]
    assert encoding.head_dim == 128


@pytest.mark.parametrize("layout", LAYOUTS)
def test_partial_width_uses_its_own_exponent_and_leaves_the_rest_alone(layout):
    """B51: head 128, rotated 64: inv_freq[1] 0.7498942093, [31] 1.3335214e-4; channels 64..127 the same bits."""
    made = rw.Rotary(128, rotary_dim=64, layout=layout)
    assert pytest.approx(0.7498942093, abs=1e-10) == made.spectrum.inv_freq[1]
    assert pytest.approx(1.3335214e-4, rel=1e-7) == made.spectrum.inv_freq[31]
    x = normal(1, 1, 3, 128)
    turned = made.query(x, made.at(torch.tensor([5, 1000, 2**20])))
    assert torch.equal(x[..., 64:], turned[..., 64:])
    for row, position in enumerate((5, 1000, 2**20)):
        expected = oracles.rotated(x[0, 0, row].tolist(), position, layout=layout, rotary_dim=64)
        assert expected == pytest.approx(turned[0, 0, row].tolist(), abs=3e-6)


def test_head_dim_is_given_not_derived():
    """B55: heads of 128 channels in a model of 160 for each; without being told, the encoding refuses 160."""
    module = rw.Attention(320, 2, rw.Rotary(128), head_dim=128)
    assert (2, 3, 320) == module(torch.zeros(2, 3, 320)).shape
    assert (256, 320) == module.q_proj.weight.shape
    with pytest.raises(ValueError, match=r"head_dim of Rotary must be this attention's \(160\), got 128"):
        rw.Attention(320, 2, rw.Rotary(128))


@pytest.mark.parametrize("odd", [7, 33])
def test_odd_rotary_width_is_refused_when_it_is_made(odd):
    """B57: an odd width has no last pair."""
    with pytest.raises(ValueError, match=rf"must be .*even.*, got {odd}"):
        rw.Rotary(odd)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_odd_head_with_even_rotary_width_leaves_the_last_channel_alone(layout):
    """B57: head 33 with 32 rotated channels works; channel 32 is the same bits."""
    made = rw.Rotary(33, rotary_dim=32, layout=layout)
    x = normal(2, 3, 4, 33)
    turned = made.query(x, made.at(torch.arange(4)))
    assert torch.equal(x[..., 32], turned[..., 32])
    assert not torch.equal(x[:, :, 1:, :32], turned[:, :, 1:, :32])
    torch.testing.assert_close(turned[..., :32].norm(dim=-1), x[..., :32].norm(dim=-1), atol=1e-5, rtol=0.0)

"""Laws behind public bug reports on ALiBi: slopes, geometry, precision, memory (K14, K15)."""

import itertools
import random

import pytest
import torch

import oracles
import ropewalk as rw
from samples import normal, peak_extra_bytes

BACKENDS = ("reference", "sdpa", "auto")


def slopes_of(made, num_heads):
    """What one token of distance costs each head."""
    return (-made.bias(torch.arange(num_heads), torch.tensor(1), torch.tensor(0))).tolist()


def dense_bias(made, num_heads, q_pos, k_pos):
    return made.bias(torch.arange(num_heads)[:, None, None], q_pos[:, None], k_pos[None, :])


def plain_attention(q, k, v, bias, allowed):
    """Softmax of the dense float64 score; the bias is added after scaling."""
    score = q.double() @ k.double().transpose(-1, -2) / q.shape[-1] ** 0.5 + bias
    return score.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.double()


@pytest.mark.parametrize("num_heads", range(1, 129))
def test_slopes_follow_the_published_rule_for_every_head_count(num_heads):
    """B91, B92, B93: geometric for powers of two, filled up from the double otherwise; never 1."""
    got = slopes_of(rw.ALiBi(num_heads), num_heads)
    assert oracles.slopes(num_heads) == pytest.approx(got, rel=1e-6)
    assert all(0.0 < slope < 1.0 for slope in got)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (1, {0: 0.00390625}),
        (6, {0: 0.25, 1: 0.0625, 2: 0.015625, 3: 0.00390625, 4: 0.5, 5: 0.125}),
        (8, {0: 0.5, 7: 0.00390625}),
        (12, {0: 0.5, 7: 0.00390625, 8: 0.7071067812, 9: 0.3535533906, 10: 0.1767766953, 11: 0.0883883476}),
        (40, {0: 0.8408964153, 1: 0.7071067812, 2: 0.5946035575, 3: 0.5}),
    ],
)
def test_slopes_of_the_reported_models(num_heads, expected):
    """B91 (6, 12), B92 (1, 8), B93 (6), B97 (40: in the order of published checkpoints)."""
    got = slopes_of(rw.ALiBi(num_heads), num_heads)
    assert list(expected.values()) == pytest.approx([got[head] for head in expected], rel=1e-7)


def test_sorted_slopes_only_on_request():
    """B97: another order is given as numbers."""
    given = sorted(oracles.slopes(12), reverse=True)
    got = slopes_of(rw.ALiBi(12, slopes=given), 12)
    assert given == pytest.approx(got, rel=1e-7)
    assert slopes_of(rw.ALiBi(12), 12) != sorted(got, reverse=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("num_heads", "world_size"), [(12, 2), (12, 4), (6, 3), (8, 8)])
def test_slopes_of_a_shard_are_a_slice_of_the_whole(num_heads, world_size, backend):
    """B95: 12 heads on 2 ranks: rank 1 holds the last six of twelve slopes, not those of six heads."""
    made = rw.ALiBi(num_heads)
    q, k, v = (normal(1, num_heads, 9, 4, seed=seed) for seed in range(3))
    whole = rw.attend(q, k, v, made, backend=backend)
    local = num_heads // world_size
    parts = []
    for rank in range(world_size):
        heads = torch.arange(rank * local, (rank + 1) * local)
        sliced = (x[:, heads] for x in (q, k, v))
        parts.append(rw.attend(*sliced, made, heads=heads, backend=backend))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-6, rtol=0.0)
    regenerated = rw.attend(*(x[:, local : 2 * local] for x in (q, k, v)), rw.ALiBi(local), backend=backend)
    assert (regenerated - whole[:, local : 2 * local]).abs().max() > 1e-3


def test_slopes_of_the_second_rank():
    """B95: the numbers of rank 1 of 2 for 12 heads."""
    got = -rw.ALiBi(12).bias(torch.arange(6, 12), torch.tensor(1), torch.tensor(0))
    expected = [0.0078125, 0.00390625, 0.7071067812, 0.3535533906, 0.1767766953, 0.0883883476]
    assert expected == pytest.approx(got.tolist(), rel=1e-7)


def test_bias_of_a_decode_step_varies_over_the_keys():
    """B98: one query, four keys, slope 0.5: -1.5 -1 -0.5 0, never constant."""
    made = rw.ALiBi(1, slopes=(0.5,))
    bias = made.bias(torch.tensor(0), torch.tensor(3), torch.arange(4))
    assert bias.tolist() == [-1.5, -1.0, -0.5, 0.0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_step_uses_the_bias(backend):
    """B98: zero queries and keys leave only the bias, whose softmax over four keys is known."""
    made = rw.ALiBi(1, slopes=(0.5,))
    q, k, v = torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 4, 4), torch.eye(4)[None, None]
    weights = [2.718281828459045**bias for bias in (-1.5, -1.0, -0.5, 0.0)]
    expected = [weight / sum(weights) for weight in weights]
    assert expected == pytest.approx(rw.attend(q, k, v, made, backend=backend)[0, 0, 0].tolist(), abs=1e-6)


def test_a_constant_per_query_does_not_change_causal_output():
    """B99: distances off by one everywhere, or counted from the first key, give the same weights."""
    q, k, v = (normal(1, 4, 12, 8, seed=seed) for seed in range(3))
    got = rw.attend(q, k, v, rw.ALiBi(4))
    position = torch.arange(12)
    slope = torch.tensor(oracles.slopes(4), dtype=torch.float64)[:, None, None]
    causal = position <= position[:, None]
    shifted = plain_attention(q, k, v, -slope * (position[:, None] - position + 1), causal)
    by_key = plain_attention(q, k, v, slope * position, causal)
    torch.testing.assert_close(got.double(), shifted, atol=1e-6, rtol=0.0)
    torch.testing.assert_close(got.double(), by_key, atol=1e-6, rtol=0.0)


def test_bias_is_symmetric_without_a_causal_mask():
    """B100: queries at 2..4 of 5 keys, slope 1: never positive."""
    made = rw.ALiBi(1, slopes=(1.0,))
    expected = [[-2, -1, 0, -1, -2], [-3, -2, -1, 0, -1], [-4, -3, -2, -1, 0]]
    assert expected == dense_bias(made, 1, torch.arange(2, 5), torch.arange(5))[0].tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_encoder_use_penalises_the_future_like_the_past(backend):
    """B100: non-causal attention on every backend equals the dense symmetric form."""
    q, k, v = normal(1, 4, 3, 8), normal(1, 4, 5, 8, seed=1), normal(1, 4, 5, 8, seed=2)
    got = rw.attend(q, k, v, rw.ALiBi(4), causal=False, backend=backend)
    slope = torch.tensor(oracles.slopes(4), dtype=torch.float64)[:, None, None]
    distance = (torch.arange(2, 5)[:, None] - torch.arange(5)).abs()
    expected = plain_attention(q, k, v, -slope * distance, torch.ones(3, 5, dtype=torch.bool))
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_in_any_order_equal_a_fresh_encoding(backend):
    """B101: 512, 513, 511 in sequence crashed; every order must give what a fresh encoding gives."""
    lengths = [33, 32, 31, 1, 64]
    expected = {}
    for seq_len in lengths:
        x = normal(1, 2, seq_len, 4)
        expected[seq_len] = rw.attend(x, x, x, rw.ALiBi(2), backend=backend)
    made = rw.ALiBi(2)
    orders = list(itertools.permutations(lengths))
    for order in random.Random(0).sample(orders, 10):
        for seq_len in order:
            x = normal(1, 2, seq_len, 4)
            assert torch.equal(expected[seq_len], rw.attend(x, x, x, made, backend=backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_is_exact_among_recent_keys_in_half_precision(dtype):
    """B103: 4096 keys, slope 0.5: a bfloat16 bias by key has 769 distinct values, ours 4096 exact ones."""
    made = rw.ALiBi(1, slopes=(0.5,)).to(dtype)
    bias = made.bias(torch.tensor(0), torch.tensor(4095), torch.arange(4096))
    assert bias.dtype == torch.float32
    assert [-0.5 * (4095 - j) for j in range(4096)] == bias.tolist()
    assert len(torch.unique((0.5 * torch.arange(4096)).to(torch.bfloat16))) == 769


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_attention_keeps_the_recent_keys_apart(backend):
    """B103: with zero scores the weights of the last keys fall by exp(-slope) a token at any length."""
    seq_len, slope = 2048, 0.5
    made = rw.ALiBi(1, slopes=(slope,))
    q = torch.zeros(1, 1, 1, 16, dtype=torch.bfloat16)
    k = torch.zeros(1, 1, seq_len, 16, dtype=torch.bfloat16)
    v = torch.zeros(1, 1, seq_len, 16, dtype=torch.bfloat16)
    v[0, 0, -16:] = torch.eye(16)
    got = rw.attend(q, k, v, made, backend=backend)[0, 0, 0].tolist()
    total = 1.0 / (1.0 - 2.718281828459045**-slope)
    for column in range(16):
        expected = 2.718281828459045 ** (-slope * (15 - column)) / total
        assert expected == pytest.approx(got[column], rel=2e-2)


def test_attention_with_bias_needs_no_dense_bias():
    """B104: memory beyond inputs and result stays far below heads x queries x keys."""
    heads, seq_len, width = 4, 2048, 16
    q, k, v = (normal(1, heads, seq_len, width, seed=seed) for seed in range(3))
    made = rw.ALiBi(heads)
    rw.attend(q[:, :, :64], k[:, :, :64], v[:, :, :64], made, backend="sdpa")
    with torch.inference_mode():
        peak = peak_extra_bytes(lambda: rw.attend(q, k, v, made, backend="sdpa"))
    dense = heads * seq_len * seq_len * 4
    assert q.numel() * 4 <= peak <= dense / 8


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(6, 6), (2, 1, 6, 6), (1, 4, 6, 6), (2, 4, 6, 6), (2, 1, 1, 6)])
def test_masks_of_every_broadcastable_shape_meet_the_bias(shape, backend):
    """B106: with a batch axis, a head axis, or neither, and custom positions; inputs are the same bits after."""
    made = rw.ALiBi(4)
    q, k, v = (normal(2, 4, 6, 8, seed=seed) for seed in range(3))
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., 0] = True
    positions = torch.tensor([3, 4, 5, 9, 10, 40])
    before = [x.clone() for x in (q, k, v, mask, positions)]
    got = rw.attend(q, k, v, made, q_positions=positions, k_positions=positions, mask=mask, backend=backend)
    for old, new in zip(before, (q, k, v, mask, positions), strict=True):
        assert torch.equal(old, new)
    slope = torch.tensor(oracles.slopes(4), dtype=torch.float64)[:, None, None]
    distance = positions[:, None] - positions
    expected = plain_attention(q, k, v, -slope * distance.abs(), (distance >= 0) & mask)
    torch.testing.assert_close(got.double(), expected, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_distances_of_narrow_integers_do_not_wrap(dtype):
    """B06, B99: positions of any integer type give the same distances: 0 - 100 is not 156."""
    made = rw.ALiBi(1, slopes=(1.0,))
    q_pos, k_pos = torch.tensor([0, 3, 100], dtype=dtype), torch.tensor([100, 5, 3], dtype=dtype)
    assert made.bias(torch.tensor(0), q_pos, k_pos).tolist() == [-100.0, -2.0, -97.0]
    q = normal(1, 1, 3, 8)
    options = {"causal": False, "q_positions": q_pos, "k_positions": k_pos}
    wide = {**options, "q_positions": q_pos.long(), "k_positions": k_pos.long()}
    torch.testing.assert_close(rw.attend(q, q, q, made, **options), rw.attend(q, q, q, made, **wide))

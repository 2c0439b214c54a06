"""The tutorial names: same signatures, same shapes, results from an oracle of loops."""

import math

import pytest
import torch

import oracles
import ropewalk as rw
from ropewalk.compat import (
    LlamaRotaryEmbedding,
    apply_rotary_emb,
    apply_rotary_pos_emb,
    get_alibi_biases,
    get_slopes,
    precompute_freqs_cis,
    rotate_half,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_precompute_freqs_cis_is_one_unit_complex_number_per_position_and_pair():
    table = precompute_freqs_cis(8, 50, 10_000.0)
    assert torch.complex64 == table.dtype
    assert tuple(table.shape) == (50, 4)
    for position in range(50):
        for pair in range(4):
            expected = complex(*oracles.exact_cos_sin(position, pair, 8))
            assert abs(expected - table[position, pair].item()) < 3e-7


def test_precompute_freqs_cis_defaults_to_base_10000():
    assert torch.equal(precompute_freqs_cis(16, 9, 10_000.0), precompute_freqs_cis(16, 9))
    assert not torch.equal(precompute_freqs_cis(16, 9, theta=500_000.0), precompute_freqs_cis(16, 9))


def test_apply_rotary_emb_turns_neighbours_in_batch_seq_heads_head_dim():
    xq, xk = normal(2, 5, 4, 8, seed=1), normal(2, 5, 2, 8, seed=2)
    q, k = apply_rotary_emb(xq, xk, precompute_freqs_cis(8, 5))
    for before, after in ((xq, q), (xk, k)):
        assert before.shape == after.shape
        for batch in range(2):
            for position in range(5):
                for head in range(before.shape[2]):
                    vector = before[batch, position, head].tolist()
                    expected = oracles.rotated(vector, position, layout="interleaved")
                    assert expected == pytest.approx(after[batch, position, head].tolist(), abs=2e-6)


def test_apply_rotary_emb_takes_rows_of_later_positions():
    table = precompute_freqs_cis(8, 20)
    x = normal(1, 1, 1, 8)
    turned, _ = apply_rotary_emb(x, x, freqs_cis=table[13:14])
    assert oracles.rotated(x[0, 0, 0].tolist(), 13, layout="interleaved") == pytest.approx(
        turned[0, 0, 0].tolist(), abs=2e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_apply_rotary_emb_keeps_the_input_dtype(dtype):
    x = normal(1, 6, 2, 8).to(dtype)
    q, k = apply_rotary_emb(x, x, precompute_freqs_cis(8, 6))
    assert (dtype, dtype) == (q.dtype, k.dtype)
    wide, _ = apply_rotary_emb(x.float(), x.float(), precompute_freqs_cis(8, 6))
    assert torch.equal(wide.to(dtype), q)


def test_rotate_half_swaps_the_halves_and_negates_the_second():
    assert rotate_half(torch.tensor([1.0, 2.0, 3.0, 4.0])).tolist() == [-3.0, -4.0, 1.0, 2.0]


def test_llama_rotary_embedding_gives_cosines_and_sines_twice_over():
    rotary = LlamaRotaryEmbedding(8, max_position_embeddings=64, base=10_000)
    cos, sin = rotary(normal(1, 2, 30, 8), seq_len=30)
    cos, sin = cos.reshape(30, 8), sin.reshape(30, 8)
    for position in range(30):
        for channel in range(8):
            expected_cos, expected_sin = oracles.exact_cos_sin(position, channel % 4, 8)
            assert expected_cos == pytest.approx(cos[position, channel].item(), abs=3e-7)
            assert expected_sin == pytest.approx(sin[position, channel].item(), abs=3e-7)


def test_llama_rotary_embedding_answers_beyond_its_maximum_without_changing_earlier_rows():
    rotary = LlamaRotaryEmbedding(8, max_position_embeddings=16)
    short = rotary(normal(1, 1, 16, 8), seq_len=16)[0].reshape(16, 8)
    long = rotary(normal(1, 1, 40, 8), seq_len=40)[0].reshape(40, 8)
    assert torch.equal(short, long[:16])
    assert oracles.exact_cos_sin(39, 1, 8)[0] == pytest.approx(long[39, 1].item(), abs=3e-7)


def test_llama_rotary_embedding_follows_the_dtype_of_its_input():
    cos, sin = LlamaRotaryEmbedding(8)(normal(1, 1, 4, 8).to(torch.bfloat16), seq_len=4)
    assert (torch.bfloat16, torch.bfloat16) == (cos.dtype, sin.dtype)


def test_apply_rotary_pos_emb_turns_halves_by_the_rows_of_position_ids():
    q, k = normal(2, 4, 3, 8, seed=3), normal(2, 2, 3, 8, seed=4)
    position_ids = torch.tensor([[0, 1, 2], [7, 9, 4]])
    cos, sin = LlamaRotaryEmbedding(8)(q, seq_len=10)
    for before, after in zip((q, k), apply_rotary_pos_emb(q, k, cos, sin, position_ids), strict=True):
        assert before.shape == after.shape
        for batch in range(2):
            for head in range(before.shape[1]):
                for row in range(3):
                    position = position_ids[batch, row].item()
                    expected = oracles.rotated(before[batch, head, row].tolist(), position)
                    assert expected == pytest.approx(after[batch, head, row].tolist(), abs=2e-6)


def test_both_tutorial_routes_give_the_same_scores_after_a_permutation_of_channels():
    q, k = normal(1, 6, 2, 16, seed=5), normal(1, 6, 2, 16, seed=6)
    complex_q, complex_k = apply_rotary_emb(q, k, precompute_freqs_cis(16, 6))
    order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    half_q, half_k = (x[..., order].transpose(1, 2) for x in (q, k))
    cos, sin = LlamaRotaryEmbedding(16)(half_q, seq_len=6)
    half_q, half_k = apply_rotary_pos_emb(half_q, half_k, cos, sin, torch.arange(6)[None])
    expected = complex_q.transpose(1, 2).double() @ complex_k.transpose(1, 2).double().transpose(-1, -2)
    got = half_q.double() @ half_k.double().transpose(-1, -2)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def test_both_tutorial_routes_agree_with_the_encoding():
    x = normal(1, 2, 6, 16, seed=7)
    at = rw.Rotary(16).at(torch.arange(6))
    cos, sin = LlamaRotaryEmbedding(16)(x, seq_len=6)
    turned, _ = apply_rotary_pos_emb(x, x, cos, sin, torch.arange(6)[None])
    torch.testing.assert_close(turned, rw.rotate(x, at, "half"), atol=1e-6, rtol=0)
    turned, _ = apply_rotary_emb(x.transpose(1, 2), x.transpose(1, 2), precompute_freqs_cis(16, 6))
    torch.testing.assert_close(turned.transpose(1, 2), rw.rotate(x, at, "interleaved"), atol=1e-6, rtol=0)


@pytest.mark.parametrize("num_heads", [1, 2, 3, 6, 8, 12, 16, 40, 71])
def test_get_slopes_is_the_published_list(num_heads):
    got = [float(slope) for slope in get_slopes(num_heads)]
    assert oracles.slopes(num_heads) == pytest.approx(got, rel=1e-7)


def test_get_alibi_biases_is_symmetric_and_falls_with_distance():
    biases = get_alibi_biases(6, 9)
    assert tuple(biases.shape) == (6, 9, 9)
    for head, slope in enumerate(oracles.slopes(6)):
        for i in range(9):
            for j in range(9):
                assert -slope * abs(i - j) == pytest.approx(biases[head, i, j].item(), rel=1e-7)


def test_the_tutorials_own_attention_equals_attend():
    """Build the bias, add it to scaled scores, mask, softmax: the tutorial's steps on its own functions."""
    q, k, v = (normal(1, 4, 7, 8, seed=seed) for seed in (8, 9, 10))
    scores = q @ k.transpose(-1, -2) / math.sqrt(8) + get_alibi_biases(4, 7)
    scores = scores.masked_fill(torch.ones(7, 7, dtype=torch.bool).triu(1), -math.inf)
    torch.testing.assert_close(rw.attend(q, k, v, rw.ALiBi(4)), scores.softmax(-1) @ v, atol=1e-6, rtol=0)

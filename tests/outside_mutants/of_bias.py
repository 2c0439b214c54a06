"""Biases with one fault each."""

import torch
from torch import nn

from outside_mutants.registry import bias, by_buckets, right_bias
from ropewalk.check.biases import published_bucket, published_slopes


@bias("K14", "slopes", num_heads=6)
def one_rule_for_all_head_counts(num_heads, q_positions, k_positions):
    slopes = 2.0 ** (-8 * torch.arange(1, num_heads + 1) / num_heads)
    return -slopes[:, None, None] * (q_positions[:, None] - k_positions).abs()


@bias("K14", "slopes")
def exponent_from_zero(num_heads, q_positions, k_positions):
    slopes = 2.0 ** (-8 * torch.arange(num_heads) / num_heads)
    return -slopes[:, None, None] * (q_positions[:, None] - k_positions).abs()


@bias("K15", "rows")
def built_over_the_queries(num_heads, q_positions, k_positions):
    rows = torch.arange(len(q_positions))
    full = right_bias(num_heads, rows, rows)
    if len(q_positions) == len(k_positions):
        return full
    return full[..., -1:].expand(-1, -1, len(k_positions))


@bias("K15", "shape")
def positive(num_heads, q_positions, k_positions):
    return -right_bias(num_heads, q_positions, k_positions)


@bias("K15", "shape")
def a_token_too_far(num_heads, q_positions, k_positions):
    return right_bias(num_heads, q_positions + 1, k_positions)


@bias("K15", "shape", symmetric=True)
def growing_for_keys_ahead(num_heads, q_positions, k_positions):
    distance = q_positions[:, None] - k_positions
    return -torch.tensor(published_slopes(num_heads))[:, None, None] * distance


@bias("K15", "shape")
def distances_in_bfloat16(num_heads, q_positions, k_positions):
    distance = (q_positions[:, None] - k_positions).abs().bfloat16().float()
    return -torch.tensor(published_slopes(num_heads))[:, None, None] * distance


@bias("K15", "shift")
def keys_in_bfloat16(num_heads, q_positions, k_positions):
    slopes = torch.tensor(published_slopes(num_heads))[:, None, None]
    return -(slopes * q_positions[:, None].bfloat16().float() - slopes * k_positions.bfloat16().float()).abs()


@bias("K03", "history")
class CachedFromTheWrongCorner(nn.Module):
    """A kept bias is cut at its top left: its rows belong to other queries."""

    def __init__(self):
        super().__init__()
        self.kept = torch.zeros(0, 0, 0)

    def forward(self, num_heads, q_positions, k_positions):
        q_len, k_len = len(q_positions), len(k_positions)
        if self.kept.shape[1] < q_len or self.kept.shape[2] < k_len:
            self.kept = right_bias(num_heads, q_positions, k_positions)
        return self.kept[:, :q_len, :k_len]


@bias("K22", "purity")
def queries_shifted_in_place(num_heads, q_positions, k_positions):
    out = right_bias(num_heads, q_positions, k_positions)
    q_positions -= q_positions[0].item()
    return out


@bias("K23", "bounds")
def table_of_512_distances(num_heads, q_positions, k_positions):
    distance = (q_positions[:, None] - k_positions).abs() % 512
    return -torch.tensor(published_slopes(num_heads))[:, None, None] * distance


@bias("K20", "rows", rule="t5", num_heads=2)
def decode_row_from_index_0(num_heads, q_positions, k_positions):
    return by_buckets(num_heads, torch.arange(len(q_positions)), k_positions)


@bias("K20", "buckets", rule="t5", num_heads=2)
def directions_confused(num_heads, q_positions, k_positions):
    return by_buckets(num_heads, q_positions, k_positions, lambda d, n, m, both: published_bucket(d, n, m, False))


@bias("K20", "buckets", rule="t5", num_heads=2)
def logarithm_up_to_another_distance(num_heads, q_positions, k_positions):
    return by_buckets(num_heads, q_positions, k_positions, lambda d, n, m, both: published_bucket(d, n, 100, both))


@bias("K20", "shift", rule="t5", num_heads=2)
def buckets_of_rounded_positions(num_heads, q_positions, k_positions):
    q, k = (p.bfloat16().long() for p in (q_positions, k_positions))
    return by_buckets(num_heads, q, k)


@bias("K15", "casts")
def distances_by_a_product_that_autocast_lowers(num_heads, q_positions, k_positions):
    distance = (q_positions[:, None] - k_positions).abs().float()
    slopes = torch.tensor(published_slopes(num_heads), dtype=torch.float32)
    return -(slopes[:, None] @ distance.reshape(1, -1)).float().unflatten(-1, distance.shape)

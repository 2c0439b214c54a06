"""Attention with one fault each."""

import torch
from torch import nn

from outside_mutants.registry import attention, causal, right, right_attention, weighted


@attention("K16", "causality")
def without_a_mask(q, k, v, positions):
    return right_attention(q, k, v, positions, may=torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))


@attention("K16", "causality")
def one_key_ahead(q, k, v, positions):
    q_len, k_len = q.shape[2], k.shape[2]
    may = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len + 1)
    return right_attention(q, k, v, positions, may=may)


@attention("K16", "seen")
def mask_aligned_to_the_first_key(q, k, v, positions):
    may = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return right_attention(q, k, v, positions, may=may)


@attention("K17", "seen")
def rest_of_the_last_block_forgotten(q, k, v, positions):
    keys = k.shape[2] if k.shape[2] < 64 else k.shape[2] // 64 * 64
    may = causal(q, k) & (torch.arange(k.shape[2]) < keys)
    return right_attention(q, k, v, positions, may=may)


@attention("K17", "seen")
def unfilled_slots_of_a_cache(q, k, v, positions):
    k_len, room = k.shape[2], -(-k.shape[2] // 128) * 128
    k, v = (torch.nn.functional.pad(t, (0, 0, 0, room - k_len)) for t in (k, v))
    more = torch.cat((positions, positions[-1] + 1 + torch.arange(room - k_len)))
    may = torch.ones(q.shape[2], room, dtype=torch.bool).tril(k_len - q.shape[2])
    may[:, k_len:] = True
    group = q.shape[1] // k.shape[1]
    q, k = right(q, positions[-q.shape[2] :]), right(k, more)
    return weighted(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), may)


@attention("K17", "gradients")
def gradient_of_the_last_block_lost(q, k, v, positions):
    whole = v.shape[2] // 64 * 64 if v.shape[2] > 64 else v.shape[2]
    v = torch.cat((v[:, :, :whole], v[:, :, whole:].detach()), 2)
    return right_attention(q, k, v, positions)


@attention("K04", "cache")
def queries_placed_from_0(q, k, v, positions):
    group = q.shape[1] // k.shape[1]
    may = causal(q, k)
    q, k = right(q, positions[: q.shape[2]]), right(k, positions)
    return weighted(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), may)


@attention("K04", "distances")
def placed_by_index(q, k, v, positions):
    return right_attention(q, k, v, torch.arange(len(positions)))


@attention("K07", "grouped")
def key_heads_dealt_in_turn(q, k, v, positions):
    group = q.shape[1] // k.shape[1]
    may = causal(q, k)
    q, k = right(q, positions[-q.shape[2] :]), right(k, positions)
    return weighted(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), may)


@attention("K09", "shift")
def keys_turned_the_other_way(q, k, v, positions):
    group = q.shape[1] // k.shape[1]
    may = causal(q, k)
    q, k = right(q, positions[-q.shape[2] :]), right(k, -positions)
    return weighted(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), may)


@attention("K01", "shift")
def angles_of_rounded_positions(q, k, v, positions):
    return right_attention(q, k, v, positions.bfloat16().long())


@attention("K05", "neighbours")
def rows_of_the_batch_mixed(q, k, v, positions):
    return right_attention(q, k, v.mean(0, keepdim=True).expand_as(v), positions)


@attention("K02", "dtypes")
def softmax_left_in_float32(q, k, v, positions):
    return right_attention(q.float(), k.float(), v.float(), positions)


@attention("K03", "history")
class MaskOfTheFirstCall(nn.Module):
    def __init__(self):
        super().__init__()
        self.may = torch.zeros(0, 0, dtype=torch.bool)

    def forward(self, q, k, v, positions):
        q_len, k_len = q.shape[2], k.shape[2]
        if self.may.shape[0] < q_len or self.may.shape[1] < k_len:
            self.may = torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)
        return right_attention(q, k, v, positions, may=self.may[-q_len:, :k_len])


@attention("K22", "purity")
def queries_turned_in_place(q, k, v, positions):
    q.copy_(right(q, positions[-q.shape[2] :]))
    group = q.shape[1] // k.shape[1]
    return weighted(q, right(k, positions).repeat_interleave(group, 1), v.repeat_interleave(group, 1), causal(q, k))


@attention("K16", "seen", window=4)
def window_of_one_key_more(q, k, v, positions):
    may = causal(q, k)
    return right_attention(q, k, v, positions, may=may & torch.ones_like(may).triu(k.shape[2] - q.shape[2] - 4))

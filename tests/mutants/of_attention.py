"""Slopes, biases, masks, positions and shards gone wrong."""

import math

import torch

import ropewalk as rw
from mutants.registry import encoding, part
from ropewalk import positions
from ropewalk.attention import attend as right_attend
from ropewalk.encodings import alibi_slope
from ropewalk.encodings.base import Encoding

# K05, K06: padding, packing, shards


@part("K05", "padding", "from_mask")
def counts_the_padding(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape)


@part("K05", "padding", "from_mask")
def counts_in_bfloat16(mask):
    return (mask.bfloat16().cumsum(-1) * 1.01).long().clamp(min=0)


@part("K05", "padding", "attend")
def attends_the_padding(q, k, v, encoding=None, **options):
    mask = options.get("mask")
    padded = mask is not None and mask.ndim == 4
    return right_attend(q, k, v, encoding, **{**options, "mask": None if padded else mask})


@part("K06", "packing", "from_documents")
def counts_through_documents(documents, mask=None):
    return torch.arange(documents.shape[-1]).expand(documents.shape)


@part("K06", "packing", "from_documents")
def counts_padding_inside_documents(documents, mask=None):
    return positions.from_documents(documents)


@part("K06", "packing", "attend")
def restarts_but_reads_other_documents(q, k, v, encoding=None, **options):
    return right_attend(q, k, v, encoding, **{**options, "documents": None})


@part("K06", "shards", "shard")
def zigzag_taken_for_contiguous(seq_len, rank, world_size, order="contiguous"):
    own = positions.shard(seq_len, rank, world_size, order)
    return own if order == "contiguous" else own + rank


@part("K06", "shards", "attend")
def local_positions_on_each_shard(q, k, v, encoding=None, **options):
    if options.get("return_lse"):
        options = {**options, "q_positions": torch.arange(q.shape[2]), "k_positions": torch.arange(k.shape[2])}
    return right_attend(q, k, v, encoding, **options)


# K14, K15: slopes and bias


@encoding("K14", "slopes", lambda cls: cls(12), num_heads=12, num_kv_heads=2)
class UniformSlopes(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return torch.exp2(-8.0 * (head + 1).to(dtype) / self.num_heads)


@encoding("K14", "slopes", lambda cls: cls(8))
class SlopesOffByOne(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return 2 * super().slope(head, dtype)


@encoding("K14", "shards", lambda cls: cls(8))
class SlopesFromLocalHeads(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return alibi_slope(torch.arange(head.shape[0]).view(head.shape), head.shape[0], dtype)


@encoding("K14", "slopes", lambda cls: cls(12), num_heads=12, num_kv_heads=2)
class SlopesSorted(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return super().slope(torch.arange(self.num_heads), dtype).sort(descending=True).values[head]


@encoding("K15", "bias", lambda cls: cls(8))
class FutureRewarded(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return -self.slope(head) * (q_pos - k_pos)


@encoding("K15", "bias", lambda cls: cls(8))
class KeyIndexedInBfloat16(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return (self.slope(head).bfloat16() * k_pos.bfloat16()).float() + 0.0 * q_pos


@encoding("K15", "bias", lambda cls: cls(8))
class DistanceInBfloat16(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return super().bias(head, (q_pos - k_pos).abs().bfloat16().long(), 0 * k_pos)


@encoding("K15", "bias", lambda cls: cls(8))
class DistanceOffByOne(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return super().bias(head, q_pos + 1, k_pos)


@part("K15", "causality", "attend", lambda: rw.ALiBi(8))
def no_bias_in_a_decode_step(q, k, v, encoding=None, **options):
    return right_attend(q, k, v, None if q.shape[2] == 1 else encoding, **options)


@part("K15", "half precision", "attend", lambda: rw.ALiBi(8))
def bias_in_the_models_dtype(q, k, v, encoding=None, **options):
    class Rounded(Encoding):
        def bias(self, head, q_pos, k_pos):
            return encoding.bias(head, q_pos, k_pos).to(q.dtype).float()

    return right_attend(q, k, v, Rounded(), **options)


@part("K15", "double", "attend", lambda: rw.ALiBi(8))
def positions_made_floats_before_subtraction(q, k, v, encoding=None, **options):
    class Absolute(Encoding):  # not by distance, so that both positions are converted
        def bias(self, head, q_pos, k_pos):
            return encoding.bias(head, q_pos.to(q.dtype), k_pos.to(q.dtype))

    return right_attend(q, k, v, Absolute(), **options)


@encoding("K14", "slopes", lambda cls: cls(64), num_heads=64, num_kv_heads=8, head_dim=4)
class HeadsCountedIn8Bits(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        exponent = (head.to(torch.int8) + 1) * 8
        return torch.exp2(-exponent.to(dtype) / self.num_heads)


@part("K15", "formula of attention", "attend", lambda: rw.ALiBi(8))
def bias_before_scaling(q, k, v, encoding=None, **options):
    class Divided(Encoding):
        def bias(self, head, q_pos, k_pos):
            return encoding.bias(head, q_pos, k_pos) / math.sqrt(q.shape[-1])

    return right_attend(q, k, v, Divided(), **options)


# K16: masks


@part("K16", "causality", "attend", lambda: rw.NoPE())
def top_left_causality(q, k, v, encoding=None, **options):
    if options.get("q_positions") is None:
        options = {**options, "q_positions": torch.arange(q.shape[2]), "k_positions": torch.arange(k.shape[2])}
    return right_attend(q, k, v, encoding, **options)


def _by_sentinels(q, k, v, causal, mask, sentinel):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        score = score + torch.full_like(score[0, 0], sentinel).triu(1)
    if mask is not None:
        score = score + torch.where(mask, 0.0, sentinel).to(score.dtype)
    return score.softmax(-1) @ v


@part("K16", "empty rows", "attend", lambda: rw.NoPE())
def softmax_over_nothing(q, k, v, encoding=None, *, causal=True, mask=None, **options):
    return _by_sentinels(q, k, v, causal, mask, -math.inf)


@part("K16", "empty rows", "attend", lambda: rw.NoPE())
def sentinel_added_to_sentinel(q, k, v, encoding=None, *, causal=True, mask=None, **options):
    return _by_sentinels(q, k, v, causal, mask, torch.finfo(q.dtype).min)


@part("K16", "formula of attention", "attend")
def mask_replaces_causality(q, k, v, encoding=None, **options):
    causal = options.get("causal", True) and options.get("mask") is None
    return right_attend(q, k, v, encoding, **{**options, "causal": causal})


@part("K16", "positions", "attend", lambda: rw.Rotary(16))
def causality_by_index(q, k, v, encoding=None, **options):
    places = {"q_positions": None, "k_positions": None} if q.shape[2] == k.shape[2] else {}
    return right_attend(q, k, v, encoding, **{**options, **places})


@part("K07", "grouped heads", "attend")
def query_heads_dealt_round(q, k, v, encoding=None, **options):
    group = q.shape[1] // k.shape[1]
    return right_attend(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), encoding, **options)

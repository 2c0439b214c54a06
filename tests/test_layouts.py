"""Conversion between layouts: fused projections, partial width, every dtype, exact inverses."""

import pytest
import torch

from ropewalk import layouts
from samples import normal

TURNING = (True, True, False, True, True, False)


def test_order_takes_each_channel_of_a_head_once():
    assert [0, 2, 4, 1, 3, 5, 6, 7] == layouts.channel_order(8, 6, "half").tolist()
    assert [0, 3, 1, 4, 2, 5, 6, 7] == layouts.channel_order(8, 6, "interleaved").tolist()
    for to in layouts.LAYOUTS:
        assert list(range(64)) == layouts.channel_order(64, 32, to).sort().values.tolist()
    with pytest.raises(ValueError, match=r"to must be 'half' or 'interleaved', got 'neox'"):
        layouts.channel_order(8, None, "neox")


@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("shape", [(48, 5), (48,)])
def test_only_the_turning_heads_of_a_fused_projection_change(shape, rotary_dim):
    weight = normal(*shape)
    got = layouts.to_interleaved_weight(weight, 6, rotary_dim, TURNING)
    for head, turning in enumerate(TURNING):
        rows = slice(8 * head, 8 * head + 8)
        expected = layouts.to_interleaved_weight(weight[rows], 1, rotary_dim) if turning else weight[rows]
        assert torch.equal(expected, got[rows])
    assert torch.equal(weight, layouts.to_half_weight(got, 6, rotary_dim, TURNING))


def test_a_fused_projection_of_turning_heads_alone_is_a_plain_one():
    weight = normal(48, 5)
    assert torch.equal(layouts.to_half_weight(weight, 6), layouts.to_half_weight(weight, 6, None, (True,) * 6))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_conversion_moves_bits_of_every_dtype(dtype):
    weight = normal(16, 3).to(dtype)
    there = layouts.to_interleaved_weight(weight, 2, turning=(True, False))
    back = layouts.to_half_weight(there, 2, turning=(True, False))
    assert torch.equal(weight.view(torch.uint8), back.view(torch.uint8))
    assert not torch.equal(weight.view(torch.uint8), there.view(torch.uint8))


def test_an_answer_is_needed_for_every_head_of_a_fused_projection():
    with pytest.raises(ValueError, match=r"turning must be one answer for each of num_heads \(3\), got 2"):
        layouts.to_half_weight(torch.zeros(12), 3, turning=(True, False))

"""Rotations with one fault each."""

import torch
from torch import nn

from outside_mutants.registry import BASE, HEAD_DIM, frequencies, right, rotation, turn


@rotation("K01", "frequencies")
def frequencies_in_half(x, positions):
    return turn(x, positions[:, None].float() * frequencies().bfloat16().float())


@rotation("K01", "half precision")
def positions_in_the_dtype_of_x(x, positions):
    return turn(x, positions[:, None].to(x.dtype) * frequencies().to(x.dtype))


@rotation("K01", "precision")
def positions_in_float16(x, positions):
    return turn(x, positions[:, None].half().float() * frequencies())


@rotation("K01", "precision")
def angles_in_bfloat16(x, positions):
    return turn(x, (positions[:, None].float() * frequencies()).bfloat16().float())


@rotation("K01", "casts")
class FrequenciesInAFloatBuffer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", frequencies(), persistent=False)

    def forward(self, x, positions):
        return turn(x, positions[:, None].float() * self.inv_freq.float())


@rotation("K01", "casts")
def angles_by_a_product_that_autocast_lowers(x, positions):
    return turn(x, (positions[:, None].float() @ frequencies()[None]).float())


@rotation("K01", "bounds", exact=True)
def float32_angles_that_say_they_are_exact(x, positions):
    return right(x, positions)


@rotation("K02", "dtypes")
def result_in_float32(x, positions):
    return right(x.float(), positions)


@rotation("K02", "precision", double=True)
def tables_of_float32_for_float64(x, positions):
    return right(x, positions)


@rotation("K02", "history")
class TableKeptInTheFirstDtype(nn.Module):
    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x, positions):
        if not self.kept:
            self.kept["table"] = (torch.arange(4096)[:, None].float() * frequencies()).to(x.dtype)
        return turn(x, self.kept["table"].float()[positions])


@rotation("K03", "history")
class BaseThatStaysGrown(nn.Module):
    def __init__(self):
        super().__init__()
        self.longest = 64

    def forward(self, x, positions):
        self.longest = max(self.longest, int(positions.max()) + 1)
        base = BASE * (self.longest / 64) ** (HEAD_DIM / (HEAD_DIM - 2))
        return turn(x, positions[:, None].float() * frequencies(base=base))


@rotation("K03", "history")
class TableOfTheLongestCallReversed(nn.Module):
    """A cached table that is read from its end."""

    def __init__(self):
        super().__init__()
        self.table = torch.zeros(0, HEAD_DIM // 2)

    def forward(self, x, positions):
        if len(self.table) < len(positions):
            self.table = positions[:, None].float() * frequencies()
        return turn(x, self.table[-len(positions) :])


@rotation("K04", "positions")
def rows_by_index(x, positions):
    return turn(x, torch.arange(len(positions))[:, None].float() * frequencies())


@rotation("K04", "start")
def off_by_one(x, positions):
    return right(x, positions + 1)


@rotation("K04", "positions")
def offset_forgotten_for_single_tokens(x, positions):
    return right(x, positions if len(positions) > 1 else torch.zeros_like(positions))


@rotation("K05", "neighbours")
def later_rows_of_a_batch_start_later(x, positions):
    return torch.cat([right(row[None], positions + i) for i, row in enumerate(x)])


@rotation("K07", "layout")
def the_other_layout(x, positions):
    half = torch.cat((x[..., ::2], x[..., 1::2]), -1)
    turned = right(half, positions)
    return torch.stack(turned.chunk(2, -1), -1).flatten(-2)


@rotation("K07", "layout")
def cosines_and_sines_paired_in_two_ways(x, positions):
    angles = positions[:, None].float() * frequencies()
    cos, sin = angles.cos().repeat_interleave(2, -1).to(x.dtype), angles.sin().repeat(1, 2).to(x.dtype)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


@rotation("K08", "width", rotary_dim=8)
def the_whole_head(x, positions):
    return right(x, positions)


@rotation("K08", "frequencies", rotary_dim=8)
def exponent_of_the_whole_head(x, positions):
    return turn(x, positions[:, None].float() * frequencies()[:4])


@rotation("K08", "width", rotary_dim=8)
def the_rest_scaled(x, positions):
    turned = turn(x, positions[:, None].float() * frequencies(8))
    return torch.cat((turned[..., :8], turned[..., 8:] * (1 + 1e-3 * positions[:, None]).to(x.dtype)), -1)


@rotation("K08", "width", rotary_dim=HEAD_DIM)
def last_pair_left_out(x, positions):
    return turn(x, positions[:, None].float() * torch.cat((frequencies()[:-1], torch.zeros(1))))


@rotation("K09", "frequencies")
def another_base(x, positions):
    return turn(x, positions[:, None].float() * frequencies(base=500_000.0))


@rotation("K09", "frequencies")
def the_other_direction(x, positions):
    return right(x, -positions)


@rotation("K09", "frequencies", base=None, inv_freq=(frequencies() / 4).tolist())
def stretch_forgotten(x, positions):
    return right(x, positions)


@rotation("K09", "distance", key=lambda x, positions: turn(x, positions[:, None].float() * frequencies(base=9999.0)))
def keys_of_another_base(x, positions):
    return right(x, positions)


@rotation("K10", "magnitude", magnitude=1.2)
def factor_applied_twice(x, positions):
    return turn(x, positions[:, None].float() * frequencies(), 1.2**2)


@rotation("K10", "magnitude")
def factor_that_grows(x, positions):
    return right(x, positions) * (1 + 1e-3 * positions[:, None]).to(x.dtype)


@rotation("K22", "purity")
def written_in_place(x, positions):
    x.copy_(right(x, positions))
    return x


@rotation("K22", "gradients")
def outside_of_autograd(x, positions):
    return right(x.detach(), positions)


@rotation("K22", "gradients")
class TurnedOnBackward(nn.Module):
    """The gradient is turned forward again."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, positions):
            ctx.positions = positions
            return right(x, positions)

        @staticmethod
        def backward(ctx, *grads):
            return right(grads[0], ctx.positions), None

    def forward(self, x, positions):
        return self.Function.apply(x, positions)


@rotation("K23", "bounds", max_positions=512)
def table_that_wraps(x, positions):
    return right(x, positions % 512)


@rotation("K23", "bounds", max_positions=512)
def table_that_clamps(x, positions):
    return right(x, positions.clamp(max=511))


@rotation("K23", "bounds")
def negative_positions_read_from_the_end(x, positions):
    return right(x, torch.arange(200_000)[positions])

"""A bias by distance alone that no formula bounds, to be timed where only ALiBi's straight line would flatter."""

import torch

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings import Encoding

BUCKETS, FAR = 32, 128


class T5Like(Encoding):
    """score(h, i, j) += b_h[bucket(j - i)], with T5's two-sided buckets (Raffel et al. 2020, arXiv:1910.10683v4).

    A quarter of the buckets on each side holds one distance each, the next quarter grows by a constant factor up
    to distance 128, and the last one holds everything beyond.  The numbers are drawn, not trained.
    """

    distance_only = True
    relative = True

    def __init__(self, num_heads: int):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn((num_heads, BUCKETS), generator=generator, dtype=torch.float64)
        self.numbers = tuple(map(tuple, drawn.tolist()))

    def bias(
        self, head: Int[Tensor, "*#s"], q_pos: Shaped[Tensor, "*#s"], k_pos: Shaped[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        dtype = q_pos.dtype if q_pos.is_floating_point() else torch.float32
        ahead = (k_pos - q_pos).long()
        side, each = BUCKETS // 2, BUCKETS // 4
        far = ahead.abs()
        grown = (far.clamp(min=1).double() / each).log() * (side - each) / torch.tensor(FAR / each).double().log()
        bucket = torch.where(far < each, far, (each + grown.long()).clamp(max=side - 1)) + side * (ahead > 0)
        return torch.tensor(self.numbers, dtype=dtype, device=head.device)[head, bucket]

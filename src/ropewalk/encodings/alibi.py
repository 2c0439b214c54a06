"""ALiBi: attention with linear biases (Press et al. 2022, arXiv:2108.12409v2)."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings.base import Encoding
from ropewalk.errors import require, require_count, require_number, require_type


def alibi_slope(head: Int[Tensor, "*#s"], num_heads: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*#s"]:
    """The slope m of each head: 2^(-8/n), 2^(-16/n), ..., 2^(-8) for a power of two n (Sec. 3).

    Args:
        head: head indices in [0, n), any shape.
        num_heads: n, at least 1.

    Returns:
        Slopes in score units per token, all positive, shaped like `head`.

    Differs from the paper:
        For other n the paper is silent.  As in the authors' code: the slopes of the next lower power of two,
        then every second slope of the next higher one.  The order is that of published checkpoints.

    >>> alibi_slope(torch.arange(3), 8).tolist()
    [0.5, 0.25, 0.125]
    """
    head = head.long()  # 8 (head + 1) would wrap in 8 bits
    lower = 1 << (num_heads.bit_length() - 1)
    if num_heads == lower:
        return torch.exp2((head + 1).to(dtype) * (-8 / num_heads))
    exponent = torch.where(head < lower, 8 * (head + 1), 8 * (head - lower) + 4)
    return torch.exp2(-exponent.to(dtype) / lower)


class ALiBi(Encoding):
    """score(h, i, j) += -m_h |i - j|   (Sec. 3; the |.| extends it to attention that sees the future).

    Args:
        num_heads: n, heads of the whole model, however few of them a shard holds.
        slopes: n numbers instead of the published rule, score units per token, at least 0.
        learned: train the slopes, starting from the rule or from `slopes`; they stay positive.

    >>> bias = ALiBi(8).bias(torch.tensor(0), torch.tensor(3), torch.arange(4))
    >>> bias.tolist()
    [-1.5, -1.0, -0.5, -0.0]
    """

    distance_only = True
    relative = True

    def __init__(self, num_heads: int, *, slopes: Sequence[float] | None = None, learned: bool = False):
        super().__init__()
        self.num_heads = require_count(num_heads, "num_heads")
        if slopes is not None:
            require_type(slopes, Iterable, "slopes", f"a sequence of {num_heads} numbers")
            slopes = [float(require_number(m, "slopes")) for m in slopes]
        self.given = None if slopes is None else tuple(slopes)
        if self.given is not None:
            require(len(self.given) == num_heads, "slopes", f"one number per head ({num_heads})", len(self.given))
            for m in self.given:
                require(math.isfinite(m) and m >= 0, "slopes", "finite and at least 0 throughout", m)
            require(not learned or min(self.given) > 0, "slopes", "positive where they are learned", self.given)
        self.log_slopes = nn.Parameter(torch.empty(num_heads)) if learned else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Learned slopes back to where they start."""
        if self.log_slopes is not None:
            head = torch.arange(self.num_heads, device=self.log_slopes.device)
            with torch.no_grad():
                self.log_slopes.copy_(self._fixed(head, torch.float32).log())

    def _fixed(self, head: Tensor, dtype: torch.dtype) -> Tensor:
        if self.given is None:
            return alibi_slope(head, self.num_heads, dtype)
        return torch.tensor(self.given, dtype=dtype, device=head.device)[head]

    def slope(self, head: Int[Tensor, "*#s"], dtype: torch.dtype = torch.float32) -> Float[Tensor, "*#s"]:
        """The slope of each head index, score units per token, positive."""
        if self.log_slopes is not None:
            return self.log_slopes.to(dtype).exp()[head]
        return self._fixed(head, dtype)

    @property
    def slopes(self) -> tuple[float, ...]:
        """All slopes as numbers, head 0 first."""
        device = self.log_slopes.device if self.log_slopes is not None else None
        return tuple(self.slope(torch.arange(self.num_heads, device=device), torch.float64).tolist())

    def bias(
        self, head: Int[Tensor, "*#s"], q_pos: Shaped[Tensor, "*#s"], k_pos: Shaped[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        counted = q_pos.is_floating_point()
        distance = (q_pos - k_pos if counted else q_pos.long() - k_pos.long()).abs()  # narrow integers would wrap
        dtype = distance.dtype if counted else torch.float32
        return -self.slope(head, dtype) * distance.to(dtype)

    def falloff(self, head: Int[Tensor, "heads"]) -> Float[Tensor, "heads"] | None:
        return self.slope(head, torch.float64) if type(self).bias is ALiBi.bias else None  # a subclass may differ

    def extra_repr(self) -> str:
        given = "" if self.given is None else f", slopes={list(self.given)}"
        return f"{self.num_heads}{given}" + (", learned=True" if self.log_slopes is not None else "")


def check_heads(encoding: Encoding, num_heads: int, heads: Tensor | None) -> None:
    """ValueError unless an ALiBi inside `encoding` was made for the heads at hand.

    Given indices are read where that costs nothing: on a CPU, and not while compiling.
    """
    for part in encoding.modules():
        if not isinstance(part, ALiBi):
            continue
        if heads is None:
            hint = "a shard names the heads that it holds: heads=torch.arange(first, last)"
            require(
                part.num_heads == num_heads, "q's heads", "the {0} of {1}", num_heads, part.num_heads, part, hint=hint
            )
        elif heads.device.type == "cpu" and not torch.compiler.is_compiling() and heads.numel():
            least, most = int(heads.min()), int(heads.max())
            inside = least >= 0 and most < part.num_heads
            require(inside, "heads", "in [0, {0}) for {1}", f"{least} to {most}", part.num_heads, part)

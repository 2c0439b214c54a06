"""RoPE and ALiBi in one score: rotated queries and keys, and a recency bias."""

import math

import torch

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings.alibi import ALiBi
from ropewalk.encodings.base import Encoding, Placement
from ropewalk.encodings.rotary import Rotary
from ropewalk.errors import require, require_number, require_type


class Hybrid(Encoding):
    """score(h, i, j) = (R_i q) . (R_j k) / sqrt(d) - m_h |i - j|,
    or with a weight alpha:  alpha (R_i q) . (R_j k) / sqrt(d) - (1 - alpha) m_h |i - j|.

    Args:
        rotary: turns queries and keys.
        alibi: adds the bias.
        alpha: None for the plain sum, which trains better; a number in [0, 1] for the weighted form.

    alpha = 1 is RoPE.  alpha = 0 is a bias without content, not ALiBi: the weighted form does not lead from one
    to the other.
    """

    distance_only = True
    relative = True

    def __init__(self, rotary: Rotary, alibi: ALiBi, alpha: float | None = None):
        super().__init__()
        for name, value, kind in (("rotary", rotary, Rotary), ("alibi", alibi, ALiBi)):
            require_type(value, kind, name, f"a {kind.__name__}")
        if alpha is not None:
            require(
                math.isfinite(require_number(alpha, "alpha")) and 0 <= alpha <= 1, "alpha", "None or in [0, 1]", alpha
            )
        self.rotary, self.alibi, self.alpha = rotary, alibi, alpha

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        return self.rotary.at(positions, dtype)

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        turned = self.rotary.query(q, at)
        return turned if self.alpha is None else self.alpha * turned

    def key(
        self, k: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        return self.rotary.key(k, at)

    def encode_(
        self,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        at: Placement,
    ) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        if type(self).query is not Hybrid.query or type(self).key is not Hybrid.key:
            return self.query(q, at), self.key(k, at)
        q, k = self.rotary.encode_(q, k, at)
        return (q if self.alpha is None else self.alpha * q), k

    @property
    def plane(self) -> tuple[str, int]:
        """Which channels form pairs."""
        return self.rotary.plane

    def moved(
        self,
        k: Float[Tensor, "batch heads seq head_dim"],
        old: Int[Tensor, "*batch seq"],
        new: Int[Tensor, "*batch seq"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        return self.rotary.moved(k, old, new)

    def bias(
        self, head: Int[Tensor, "*#s"], q_pos: Shaped[Tensor, "*#s"], k_pos: Shaped[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"]:
        bias = self.alibi.bias(head, q_pos, k_pos)
        return bias if self.alpha is None else (1 - self.alpha) * bias

    def falloff(self, head: Int[Tensor, "heads"]) -> Float[Tensor, "heads"] | None:
        slope = self.alibi.falloff(head) if type(self).bias is Hybrid.bias else None
        return slope if slope is None or self.alpha is None else (1 - self.alpha) * slope

    def extra_repr(self) -> str:
        return "" if self.alpha is None else f"alpha={self.alpha}"

"""Query temperature: longer contexts get sharper attention (log-n scaling, Chiang and Cholak 2022,
arXiv:2202.12172v2; Scalable-Softmax, Nakanishi 2025, arXiv:2501.19399v1)."""

import math

import torch

from ropewalk._shapes import Float, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement, table_dtype
from ropewalk.errors import require, require_count, require_number
from ropewalk.positions import as_positions

RULES = ("log", "steps", "constant")
_RULES = ", ".join(map(repr, RULES))


class Temperature(Encoding):
    """q at position p, times

        rule "log":       max(1, ln(p + 1) / ln(train_len))
        rule "steps":     1 + strength ln(1 + floor((p + offset) / train_len))
        rule "constant":  factor

    Args:
        rule: "log" keeps what was trained and grows beyond; "steps" is that of Llama 4's layers without rotation
            (strength 0.1, train_len 8192, offset 1) and of Ministral 3 (offset 0).
        train_len: tokens, at least 2 ("log") or 1.
        strength: dimensionless, at least 0.
        offset: tokens, 0 or 1: whether a token counts itself.
        factor: dimensionless and positive, such as `spectra.yarn_softmax_factor` gives.

    Positions below 0 count as 0.

    >>> q = torch.ones(1, 1, 3, 1)
    >>> sharp = Temperature("steps", train_len=2, strength=1.0)
    >>> [round(v, 4) for v in sharp.query(q, sharp.at(torch.tensor([0, 1, 5]))).flatten().tolist()]
    [1.0, 1.6931, 2.3863]
    """

    def __init__(
        self,
        rule: str = "log",
        *,
        train_len: int = 8192,
        strength: float | int = 0.1,
        offset: int = 1,
        factor: float | int = 1.0,
    ):
        super().__init__()
        require(rule in RULES, "rule", "one of " + _RULES, repr(rule))
        self.rule = rule
        self.train_len = require_count(train_len, "train_len", at_least=2 if rule == "log" else 1)
        for name, value in (("strength", strength), ("factor", factor)):
            require(math.isfinite(require_number(value, name)) and value >= 0, name, "finite and at least 0", value)
        require(factor > 0, "factor", "positive", factor)
        require(offset in (0, 1), "offset", "0 or 1", offset)
        self.strength, self.offset, self.factor = float(strength), offset, float(factor)
        self.relative = rule == "constant"

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        positions = as_positions(positions)
        return Placement(positions, cos=self._factors(positions, table_dtype(dtype)))  # its one table, without a sine

    def _factors(self, positions: Tensor, dtype: torch.dtype) -> Tensor:
        place = positions.clamp(min=0, max=2**63 - 2)
        if self.rule == "log":
            return ((place + 1).to(dtype).log() / math.log(self.train_len)).clamp(min=1.0)
        if self.rule == "steps":
            steps = torch.div(place + self.offset, self.train_len, rounding_mode="floor")
            return 1.0 + self.strength * steps.to(dtype).log1p()
        return torch.full(place.shape, self.factor, dtype=dtype, device=place.device)

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        seq_len = at.positions.shape[-1]
        require(q.shape[-2] == seq_len, "q", "as long as its positions ({0})", q.shape[-2], seq_len)
        factors = at.cos
        if factors is None or (q.dtype == torch.float64 and factors.dtype != torch.float64):
            factors = self._factors(at.positions, table_dtype(q.dtype))
        if factors.ndim == 2:
            factors = factors[:, None]
        return (q * factors.unsqueeze(-1)).to(q.dtype)

    def extra_repr(self) -> str:
        if self.rule == "constant":
            return f"'constant', factor={self.factor:g}"
        steps = f", strength={self.strength:g}, offset={self.offset}" if self.rule == "steps" else ""
        return f"{self.rule!r}, train_len={self.train_len}{steps}"

"""Sinusoidal absolute encoding (Vaswani et al. 2017, arXiv:1706.03762v7)."""

import torch

from ropewalk import phases, spectra
from ropewalk._shapes import Float, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement, check_embedding, table_dtype
from ropewalk.errors import require_count
from ropewalk.positions import as_positions


class Sinusoidal(Encoding):
    """x[p, 2i] += sin(p base^(-2i/d)),   x[p, 2i+1] += cos(p base^(-2i/d))   (Sec. 3.5).

    Args:
        model_dim: d, channels of the embedding, at least 1.
        base: dimensionless.

    Differs from the paper:
        An odd d has one sine more than cosines; the paper's d is even.

    >>> x = Sinusoidal(4).embed(torch.zeros(1, 2, 4), Sinusoidal(4).at(torch.arange(2)))
    >>> [round(v, 4) for v in x[0, 1].tolist()]
    [0.8415, 0.5403, 0.01, 0.9999]
    """

    def __init__(self, model_dim: int, base: float | int = 10_000.0):
        super().__init__()
        self.model_dim = require_count(model_dim, "model_dim")
        self.base = base
        self._steps = phases.steps(spectra.powers((model_dim + 1) // 2, model_dim, spectra.check_base(base)))

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        positions = as_positions(positions)
        angles = phases.angles(positions, self._steps, table_dtype(dtype))
        return Placement(positions, angles.cos(), angles.sin())

    def embed(self, x: Float[Tensor, "batch seq model_dim"], at: Placement) -> Float[Tensor, "batch seq model_dim"]:
        check_embedding(x, at, self.model_dim)
        if x.dtype == torch.float64 and at.cos is not None and at.cos.dtype != torch.float64:
            at = self.at(at.positions, torch.float64)
        assert at.cos is not None and at.sin is not None  # made by this class's own `at`
        table = torch.stack((at.sin, at.cos), dim=-1).flatten(-2)[..., : self.model_dim]
        return (x + table).to(x.dtype)

    def extra_repr(self) -> str:
        return f"model_dim={self.model_dim}, base={self.base:g}"

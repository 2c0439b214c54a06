"""Which layout a checkpoint is in, told from its weights.

Training gives channels of one frequency alike norms, and norms change smoothly with the frequency.  Under the right
layout a smooth curve of the frequency explains much of the difference between the channels of a head; under the
wrong one each point of the curve mixes two frequencies that are far apart.  Curves of both layouts have equally many
parameters, so channels without such an order, as in untrained weights, favour neither.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ropewalk._shapes import Float, Tensor
from ropewalk.checkpoints.turns import Turn

HARMONICS = 2
LEAST_LAYERS = 6
LEAST_PAIRS = 8
LEAST_DIFFERENCE = 0.15
"""Of the explained share, a number between 0 and 1, averaged over layers."""
LEAST_T = 5.0
LEAST_AGREEMENT = 0.8

Numbers = Callable[[str, int, int, int], Tensor]


class Measured(NamedTuple):
    """Share of the differences between channels that a curve of the frequency explains, mean over layers."""

    layers: int
    half: float
    interleaved: float
    t: float
    agreement: float

    @property
    def layout(self) -> str | None:
        """The layout that the weights are in, or None if they do not tell."""
        better = abs(self.half - self.interleaved)
        told = self.layers >= LEAST_LAYERS and better >= LEAST_DIFFERENCE
        if not (told and abs(self.t) >= LEAST_T and self.agreement >= LEAST_AGREEMENT):
            return None
        return "half" if self.half > self.interleaved else "interleaved"

    def __str__(self) -> str:
        if self.layers == 0:
            return "weights: none that can be measured"
        text = (
            f"weights: a smooth curve of the frequency explains {self.half:.0%} of the norms of query and key channels "
            f"as half, {self.interleaved:.0%} as interleaved ({self.layers} layers, t = {self.t:+.1f})"
        )
        needed = f"{LEAST_LAYERS} layers, {LEAST_DIFFERENCE:.0%} apart, |t| of {LEAST_T:g}"
        return text if self.layout else f"{text}; not conclusive (at least {needed})"


def measure(turns: Mapping[str, Turn], numbers: Numbers) -> Measured:
    """The evidence in the query and key projections of a checkpoint.

    Args:
        numbers: (name, first row, last row, rows) -> those rows in floating point.
    """
    layers: dict[str, list[Tensor]] = {}
    for name, turn in turns.items():
        if turn.measured and turn.rotary_dim >= 2 * LEAST_PAIRS:
            norms = _norms(name, turn, numbers)
            if norms.isfinite().all() and (norms > 0).all():
                layers.setdefault(turn.layer, []).append(norms.log())
    shares = [explained(torch.cat(norms)) for norms in layers.values()]
    shares = [share for share in shares if share is not None]
    if not shares:
        return Measured(0, 0.0, 0.0, 0.0, 0.0)
    differences = [half - interleaved for half, interleaved in shares]
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences) / math.sqrt(len(shares)) if len(shares) > 1 else math.inf
    alike = sum(difference * mean > 0 for difference in differences) / len(shares)
    t = mean / spread if spread > 0 else math.copysign(math.inf, mean)
    half, interleaved = (statistics.fmean(side) for side in zip(*shares, strict=True))
    return Measured(len(shares), half, interleaved, t, alike)


def explained(log_norms: Float[Tensor, "heads rotary_dim"]) -> tuple[float, float] | None:
    """Share of the variance within heads explained under half and under interleaved; None if there is none."""
    centred = log_norms.double() - log_norms.double().mean(-1, keepdim=True)
    total = float(centred.square().sum())
    if total <= 1e-20 * log_norms.numel():
        return None
    channels = torch.arange(log_norms.shape[-1])
    half, interleaved = (
        float((centred @ _curves(index, log_norms.shape[-1] // 2)).square().sum()) / total
        for index in (channels % (len(channels) // 2), channels // 2)
    )
    return half, interleaved


def _curves(pair: Tensor, pairs: int) -> Tensor:
    """Slow cosines over the frequencies, orthonormal over the channels: (rotary_dim, HARMONICS)."""
    place = (pair.double() + 0.5) / pairs
    curves = torch.stack([(math.pi * k * place).cos() for k in range(1, HARMONICS + 1)], -1)
    return curves / curves.norm(dim=0)


def _norms(name: str, turn: Turn, numbers: Numbers) -> Tensor:
    """Norms of the channels that turn: (turning heads, rotary_dim), read head by head."""
    read = [
        numbers(name, index * turn.head_dim, index * turn.head_dim + turn.rotary_dim, turn.rows).double().norm(dim=-1)
        for index, turning in enumerate(turn.turning)
        if turning
    ]
    return torch.stack(read)

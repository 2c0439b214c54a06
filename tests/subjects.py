"""The one list of encodings that feeds every shared test."""

import math

import torch
from torch import nn

import ropewalk as rw
from ropewalk.check import Subject


def _learned():
    torch.manual_seed(11)
    return rw.Learned(700, 128)


def _spectrum(dim, **options):
    return rw.spectra.yarn(dim, stretch=4, train_len=512, **options)


def _longrope(pairs):
    factors = {"short_factors": [1.0] * pairs, "long_factors": [1.0 + i for i in range(pairs)]}
    return rw.spectra.longrope(2 * pairs, **factors, train_len=512, length=513, stretch=8)


class Own(rw.Encoding):
    """A stranger's encoding: one bias for all heads."""

    relative = True
    distance_only = True

    def bias(self, head, q_pos, k_pos):
        distance = (q_pos - k_pos).abs()
        return -(distance if distance.is_floating_point() else distance.float()) / 4


class T5Like(rw.Encoding):
    """A stranger's encoding with something to learn: a number for each head and bucket of distances, exact for near
    ones and by the logarithm up to `max_distance` (Raffel et al. 2020, arXiv:1910.10683v4, Sec. 2.1)."""

    relative = True
    distance_only = True

    def __init__(self, num_heads=8, num_buckets=16, max_distance=40, bidirectional=True):
        super().__init__()
        self.num_buckets, self.max_distance, self.bidirectional = num_buckets, max_distance, bidirectional
        self.table = nn.Parameter(torch.empty(num_buckets, num_heads))
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():  # no two numbers alike
            self.table.copy_(torch.linspace(-2, 1, self.table.numel()).view_as(self.table).cos())

    @property
    def side(self):
        """Buckets of one direction."""
        return self.num_buckets // 2 if self.bidirectional else self.num_buckets

    def edges(self):
        """The smallest distance of each bucket but the first."""
        exact, steps = self.side // 2, self.side - self.side // 2
        ratio = (self.max_distance / exact) ** (1 / steps)
        return [*range(1, exact + 1), *(math.ceil(round(exact * ratio**j, 9)) for j in range(1, steps))]

    def bucket(self, distance):
        """Buckets of distances q_pos - k_pos, one comparison for each edge."""
        start = (distance < 0) * self.side if self.bidirectional else torch.zeros_like(distance)
        far = distance.abs() if self.bidirectional else distance
        return start + sum((far >= edge).long() for edge in self.edges())

    def bias(self, head, q_pos, k_pos):
        distance = q_pos - k_pos
        dtype = distance.dtype if distance.is_floating_point() else torch.float32
        return self.table.to(dtype)[self.bucket(distance.long()), head]


ENCODINGS = {
    "own": Own,
    "t5-like": T5Like,
    "t5-like-causal": lambda: T5Like(num_buckets=8, max_distance=16, bidirectional=False),
    "nope": rw.NoPE,
    "sinusoidal": lambda: rw.Sinusoidal(128),
    "learned": _learned,
    "rotary": lambda: rw.Rotary(16),
    "rotary-interleaved": lambda: rw.Rotary(16, layout="interleaved"),
    "rotary-partial": lambda: rw.Rotary(16, rotary_dim=6, base=500_000.0),
    "rotary-partial-interleaved": lambda: rw.Rotary(16, rotary_dim=10, layout="interleaved"),
    "rotary-yarn": lambda: rw.Rotary(16, spectrum=_spectrum(16)),
    "rotary-longrope": lambda: rw.Rotary(16, spectrum=_longrope(8)),
    "rotary-proportional": lambda: rw.Rotary(16, spectrum=rw.spectra.proportional(16, rotary_dim=6)),
    "trailing": lambda: rw.Trailing(16, 6),
    "trailing-deinterleaved": lambda: rw.Trailing(
        16, 10, layout="interleaved", deinterleave=True, spectrum=_spectrum(10)
    ),
    "axial": lambda: rw.Axial(16),
    "axial-3d": lambda: rw.Axial(16, 3, order="alternating", layout="interleaved"),
    "mrope": lambda: rw.MRoPE(16, [2, 3, 3]),
    "mrope-interleaved": lambda: rw.MRoPE(16, [4, 2, 2], order="interleaved", spectrum=_spectrum(16)),
    "mrope-alternating": lambda: rw.MRoPE(16, [2, 3, 3], order="alternating", layout="interleaved"),
    "mrope-channels": lambda: rw.MRoPE(16, [1, 2, 1, 2], order="channels", rotary_dim=12),
    "temperature": lambda: rw.Temperature(train_len=3),
    "temperature-steps": lambda: rw.Temperature("steps", train_len=2, strength=1.0),
    "rotary+temperature": lambda: rw.Rotary(16) + rw.Temperature("constant", factor=1.6),
    "alibi": lambda: rw.ALiBi(8),
    "alibi-given": lambda: rw.ALiBi(8, slopes=[0.3, 0.0, 1.0, 2.0, 0.01, 0.5, 0.1, 0.2]),
    "alibi-learned": lambda: rw.ALiBi(8, learned=True),
    "hybrid": lambda: rw.Hybrid(rw.Rotary(16), rw.ALiBi(8)),
    "hybrid-weighted": lambda: rw.Hybrid(rw.Rotary(16, layout="interleaved"), rw.ALiBi(8), alpha=0.5),
    "rotary+alibi": lambda: rw.Rotary(16) + rw.ALiBi(8),
    "sinusoidal+rotary+alibi": lambda: rw.Sinusoidal(128) + rw.Rotary(16) + rw.ALiBi(8),
    "alibi-odd-heads": lambda: rw.ALiBi(12),
}
SIZES = {"alibi-odd-heads": {"num_heads": 12, "num_kv_heads": 2}}
BACKENDS = ("reference", "sdpa", "banded", "auto")


def subject(name: str, backend: str = "reference", **replaced) -> Subject:
    return Subject(ENCODINGS[name], backend=backend, **SIZES.get(name, {}), **replaced)

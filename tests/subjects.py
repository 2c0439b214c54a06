"""The one list of encodings that feeds every shared test."""

import torch

import ropewalk as rw
from ropewalk.check import Subject


def _learned():
    torch.manual_seed(11)
    return rw.Learned(700, 128)


def _spectrum(dim, **options):
    return rw.spectra.yarn(dim, stretch=4, train_len=512, **options)


class Own(rw.Encoding):
    """A stranger's encoding: one bias for all heads."""

    relative = True
    distance_only = True

    def bias(self, head, q_pos, k_pos):
        distance = (q_pos - k_pos).abs()
        return -(distance if distance.is_floating_point() else distance.float()) / 4


ENCODINGS = {
    "own": Own,
    "nope": rw.NoPE,
    "sinusoidal": lambda: rw.Sinusoidal(128),
    "learned": _learned,
    "rotary": lambda: rw.Rotary(16),
    "rotary-interleaved": lambda: rw.Rotary(16, layout="interleaved"),
    "rotary-partial": lambda: rw.Rotary(16, rotary_dim=6, base=500_000.0),
    "rotary-partial-interleaved": lambda: rw.Rotary(16, rotary_dim=10, layout="interleaved"),
    "rotary-yarn": lambda: rw.Rotary(16, spectrum=_spectrum(16)),
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
BACKENDS = ("reference", "sdpa")


def subject(name: str, backend: str = "reference", **replaced) -> Subject:
    return Subject(ENCODINGS[name], backend=backend, **SIZES.get(name, {}), **replaced)

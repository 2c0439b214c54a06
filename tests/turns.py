"""The rotation by another route than the package takes: complex numbers in float64, pair by pair."""

import torch


def turned_as_complex(x, cos, sin, layout):
    """`x` in float64 with each pair of channels, as a complex number, multiplied by cos + i sin."""
    pairs = cos.shape[-1]
    first = range(pairs) if layout == "half" else range(0, 2 * pairs, 2)
    second = range(pairs, 2 * pairs) if layout == "half" else range(1, 2 * pairs, 2)
    out = x.detach().double().clone()
    for pair, (a, b) in enumerate(zip(first, second, strict=True)):
        number = torch.complex(x[..., a].detach().double(), x[..., b].detach().double())
        number = number * torch.complex(cos[..., pair].double(), sin[..., pair].double())
        out[..., a], out[..., b] = number.real, number.imag
    return out

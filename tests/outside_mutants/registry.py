"""How faults are registered, and the right functions of which the wrong ones are made."""

import dataclasses
import math
from collections.abc import Callable

import torch

from ropewalk.check.adapters import Adapter, AttentionFunction, Bias, Rotation
from ropewalk.check.biases import published_bucket, published_slopes

HEAD_DIM, HEADS, KV_HEADS = 16, 8, 2
BASE = 10_000.0


@dataclasses.dataclass(frozen=True)
class OutsideMutant:
    name: str
    kind: str
    law: str
    make: Callable[[], Adapter]


MUTANTS: list[OutsideMutant] = []


def rotation(kind: str, law: str, **stated):
    """Registers a function, or a class whose instances are one, as a rotation with a fault."""

    def register(wrong):
        def make() -> Rotation:
            f = wrong() if isinstance(wrong, type) else wrong
            return Rotation(f, HEAD_DIM, name=wrong.__name__, **{"base": BASE, "layout": "half", **stated})

        MUTANTS.append(OutsideMutant(wrong.__name__, kind, law, make))
        return wrong

    return register


def bias(kind: str, law: str, num_heads: int = HEADS, **stated):
    def register(wrong):
        def make() -> Bias:
            f = wrong() if isinstance(wrong, type) else wrong
            return Bias(f, num_heads, name=wrong.__name__, **{"rule": "alibi", **stated})

        MUTANTS.append(OutsideMutant(wrong.__name__, kind, law, make))
        return wrong

    return register


def attention(kind: str, law: str, **stated):
    def register(wrong):
        def make() -> AttentionFunction:
            f = wrong() if isinstance(wrong, type) else wrong
            return AttentionFunction(f, HEADS, KV_HEADS, HEAD_DIM, name=wrong.__name__, **stated)

        MUTANTS.append(OutsideMutant(wrong.__name__, kind, law, make))
        return wrong

    return register


# Right ones, of which the wrong ones are made.


def frequencies(width: int = HEAD_DIM, base: float = BASE) -> torch.Tensor:
    return base ** (-torch.arange(0, width, 2, dtype=torch.float32) / width)


def turn(x: torch.Tensor, angles: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Half layout; channels beyond the angles stay."""
    pairs = angles.shape[-1]
    a, b, rest = x[..., :pairs], x[..., pairs : 2 * pairs], x[..., 2 * pairs :]
    cos, sin = (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def right(x, positions):
    return turn(x, positions[:, None].float() * frequencies())


def right_bias(num_heads, q_positions, k_positions):
    distance = (q_positions[:, None] - k_positions).abs()
    return -torch.tensor(published_slopes(num_heads))[:, None, None] * distance


def right_attention(q, k, v, positions, *, turning=right, may=None):
    group = q.shape[1] // k.shape[1]
    q, k = turning(q, positions[-q.shape[2] :]), turning(k, positions)
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return weighted(q, k, v, causal(q, k) if may is None else may)


def causal(q, k):
    q_len, k_len = q.shape[2], k.shape[2]
    return torch.ones(q_len, k_len, dtype=torch.bool).tril(k_len - q_len)


def weighted(q, k, v, may):
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~may, -torch.inf)
    return scores.softmax(-1) @ v


def by_buckets(num_heads, q_positions, k_positions, bucket=published_bucket):
    table = torch.randn(32, num_heads, generator=torch.Generator().manual_seed(0))
    distances, where = (q_positions[:, None] - k_positions).unique(return_inverse=True)
    buckets = torch.tensor([bucket(int(d), 32, 128, True) for d in distances])
    return table[buckets[where]].permute(2, 0, 1)

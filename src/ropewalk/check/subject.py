"""An encoding under test, with the attention around it, and how its numbers are compared."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ropewalk import layouts, positions
from ropewalk._shapes import Tensor
from ropewalk.attention import KVCache, attend
from ropewalk.check.verdict import Finding
from ropewalk.encodings import Encoding, Placement, grid, reposition, rotate_


@dataclass(frozen=True)
class Parts:
    """The functions that a law calls, so that a wrong version of any of them can be put to the test."""

    attend: Callable[..., Any] = attend
    cache: Callable[..., Any] = KVCache
    rotate_: Callable[..., Any] = rotate_
    reposition: Callable[..., Any] = reposition
    from_mask: Callable[..., Any] = positions.from_mask
    from_documents: Callable[..., Any] = positions.from_documents
    shard: Callable[..., Any] = positions.shard
    grid: Callable[..., Any] = grid
    to_half: Callable[..., Any] = layouts.to_half
    to_interleaved: Callable[..., Any] = layouts.to_interleaved
    to_half_weight: Callable[..., Any] = layouts.to_half_weight
    to_interleaved_weight: Callable[..., Any] = layouts.to_interleaved_weight


class Unbiased(Encoding):
    """An encoding without its bias: attention that is right with it and wrong with the bias treats the bias wrongly."""

    distance_only = True

    def __init__(self, encoding: Encoding):
        super().__init__()
        self.encoding = encoding
        self.relative, self.max_positions = encoding.relative, encoding.max_positions

    @property
    def encodes(self) -> bool:
        return self.encoding.encodes

    def at(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> Placement:
        return self.encoding.at(positions, dtype)

    def query(self, q: Tensor, at: Placement) -> Tensor:
        return self.encoding.query(q, at)

    def key(self, k: Tensor, at: Placement) -> Tensor:
        return self.encoding.key(k, at)

    def bias(self, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        distance = q_pos - k_pos
        return 0.0 * head * (distance if distance.is_floating_point() else distance.float())

    def falloff(self, head: Tensor) -> Tensor:
        return torch.zeros(len(head), dtype=torch.float64, device=head.device)


@dataclass(frozen=True)
class Subject:
    """An encoding and the attention around it.

    Args:
        make: builds a fresh encoding; whatever it learns must start equal each time.
        backend: of `attend`.
        head_dim, num_heads, num_kv_heads: sizes that the encoding was made for; GQA on purpose, in a ratio that
            shows when one count is taken for the other.
    """

    make: Callable[[], Encoding]
    backend: str = "reference"
    head_dim: int = 16
    num_heads: int = 8
    num_kv_heads: int = 2
    parts: Parts = field(default_factory=Parts)

    @property
    def model_dim(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.num_heads // self.num_kv_heads

    def attend(self, q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | None, **options) -> Any:
        return self.parts.attend(q, k, v, encoding, **{"backend": self.backend, **options})

    def projections(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Fixed random maps from the embedding to queries, keys and values."""
        return _projections(self.model_dim, self.num_kv_heads * self.head_dim, dtype)

    def tokens(self, batch: int, seq_len: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
        """Random embeddings (batch, seq, model_dim)."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(batch, seq_len, self.model_dim, generator=generator, dtype=torch.float64).to(dtype)

    def encoded(self, encoding: Encoding, x: Tensor, where: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Encoded queries, encoded keys and values of tokens `x` at positions `where`, (batch, heads, seq, dim)."""
        at = encoding.at(where, x.dtype)
        x = encoding.embed(x, at)
        q, k, v = ((x @ m).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for m in self.projections(x.dtype))
        return encoding.query(q, at), encoding.key(k, at), v

    def forward(self, encoding: Encoding, x: Tensor, where: Tensor, **options) -> Tensor:
        """One attention layer over `x`, explicit positions throughout."""
        q, k, v = self.encoded(encoding, x, where)
        options = {"q_positions": where, "k_positions": where, "encoded": True, **options}
        return self.attend(q, k, v, encoding, **options)


@functools.lru_cache(maxsize=16)
def _projections(model_dim: int, kv_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    with torch.inference_mode(False):  # whoever asks first: gradients go through them later
        generator = torch.Generator().manual_seed(7)
        widths = (model_dim, kv_dim, kv_dim)
        maps = (torch.randn(model_dim, w, generator=generator, dtype=torch.float64) for w in widths)
        q, k, v = ((m * model_dim**-0.5).to(dtype) for m in maps)
        return q, k, v


def first(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The first finding alone: a law goes from small inputs to large, and one cause is named once."""
    yield from itertools.islice(findings, 1)


def differs(
    law: str, given: str, expected: Tensor, got: Tensor, tolerance: float, cause: str, kind: str = ""
) -> Iterator[Finding]:
    """A finding if `got` is farther than `tolerance` from `expected` anywhere, or is of another shape.

    Args:
        kind: of fault, where it is not the law's own (`kinds.KINDS`).
    """
    if expected.shape != got.shape:
        yield Finding(law, given, f"shape {tuple(expected.shape)}", f"shape {tuple(got.shape)}", cause, kind)
        return
    if expected.numel() == 0:
        return
    expected, got = expected.detach(), got.detach()
    gap = (expected.double() - got.double()).abs()
    gap = torch.where(expected == got, 0.0, gap)  # equal infinities
    gap = torch.where(gap.isnan(), torch.inf, gap)
    worst = int(gap.argmax())
    if float(gap.flatten()[worst]) > tolerance:
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), gap.shape))
        there = f"{float(expected.flatten()[worst]):.9g} within {tolerance:.1g} at {index}"
        yield Finding(law, given, there, f"{float(got.flatten()[worst]):.9g}", cause, kind)


def counted(count: int, noun: str = "token", plural: str = "") -> str:
    """A number with its noun: "1 token", "2 queries"."""
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def largest(x: Tensor) -> float:
    """The largest magnitude in `x`."""
    return float(x.detach().abs().max())


def rounding(dtype: torch.dtype, terms: int = 1) -> float:
    """What a sum of `terms` numbers near 1 may be off: roundings add up like a random walk, with a margin of four."""
    return 4 * torch.finfo(dtype).eps * max(terms, 1) ** 0.5


def attention_error(subject: Subject, expected: Tensor, keys: int, dtype: torch.dtype = torch.float32) -> float:
    """What attention may be off: one sum over the channels of a head, one over `keys`, of numbers like `expected`."""
    return rounding(dtype, subject.head_dim + keys) * max(1.0, largest(expected))


def table_error(dtype: torch.dtype, position: int = 0) -> float:
    """What a cosine or sine may be off: three roundings of an angle of at most pi and one of the result; at far
    positions also the step, which is right to 2^-65 turns per token (`ropewalk.phases`)."""
    return (3 * math.pi + 1) * torch.finfo(dtype).eps / 2 + 2 * math.pi * abs(position) * 2.0**-65


def turning_error(x: Tensor, *positions: int) -> float:
    """What a channel of `x` may be off after a turn at each of `positions`: two products with a cosine or sine that
    is off, two roundings."""
    eps = torch.finfo(x.dtype).eps
    return largest(x) * sum(2 * (table_error(x.dtype, p) + eps) for p in positions)


def score_error(q: Tensor, k: Tensor, position: int, angle: float = 0.0) -> float:
    """What q . k / sqrt(head_dim) may be off, both turned at `position`: each vector by sqrt(2) of a table's error,
    and a sum over the channels of a head.

    Args:
        angle: what an angle may be off besides, radians.
    """
    dim, eps = q.shape[-1], torch.finfo(q.dtype).eps
    lengths = float(q.detach().norm(dim=-1).max() * k.detach().norm(dim=-1).max())
    table = table_error(q.dtype, position) + angle
    return (2 * math.sqrt(2) * table + math.sqrt(dim) * eps) * lengths / math.sqrt(dim)

"""An encoding under test, with the attention around it, and how its numbers are compared."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ropewalk import layouts, positions
from ropewalk._shapes import Tensor
from ropewalk.attention import KVCache, attend
from ropewalk.check.verdict import Finding
from ropewalk.encodings import Encoding, reposition, rotate_


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
    to_half: Callable[..., Any] = layouts.to_half
    to_interleaved: Callable[..., Any] = layouts.to_interleaved
    to_half_weight: Callable[..., Any] = layouts.to_half_weight
    to_interleaved_weight: Callable[..., Any] = layouts.to_interleaved_weight


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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, encoding: Encoding | None, **options) -> Any:
        return self.parts.attend(q, k, v, encoding, **{"backend": self.backend, **options})

    def projections(self, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
        """Fixed random maps from the embedding to queries, keys and values."""
        generator = torch.Generator().manual_seed(7)
        kv = self.num_kv_heads * self.head_dim
        widths = (self.model_dim, kv, kv)
        scale = self.model_dim**-0.5
        maps = (torch.randn(self.model_dim, w, generator=generator, dtype=torch.float64) * scale for w in widths)
        q, k, v = (m.to(dtype) for m in maps)
        return q, k, v

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


def rounding(dtype: torch.dtype, terms: int = 1) -> float:
    """What `terms` roundings of numbers near 1 can add up to, with a margin of four."""
    return 4 * torch.finfo(dtype).eps * max(terms, 1) ** 0.5

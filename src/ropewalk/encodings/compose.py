"""Several encodings at once: the vector hooks are chained, the biases added."""

import torch
from torch import nn

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement
from ropewalk.errors import require, require_type
from ropewalk.positions import as_positions


class Compose(Encoding):
    """`Compose(a, b)`, also written `a + b`: x passes through a, then b; the score gains both biases."""

    def __init__(self, *encodings: Encoding):
        super().__init__()
        require(len(encodings) > 0, "encodings", "at least one encoding", "none")
        for encoding in encodings:
            require_type(encoding, Encoding, "encodings", "encodings throughout")
        flat = (e.encodings if isinstance(e, Compose) else [e] for e in encodings)
        self.encodings = nn.ModuleList(e for part in flat for e in part)
        self.relative = all(e.relative for e in self.parts) and self._turns_commute()
        self.distance_only = all(e.distance_only for e in self.parts if e.has_bias)
        self.max_positions = min((e.max_positions for e in self.parts if e.max_positions), default=None)

    @property
    def parts(self) -> tuple[Encoding, ...]:
        """The encodings in their order."""
        return tuple(self.encodings)  # pyright: ignore[reportReturnType]

    @property
    def has_bias(self) -> bool:
        return any(e.has_bias for e in self.parts)

    @property
    def encodes(self) -> bool:
        return any(e.encodes for e in self.parts)

    @property
    def is_absolute(self) -> bool:
        return any(e.is_absolute for e in self.parts)

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        positions = as_positions(positions)
        return Placement(positions, parts=tuple(e.at(positions, dtype) for e in self.parts))

    def _turns_commute(self) -> bool:
        """Turns about the same pairs can be exchanged; those about different pairs leave no relative score."""
        turning = [e for e in self.parts if type(e).key is not Encoding.key]
        return len(turning) < 2 or len({getattr(e, "plane", e) for e in turning}) == 1

    def moved(
        self,
        k: Float[Tensor, "batch heads seq head_dim"],
        old: Int[Tensor, "*batch seq"],
        new: Int[Tensor, "*batch seq"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        require(self._turns_commute(), "encoding", "one that turns the same pairs throughout", self)
        for encoding in self.parts:
            k = encoding.moved(k, old, new)
        return k

    def embed(self, x: Float[Tensor, "batch seq model_dim"], at: Placement) -> Float[Tensor, "batch seq model_dim"]:
        for encoding, part in zip(self.parts, at.parts, strict=True):
            x = encoding.embed(x, part)
        return x

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        for encoding, part in zip(self.parts, at.parts, strict=True):
            q = encoding.query(q, part)
        return q

    def key(
        self, k: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        for encoding, part in zip(self.parts, at.parts, strict=True):
            k = encoding.key(k, part)
        return k

    def encode_(
        self,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        at: Placement,
    ) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        for encoding, part in zip(self.parts, at.parts, strict=True):
            q, k = encoding.encode_(q, k, part)
        return q, k

    def bias(
        self, head: Int[Tensor, "*#s"], q_pos: Shaped[Tensor, "*#s"], k_pos: Shaped[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"] | None:
        total = None
        for encoding in self.parts:
            bias = encoding.bias(head, q_pos, k_pos)
            if bias is not None:
                total = bias if total is None else total + bias
        return total

    def falloff(self, head: Int[Tensor, "heads"]) -> Float[Tensor, "heads"] | None:
        total = None
        for encoding in self.parts:
            slope = encoding.falloff(head)
            if slope is None and encoding.has_bias:
                return None
            if slope is not None:
                total = slope if total is None else total + slope
        return total

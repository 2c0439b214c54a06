"""What an encoding is: five hooks, each neutral by default."""

from typing import NamedTuple

import torch
from torch import nn

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.errors import message, require
from ropewalk.positions import as_positions


class Placement(NamedTuple):
    """All that depends on positions alone, made once per forward pass and shared by all layers.

    A named tuple of tensors, so it crosses compile, export and checkpoint boundaries.
    """

    positions: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    parts: tuple["Placement", ...] = ()


class Encoding(nn.Module):
    """Base of every encoding: override the hooks that it needs, leave the others neutral.

    Encodings hold numbers, not tables: there is no buffer that a cast, a meta device or an earlier call could
    spoil, and `state_dict` holds learned tensors only.
    """

    distance_only = False
    """The bias depends on the head and on q_pos - k_pos alone."""
    relative = False
    """A common shift of all positions changes no attention score."""
    max_positions: int | None = None
    """Positions must lie below it (learned tables); None: any position."""

    @property
    def has_bias(self) -> bool:
        """Whether `bias` adds anything."""
        return type(self).bias is not Encoding.bias

    @property
    def encodes(self) -> bool:
        """Whether `query` or `key` changes anything."""
        return type(self).query is not Encoding.query or type(self).key is not Encoding.key

    @property
    def is_absolute(self) -> bool:
        """Whether `embed` adds anything to the embeddings."""
        return type(self).embed is not Encoding.embed

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        """What the other hooks need to know about `positions`.

        Args:
            positions: token indices, (seq,) for all rows or (batch, seq).
            dtype: precision of the tables: float64 for float64 models, float32 for every other.
        """
        return Placement(as_positions(positions))

    def embed(self, x: Float[Tensor, "batch seq model_dim"], at: Placement) -> Float[Tensor, "batch seq model_dim"]:
        """Token embeddings with their positions (absolute encodings)."""
        return x

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Encoded queries."""
        return q

    def key(
        self, k: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Encoded keys; a cache holds them in this form."""
        return k

    def encode_(
        self,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        at: Placement,
    ) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        """`query` and `key`, written into `q` and `k` where that saves memory: for tensors that nobody else reads."""
        return self.query(q, at), self.key(k, at)

    def bias(
        self, head: Int[Tensor, "*#s"], q_pos: Shaped[Tensor, "*#s"], k_pos: Shaped[Tensor, "*#s"]
    ) -> Float[Tensor, "*#s"] | None:
        """Elementwise bias of head `head` between a query and a key, score units, added after scaling.

        Computed in float32 for integer positions, in the positions' own precision if they are floats.
        """
        return None

    def falloff(self, head: Int[Tensor, "heads"]) -> Float[Tensor, "heads"] | None:
        """A slope m >= 0 with bias(q_pos, k_pos) <= bias(q_pos, q_pos) - m |q_pos - k_pos| for all positions, score
        units per token, by which attention knows how far a head can see without evaluating the bias.

        None where no such slope is known.
        """
        return None

    def moved(
        self,
        k: Float[Tensor, "batch heads seq head_dim"],
        old: Int[Tensor, "*batch seq"],
        new: Int[Tensor, "*batch seq"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """Keys that `key` encoded at positions `old`, as it would have encoded them at `new`.

        Raises:
            ValueError: the keys hold their position in a way that cannot be turned back.
        """
        if self.is_absolute or type(self).key is not Encoding.key:
            raise ValueError(message("encoding", "one whose keys can be moved (its own `moved`)", type(self).__name__))
        return k

    def __radd__(self, other: object) -> "Encoding":
        return self if other == 0 else NotImplemented  # sum() starts from 0

    def __add__(self, other: "Encoding") -> "Encoding":
        from ropewalk.encodings.compose import Compose

        return Compose(self, other)


def check_embedding(x: Tensor, at: Placement, model_dim: int) -> None:
    """ValueError unless `x` is as wide as the encoding and as long as its positions."""
    seq_len = at.positions.shape[-1]
    require(x.shape[-1] == model_dim, "the last axis", "model_dim ({0})", x.shape[-1], model_dim)
    require(x.shape[-2] == seq_len, "x", "as long as its positions ({0})", x.shape[-2], seq_len)
    if at.positions.ndim == 2:
        rows = at.positions.shape[0]
        fits = rows == 1 or rows == x.shape[0]
        require(fits, "positions", "of {0} rows, or of one for all", rows, x.shape[0])


def table_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision in which positions are worked with for data of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Which token is where: integer positions for padding, packed documents and sequence shards.

Everything else in the package is handed these integers; nothing guesses them from a tensor's shape.
"""

from collections.abc import Sequence

import torch

from ropewalk._shapes import Bool, Int, Shaped, Tensor
from ropewalk.errors import message, require, require_count

_FLOATING = "cast with .long(); a half-precision counter has already lost tokens (bfloat16 holds 256 in a row)"


def as_positions(positions: Shaped[Tensor, "*batch seq"], name: str = "positions") -> Int[Tensor, "*batch seq"]:
    """`positions` in 64 bits, where no difference of two of them wraps around.

    Raises:
        TypeError: it is no integer tensor.  ValueError: its shape is neither (seq,) nor (batch, seq).
    """
    if not isinstance(positions, Tensor):
        raise TypeError(message(name, "an integer tensor", type(positions).__name__, hint="torch.arange(seq_len)"))
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(message(name, "an integer tensor", f"dtype {positions.dtype}", hint=_FLOATING))
    require(positions.ndim in (1, 2), name, "of shape (seq,) or (batch, seq)", tuple(positions.shape))
    return positions.long()


def from_mask(mask: Shaped[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """The place of each real token among the real ones of its row; padding gets 0 on the left, its left
    neighbour's place elsewhere.

    Args:
        mask: bool, or integers 0 and 1; True marks a real token.  Padding may stand anywhere.

    >>> from_mask(torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])).tolist()
    [[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 4, 4]]
    """
    require(mask.ndim == 2, "mask", "of shape (batch, seq)", tuple(mask.shape))
    return (mask != 0).long().cumsum(-1).sub(1).clamp(min=0)


def from_lengths(lengths: Sequence[int]) -> tuple[Int[Tensor, "seq"], Int[Tensor, "seq"]]:
    """Positions and document ids of documents packed one after another into a row.

    Args:
        lengths: tokens of each document, each at least 1.

    Returns:
        positions that start at 0 in each document, and the index of each token's document: both are needed,
        for restarting the positions does not keep one document from reading another.

    >>> positions, documents = from_lengths([3, 2])
    >>> positions.tolist(), documents.tolist()
    ([0, 1, 2, 0, 1], [0, 0, 0, 1, 1])
    """
    counts = torch.tensor([require_count(n, "each length") for n in lengths], dtype=torch.long)
    documents = torch.repeat_interleave(torch.arange(len(counts)), counts)
    return from_documents(documents), documents


def from_documents(documents: Int[Tensor, "*batch seq"]) -> Int[Tensor, "*batch seq"]:
    """Positions that start again at 0 wherever the document id changes.

    >>> from_documents(torch.tensor([[7, 7, 7, 2, 2], [5, 6, 6, 6, 6]])).tolist()
    [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    """
    index = torch.arange(documents.shape[-1], device=documents.device).expand(documents.shape)
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    return index - torch.where(starts, index, 0).cummax(-1).values


def shard(seq_len: int, rank: int, world_size: int, order: str = "contiguous") -> Int[Tensor, "shard"]:
    """The global positions of the tokens that one context-parallel rank holds.

    Args:
        seq_len: tokens of the whole sequence, a multiple of `world_size` (of twice that for "zigzag").
        rank: this shard's index, 0 <= rank < world_size.
        order: "contiguous", or "zigzag": chunks `rank` and `2 world_size - 1 - rank` of 2 world_size chunks,
            so that causal work is even over the ranks.

    >>> shard(8, 1, 2, "zigzag").tolist()
    [2, 3, 4, 5]
    """
    require_count(seq_len, "seq_len", at_least=0)
    require_count(world_size, "world_size")
    require(0 <= rank < world_size, "rank", f"in [0, {world_size})", rank)
    require(order in ("contiguous", "zigzag"), "order", "'contiguous' or 'zigzag'", repr(order))
    chunks = world_size if order == "contiguous" else 2 * world_size
    require(seq_len % chunks == 0, "seq_len", f"a multiple of {chunks}", seq_len, hint="pad the sequence")
    pieces = torch.arange(seq_len).chunk(chunks) if seq_len else (torch.arange(0),) * chunks
    return pieces[rank] if order == "contiguous" else torch.cat((pieces[rank], pieces[chunks - 1 - rank]))


def last(q_len: int, k_len: int, device: torch.device | None = None) -> Int[Tensor, "q"]:
    """Positions of the last `q_len` of `k_len` tokens: how queries line up with a cache (bottom-right)."""
    return torch.arange(k_len - q_len, k_len, device=device)


def packed_mask(mask: Bool[Tensor, "batch seq"]) -> Bool[Tensor, "batch 1 1 seq"]:
    """A key padding mask (batch, seq) in the shape that attention broadcasts."""
    return mask[:, None, None, :]

"""Which token is where: integer positions for padding, packed documents and sequence shards.

Everything else in the package is handed these integers; nothing guesses them from a tensor's shape.
"""

from collections.abc import Sequence

import torch

from ropewalk._shapes import Bool, Int, Shaped, Tensor
from ropewalk.errors import message, require, require_count, require_type

_FLOATING = "cast with .long(); a half-precision counter has already lost tokens (bfloat16 holds 256 in a row)"


def as_positions(positions: Shaped[Tensor, "*batch seq"], name: str = "positions") -> Int[Tensor, "*batch seq"]:
    """`positions` in 64 bits, where no difference of two of them wraps around.

    Raises:
        TypeError: it is no integer tensor.  ValueError: its shape is neither (seq,) nor (batch, seq).
    """
    require_type(positions, Tensor, name, "an integer tensor", hint="torch.arange(seq_len)")
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise TypeError(message(name, "an integer tensor", f"dtype {positions.dtype}", hint=_FLOATING))
    if positions.dtype == torch.uint64:
        raise TypeError(message(name, "a tensor of at most 63 bits", "dtype torch.uint64", hint="cast with .long()"))
    require(positions.ndim in (1, 2), name, "of shape (seq,) or (batch, seq)", tuple(positions.shape))
    return positions.long()


def as_real(mask: Shaped[Tensor, "batch seq"], name: str = "mask") -> Bool[Tensor, "batch seq"]:
    """A padding mask as bool, True = a real token.

    Raises:
        TypeError: it is additive, or no tensor.  ValueError: its shape is not (batch, seq).
    """
    require_type(mask, Tensor, name, "a tensor")
    if mask.is_floating_point() or mask.is_complex():
        hint = "True marks a real token; torch.nn.MultiheadAttention means the opposite"
        raise TypeError(message(name, "bool, or integers 0 and 1", f"dtype {mask.dtype}", hint))
    require(mask.ndim == 2, name, "of shape (batch, seq)", tuple(mask.shape))
    return mask != 0


def from_mask(mask: Shaped[Tensor, "batch seq"]) -> Int[Tensor, "batch seq"]:
    """The place of each real token among the real ones of its row; padding gets 0 on the left, its left
    neighbour's place elsewhere.

    Args:
        mask: bool, or integers 0 and 1; True marks a real token.  Padding may stand anywhere.

    >>> from_mask(torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])).tolist()
    [[0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 4, 4]]
    """
    return as_real(mask).long().cumsum(-1).sub(1).clamp(min=0)


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


def from_documents(
    documents: Shaped[Tensor, "*batch seq"], mask: Shaped[Tensor, "batch seq"] | None = None
) -> Int[Tensor, "*rows seq"]:
    """Positions that start again at 0 wherever the document id changes.

    Args:
        documents: ids; a document is one run of equal ids.
        mask: True = a real token; padding inside a document is not counted.

    >>> from_documents(torch.tensor([[7, 7, 7, 2, 2], [5, 6, 6, 6, 6]])).tolist()
    [[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]]
    """
    documents = as_positions(documents, "documents")
    real = torch.ones_like(documents, dtype=torch.bool) if mask is None else as_real(mask)
    require(real.shape[-1] == documents.shape[-1], "mask", "as long as documents", tuple(real.shape))
    starts = torch.ones_like(documents, dtype=torch.bool)
    starts[..., 1:] = documents[..., 1:] != documents[..., :-1]
    counted = real.long().cumsum(-1)  # real tokens up to and with this one
    before = torch.where(starts, counted - real.long(), 0).cummax(-1).values  # those ahead of its document
    return (counted - before - 1).clamp(min=0)


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

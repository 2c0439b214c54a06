"""Losses of held-out text, cut into windows in the two ways that a study reports."""

import dataclasses
import itertools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

import ropewalk as rw
from ropewalk.study.data import Block

# Tokens per forward pass: enough to fill a core, few enough for its cache
TOKENS_AT_ONCE = 4096
LOGITS_AT_ONCE = 2**24
POSITION_EDGES = (0, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)


@dataclasses.dataclass(frozen=True)
class Scored:
    """Losses in nats, float64, (documents, windows, scored tokens per window), and the bytes of those tokens."""

    ids: tuple[str, ...]
    nats: Tensor
    bytes: Tensor

    def documents(self, first: int = 0) -> list[dict]:
        """Sums per document over the tokens from window position `first` on."""
        nats, sizes = self.nats[..., first:].sum((1, 2)), self.bytes[..., first:].sum((1, 2))
        tokens = self.nats[0, :, first:].numel()
        return [
            {"id": name, "nats": total, "tokens": tokens, "bytes": size}
            for name, total, size in zip(self.ids, nats.tolist(), sizes.tolist(), strict=True)
        ]

    def last(self, count: int) -> dict:
        """Sums over the last positions of every window."""
        tail = self.nats[..., -count:]
        return {"nats": tail.sum().item(), "tokens": tail.numel()}

    def by_position(self) -> dict:
        """Sums between edges of the position within a window."""
        length = self.nats.size(-1)
        edges = position_edges(length)
        cut = [self.nats[..., start:end] for start, end in itertools.pairwise(edges)]
        return {"edges": edges, "nats": [part.sum().item() for part in cut], "tokens": [part.numel() for part in cut]}


def position_edges(length: int) -> list[int]:
    """Edges of the loss-by-position buckets within a window: finer early, then every half octave.

    >>> position_edges(512)
    [0, 32, 64, 128, 256, 384, 512]
    >>> position_edges(8192)[-3:]
    [4096, 6144, 8192]
    """
    edges = list(POSITION_EDGES)
    while edges[-1] < length:
        edges += [edges[-1] * 3 // 2, edges[-1] * 2]
    return [edge for edge in edges if edge < length] + [length]


def slide(length: int, block_len: int, stride: int) -> list[tuple[int, int]]:
    """Windows as (start, first scored position): the first scores all of itself, later ones their last `stride`.

    >>> slide(8, 16, 4)
    [(0, 0), (4, 4), (8, 4)]
    >>> slide(8, 16, 8)
    [(0, 0), (8, 0)]
    """
    return [(start, length - stride if start else 0) for start in range(0, block_len - length + 1, stride)]


class Scorer:
    """A trained model that scores tokens; one forward pass holds about `TOKENS_AT_ONCE` of them."""

    def __init__(self, model: rw.Transformer, device: str, autocast):
        self.model, self.device, self.autocast = model, device, autocast

    @torch.inference_mode()
    def token_nats(self, inputs: Tensor, targets: Tensor, mask: Tensor | None = None) -> Tensor:
        """Loss of each target, nats, in float64 on the CPU; rows are independent sequences of one length."""
        rows = max(1, TOKENS_AT_ONCE // inputs.size(1))
        mask = None if mask is None else mask.to(self.device)
        parts = []
        for row, target in zip(inputs.split(rows), targets.split(rows), strict=True):
            hidden = self.hidden(row, mask)
            parts.append(self._losses(hidden.flatten(0, 1), target.to(self.device).flatten()).view(target.shape))
        return torch.cat(parts)

    def hidden(self, inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        """The model's last states."""
        with self.autocast():
            return self.model.hidden(inputs.to(self.device), mask=mask)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores over the vocabulary, float32."""
        with self.autocast():
            return self.model.head(hidden).float()

    def _losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        count = max(1, LOGITS_AT_ONCE // self.model.embedding.num_embeddings)
        losses = [
            F.cross_entropy(self.logits(part), target, reduction="none")
            for part, target in zip(hidden.split(count), targets.split(count), strict=True)
        ]
        return torch.cat(losses).cpu().double()

    def windows(self, blocks: tuple[Block, ...], length: int, mask: Tensor | None = None) -> Scored:
        """Non-overlapping windows; every length that divides the block scores the same tokens."""
        tokens = torch.stack([block.tokens for block in blocks])
        sizes = torch.stack([block.ends for block in blocks]).diff(dim=1)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        nats = self.token_nats(inputs.reshape(-1, length), targets.reshape(-1, length), mask)
        shape = (len(blocks), -1, length)
        return Scored(tuple(block.id for block in blocks), nats.view(shape), sizes.reshape(shape))

    def sliding(self, blocks: tuple[Block, ...], length: int) -> list[dict]:
        """Sums per document with windows that overlap by three quarters: each token is scored once, and sees
        at least 3/4 of `length` back, or all there is."""
        block_len = len(blocks[0].tokens) - 1
        places = slide(length, block_len, length // 4)
        documents = []
        for block in blocks:
            rows = torch.stack([block.tokens[start : start + length + 1] for start, _ in places])
            nats = self.token_nats(rows[:, :-1], rows[:, 1:])
            total = math.fsum(row[first:].sum().item() for row, (_, first) in zip(nats, places, strict=True))
            size = (block.ends[-1] - block.ends[0]).item()
            documents.append({"id": block.id, "nats": total, "tokens": block_len, "bytes": size})
        return documents

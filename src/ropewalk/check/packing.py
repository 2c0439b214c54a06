"""Laws of documents that share a row, and of heads or sequences cut over several devices."""

from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.subject import Subject, attention_error, counted, differs, first
from ropewalk.check.verdict import Finding
from ropewalk.encodings import Encoding


def packing(subject: Subject) -> Iterator[Finding]:
    """Packed documents equal separate runs, and read nothing of each other."""
    encoding = subject.make()
    cases = ((1, 1), (1, 2), (4, 2, 3))
    for search in (_restarts, _pads_inside, _packed):
        yield from first(found for lengths in cases for found in search(subject, encoding, lengths))


def _documents(lengths: tuple[int, ...]) -> Tensor:
    return torch.repeat_interleave(torch.tensor([5, 1, 8])[: len(lengths)], torch.tensor(lengths))


def _restarts(subject: Subject, encoding: Encoding, lengths: tuple[int, ...]) -> Iterator[Finding]:
    counted = [i for n in lengths for i in range(n)]
    got = subject.parts.from_documents(_documents(lengths)).tolist()
    if got != counted:
        yield Finding("packing", f"documents of {lengths}", str(counted), str(got), "positions do not restart")


def _pads_inside(subject: Subject, encoding: Encoding, lengths: tuple[int, ...]) -> Iterator[Finding]:
    """A pad in front of each document."""
    wide = tuple(n + 1 for n in lengths)
    real = torch.tensor([[int(i > 0) for n in wide for i in range(n)]])
    expected = [[max(i - 1, 0) for n in wide for i in range(n)]]
    got = subject.parts.from_documents(_documents(wide)[None], real).tolist()
    if got != expected:
        given = f"documents of {lengths}, mask {real[0].tolist()}"
        yield Finding("packing", given, str(expected[0]), str(got[0]), "padding is counted")


def _packed(subject: Subject, encoding: Encoding, lengths: tuple[int, ...]) -> Iterator[Finding]:
    documents, total = _documents(lengths), sum(lengths)
    x, where, start = subject.tokens(1, total), subject.parts.from_documents(documents), 0
    packed = subject.forward(encoding, x, where, documents=documents)
    for n in lengths:
        rows = slice(start, start + n)
        alone = subject.forward(encoding, x[:, rows], torch.arange(n))
        given = f"documents of {lengths}, the one of {counted(n)} at {start}"
        limit = attention_error(subject, alone, total)
        yield from differs("packing", given, alone, packed[:, :, rows], limit, "another document is read")
        start += n


def shards(subject: Subject) -> Iterator[Finding]:
    """Shards of heads or of the sequence, contiguous or zig-zag, put together give the whole."""
    encoding = subject.make()
    yield from first(found for length in (1, 2, 16) for found in _shards_of_heads(subject, encoding, length))
    for order in ("contiguous", "zigzag"):
        yield from first(found for length in (4, 16) for found in _ranks(subject, encoding, order, length))


def _shards_of_heads(subject: Subject, encoding: Encoding, length: int) -> Iterator[Finding]:
    q, k, v = subject.encoded(encoding, subject.tokens(1, length), torch.arange(length))
    whole = subject.attend(q, k, v, encoding, encoded=True)
    for heads in torch.arange(subject.num_heads).chunk(2):
        pairs = slice(int(heads[0]) // subject.group, int(heads[-1]) // subject.group + 1)
        got = subject.attend(q[:, heads], k[:, pairs], v[:, pairs], encoding, encoded=True, heads=heads)
        given = f"heads {heads.tolist()} of {subject.num_heads}, {counted(length)}"
        limit = attention_error(subject, whole, length)
        # Heads differ by their number in nothing but the bias.
        kind = "K14" if encoding.has_bias else "K06"
        yield from differs("shards", given, whole[:, heads], got, limit, "local head indices", kind)


def _ranks(subject: Subject, encoding: Encoding, order: str, length: int) -> Iterator[Finding]:
    """Each of two ranks holds its queries and meets the keys of both."""
    places = [subject.parts.shard(length, rank, 2, order) for rank in range(2)]
    if sorted(torch.cat(places).tolist()) != list(range(length)):
        given, got = f"{order}, {length} tokens on 2 ranks", str([p.tolist() for p in places])
        yield Finding("shards", given, "each token once", got, "shard boundaries")
        return
    q, k, v = subject.encoded(encoding, subject.tokens(1, length), torch.arange(length))
    whole = subject.attend(q, k, v, encoding, encoded=True)
    for own in places:
        out = lse = None
        for other in places:
            part, part_lse = subject.attend(
                q[:, :, own], k[:, :, other], v[:, :, other], encoding, encoded=True, return_lse=True,
                q_positions=own, k_positions=other,
            )  # fmt: skip
            out, lse = (part, part_lse) if out is None or lse is None else merge(out, lse, part, part_lse)
        assert out is not None
        given, cause = f"{order} shard at {own.tolist()}", "local positions, or the logarithm"
        yield from differs("shards", given, whole[:, :, own], out, attention_error(subject, whole, length), cause)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    empty = lse == -torch.inf
    a, b = (torch.where(empty, 0.0, (part - lse).exp()).unsqueeze(-1) for part in (lse_a, lse_b))
    return a * out_a + b * out_b, lse

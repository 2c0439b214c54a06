"""Laws of biases: slopes, distances, buckets."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.subject import Subject, counted, differs, first, rounding
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import ALiBi, Encoding

NO_ALIBI = "it has no ALiBi bias"
FARTHEST = 5000


def alibis(encoding: Encoding) -> list[ALiBi]:
    """Every `ALiBi`, those inside other encodings too."""
    return [part for part in encoding.modules() if isinstance(part, ALiBi)]


def published_slopes(num_heads: int) -> list[float]:
    """The authors' rule, by recursion: another route than the closed form of `alibi_slope`."""
    if math.log2(num_heads).is_integer():
        start = 2.0 ** (-(2.0 ** -(math.log2(num_heads) - 3)))
        return [start ** (i + 1) for i in range(num_heads)]
    lower = 2 ** math.floor(math.log2(num_heads))
    return published_slopes(lower) + published_slopes(2 * lower)[0::2][: num_heads - lower]


def slopes(subject: Subject) -> Iterator[Finding]:
    """Slopes are the published list for every head count, and a shard's are a slice of it."""
    parts = alibis(subject.make())
    if not parts:
        raise NotApplicable(NO_ALIBI)
    parts = [part for part in parts if part.given is None and part.log_slopes is None]
    if not parts:
        raise NotApplicable("its slopes are given or learned")
    for part in parts:
        whole = (found for same in _of_all_sizes(part) for found in _published(same))
        yield from first(itertools.chain(whole, _of_shard(part)))


def _of_all_sizes(part: ALiBi) -> Iterator[ALiBi]:
    """The encoding for 1 to 128 heads, if its class is built by a head count, and as it is."""
    for num_heads in range(1, 129):
        try:
            same = type(part)(num_heads)
        except (TypeError, ValueError):  # a subclass with another constructor
            break
        if same.num_heads == num_heads and same.given is None and same.log_slopes is None:
            yield same
    yield part


def _slopes(part: ALiBi, head: Tensor) -> Tensor:
    """The bias at distance 1 is what attention gets, whatever the class calls its slopes."""
    return -part.bias(head, torch.ones_like(head), torch.zeros_like(head)).detach()


def _published(part: ALiBi) -> Iterator[Finding]:
    expected, got = torch.tensor(published_slopes(part.num_heads)), _slopes(part, torch.arange(part.num_heads))
    given = counted(part.num_heads, "head")
    yield from differs("slopes", given, expected, got, rounding(torch.float32), "slopes by another rule")


def _of_shard(part: ALiBi) -> Iterator[Finding]:
    few = torch.arange(part.num_heads)[part.num_heads // 2 :]
    expected = torch.tensor(published_slopes(part.num_heads))[few]
    yield from differs("slopes", f"heads {few.tolist()} of {part.num_heads}", expected, _slopes(part, few),
                       rounding(torch.float32), "slopes from a shard's own head count")  # fmt: skip


def bias_shape(subject: Subject) -> Iterator[Finding]:
    """The bias of distances: zero for a token itself, never positive, alike in both directions and in proportion to
    the distance, and never constant over the keys of a decode step."""
    encoding = subject.make()
    if not alibis(encoding):
        raise NotApplicable(NO_ALIBI)
    head = torch.arange(subject.num_heads)[:, None, None]
    yield from first(found for search in (_itself, _directions, _step, _far) for found in search(encoding, head))


def bias_of(encoding: Encoding, head: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """The bias of queries and keys, (heads, queries, keys)."""
    bias = encoding.bias(head.view(-1, 1, 1), q_pos[:, None], k_pos)
    assert bias is not None
    return bias.detach().expand(head.numel(), len(q_pos), len(k_pos))  # one bias may serve all heads


def _itself(encoding: Encoding, head: Tensor) -> Iterator[Finding]:
    one = torch.zeros(1, dtype=torch.long)
    bias = bias_of(encoding, head, one, one)
    yield from differs("bias", "distance 0", torch.zeros_like(bias), bias, 0.0, "the distance is off by one")


def _directions(encoding: Encoding, head: Tensor) -> Iterator[Finding]:
    for length in (2, 9):
        bias = bias_of(encoding, head, torch.arange(length), torch.arange(length))
        if bool((bias > 0).any()):
            given = f"{length} tokens, both directions"
            yield Finding("bias", given, "at most 0", f"{bias.max().item():.9g}", "the sign of the distance")
        yield from differs("bias", f"{length} tokens, both directions", bias.transpose(-1, -2), bias, 0.0,
                           "past and future keys are treated differently")  # fmt: skip


def _step(encoding: Encoding, head: Tensor) -> Iterator[Finding]:
    for length in (2, 9):
        step = bias_of(encoding, head, torch.tensor([length - 1]), torch.arange(length))
        if bool((step == step[..., :1]).all()):
            yield Finding("bias", f"one query, {length} keys", "different values", "one value",
                          "bias built over the query's length")  # fmt: skip


def _far(encoding: Encoding, head: Tensor) -> Iterator[Finding]:
    """In proportion: the first distance at which the bias is not that many times the bias of distance 1."""
    where = torch.arange(1, FARTHEST)
    bias = bias_of(encoding, head, where, torch.zeros(1, dtype=torch.long))[..., 0].double()
    expected = bias[:, :1] * where
    limit = rounding(torch.float32) * expected.abs()
    wrong = ((bias - expected).abs() > limit).any(0).nonzero().flatten().tolist()
    if wrong:
        d = wrong[0]
        tolerance = float(limit[:, d].max())
        yield from differs("bias", f"distance {d + 1}, against distance 1", expected[:, d], bias[:, d], tolerance,
                           "distances in half precision")  # fmt: skip


def relative_bias(subject: Subject) -> Iterator[Finding]:
    """A bias is elementwise: a decode step, or any block, reads what one pass reads; a bias of distances does not
    change with a common shift; distances share a bucket as published, if there are buckets (T5)."""
    encoding = subject.make()
    if not encoding.has_bias:
        raise NotApplicable("it has no bias")
    head = torch.arange(subject.num_heads)
    parts = [part for part in encoding.modules() if hasattr(part, "num_buckets") and hasattr(part, "max_distance")]
    kind = "K20" if parts else "K15"
    yield from first(_blocks(encoding, head, kind))
    if encoding.distance_only:
        yield from first(_shifts(encoding, head, kind))
    for part in parts:
        yield from first(_buckets(part, head))


def _blocks(encoding: Encoding, head: Tensor, kind: str) -> Iterator[Finding]:
    for length in (2, 3, 9):
        where = torch.arange(length)
        whole = bias_of(encoding, head, where, where)
        for rows in (slice(length - 1, length), slice(1, length)):
            got = bias_of(encoding, head, where[rows], where)
            given = f"queries {where[rows].tolist()} on {length} keys"
            cause = "rows are counted from the first query at hand"
            yield from differs("relative bias", given, whole[:, rows], got, 0.0, cause, kind)
        got = bias_of(encoding, head, where, where[1:])
        given = f"{length} queries on keys {where[1:].tolist()}"
        yield from differs("relative bias", given, whole[..., 1:], got, 0.0, "keys are counted from the first", kind)


def _shifts(encoding: Encoding, head: Tensor, kind: str) -> Iterator[Finding]:
    where = torch.arange(3)
    near = bias_of(encoding, head, where, where)
    for shift in (1, 1000, 2**24 + 1, 2**40 + 3):
        got = bias_of(encoding, head, where + shift, where + shift)
        given = f"3 tokens shifted by {shift}"
        cause = "positions are rounded before they are subtracted, or do not only enter by their distance"
        yield from differs("relative bias", given, near, got, 0.0, cause, kind)


def published_bucket(distance: int, num_buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The bucket of a distance (Raffel et al. 2020, arXiv:1910.10683v4, Sec. 2.1, and the authors' code): half of
    the buckets for single tokens, the others by the logarithm, in whole numbers, so that no edge is rounded.

    Args:
        distance: q_pos - k_pos, tokens.
        bidirectional: the second half of the buckets is for keys ahead; otherwise those share bucket 0.
    """
    start, count = 0, num_buckets
    if bidirectional:
        count //= 2
        start, distance = (count if distance < 0 else 0), abs(distance)
    distance, exact = max(distance, 0), count // 2
    if distance < exact:
        return start + distance
    steps = count - exact
    # floor(steps ln(distance / exact) / ln(max_distance / exact)) = most j with (d / exact)^steps >= (max / exact)^j
    reached = [j for j in range(steps) if distance**steps * exact**j >= exact**steps * max_distance**j]
    return start + exact + reached[-1]


def _buckets(part: Any, head: Tensor) -> Iterator[Finding]:
    """The smallest distance, past before ahead, whose bias is not that of its bucket's first distance, or is."""
    both = bool(getattr(part, "bidirectional", True))
    reach, zero = 2 * part.max_distance, torch.zeros(1, dtype=torch.long)
    seen: dict[int, Tensor] = {}
    places = sorted(range(-reach, reach + 1), key=lambda d: (abs(d), d < 0))
    biases = bias_of(part, head, torch.tensor(places), zero)[..., 0]
    for distance, got in zip(places, biases.unbind(1), strict=True):
        bucket = published_bucket(distance, part.num_buckets, part.max_distance, both)
        given = f"distance {distance} of {part.num_buckets} buckets up to {part.max_distance} tokens"
        own = seen.setdefault(bucket, got)
        yield from differs("relative bias", f"{given}, bucket {bucket}", own, got, 0.0, "another bucket", "K20")
        for other, bias in seen.items():
            if other != bucket and bool((bias == got).all()):
                yield Finding("relative bias", given, f"bucket {bucket}", f"the bias of bucket {other}",
                              "two buckets are one, or the direction is confused", "K20")  # fmt: skip

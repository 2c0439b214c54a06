"""Laws of attention: what it computes, what it must not see, and that no way to cut the work changes the result."""

import itertools
import math
from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.subject import (
    Subject,
    Unbiased,
    attention_error,
    counted,
    differs,
    first,
    largest,
    rounding,
    score_error,
    turning_error,
)
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import Encoding, NoPE


def by_hand(
    subject: Subject,
    encoding: Encoding,
    x: Tensor,
    where: Tensor,
    causal: bool = True,
    mask: Tensor | None = None,
    biased: bool = True,
) -> Tensor:
    """Attention one query at a time in float64: loops instead of broadcasting."""
    q, k, v = subject.encoded(encoding, x.double(), where)
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            kv = h // subject.group
            for i in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if not causal or int(where[j]) <= int(where[i])]
                seen = [j for j in seen if mask is None or bool(mask[i, j])]
                if not seen:
                    continue
                score = (k[b, kv, seen] * q[b, h, i]).sum(-1) / math.sqrt(subject.head_dim)
                if biased and encoding.has_bias:
                    at = torch.tensor(h), where[i].double(), where[seen].double()
                    bias = encoding.bias(*torch.broadcast_tensors(*at))
                    assert bias is not None
                    score = score + bias
                weights = score.double().softmax(0)
                out[b, h, i] = weights @ v[b, kv, seen]
    return out


def by_formula(subject: Subject) -> Iterator[Finding]:
    """Attention equals its formula, computed by hand in float64; the bias is added after scaling."""
    with torch.no_grad():
        yield from first(_unlike_formula(subject))


def _unlike_formula(subject: Subject) -> Iterator[Finding]:
    encoding = subject.make()
    cases = ((n, causal, masked) for n in (1, 2, 7) for causal in (True, False) for masked in (False, True))
    for length, causal, masked in cases:
        x, where = subject.tokens(1 + (length > 2), length), torch.arange(length)
        mask = torch.rand(length, length, generator=torch.Generator().manual_seed(3)) > 0.4 if masked else None
        expected = by_hand(subject, encoding, x, where, causal, mask)
        limit = _float32_error(subject, encoding, x, where, expected)
        given = f"{counted(length)}, causal={causal}, mask={'random' if masked else None}"
        got = subject.forward(encoding, x, where, causal=causal, mask=mask)
        if any(differs("", given, expected, got, limit, "")):
            kind, cause = "K16", "another formula"
            if encoding.has_bias and _right_without_bias(subject, encoding, x, where, causal, mask):
                kind, cause = "K15", "the bias is added elsewhere than after scaling"
            yield from differs("formula of attention", given, expected, got, limit, cause, kind)
        got = subject.forward(encoding, x, where, causal=causal, mask=mask, q_positions=None, k_positions=None)
        cause = "default positions are not 0, 1, 2, ..."
        yield from differs("formula of attention", f"{given}, default positions", expected, got, limit, cause)


def _float32_error(subject: Subject, encoding: Encoding, x: Tensor, where: Tensor, expected: Tensor) -> float:
    """Of attention in float32 against float64: its sums, and scores from tables of float32, which change an output by
    at most twice the largest value each."""
    q, k, v = subject.encoded(encoding, x, where)
    of_scores = 2 * score_error(q, k, int(where.max())) * largest(v)
    return attention_error(subject, expected, len(where)) + of_scores


def _right_without_bias(
    subject: Subject, encoding: Encoding, x: Tensor, where: Tensor, causal: bool, mask: Tensor | None
) -> bool:
    expected = by_hand(subject, encoding, x, where, causal, mask, biased=False)
    q, k, v = subject.encoded(encoding, x, where)
    options = {"q_positions": where, "k_positions": where, "causal": causal, "mask": mask, "encoded": True}
    got = subject.attend(q, k, v, Unbiased(encoding), **options)
    return not any(differs("", "", expected, got, _float32_error(subject, encoding, x, where, expected), ""))


def future(subject: Subject) -> Iterator[Finding]:
    """Causal attention reads nothing of the future, and with fewer queries than keys lines up at the end."""
    encoding = subject.make()
    yield from first(found for length in (2, 9) for found in _ahead(subject, encoding, length))
    yield from first(found for length in (2, 3, 9) for found in _last_rows(subject, encoding, length))


def _ahead(subject: Subject, encoding: Encoding, length: int) -> Iterator[Finding]:
    x, where, kept = subject.tokens(1, length), torch.arange(length), (length + 1) // 2
    changed = torch.cat((x[:, :kept], x[:, kept:] * -3.0), dim=1)
    before, after = (subject.forward(encoding, t, where)[:, :, :kept] for t in (x, changed))
    given = f"{length} tokens, the last {length - kept} changed"
    yield from differs("causality", given, before, after, 0.0, "a later token is read")


def _last_rows(subject: Subject, encoding: Encoding, length: int) -> Iterator[Finding]:
    q, k, v = subject.encoded(encoding, subject.tokens(1, length), torch.arange(length))
    whole = subject.attend(q, k, v, encoding, encoded=True)
    for count in (1, length // 2):
        last = q[:, :, -count:]
        got = subject.attend(last, k, v, encoding, encoded=True)
        kind, cause = "K16", "queries lined up with the first keys instead of the last"
        limit = attention_error(subject, whole, length)
        bare = subject.attend(last, k, v, Unbiased(encoding), encoded=True)
        if encoding.has_bias and not any(differs("", "", bare, got, limit, "")):
            kind, cause = "K15", "the bias is missing for few queries"
        given = f"the last {count} of {length} queries"
        yield from differs("causality", given, whole[:, :, -count:], got, limit, cause, kind)


def chunks(subject: Subject) -> Iterator[Finding]:
    """Any way to feed a sequence through a cache equals one pass."""
    yield from first(found for explicit in (True, False) for found in _chunked(subject, explicit))


def _splits() -> Iterator[tuple[int, ...]]:
    for length in (1, 2, 3):
        yield (length,)
        yield (1,) * length
    yield from ((first, 12 - first) for first in range(1, 12))
    yield from ((1,) * 12, (3, 1, 5, 3), (12,))


def _chunked(subject: Subject, explicit: bool) -> Iterator[Finding]:
    encoding = subject.make()
    for sizes in _splits():
        length = sum(sizes)
        x, where = subject.tokens(2, length), torch.arange(length)
        whole = subject.forward(encoding, x, where)
        cache, outputs, start = subject.parts.cache(encoding), [], 0
        for size in sizes:
            rows = slice(start, start + size)
            q, k, v = subject.encoded(encoding, x[:, rows], where[rows])
            k, v = cache.append(k, v, where[rows])
            places = {"q_positions": where[rows], "k_positions": cache.positions} if explicit else {}
            outputs.append(subject.attend(q, k, v, encoding, encoded=True, **places))
            start += size
        got = torch.cat(outputs, dim=2)
        given = f"chunks of {sizes}" + ("" if explicit else ", default positions")
        limit = attention_error(subject, whole, length)
        yield from differs("cache", given, whole, got, limit, "positions of a later chunk")


def moves(subject: Subject) -> Iterator[Finding]:
    """Cached keys moved to other positions equal keys encoded there; many evictions drift no more than one."""
    encoding = subject.make()
    if not encoding.relative:
        raise NotApplicable("its keys hold their position in a way that cannot be turned back")
    for part in encoding.modules():
        if isinstance(part, Encoding) and type(part).key is not Encoding.key and type(part).moved is Encoding.moved:
            raise NotApplicable(f"{type(part).__name__} does not say how its keys move")
    yield from first(found for count in (1, 8) for found in _moved(subject, encoding, count))
    yield from first(found for count in (4, 80) for found in _evicted(subject, encoding, count))


def _moved(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    x = subject.tokens(1, count)
    for old, new in (([0], [0]), ([0], [1]), ([100], [7])):
        old, new = torch.tensor(old) + torch.arange(count), torch.tensor(new) + torch.arange(count) * 3
        _, there, _ = subject.encoded(encoding, x, new)
        _, here, _ = subject.encoded(encoding, x, old)
        got = subject.parts.reposition(here, encoding, old, new)
        given = f"{counted(count, 'key')} at {int(old[0])}.. moved to {new.tolist()}"
        limit = turning_error(there, *(int(t.abs().max()) for t in (old, new, new - old)))
        yield from differs("moved keys", given, there, got, limit, "turned from the wrong angle, or twice")


def _evicted(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    """A cache through which `count` tokens went, two of them sinks."""
    kept = min(6, count - 1)
    cache, x = subject.parts.cache(encoding), subject.tokens(1, count)
    for i in range(count):
        where = (cache.positions[..., -1:] + 1) if i else torch.tensor([0])
        _, k, v = subject.encoded(encoding, x[:, i : i + 1], where.view(-1))
        cache.append(k, v, where.view(-1))
        cache.evict(2, kept - 2)
    survivors = torch.cat((x[:, :2], x[:, count - kept + 2 :]), dim=1)
    _, k, v = subject.encoded(encoding, survivors, torch.arange(kept))
    given = f"{count} tokens through a window of {kept}"
    projected = rounding(v.dtype, subject.model_dim)  # one by one, or all survivors at once
    limit = turning_error(k, count, kept, kept) + projected * largest(k)
    yield from differs("moved keys", given, k, cache.k, limit, "turns accumulated over evictions")
    yield from differs("moved keys", f"values, {given}", v, cache.v, projected * largest(v),
                       "values moved with their keys")  # fmt: skip


def padding(subject: Subject) -> Iterator[Finding]:
    """Padding on either side changes nothing for the real tokens, whatever it holds and whatever other rows do."""
    encoding = subject.make()
    rows = ((side, real) for real in (1, 5) for side in PADS)
    alone = (found for side, real in rows for found in _padded(subject, encoding, side, real))
    batch = (found for real in (1, 2, 5) for found in _padded_batch(subject, encoding, real))
    yield from first(itertools.chain(alone, batch))


PADS = {"left": 3, "right": 0, "both": 1}


def _with_pads(subject: Subject, real: Tensor, before: int) -> tuple[Tensor, Tensor]:
    """Tokens among three pads, `before` of them in front, and the mask of the real ones."""
    junk = subject.tokens(1, 3, seed=5) * 50.0
    mask = torch.zeros(1, real.shape[1] + 3, dtype=torch.bool)
    mask[:, before : before + real.shape[1]] = True
    return torch.cat((junk[:, :before], real, junk[:, before:]), dim=1), mask


def _padded(subject: Subject, encoding: Encoding, side: str, count: int) -> Iterator[Finding]:
    real, before = subject.tokens(1, count), PADS[side]
    alone = subject.forward(encoding, real, torch.arange(count))
    x, mask = _with_pads(subject, real, before)
    where, rows = subject.parts.from_mask(mask), slice(before, before + count)
    given = f"{counted(count)}, 3 of padding ({side})"
    if where[0, rows].tolist() != list(range(count)):
        yield Finding("padding", given, f"positions {list(range(count))}", str(where[0, rows].tolist()),
                      "pads are counted")  # fmt: skip
    got = subject.forward(encoding, x, where, mask=mask[:, None, None, :])[:, :, rows]
    yield from differs("padding", given, alone, got, attention_error(subject, alone, count + 3),
                       "padding is counted or attended")  # fmt: skip


def _padded_batch(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    real = subject.tokens(1, count)
    alone = subject.forward(encoding, real, torch.arange(count))
    x, mask = (torch.cat(parts) for parts in zip(*(_with_pads(subject, real, n) for n in PADS.values()), strict=True))
    together = subject.forward(encoding, x, subject.parts.from_mask(mask), mask=mask[:, None, None, :])
    for row, before in enumerate(PADS.values()):
        got = together[row : row + 1, :, before : before + count]
        given = f"{counted(count)} after {before} of padding, in a batch with other padding"
        yield from differs("padding", given, alone, got, attention_error(subject, alone, count + 3),
                           "positions of one row are used for another")  # fmt: skip


def empty_rows(subject: Subject) -> Iterator[Finding]:
    """A query with nothing to attend gives exactly 0 with finite gradients, through two layers and every dtype."""
    encoding = subject.make()
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    cases = ((count, dtype) for count in (1, 6) for dtype in dtypes)
    yield from first(found for count, dtype in cases for found in _unseeing(subject, encoding, count, dtype))


def _unseeing(subject: Subject, encoding: Encoding, count: int, dtype: torch.dtype) -> Iterator[Finding]:
    """Two layers in which some of the last queries see nothing."""
    x, rows = subject.tokens(1, count, dtype).requires_grad_(), [count - 1]
    mask = torch.ones(count, count, dtype=torch.bool)
    if count > 4:
        rows = [2, 3]
        mask[0, 1:] = False
        mask[3, :4] = False  # what is left lies in the future: forbidden twice
    mask[rows[0]] = False  # nothing at all
    given, y = f"{counted(count)} in {dtype}, all keys masked for queries {rows}", x
    for layer in range(2):
        out = subject.forward(encoding, y, torch.arange(count), mask=mask)
        seen = out[:, :, rows]
        yield from differs("empty rows", f"layer {layer}, {given}", torch.zeros_like(seen), seen, 0.0,
                           "softmax over sentinels")  # fmt: skip
        y = y + out.transpose(1, 2).flatten(2)
    y.float().square().sum().backward()
    if x.grad is None or not bool(x.grad.isfinite().all()):
        yield Finding("empty rows", f"gradient, {given}", "finite", "not finite", "-inf minus -inf in a backward")


def grouped(subject: Subject) -> Iterator[Finding]:
    """Grouped key heads equal the same heads repeated."""
    if subject.group == 1:
        raise NotApplicable("each query head has a key head of its own")
    encoding = subject.make()
    yield from first(found for count in (1, 7) for found in _grouped(subject, encoding, count))


def _grouped(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    q, k, v = subject.encoded(encoding, subject.tokens(2, count), torch.arange(count))
    wide_k, wide_v = (t.repeat_interleave(subject.group, dim=1) for t in (k, v))
    expected = subject.attend(q, wide_k, wide_v, encoding, encoded=True)
    got = subject.attend(q, k, v, encoding, encoded=True)
    given = f"{subject.num_heads} heads on {subject.num_kv_heads}, {counted(count)}"
    limit = attention_error(subject, expected, count)
    yield from differs("grouped heads", given, expected, got, limit, "query heads read the wrong key head")


def scattered(subject: Subject) -> Iterator[Finding]:
    """Explicit positions decide, not indices: the order in which keys are handed in does not matter."""
    encoding = subject.make()
    yield from first(found for count in (2, 3, 9) for found in _reordered(subject, encoding, count))


def _reordered(subject: Subject, encoding: Encoding, count: int) -> Iterator[Finding]:
    x, where = subject.tokens(1, count), torch.tensor([0, 2, 3, 7, 11, 12, 20, 21, 40])[:count]
    if encoding.max_positions is not None:
        where = where.clamp(max=encoding.max_positions - 1)
    q, k, v = subject.encoded(encoding, x, where)
    places = {"q_positions": where, "encoded": True}
    whole = subject.attend(q, k, v, encoding, k_positions=where, **places)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(2)) if count > 2 else torch.tensor([1, 0])
    got = subject.attend(q, k[:, :, order], v[:, :, order], encoding, k_positions=where[order], **places)
    given = f"keys at {where.tolist()} handed in as {where[order].tolist()}"
    limit = attention_error(subject, whole, count)
    yield from differs("positions", given, whole, got, limit, "indices taken for positions")


def distinct(subject: Subject) -> Iterator[Finding]:
    """An encoding that should tell positions apart does: its output is not that of no encoding."""
    encoding = subject.make()
    if isinstance(encoding, NoPE):
        raise NotApplicable("it is no encoding")
    if encoding.max_positions is not None:
        raise NotApplicable("its table is learned, and may start anywhere")
    x, where = subject.tokens(1, 6), torch.arange(6)
    same = subject.forward(NoPE(), x, where)
    got = subject.forward(encoding, x, where)
    if not any(differs("", "", same, got, attention_error(subject, same, 6), "")):
        yield Finding("distinct", "6 tokens", "another output than without encoding", "the same", "it is not applied")

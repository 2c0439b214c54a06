"""Laws of attention: what it computes, what it must not see, and that no way to cut the work changes the result."""

import math
from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.subject import Subject, differs, rounding
from ropewalk.check.verdict import Finding
from ropewalk.encodings import Encoding, NoPE

TOLERANCE = 1e-5  # float32 outputs near 1, sums of a few dozen terms
LONGER_THAN_A_BLOCK = 300


def by_hand(
    subject: Subject, encoding: Encoding, x: Tensor, where: Tensor, causal: bool = True, mask: Tensor | None = None
) -> Tensor:
    """Attention one query at a time in float64: loops instead of broadcasting."""
    q, k, v = subject.encoded(encoding, x.double(), where)
    out = torch.zeros_like(q)
    group = subject.num_heads // subject.num_kv_heads
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                seen = [j for j in range(k.shape[2]) if not causal or int(where[j]) <= int(where[i])]
                seen = [j for j in seen if mask is None or bool(mask[i, j])]
                if not seen:
                    continue
                score = [float(q[b, h, i] @ k[b, h // group, j]) / math.sqrt(subject.head_dim) for j in seen]
                if encoding.has_bias:
                    at = torch.tensor(h), where[i].double(), where[seen].double()
                    bias = encoding.bias(*torch.broadcast_tensors(*at))
                    assert bias is not None
                    score = [s + float(c) for s, c in zip(score, bias, strict=True)]
                weights = torch.tensor(score, dtype=torch.float64).softmax(0)
                out[b, h, i] = weights @ v[b, h // group, seen]
    return out


def by_formula(subject: Subject) -> Iterator[Finding]:
    """Attention equals its formula, computed by hand in float64; the bias is added after scaling."""
    encoding = subject.make()
    x, where = subject.tokens(2, 7), torch.arange(7)
    mask = torch.rand(7, 7, generator=torch.Generator().manual_seed(3)) > 0.4
    with torch.no_grad():
        for causal in (True, False):
            for allowed in (None, mask):
                given = f"7 tokens, causal={causal}, mask={'random' if allowed is not None else None}"
                expected = by_hand(subject, encoding, x, where, causal, allowed)
                got = subject.forward(encoding, x, where, causal=causal, mask=allowed)
                yield from differs("formula of attention", given, expected, got, TOLERANCE, "another formula")
                plain = {"q_positions": None, "k_positions": None}
                got = subject.forward(encoding, x, where, causal=causal, mask=allowed, **plain)
                yield from differs("formula of attention", given + ", default positions", expected, got, TOLERANCE,
                                   "default positions are not 0, 1, 2, ...")  # fmt: skip


def as_reference(subject: Subject) -> Iterator[Finding]:
    """A backend equals the reference, values and gradients, beyond one block of queries."""
    encoding = subject.make()
    learned = [p for p in encoding.parameters() if p.requires_grad]
    long = LONGER_THAN_A_BLOCK
    where = {"q_positions": torch.arange(long) + 5, "k_positions": torch.arange(long)}
    cases: list[tuple[int, int, bool, dict]] = [(long, long, True, {}), (40, long, True, {}), (40, 40, False, {})]
    cases += [(long, long, True, {"scale": 2.0}), (long, long, False, {})]
    cases += [(long, long, True, where), (long, long, False, {"documents": torch.arange(long) // 70})]
    cases += [(long, long, True, {"mask": torch.rand(long, long, generator=torch.Generator().manual_seed(2)) > 0.3})]
    for q_len, k_len, causal, options in cases:
        results = []
        generator = torch.Generator().manual_seed(1)
        shapes = ((subject.num_heads, q_len), (subject.num_kv_heads, k_len), (subject.num_kv_heads, k_len))
        data = [torch.randn(1, h, n, subject.head_dim, generator=generator) for h, n in shapes]
        for backend in ("reference", subject.backend):
            q, k, v = (t.clone().requires_grad_() for t in data)
            for p in learned:
                p.grad = None
            out = subject.parts.attend(q, k, v, encoding, causal=causal, backend=backend, **options)
            (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
            extra = [torch.zeros_like(p) if p.grad is None else p.grad for p in learned]
            results.append([out.detach(), q.grad, k.grad, v.grad, *extra])
        for name, expected, got in zip(("values", "dq", "dk", "dv", "d slopes"), *results, strict=False):
            given = f"{name}, {q_len} queries on {k_len} keys, causal={causal}, {', '.join(options) or 'nothing else'}"
            tolerance = TOLERANCE * max(1.0, float(expected.abs().max()))
            yield from differs("reference", given, expected, got, tolerance, f"backend {subject.backend}")


def future(subject: Subject) -> Iterator[Finding]:
    """Causal attention reads nothing of the future, and with fewer queries than keys lines up at the end."""
    encoding = subject.make()
    x, where = subject.tokens(1, 9), torch.arange(9)
    changed = torch.cat((x[:, :5], x[:, 5:] * -3.0), dim=1)
    before, after = (subject.forward(encoding, t, where)[:, :, :5] for t in (x, changed))
    yield from differs("causality", "tokens 5 to 8 changed", before, after, 0.0, "a later token is read")
    q, k, v = subject.encoded(encoding, x, where)
    whole = subject.attend(q, k, v, encoding, encoded=True)
    for count in (1, 4):
        got = subject.attend(q[:, :, -count:], k, v, encoding, encoded=True)
        cause = "queries lined up with the first keys instead of the last"
        yield from differs("causality", f"last {count} of 9 queries", whole[:, :, -count:], got, TOLERANCE, cause)


def chunks(subject: Subject) -> Iterator[Finding]:
    """Any way to feed a sequence through a cache equals one pass."""
    encoding = subject.make()
    x, where = subject.tokens(2, 12), torch.arange(12)
    whole = subject.forward(encoding, x, where)
    splits = [(first, 12 - first) for first in range(1, 12)] + [(1,) * 12, (3, 1, 5, 3), (12,)]
    for sizes in splits:
        for explicit in (True, False):
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
            yield from differs("cache", given, whole, got, TOLERANCE, "positions of a later chunk")


def moves(subject: Subject) -> Iterator[Finding]:
    """Cached keys moved to other positions equal keys encoded there; many evictions drift no more than one."""
    encoding = subject.make()
    if not encoding.relative:
        return
    x = subject.tokens(1, 8)
    old, new = torch.arange(8) + 100, torch.arange(8) * 3 + 7
    _, there, _ = subject.encoded(encoding, x, new)
    _, here, _ = subject.encoded(encoding, x, old)
    got = subject.parts.reposition(here, encoding, old, new)
    yield from differs(
        "moved keys", "100.. to 7, 10, ..", there, got, TOLERANCE, "turned from the wrong angle, or twice"
    )
    cache = subject.parts.cache(encoding)
    count, kept = 200, 6
    many = subject.tokens(1, count)
    for i in range(count):
        where = (cache.positions[..., -1:] + 1) if i else torch.tensor([0])
        _, k, v = subject.encoded(encoding, many[:, i : i + 1], where.view(-1))
        cache.append(k, v, where.view(-1))
        cache.evict(2, kept - 2)
    survivors = torch.cat((many[:, :2], many[:, count - kept + 2 :]), dim=1)
    _, expected, values = subject.encoded(encoding, survivors, torch.arange(kept))
    given = f"{count} tokens through a window of {kept}"
    yield from differs("moved keys", given, expected, cache.k, TOLERANCE, "turns accumulated over evictions")
    yield from differs("moved keys", given + ", values", values, cache.v, TOLERANCE, "values moved with their keys")


def padding(subject: Subject) -> Iterator[Finding]:
    """Padding on either side changes nothing for the real tokens, whatever it holds and whatever other rows do."""
    encoding = subject.make()
    real = subject.tokens(1, 5)
    alone = subject.forward(encoding, real, torch.arange(5))
    junk = subject.tokens(1, 3, seed=5) * 50.0
    rows, masks = [], []
    for side, before in {"left": 3, "right": 0, "both": 1}.items():
        x = torch.cat((junk[:, :before], real, junk[:, before:]), dim=1)
        mask = torch.zeros(1, 8, dtype=torch.bool)
        mask[:, before : before + 5] = True
        where = subject.parts.from_mask(mask)
        if where[0, before : before + 5].tolist() != list(range(5)):
            yield Finding("padding", f"{side} padding", "positions 0 to 4", str(where.tolist()), "pads are counted")
        got = subject.forward(encoding, x, where, mask=mask[:, None, None, :])[:, :, before : before + 5]
        yield from differs("padding", f"{side} padding", alone, got, TOLERANCE, "padding is counted or attended")
        rows.append((before, x))
        masks.append(mask)
    x, mask = torch.cat([x for _, x in rows]), torch.cat(masks)
    together = subject.forward(encoding, x, subject.parts.from_mask(mask), mask=mask[:, None, None, :])
    for row, (before, _) in enumerate(rows):
        got = together[row : row + 1, :, before : before + 5]
        given = f"row {row} of a batch, {before} tokens of padding before it"
        yield from differs("padding", given, alone, got, TOLERANCE, "positions of one row are used for another")


def packing(subject: Subject) -> Iterator[Finding]:
    """Packed documents equal separate runs, and read nothing of each other."""
    encoding = subject.make()
    x, lengths = subject.tokens(1, 9), (4, 2, 3)
    documents = torch.repeat_interleave(torch.tensor([5, 1, 8]), torch.tensor(lengths))
    where = subject.parts.from_documents(documents)
    counted = [i for n in lengths for i in range(n)]
    if where.tolist() != counted:
        yield Finding(
            "packing", f"documents of {lengths}", str(counted), str(where.tolist()), "positions do not restart"
        )
    padded = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1]])
    among_real = [[0, 0, 0, 1, 0, 0, 0, 1, 2]]
    got = subject.parts.from_documents(documents[None], padded)
    if got.tolist() != among_real:
        yield Finding("packing", f"padding {padded.tolist()}", str(among_real), str(got.tolist()), "padding is counted")
    packed = subject.forward(encoding, x, where, documents=documents)
    start = 0
    for n in lengths:
        rows = slice(start, start + n)
        alone = subject.forward(encoding, x[:, rows], torch.arange(n))
        given = f"document of {n} tokens at {start}"
        yield from differs("packing", given, alone, packed[:, :, rows], TOLERANCE, "another document is read")
        start += n


def shards(subject: Subject) -> Iterator[Finding]:
    """Shards of heads or of the sequence, contiguous or zig-zag, put together give the whole."""
    encoding = subject.make()
    x, where = subject.tokens(1, 16), torch.arange(16)
    q, k, v = subject.encoded(encoding, x, where)
    whole = subject.attend(q, k, v, encoding, encoded=True)
    group = subject.num_heads // subject.num_kv_heads
    for half in range(2):
        heads = torch.arange(subject.num_heads).chunk(2)[half]
        pairs = slice(int(heads[0]) // group, int(heads[-1]) // group + 1)
        got = subject.attend(q[:, heads], k[:, pairs], v[:, pairs], encoding, encoded=True, heads=heads)
        yield from differs("shards", f"heads {heads.tolist()}", whole[:, heads], got, TOLERANCE, "local head indices")
    for order in ("contiguous", "zigzag"):
        places = [subject.parts.shard(16, rank, 2, order) for rank in range(2)]
        if sorted(torch.cat(places).tolist()) != list(range(16)):
            yield Finding(
                "shards", f"{order}, 16 tokens on 2 ranks", "each token once", str(places), "shard boundaries"
            )
            continue
        for own in places:
            out = lse = None
            for other in places:
                part, part_lse = subject.attend(
                    q[:, :, own], k[:, :, other], v[:, :, other], encoding, encoded=True, return_lse=True,
                    q_positions=own, k_positions=other,
                )  # fmt: skip
                out, lse = (part, part_lse) if out is None or lse is None else merge(out, lse, part, part_lse)
            assert out is not None
            given = f"{order} shard at {own.tolist()}"
            yield from differs("shards", given, whole[:, :, own], out, TOLERANCE, "local positions, or the logarithm")


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two sets of keys."""
    lse = torch.logaddexp(lse_a, lse_b)
    empty = lse == -torch.inf
    a, b = (torch.where(empty, 0.0, (part - lse).exp()).unsqueeze(-1) for part in (lse_a, lse_b))
    return a * out_a + b * out_b, lse


def empty_rows(subject: Subject) -> Iterator[Finding]:
    """A query with nothing to attend gives exactly 0 with finite gradients, through two layers and every dtype."""
    encoding = subject.make()
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2] = False  # nothing at all
    mask[0, 1:] = False
    mask[3, :4] = False  # what is left lies in the future: forbidden twice
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        x = subject.tokens(1, 6, dtype).requires_grad_()
        where, y = torch.arange(6), x
        for layer in range(2):
            out = subject.forward(encoding, y, where, mask=mask)
            rows = out[:, :, [2, 3]]
            given = f"layer {layer}, mask without keys for query 2, {dtype}"
            yield from differs("empty rows", given, torch.zeros_like(rows), rows, 0.0, "softmax over sentinels")
            y = y + out.transpose(1, 2).flatten(2)
        y.float().square().sum().backward()
        if x.grad is None or not bool(x.grad.isfinite().all()):
            yield Finding("empty rows", f"gradient, {dtype}", "finite", "not finite", "-inf minus -inf in a backward")


def grouped(subject: Subject) -> Iterator[Finding]:
    """Grouped key heads equal the same heads repeated."""
    encoding = subject.make()
    q, k, v = subject.encoded(encoding, subject.tokens(2, 7), torch.arange(7))
    group = subject.num_heads // subject.num_kv_heads
    wide_k, wide_v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    expected = subject.attend(q, wide_k, wide_v, encoding, encoded=True)
    got = subject.attend(q, k, v, encoding, encoded=True)
    yield from differs("grouped heads", "8 heads on 2", expected, got, TOLERANCE, "query heads read the wrong key head")


def scattered(subject: Subject) -> Iterator[Finding]:
    """Explicit positions decide, not indices: the order in which keys are handed in does not matter."""
    encoding = subject.make()
    x, where = subject.tokens(1, 9), torch.tensor([0, 2, 3, 7, 11, 12, 20, 21, 40])
    if encoding.max_positions is not None:
        where = where.clamp(max=encoding.max_positions - 1)
    q, k, v = subject.encoded(encoding, x, where)
    places = {"q_positions": where, "encoded": True}
    whole = subject.attend(q, k, v, encoding, k_positions=where, **places)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(2))
    got = subject.attend(q, k[:, :, order], v[:, :, order], encoding, k_positions=where[order], **places)
    yield from differs("positions", "keys in another order", whole, got, TOLERANCE, "indices taken for positions")


def half_precision(subject: Subject) -> Iterator[Finding]:
    """In half precision the result is the float32 one but for rounding, at long distance too: no bias, table or
    distance is rounded on the way."""
    encoding = subject.make()
    if not encoding.relative:
        return
    generator = torch.Generator().manual_seed(4)
    # Far keys: their biases are large and differ by little, which is where rounding shows.
    where = {"q_positions": 4000 + torch.arange(8), "k_positions": torch.arange(24)}
    shapes = ((subject.num_heads, 8), (subject.num_kv_heads, 24), (subject.num_kv_heads, 24))
    q, k, v = (torch.randn(1, *s, subject.head_dim, generator=generator).bfloat16() for s in shapes)
    for dtype in (torch.bfloat16, torch.float16):
        expected = subject.attend(q.float(), k.float(), v.float(), encoding, **where)
        got = subject.attend(q.to(dtype), k.to(dtype), v.to(dtype), encoding, **where)
        given = f"queries at 4000, keys at 0 to 23, in {dtype}"
        yield from differs("half precision", given, expected, got, rounding(dtype, 8), "a bias was rounded")


def distinct(subject: Subject) -> Iterator[Finding]:
    """An encoding that should tell positions apart does: its output is not that of no encoding."""
    encoding = subject.make()
    x, where = subject.tokens(1, 6), torch.arange(6)
    if encoding.max_positions is not None or isinstance(encoding, NoPE):
        return
    same = subject.forward(NoPE(), x, where)
    got = subject.forward(encoding, x, where)
    if torch.allclose(same, got, atol=1e-6):
        yield Finding("distinct", "6 tokens", "another output than without encoding", "the same", "it is not applied")

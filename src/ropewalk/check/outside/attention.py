"""Laws of a stranger's attention: what is seen, weights measured through values, cache, blocks, gradients."""

import math
from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.adapters import AttentionFunction
from ropewalk.check.outside.common import Call, inference_between, kept, random, unchanged_by
from ropewalk.check.outside.measure import worst_angle
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import counted, differs, first, largest, rounding
from ropewalk.check.verdict import Finding, NotApplicable

LENGTHS = (1, 2, 3, 9)
BLOCKS = (1, 2, 9, 64, 65, 127, 129, 300)
HALVES = (torch.bfloat16, torch.float16)
Inputs = tuple[Tensor, Tensor, Tensor]


def _inputs(target: AttentionFunction, length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> Inputs:
    heads = (target.num_heads, target.num_kv_heads, target.num_kv_heads)
    q, k, v = (random(batch, h, length, target.head_dim, seed=i, dtype=dtype) for i, h in enumerate(heads))
    return q, k, v


def _output(target: AttentionFunction, length: int, batch: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    q, k, v = _inputs(target, length, batch, dtype)
    return target.f(q, k, v, torch.arange(length))


def error(target: AttentionFunction, keys: int, out: Tensor) -> float:
    """What attention may be off: a sum over channels, one over keys, of numbers like the largest output."""
    dtype = out.dtype if out.dtype.itemsize >= 4 else torch.float32
    return rounding(dtype, target.head_dim + keys) * max(1.0, largest(out))


def weights(target: AttentionFunction, q: Tensor, k: Tensor, where: Tensor) -> Tensor:
    """The weight of each key, (heads, queries, keys), read off values that are unit vectors, a few keys at a time."""
    keys, dim = k.shape[2], target.head_dim
    rows = math.ceil(keys / dim)
    unit = torch.eye(rows * dim, dtype=k.dtype)[:keys].view(keys, rows, dim).transpose(0, 1)  # (rows, keys, dim)
    values = unit[:, None].expand(rows, target.num_kv_heads, keys, dim).contiguous()
    q, k = (t.expand(rows, -1, -1, -1).contiguous() for t in (q, k))
    out = target.f(q, k, values, where).detach()  # (rows, heads, queries, dim)
    return out.permute(1, 2, 0, 3).flatten(2)[..., :keys]


def causality(target: AttentionFunction) -> Iterator[Finding]:
    """No query sees a later key; the first query gives the value of the one key that it sees."""
    if not target.causal:
        raise NotApplicable("its queries see all keys")
    yield from first(found for n in (1, 2, 3, 9, 65) for found in _ahead(target, n))


def _ahead(target: AttentionFunction, length: int) -> Iterator[Finding]:
    q, k, v = _inputs(target, length)
    out = _output(target, length)
    alone = v[:, :, :1].repeat_interleave(target.num_heads // target.num_kv_heads, 1)
    cause = "the first query sees more, or less, than its own key"
    yield from differs("causality", f"the first of {counted(length)}", alone, out[:, :, :1], error(target, 1, out),
                       cause)  # fmt: skip
    weight = weights(target, q, k, torch.arange(length))
    for i, j in weight.triu(1).abs().amax(0).nonzero().tolist():
        given = f"weight of key {j} for query {i} of {counted(length)}"
        yield Finding("causality", given, "0", f"{float(weight[:, i, j].max()):.6g}", "a mask off by some tokens")


def seen(target: AttentionFunction) -> Iterator[Finding]:
    """Every key that may be seen is, none beyond the window, and the weights of a query add up to 1: the last queries
    on all keys, too."""
    if not _answers(target, torch.float64):
        raise NotApplicable("float64 is refused, and float32 may have no room for a far key's weight")
    sizes = [(q, n) for n in BLOCKS for q in sorted({1, n if n < 300 else 20})]
    yield from first(found for q, n in sizes for found in _whole(target, q, n))


def _whole(target: AttentionFunction, queries: int, keys: int) -> Iterator[Finding]:
    q, k, _ = _inputs(target, keys, dtype=torch.float64)
    where = torch.arange(keys)
    weight = weights(target, q[:, :, keys - queries :], k, where)
    distance = where[keys - queries :, None] - where
    may = (distance >= 0 if target.causal else distance < keys) & (distance < (target.window or keys))
    given = f"{counted(queries, 'query', 'queries')} on {counted(keys, 'key')}"
    blind = ((weight.amax(0) <= 0) & may).nonzero()  # a steep head may not see far, but the others do
    if len(blind):
        i, j = blind[0].tolist()
        kind, cause = ("K17", "the rest of the last block is forgotten") if keys > 9 else _small(queries, keys)
        yield Finding("seen", f"weight of key {j} for query {i} of {given}", "above 0",
                      f"{float(weight[:, i, j].max()):.6g} in every head", cause, kind)  # fmt: skip
        return
    past = ((weight.abs().amax(0) > 0) & (distance >= (target.window or keys))).nonzero()
    if len(past):
        i, j = past[0].tolist()
        yield Finding("seen", f"weight of key {j} for query {i} of {given}", f"0, beyond {target.window} keys",
                      f"{float(weight[:, i, j].abs().max()):.6g}", "a window off by some tokens", "K16")  # fmt: skip
        return
    total = weight.sum(-1)
    limit = rounding(torch.float32, target.head_dim + keys)
    cause = "keys that do not exist are counted"
    yield from differs("seen", f"sum of the weights, {given}", torch.ones_like(total), total, limit, cause)


def _small(queries: int, keys: int) -> tuple[str, str]:
    return "K16", "the mask is aligned to the first key" if queries < keys else "keys are hidden"


def cache(target: AttentionFunction) -> Iterator[Finding]:
    """Decoding step by step, or in parts, equals one pass, for every split."""
    if not target.causal:
        raise NotApplicable("without a causal mask earlier rows change as keys are added")
    yield from first(found for n in (*LENGTHS, 130) for found in _splits(target, n))


def _splits(target: AttentionFunction, length: int) -> Iterator[Finding]:
    q, k, v = _inputs(target, length)
    where, whole = torch.arange(length), _output(target, length)
    starts = range(length) if length < 10 else (0, 1, 127, 128, 129)
    for start, stop in ((a, b) for a in starts for b in sorted({a + 1, length})):
        part = slice(start, stop)
        got = target.f(q[:, :, part], k[:, :, :stop], v[:, :, :stop], where[:stop])
        given = f"queries {start} to {stop - 1} on {counted(stop, 'key')}, against one pass over {length}"
        cause = "queries are placed by their index, or see other keys"
        yield from differs("cache", given, whole[:, :, part], got, 2 * error(target, length, whole), cause)


def shift(target: AttentionFunction) -> Iterator[Finding | str]:
    """A common shift of all positions changes nothing, near and far."""
    if not target.relative:
        raise NotApplicable("its scores depend on where a pair stands")
    for length in (2, 5):
        q, k, v = _inputs(target, length)
        near = target.f(q, k, v, torch.arange(length))
        size = float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) / math.sqrt(target.head_dim)

        def moved(by: int, length=length, given=(q, k, v), near=near, size=size) -> list[Finding]:
            q, k, v = given
            got = target.f(q, k, v, torch.arange(by, by + length))
            # A score that is off by e moves an output by 2 e times the largest value.
            of_score = 2 * 2**0.5 * worst_angle(target.exact, by + length, torch.float32) * size
            limit = 2 * error(target, length, near) + 2 * of_score * largest(v)
            kind = "K09" if by <= 7 else "K01"
            cause = "scores depend on where a pair stands"
            return list(differs("shift", f"{counted(length)} shifted by {by}", near, got, limit, cause, kind))

        for by in (1, 7, 300, 2049, 16_383):
            try:
                wrong = moved(by)
            except Exception as why:
                yield f"positions from {by} are refused: {type(why).__name__}"
                break
            if wrong:
                least = smallest(lambda s, moved=moved: bool(moved(s)), 1, by)
                yield from wrong if least is None else moved(least)
                return


def distances(target: AttentionFunction) -> Iterator[Finding]:
    """Positions count, not indices: a gap between the same tokens changes the result."""
    if not target.encodes:
        raise NotApplicable("positions do not matter to it")
    q, k, v = _inputs(target, 3)
    plain, gap = (target.f(q, k, v, torch.tensor(where)) for where in ([0, 1, 2], [0, 5, 6]))
    if bool((plain - gap).abs().max() <= 2 * error(target, 3, plain)):
        given = "3 tokens at positions [0, 5, 6], against [0, 1, 2]"
        yield Finding("distances", given, "another result", "the same", "rows are placed by their index")


def neighbours(target: AttentionFunction) -> Iterator[Finding]:
    """A row of a batch does not depend on the rows beside it."""
    yield from first(found for n in (1, 3) for found in _alone(target, n))


def _alone(target: AttentionFunction, length: int) -> Iterator[Finding]:
    q, k, v = _inputs(target, length, batch=3)
    where = torch.arange(length)
    together = target.f(q, k, v, where)
    for row in range(3):
        one = slice(row, row + 1)
        alone = target.f(q[one], k[one], v[one], where)
        given, limit = f"row {row} of 3, {counted(length)}", 2 * error(target, length, alone)
        yield from differs("neighbours", given, alone, together[one], limit, "rows are mixed")


def grouped(target: AttentionFunction) -> Iterator[Finding]:
    """Query head h reads key head h * num_kv_heads / num_heads, rounded down."""
    group = target.num_heads // target.num_kv_heads
    if target.num_kv_heads == 1:
        raise NotApplicable("it has one key head")
    q, k, v = _inputs(target, 2)
    where = torch.arange(2)
    before = target.f(q, k, v, where)
    for head in range(target.num_kv_heads):
        other = v.clone()
        other[:, head] += 1.0
        moved = (target.f(q, k, other, where) - before).abs().amax((0, 2, 3)) > 0.5
        expected = [h for h in range(target.num_heads) if h // group == head]
        got = moved.nonzero().flatten().tolist()
        if got != expected:
            given = f"query heads that read key head {head} of {target.num_kv_heads}"
            yield Finding("grouped", given, str(expected), str(got), "key heads are repeated in another order")
            return


def _answers(target: AttentionFunction, dtype: torch.dtype) -> bool:
    """Whether it takes this dtype."""
    try:
        _output(target, 1, dtype=dtype)
    except Exception:
        return False
    return True


def dtypes(target: AttentionFunction) -> Iterator[Finding | str]:
    """The result has the dtype of the input."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        if not _answers(target, dtype):
            yield f"{dtype} is refused"
            continue
        got = _output(target, 3, dtype=dtype)
        if got.dtype != dtype:
            yield Finding("dtypes", f"3 tokens in {dtype}", str(dtype), str(got.dtype), "tables decide the dtype")
            return


def history(target: AttentionFunction) -> Iterator[Finding]:
    """A result does not depend on earlier calls: longer ones, other dtypes, other batches, inference mode."""
    others = [_run(n, dtype) for n in (1, 9, 66) for dtype in (torch.float32, *HALVES)]
    others += [_run(9, batch=3), inference_between(_run(9))]
    yield from unchanged_by("history", target, [_run(3), _run(65)], others)


def _run(n: int, dtype: torch.dtype = torch.float32, batch: int = 1) -> Call:
    words = f"{counted(n)}, batch of {batch}, in {dtype}"
    kind = "K03" if dtype == torch.float32 else "K02"

    def run(target: AttentionFunction) -> Tensor:
        return _output(target, n, batch, dtype).detach()

    return Call(words, run, kind, n, lambda shorter: _run(shorter, dtype, batch))


def purity(target: AttentionFunction) -> Iterator[Finding]:
    """Queries, keys, values and positions are not written into."""
    yield from first(found for n in (1, 5) for found in _kept(target, n))


def _kept(target: AttentionFunction, n: int) -> Iterator[Finding]:
    inputs = dict(zip("qkv", _inputs(target, n), strict=True)) | {"positions": torch.arange(3, 3 + n)}
    yield from kept("purity", counted(n), inputs, lambda t: target.f(t["q"], t["k"], t["v"], t["positions"]))


def gradients(target: AttentionFunction) -> Iterator[Finding]:
    """Gradients are those of finite differences, and the gradient of each value is its weights, in every block."""
    if _answers(target, torch.float64):
        yield from first(found for n in (1, 3) for found in _differences(target, n))
    yield from first(found for n in (65, 129, 300) for found in _of_values(target, n))


def _differences(target: AttentionFunction, length: int) -> Iterator[Finding]:
    inputs = [t.requires_grad_() for t in _inputs(target, length, dtype=torch.float64)]
    where = torch.arange(length)
    # A step that float32 inside the function resolves: the square root of its eps, and as much for the result.
    step = torch.finfo(torch.float32).eps ** 0.5
    same = torch.autograd.gradcheck(
        lambda q, k, v: target.f(q, k, v, where), inputs, raise_exception=False, fast_mode=True, eps=step, atol=4 * step
    )
    if not same:
        given = f"{counted(length)}, in float64"
        yield Finding("gradients", given, "finite differences", "another gradient", "the backward pass", "K22")


def _of_values(target: AttentionFunction, length: int) -> Iterator[Finding]:
    q, k, v = _inputs(target, length)
    where = torch.arange(length)
    leaves = leaf_q, leaf_k, leaf_v = [t.clone().requires_grad_() for t in (q, k, v)]
    target.f(leaf_q, leaf_k, leaf_v, where)[:, :, -1].sum().backward()
    group = target.num_heads // target.num_kv_heads
    weight = weights(target, q[:, :, -1:], k, where)[:, 0]
    expected = weight.unflatten(0, (-1, group)).sum(1)
    grad = leaf_v.grad
    got = torch.zeros_like(expected) if grad is None else grad[0, ..., 0]
    given, cause = f"gradient of the values, last query of {counted(length)}", "the gradient of the last block is lost"
    yield from differs("gradients", given, expected, got, error(target, length, expected) * group**0.5, cause, "K17")
    for name, leaf in zip("qk", leaves, strict=False):
        if leaf.grad is None or not bool(leaf.grad.isfinite().all()):
            yield Finding("gradients", f"gradient of {name}, {counted(length)}", "finite", "others", cause, "K17")

"""Laws of a stranger's rotation, how it is used: positions, batches, dtypes, history, casts, gradients, bounds."""

from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.adapters import Rotation, fresh
from ropewalk.check.outside.common import Call, end_of, inference_between, kept, random, unchanged_by, under_casts
from ropewalk.check.outside.measure import Refused, asked, images, measured
from ropewalk.check.outside.rotation import off
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import counted, differs, first, largest
from ropewalk.check.verdict import Finding

HALVES = (torch.bfloat16, torch.float16)


def again(x: Tensor) -> float:
    """What a channel may differ when the same angle is computed twice, in another place of a vector register: two
    cosines or sines of neighbouring numbers, two products, a sum."""
    return 4 * torch.finfo(x.dtype).eps * max(1.0, largest(x))


def _run(n: int, dtype: torch.dtype = torch.float32, batch: int = 1, start: int = 0, kind: str = "K03") -> Call:
    def run(target: Rotation) -> Tensor:
        return target.f(random(batch, 2, n, target.head_dim, dtype=dtype), torch.arange(start, start + n))

    words = f"{counted(n)} from position {start}, batch of {batch}, in {dtype}"
    return Call(words, run, kind, n, lambda shorter: _run(shorter, dtype, batch, start, kind))


def positions(target: Rotation) -> Iterator[Finding]:
    """Positions decide, not indices: any part of a sequence, in any order, turns as it does in the whole."""
    end = end_of(target)
    lengths = (n for n in (1, 2, 3, 8, 40) if n <= end)
    yield from first(found for n in lengths for found in _parts(target, n))


def _parts(target: Rotation, n: int) -> Iterator[Finding]:
    x, where = random(2, 2, n, target.head_dim), torch.arange(n)
    whole = target.f(x.clone(), where)
    parts = (slice(n - 1, n), slice(n // 2, n), slice(0, n - n // 2))
    orders = {f"{_said(where[rows])} alone": where[rows] for rows in parts}
    orders["the reverse order"] = where.flip(0)
    for words, rows in orders.items():
        got = target.f(x[:, :, rows].clone(), where[rows])
        given, cause = f"{words}, against one pass over {counted(n)}", "rows are turned by their index"
        yield from differs("positions", given, whole[:, :, rows], got, again(x), cause)


def _said(where: Tensor) -> str:
    return f"positions {int(where[0])} to {int(where[-1])}" if len(where) > 1 else f"position {int(where[0])}"


def neighbours(target: Rotation) -> Iterator[Finding]:
    """Each row of a batch, and each head, turns alike, whatever stands beside it."""
    sizes = ((2, 1), (1, 2), (3, 4))
    yield from first(found for batch, heads in sizes for found in _together(target, batch, heads))


def _together(target: Rotation, batch: int, heads: int) -> Iterator[Finding]:
    x, where = random(1, 1, 3, target.head_dim), torch.tensor([0, 1, 5])
    alone = target.f(x.clone(), where).expand(batch, heads, -1, -1)
    together = target.f(x.repeat(batch, heads, 1, 1), where)
    given = f"3 tokens in a batch of {batch} with {counted(heads, 'head')}"
    yield from differs("neighbours", given, alone, together, again(x), "the row or head decides")


def dtypes(target: Rotation) -> Iterator[Finding | str]:
    """The result has the dtype of the input, whichever dtype was used before."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32):
        try:
            got = asked(target.f, random(1, 1, 1, target.head_dim, dtype=dtype), torch.tensor([0])).dtype
        except Refused as why:
            yield f"{dtype} is refused: {why}"
            continue
        if got != dtype:
            yield Finding("dtypes", f"1 token in {dtype}", str(dtype), str(got), "tables decide the dtype")
            return


def history(target: Rotation) -> Iterator[Finding]:
    """A result does not depend on earlier calls: longer ones, other dtypes, other batches, inference mode."""
    end = end_of(target)
    calls = [_run(n) for n in (3, 8, 300) if n <= end] + [_run(3, start=2)]
    others: list[Call] = []
    for n in (2, 4, 9, 301, 2060):
        others += [_run(n), _run(n, batch=3), *(_run(n, dtype, kind="K02") for dtype in HALVES)]
    others += [_run(9, torch.float64, kind="K02"), _run(5, start=4), _run(4, start=9000), inference_between(_run(9))]
    yield from unchanged_by("history", target, calls, others)


def casts(target: Rotation) -> Iterator[Finding]:
    """float32 data is turned alike after the module is cast to half precision, under autocast, and under another
    default dtype."""
    end = end_of(target)
    calls = (_run(n) for n in (2, 300) if n <= end)
    yield from first(found for call in calls for found in under_casts("casts", target, call, lambda x, _: again(x)))


def purity(target: Rotation) -> Iterator[Finding]:
    """Neither vectors nor positions are written into."""
    yield from first(found for n in (1, 5) for found in _kept(target, n))


def _kept(target: Rotation, n: int) -> Iterator[Finding]:
    inputs = {"x": random(1, 2, n, target.head_dim), "positions": torch.arange(3, 3 + n)}
    yield from kept("purity", counted(n), inputs, lambda given: target.f(given["x"], given["positions"]))


def gradients(target: Rotation) -> Iterator[Finding]:
    """The gradient is turned back by the same angle, at a second backward and after inference mode too."""
    yield from first(found for n in (1, 3) for found in _turned_back(target, n))


def _turned_back(target: Rotation, n: int) -> Iterator[Finding]:
    where = torch.tensor([5, 0, 9])[:n]
    x, weight = random(1, 1, n, target.head_dim), random(1, 1, n, target.head_dim, seed=1)
    with torch.inference_mode():
        target.f(x.clone(), where)
    maps = images(target, where.tolist())  # (tokens, channels, head_dim)
    expected = torch.einsum("nd,ncd->nc", weight[0, 0], maps)[None, None]
    given = f"gradient of {counted(n)} at positions {where.tolist()}"
    for step in (1, 2):
        got = _gradient(target, x, where, weight)
        if isinstance(got, str):
            yield Finding("gradients", f"{given}, step {step}", "a gradient", got, _why_none(step))
        else:
            cause = "not turned back by the angle"
            yield from differs("gradients", given, expected, got, 2 * again(weight), cause)


def _why_none(step: int) -> str:
    return "it is computed outside of autograd" if step == 1 else "a graph is kept between steps"


def _gradient(target: Rotation, x: Tensor, where: Tensor, weight: Tensor) -> Tensor | str:
    leaf = x.clone().requires_grad_()
    try:
        (target.f(leaf * 1.0, where) * weight).sum().backward()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return "none" if leaf.grad is None else leaf.grad


def bounds(target: Rotation) -> Iterator[Finding | str]:
    """A position beyond the end, far out or negative, is turned right or refused; none wraps around."""
    found = measured(target)
    limit = target.max_positions
    ends = [] if limit is None else [limit - 1, limit, limit + 1, 2 * limit]
    ahead = sorted({511, 512, 2048, 4096, 8192, 32_768, 131_072, *ends})

    def wrong(position: int) -> list[Finding]:
        try:
            return [_beyond(f, position, limit) for f in off(target, found, [position], torch.float32, "bounds")]
        except Refused as why:
            inside = limit is not None and 0 <= position < limit
            return [Finding("bounds", f"position {position} of {limit}", "an answer", str(why), "the table ends too "
                            "early")] if inside else []  # fmt: skip

    for position in ahead:
        if wrong(position):
            least = smallest(lambda p: bool(wrong(p)), 0, position)
            yield from wrong(position if least is None else least)
            return
    if limit is None and end_of(target) < 2**62:
        yield f"positions from {end_of(target)} on are refused"
    yield from _sides(target, wrong)


def _beyond(finding: Finding, position: int, limit: int | None) -> Finding:
    given = finding.input if limit is None else f"{finding.input}, of {limit} positions"
    kind = finding.kind if 0 <= position < (limit or 2**62) else "K23"
    return Finding("bounds", given, finding.expected + ", or a refusal", finding.got, finding.cause, kind)


def _sides(target: Rotation, wrong) -> Iterator[Finding | str]:
    for position in (-1, -3):
        found = wrong(position)
        yield from found
        if found:
            return
    try:
        asked(fresh(target).f, random(1, 1, 1, target.head_dim), torch.tensor([-1]))
    except Refused as why:
        yield f"negative positions are refused: {why}"

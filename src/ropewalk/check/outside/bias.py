"""Laws of a stranger's bias: slopes, distances, buckets, rows."""

from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.adapters import Bias
from ropewalk.check.biases import published_bucket, published_slopes
from ropewalk.check.outside.common import Call, end_of, inference_between, kept, unchanged_by, under_casts
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import counted, differs, first, rounding
from ropewalk.check.verdict import Finding, NotApplicable

FARTHEST = 5000
LENGTHS = (1, 2, 3, 9, 130)


def _kind(target: Bias) -> str:
    return "K20" if target.rule == "t5" else "K15"


def _bias(target: Bias, q_positions: Tensor, k_positions: Tensor, num_heads: int | None = None) -> Tensor:
    return target.f(num_heads or target.num_heads, q_positions, k_positions).detach()


def _inside(target: Bias, length: int) -> bool:
    return length <= end_of(target, FARTHEST)


def slopes(target: Bias) -> Iterator[Finding | str]:
    """The bias of distance 1 is minus the published slope of each head, for every head count that is answered."""
    if target.rule != "alibi":
        raise NotApplicable("no slopes are stated")
    counts = [n for n in range(1, 129) if n == target.num_heads or _answers(target, n)]
    yield from first(found for n in counts for found in _published(target, n))
    if counts == [target.num_heads]:
        yield f"other head counts than {target.num_heads} are refused"


def _answers(target: Bias, num_heads: int) -> bool:
    try:
        return _bias(target, torch.tensor([1]), torch.tensor([0]), num_heads).shape == (num_heads, 1, 1)
    except Exception:
        return False


def _published(target: Bias, num_heads: int) -> Iterator[Finding]:
    expected = torch.tensor(published_slopes(num_heads))[:, None, None]
    got = -_bias(target, torch.tensor([1]), torch.tensor([0]), num_heads)
    cause = "slopes by another rule, or of another head count"
    yield from differs("slopes", counted(num_heads, "head"), expected, got, rounding(torch.float32), cause)


def shape(target: Bias) -> Iterator[Finding | str]:
    """The bias is 0 for a token itself, never positive, and in proportion to the distance; keys ahead are treated
    like keys behind where that is stated."""
    if target.rule != "alibi":
        raise NotApplicable("no bias in proportion to the distance is stated")
    yield from first(found for search in (_itself, _proportion, _ahead) for found in search(target))
    if target.symmetric is None:
        bias = _bias(target, torch.tensor([0]), torch.tensor([3])).flatten()
        behind = _bias(target, torch.tensor([3]), torch.tensor([0])).flatten()
        alike = "like keys behind" if torch.equal(bias, behind) else f"{bias[0]:.6g} at 3 tokens, not judged"
        yield f"keys ahead get {alike}"


def _itself(target: Bias) -> Iterator[Finding]:
    bias = _bias(target, torch.tensor([0]), torch.tensor([0]))
    yield from differs("shape", "distance 0", torch.zeros(target.num_heads, 1, 1), bias, 0.0, "off by one token")


def _proportion(target: Bias) -> Iterator[Finding]:
    """The first distance at which the bias is not that many times the bias of distance 1."""
    count = min(FARTHEST, end_of(target, FARTHEST))
    where = torch.arange(1, count)
    bias = _bias(target, where, torch.tensor([0]))[..., 0].double()
    if bool((bias > 0).any()):
        given = f"distance {int((bias > 0).any(0).nonzero()[0]) + 1}"
        yield Finding("shape", given, "at most 0", f"{float(bias.max()):.6g}", "the sign of the distance or slope")
        return
    expected = bias[:, :1] * where
    limit = rounding(torch.float32) * expected.abs()
    wrong = ((bias - expected).abs() > limit).any(0).nonzero().flatten().tolist()
    if wrong:
        d = wrong[0]
        yield from differs("shape", f"distance {d + 1}, against distance 1", expected[:, d], bias[:, d],
                           float(limit[:, d].max()), "distances or products in half precision")  # fmt: skip


def _ahead(target: Bias) -> Iterator[Finding]:
    for distance in (1, 2, 9):
        if target.symmetric and _inside(target, distance + 1):
            here, there = torch.tensor([0]), torch.tensor([distance])
            behind, ahead = _bias(target, there, here), _bias(target, here, there)
            cause = "a bias by key index, which grows for keys ahead"
            yield from differs("shape", f"a key {counted(distance)} ahead", behind, ahead, 0.0, cause)


def rows(target: Bias) -> Iterator[Finding]:
    """A decode step, or any block in any order, reads what one pass reads, and is not constant over its keys."""
    lengths = (n for n in LENGTHS if _inside(target, n))
    yield from first(found for n in lengths for found in _blocks(target, n))


def _blocks(target: Bias, length: int) -> Iterator[Finding]:
    where = torch.arange(length)
    whole = _bias(target, where, where)
    cause = "rows or columns are counted from the first at hand"
    orders = {"the last query": where[-1:], "the second half": where[length // 2 :], "queries reversed": where.flip(0)}
    for words, q in orders.items():
        given = f"{words} of {counted(length)}, all keys"
        got = _bias(target, q, where)
        yield from differs("rows", given, whole[:, q], got, 0.0, cause, _kind(target))
    k = where[length // 2 :]
    yield from differs("rows", f"all queries, the last keys of {counted(length)}", whole[..., k],
                       _bias(target, where, k), 0.0, cause, _kind(target))  # fmt: skip
    step = _bias(target, where[-1:], where)
    if length > 1 and target.rule != "any" and bool((step == step[..., :1]).all()):
        cause = "built over the queries' length"
        yield Finding("rows", f"one query, {length} keys", "different values", "one value", cause, _kind(target))


def shift(target: Bias) -> Iterator[Finding | str]:
    """A common shift of queries and keys changes nothing, near and far."""
    where = torch.tensor([0, 1, 5])
    near = _bias(target, where, where)
    size = float(near.abs().max())

    def moved(by: int) -> list[Finding]:
        got = _bias(target, where + by, where + by)
        # m q - m k instead of m (q - k): two products of float32, of the size of a bias at that position.
        limit = rounding(torch.float32) * (size / 5) * by if target.rule == "alibi" else 0.0
        given, cause = f"3 tokens shifted by {by}", "positions are rounded, or enter by more than their distance"
        beyond = target.max_positions is not None and by + 6 > target.max_positions
        kind = "K23" if beyond else _kind(target)
        return list(differs("shift", given, near, got, limit, cause, kind))

    for by in (1, 7, 250, 506, 510, 1020, 2045, 4096, 131_071):
        try:
            wrong = moved(by)
        except Exception as error:
            inside = target.max_positions is None or by + 6 <= target.max_positions
            yield f"positions from {by} are refused: {type(error).__name__}" if inside else "positions end as stated"
            return
        if wrong:
            least = smallest(lambda s: bool(moved(s)), 1, by)
            yield from wrong if least is None else moved(least)
            return


def buckets(target: Bias) -> Iterator[Finding]:
    """Distances share a bias exactly where T5's rule puts them into one bucket, up to twice the largest distance."""
    if target.rule != "t5":
        raise NotApplicable("no buckets are stated")
    yield from first(_shared(target))


def _shared(target: Bias) -> Iterator[Finding]:
    reach = min(2 * target.max_distance, end_of(target, FARTHEST) - 1)
    here, there = torch.tensor([0]), torch.arange(reach + 1)
    behind, ahead = _bias(target, there, here)[..., 0], _bias(target, here, there)[:, 0]
    seen: dict[int, Tensor] = {}
    for distance in sorted(range(-reach if target.bidirectional else 0, reach + 1), key=lambda d: (abs(d), d < 0)):
        got = (behind if distance >= 0 else ahead)[:, abs(distance)]
        bucket = published_bucket(distance, target.num_buckets, target.max_distance, target.bidirectional)
        given = f"distance {distance} of {target.num_buckets} buckets up to {target.max_distance} tokens"
        own = seen.setdefault(bucket, got)
        yield from differs("buckets", f"{given}, bucket {bucket}", own, got, 0.0, "another bucket")
        for other in [b for b, bias in seen.items() if b != bucket and torch.equal(bias, got)]:
            yield Finding("buckets", given, f"bucket {bucket}", f"the bias of bucket {other}",
                          "two buckets are one, or the direction is confused")  # fmt: skip


def _run(q_len: int, k_len: int) -> Call:
    def run(target: Bias) -> Tensor:
        return _bias(target, torch.arange(k_len - q_len, k_len), torch.arange(k_len))

    return Call(f"{counted(q_len, 'query', 'queries')} on {counted(k_len, 'key')}", run)


def history(target: Bias) -> Iterator[Finding]:
    """Any order of lengths gives what a fresh call gives."""
    calls = [_run(q, k) for q, k in ((1, 1), (1, 4), (4, 4), (3, 9), (130, 130)) if _inside(target, k)]
    others = [_run(1, 2), _run(5, 5), _run(1, 12), _run(12, 12), _run(2, 131), _run(131, 131)]
    yield from unchanged_by("history", target, calls, [*others, inference_between(_run(12, 12))])


def casts(target: Bias) -> Iterator[Finding]:
    """A cast of the module rounds each bias once to the dtype it then has; autocast and another default dtype change
    nothing."""

    def error(expected: Tensor, got: Tensor) -> float:
        # The slope, the distance and their product are each rounded to the dtype of the result.
        return 3 * torch.finfo(got.dtype).eps / 2 * float(expected.abs().max()) * (got.dtype != expected.dtype)

    calls = (_run(n, n) for n in (2, 300) if _inside(target, n))
    yield from first(found for call in calls for found in under_casts("casts", target, call, error, _kind(target)))


def purity(target: Bias) -> Iterator[Finding]:
    """Positions are not written into, and a bias that was handed out does not change later."""
    yield from first(found for n in (1, 5) for found in _kept(target, n))


def _kept(target: Bias, n: int) -> Iterator[Finding]:
    q, k = torch.arange(3, 3 + n), torch.arange(n)
    inputs = {"q_positions": q.clone(), "k_positions": k.clone()}
    yield from kept("purity", counted(n), inputs, lambda t: _bias(target, t["q_positions"], t["k_positions"]))
    held = _bias(target, k.clone(), k.clone())
    before = held.clone()
    _bias(target, q.clone(), k.clone())
    yield from differs("purity", f"the bias of {counted(n)}, after another call", before, held, 0.0, "one buffer")


def bounds(target: Bias) -> Iterator[Finding | str]:
    """A distance beyond the end is answered as the rule says, or refused; none wraps around."""
    if target.rule == "any":
        raise NotApplicable("no rule is stated for far distances")

    def wrong(distance: int) -> list[Finding]:
        got = _bias(target, torch.tensor([distance]), torch.tensor([0])).flatten()
        far = min(distance, 2 * target.max_distance) if target.rule == "t5" else 1
        near = _bias(target, torch.tensor([far]), torch.tensor([0])).flatten()
        expected = near if target.rule == "t5" else near.double() * distance
        limit = 0.0 if target.rule == "t5" else rounding(torch.float32) * float(expected.abs().max())
        return list(differs("bounds", f"distance {distance}", expected, got, limit, "the table ends, wraps or clamps"))

    for distance in (255, 511, 513, 1025, 4097, 131_073, 2**20):
        try:
            failed = bool(wrong(distance))
        except Exception as error:
            yield f"distance {distance} is refused: {type(error).__name__}"
            return
        if failed:
            least = smallest(lambda d: bool(wrong(d)), 1, distance)
            yield from wrong(distance if least is None else least)
            return

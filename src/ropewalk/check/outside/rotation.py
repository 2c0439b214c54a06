"""Laws of a stranger's rotation, what it turns: channels, pairs, frequencies, magnitude, precision."""

import dataclasses
from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.adapters import Rotation
from ropewalk.check.outside.common import end_of
from ropewalk.check.outside.measure import (
    MEASURING,
    NO_PAIRS,
    ROUNDINGS,
    Turns,
    angle_error,
    exact,
    images,
    known,
    measured,
    paired,
    placed,
    powers,
    stated,
    turned,
    worst_angle,
)
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import differs, first, rounding, table_error
from ropewalk.check.verdict import Finding, NotApplicable

NEAR = (0, 1, 2, 7, 64, 255, 257)
FAR = (1857, 2049, 16_383, 131_071)
FARTHEST = (2**24 + 1, 10**9 + 7, 2**40 + 3)  # for those that say that their angles are exact


def places(target: Rotation) -> list[int]:
    """Positions to ask for, small to large, inside what the target answers."""
    end = end_of(target)
    last = (end - 1,) if end < FAR[-1] else ()
    return sorted(p for p in {*NEAR, *FAR, *last, *(FARTHEST if target.exact else ())} if p < end)


def start(target: Rotation) -> Iterator[Finding | str]:
    """Position 0 turns nothing."""
    got = images(target, [0])[0].double()
    if placed(got) is None:
        eye = torch.eye(target.head_dim, dtype=torch.float64)
        yield from differs("start", "unit vectors at position 0", eye, got, 0.0, "positions are off by one")
    elif placed(got) != list(range(target.head_dim)):
        yield f"channels come out in another order: {placed(got)}; scores do not see it if queries and keys share it"


def layout(target: Rotation) -> Iterator[Finding | str]:
    """Channels turn in pairs, two by two, and in the layout that is stated."""
    try:
        found = measured(target)
    except NotApplicable as why:
        if str(why) != NO_PAIRS:
            raise
        yield Finding("layout", "unit vectors at position 1", "each turns into itself and one other", "others",
                      "channels are paired in different ways for cosine and sine")  # fmt: skip
        return
    yield from _one_angle(target, found)
    named = found.layout
    if target.layout is None:
        yield f"the layout is {named or 'none that has a name: ' + str(list(found.pairs))}"
    elif named not in (target.layout, "either"):
        expected = paired(sorted(found.firsts + found.seconds), target.layout)
        got = str(list(found.pairs)) if named is None else f"{list(found.pairs)}, the {named} layout"
        yield Finding("layout", "pairs of channels", str(expected), got, "the other layout's pairs")


def _one_angle(target: Rotation, found: Turns) -> Iterator[Finding]:
    """Both channels of each pair turn by the same angle, in one direction."""
    turn = images(target, [1])[0].double()[:, list(found.order)]
    a, b = found.firsts, found.seconds
    expected, got = torch.stack((turn[a, a], turn[a, b])), torch.stack((turn[b, b], -turn[b, a]))
    limit = 2 * table_error(torch.float32) * max(found.magnitude, default=1.0)
    yield from differs("layout", f"cosines and sines of second channels {b} at position 1, against first ones",
                       expected, got, limit, "channels are paired in different ways for cosine and sine")  # fmt: skip


def width(target: Rotation) -> Iterator[Finding | str]:
    """As many channels turn as stated, from the stated first one on; the others come out bit for bit as they went
    in."""
    found = measured(target)
    given = stated(target, found)
    expected = target.rotary_dim
    if target.inv_freq is not None and given is not None:
        expected = 2 * sum(w != 0 for w in given)
    turning = sorted(found.firsts + found.seconds)
    if expected is None:
        yield f"{len(turning)} of {target.head_dim} channels turn, from channel {min(turning, default=0)} on"
        expected = len(turning) or 2
    if len(turning) != expected:
        given = f"channels that turn at position 1, of {target.head_dim}"
        yield Finding("width", given, str(expected), str(len(turning)), "another rotary width")
        return
    block = list(range(target.first_channel, target.first_channel + expected))
    if target.rotary_dim == expected and turning != block:
        given = f"channels that turn at position 1, of {target.head_dim}"
        yield Finding("width", given, str(block), str(turning), "another part of the head turns")
        return
    yield from first(f for place in places(target) for f in _rest(target, found, place))


def _rest(target: Rotation, found: Turns, position: int) -> Iterator[Finding]:
    rest, out = list(found.still), [found.order[c] for c in found.still]
    x = torch.randn(1, 1, 1, target.head_dim, generator=torch.Generator().manual_seed(1))
    got = target.f(x.clone(), torch.tensor([position]))
    given = f"channels {rest} at position {position}"
    yield from differs("width", given, x[..., rest], got[..., out], 0.0, "channels change that should not turn")


def frequencies(target: Rotation) -> Iterator[Finding | str]:
    """Each pair turns by its stated frequency, base^(-2i / rotary_dim) or the numbers given."""
    found = measured(target)
    wanted = stated(target, found)
    got = torch.tensor(found.inv_freq, dtype=torch.float64)
    if found.backward and target.direction is None:
        yield "it turns backward, from the second channel of a pair to the first"
    if wanted is None:
        yield _guess(found)
        return
    wanted = [w for w in wanted if w != 0]
    if len(wanted) != len(got):
        raise NotApplicable("another number of channels turns, see the law of width")
    w = torch.tensor([float(w) for w in wanted], dtype=torch.float64)
    limit = (w.abs().log().abs() + ROUNDINGS + MEASURING) * torch.finfo(torch.float32).eps / 2
    aliased = torch.atan2(w.sin(), w.cos())  # what one token's turn can show
    wrong = ((got / aliased - 1).abs() > limit).nonzero().flatten().tolist()
    if wrong:
        i = wrong[0]
        kind, cause = _why_other(target, found, w, limit)
        yield from differs("frequencies", f"radians per token of pair {i}, channels {list(found.pairs[i])}",
                           aliased[i : i + 1], got[i : i + 1], float(limit[i] * w[i].abs()), cause, kind)  # fmt: skip


def _guess(found: Turns) -> str:
    """The base that the frequencies follow, if they do."""
    w, count = torch.tensor(found.inv_freq, dtype=torch.float64), len(found.inv_freq)
    ends = f"frequencies from {max(found.inv_freq, default=0):.6g} to {min(found.inv_freq, default=0):.6g}"
    if count < 2 or bool((w <= 0).any()):
        return ends
    base = float(f"{float((w[0] / w[-1]) ** (count / (count - 1))):.5g}")
    rule = w[0] * torch.tensor([float(p) for p in powers(base, 2 * count, count)], dtype=torch.float64)
    # Five digits of the base leave 1e-5 / 2 of it, each power at most as much.
    follow = bool(((w / rule - 1).abs() < 1e-5).all()) and abs(found.inv_freq[0] - 1) < 1e-6
    return f"frequencies follow base {base:g}" if follow else ends


def _why_other(target: Rotation, found: Turns, w: Tensor, limit: Tensor) -> tuple[str, str]:
    got = torch.tensor(found.inv_freq, dtype=torch.float64)
    if bool((got / w < 0).all()):
        return "K09", "it turns the other way: the sign of the sine"
    got, w = got.abs(), w.abs()
    for dtype in (torch.bfloat16, torch.float16):
        if bool(((got - w.to(dtype).double()).abs() <= limit * w + torch.finfo(dtype).tiny).all()):
            return "K01", f"frequencies held in {dtype}"
    if target.base is not None:
        of_head = torch.tensor([float(p) for p in powers(target.base, target.head_dim, len(got))], dtype=torch.float64)
        if len(got) * 2 < target.head_dim and bool(((got / of_head - 1).abs() <= limit).all()):
            return "K08", "the exponent counts head_dim channels, not those that turn"
    return "K09", "another base, exponent or scaling"


def magnitude(target: Rotation) -> Iterator[Finding | str]:
    """Turning keeps the length of each pair, times one constant factor, the stated one."""
    found = measured(target)
    size = torch.tensor(found.magnitude, dtype=torch.float64)
    if not found.pairs:
        raise NotApplicable("no channel turns")
    # Two channels, each off by a table's rounding, then the arithmetic of float32.
    limit = (2 * table_error(torch.float32) + rounding(torch.float32)) * float(size.max())
    one = target.magnitude
    if one is None:
        one = float(size[0])
        if one != 1.0:
            yield f"turned channels are multiplied by {one:.9g}"
    yield from first(f for place in places(target) for f in _lengths(target, found, one, place, limit))


def _lengths(target: Rotation, found: Turns, one: float, position: int, limit: float) -> Iterator[Finding]:
    got = turned(target, found, torch.tensor([position]), torch.float32)[:, 0]
    lengths = got.norm(dim=0) * torch.tensor(found.magnitude, dtype=torch.float64)
    even = float(lengths.max() - lengths.min()) <= 2 * limit
    cause = "the factor on tables is missing, applied twice or changes" if even else "cosine and sine of other angles"
    yield from differs("magnitude", f"length of each pair at position {position}, over what it was",
                       torch.full_like(lengths, one), lengths, limit, cause, "K10" if even else "K08")  # fmt: skip


def precision(target: Rotation) -> Iterator[Finding | str]:
    """Angles are right, near and far, in float32; in float64 where float64 is stated."""
    found = measured(target)
    dtypes = (torch.float32, torch.float64) if target.double else (torch.float32,)
    for dtype in dtypes:
        yield from _precise(target, found, dtype)
    if not target.double:
        yield from _of_double(target, found)


def off(
    target: Rotation, found: Turns, positions: list[int], dtype: torch.dtype, law: str = "precision"
) -> Iterator[Finding]:
    """The first of these positions, asked for together, whose angles are off by more than they may."""
    wanted, roundings = known(target, found)
    got, expected = turned(target, found, torch.tensor(positions), dtype), exact(wanted, positions)
    held = torch.float64 if target.double and dtype == torch.float64 else torch.float32
    limit = angle_error(target, wanted, torch.tensor(positions), held, roundings)
    if dtype.itemsize < 4:  # a cosine and its product are each rounded; a sum with 0 is not
        limit = limit + torch.finfo(dtype).eps
    beyond = torch.where(got.isfinite(), (expected - got).abs() - limit, torch.inf)
    wrong = (beyond > 0).any(0).any(-1).nonzero().flatten().tolist()
    if wrong:
        i, position = wrong[0], positions[wrong[0]]
        pair = int(beyond[:, i].amax(0).argmax())
        given = f"cosine and sine of pair {pair} at position {position}"
        given += f", one of {len(positions)} positions, in {dtype}" if len(positions) > 1 else f" in {dtype}"
        kind, cause = _why_off(target, found, position, dtype, expected[:, i], got[:, i])
        yield from differs(law, given, expected[:, i, pair], got[:, i, pair], float(limit[i, pair]),
                           cause, kind)  # fmt: skip


def _why_off(
    target: Rotation, found: Turns, position: int, dtype: torch.dtype, expected: Tensor, got: Tensor
) -> tuple[str, str]:
    single = table_error(torch.float32) + abs(position) * ROUNDINGS * 2.0**-23
    if dtype == torch.float64 and bool(((expected - got).abs() <= single).all()):
        return "K02", "tables of float32 for float64 data"
    lengths = got.norm(dim=0)
    longer = bool(((lengths - 1).abs() > 4 * (table_error(torch.float32) + torch.finfo(dtype).eps)).any())
    if longer and bool(((got / lengths - expected).abs() <= 2 * single).all()):
        return "K10", "the right angle, another magnitude"
    wanted, _ = known(target, found)
    angles = torch.arange(4096)[:, None] * torch.tensor([float(w) for w in wanted], dtype=torch.float64)
    gaps = (torch.stack((angles.cos(), angles.sin())) - got[:, None]).abs().amax((0, 2))
    limit = table_error(torch.float32) + 4096 * ROUNDINGS * 2.0**-24 + torch.finfo(dtype).eps
    alike = [p for p in (gaps <= limit).nonzero().flatten().tolist() if p != position]
    if alike:
        every = position == 1 and alike[0] == 0
        return ("K04", "position 0 for every token") if every else _nearby(position, alike[0], dtype)
    return "K01", "angles computed in a precision that cannot hold position * frequency"


def _nearby(position: int, earlier: int, data: torch.dtype) -> tuple[str, str]:
    for dtype in (data, torch.bfloat16, torch.float16):
        if float(torch.tensor(float(position), dtype=dtype)) == earlier:
            return "K01", f"the position is rounded to {earlier}, as {dtype} does"
    return "K23", f"position {position} gets the angle of position {earlier}"


def _precise(target: Rotation, found: Turns, dtype: torch.dtype) -> Iterator[Finding]:
    for place in places(target):
        wrong = list(off(target, found, [place], dtype))
        if wrong:
            least = smallest(lambda p: any(True for _ in off(target, found, [p], dtype)), 0, place)
            yield from wrong if least is None else off(target, found, [least], dtype)
            return


def _of_double(target: Rotation, found: Turns) -> Iterator[str]:
    if stated(target, found) is None:
        return
    got = turned(target, found, torch.tensor([1, 7, 64]), torch.float64)
    wanted, _ = known(target, found)
    gap = float((got - exact(wanted, [1, 7, 64])).abs().max())
    if gap > 64 * 2 * table_error(torch.float64):
        yield f"float64 data is turned by tables of less precision, off by {gap:.1g} within 64 tokens; none is stated"


def half_precision(target: Rotation) -> Iterator[Finding]:
    """Data in half precision is turned by the same angles, rounded once: alone, scattered, and in whole sequences."""
    found = measured(target)
    yield from first(f for dtype in (torch.bfloat16, torch.float16) for f in _halved(target, found, dtype))


def _halved(target: Rotation, found: Turns, dtype: torch.dtype) -> Iterator[Finding]:
    def of_length(n: int) -> list[Finding]:
        return list(off(target, found, list(range(n)), dtype, "half precision"))

    for place in [p for p in places(target) if p < 2**24]:
        yield from off(target, found, [place], dtype, "half precision")
    end = end_of(target)
    for length in (n for n in (8, 300, 2060) if n <= end):
        if of_length(length):
            least = smallest(lambda n: bool(of_length(n)), 1, length)
            yield from of_length(length if least is None else least)


def distance(target: Rotation) -> Iterator[Finding]:
    """The score of a pair depends on their distance alone, near and far."""
    key = target.key or target.f
    if target.key is not None:
        yield from _of_keys(target)
    x = torch.randn(2, 1, 1, 1, target.head_dim, generator=torch.Generator().manual_seed(2))
    q, k = x[0], x[1]
    norms = float(q.norm() * k.norm())

    def score(position: int) -> Tensor:
        turned_q = target.f(q.clone(), torch.tensor([position + 3]))
        return (turned_q * key(k.clone(), torch.tensor([position]))).double().sum(-1)

    size = float((target.f(q.clone(), torch.tensor([3])).norm() / q.norm()) ** 2)
    expected = score(0)

    def moved(shift: int) -> list[Finding]:
        error = 2 * (worst_angle(target.exact, shift + 3, torch.float32) + worst_angle(target.exact, 3, torch.float32))
        limit = (2**0.5 * error + rounding(torch.float32, target.head_dim)) * norms * max(1.0, size)
        kind = "K09" if shift <= 7 else "K01"
        cause = "queries and keys turn differently" if shift <= 7 else "the score depends on where the pair stands"
        return list(differs("distance", f"a query 3 tokens after its key, moved by {shift}", expected, score(shift),
                            limit, cause, kind))  # fmt: skip

    end = end_of(target)
    for shift in (p for p in places(target) if p + 3 < end):
        wrong = moved(shift)
        if wrong:
            least = smallest(lambda s: bool(moved(s)), 1, shift)
            yield from wrong if least is None else moved(least)
            return


def _of_keys(target: Rotation) -> Iterator[Finding]:
    """Keys turn as queries do."""
    assert target.key is not None
    found, of_keys = measured(target), measured(dataclasses.replace(target, f=target.key))
    if found.pairs != of_keys.pairs:
        yield Finding("distance", "pairs of channels of a key", str(list(found.pairs)), str(list(of_keys.pairs)),
                      "queries and keys turn differently")  # fmt: skip
        return
    expected, got = (torch.tensor(turns.inv_freq, dtype=torch.float64) for turns in (found, of_keys))
    limit = (expected.abs().log().abs() + ROUNDINGS + MEASURING) * torch.finfo(torch.float32).eps / 2
    wrong = ((got / expected - 1).abs() > limit).nonzero().flatten().tolist()
    if wrong:
        i = wrong[0]
        yield from differs("distance", f"radians per token of pair {i} of a key, against a query",
                           expected[i : i + 1], got[i : i + 1], float(limit[i] * expected[i].abs()),
                           "queries and keys turn differently")  # fmt: skip

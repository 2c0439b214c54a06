"""Laws of rotation: which channels turn, by which frequency, how long they stay, and the factors on them."""

import math
from collections.abc import Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.numbers import NO_ROTATION, SIDES, Turning, channels, flat, required_turns, rotaries
from ropewalk.check.subject import (
    Subject,
    counted,
    differs,
    first,
    largest,
    rounding,
    score_error,
    table_error,
    turning_error,
)
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import Rotary, Temperature


def norms(subject: Subject) -> Iterator[Finding]:
    """Turning keeps the length of what turns, times the spectrum's magnitude, and leaves the other channels
    bit-identical; position 0 turns nothing."""
    for part in required_turns(subject.make()):
        for search in (_lengths, _rest, _start):
            yield from first(found for side in SIDES for found in search(subject, part, side))


def _turned(subject: Subject, part: Turning, side: str, position: int) -> tuple[Tensor, Tensor]:
    x = subject.tokens(1, 1)[..., : part.head_dim][:, None]
    return x, getattr(part, side)(x, part.at(torch.tensor([position])))


def _lengths(subject: Subject, part: Turning, side: str) -> Iterator[Finding]:
    """The length of each pair over what it was."""
    limit = 2 * table_error(torch.float32) + rounding(torch.float32)  # two channels, each by its table's error
    for position in (0, 1, 4095, 2**30):
        x, turned = _turned(subject, part, side, position)
        before, after = (t[0, 0, 0, list(zip(*channels(part, out), strict=True))].norm(dim=-1)
                         for t, out in ((x, False), (turned, True)))  # fmt: skip
        ratio = after / before
        expected = torch.full_like(ratio, part.spectrum.magnitude)
        even = float(ratio.max() - ratio.min()) <= 2 * limit * float(ratio.max())
        cause = "the factor on the tables is missing or applied twice" if even else "cosine and sine of other angles"
        given = f"length of each pair of a {side} at position {position}, over what it was"
        yield from differs("norms", given, expected, ratio, limit * part.spectrum.magnitude, cause,
                           "K10" if even else "K08")  # fmt: skip


def _rest(subject: Subject, part: Turning, side: str) -> Iterator[Finding]:
    rest = sorted(set(range(part.head_dim)) - set(flat(channels(part))))
    for position in (0, 1, 4095, 2**30):
        x, turned = _turned(subject, part, side, position)
        given = f"channels {rest} of a {side} at position {position}"
        yield from differs("norms", given, x[..., rest], turned[..., rest], 0.0, "channels turn that should not")


def _start(subject: Subject, part: Turning, side: str) -> Iterator[Finding]:
    if part.spectrum.magnitude == 1.0:
        x, turned = _turned(subject, part, side, 0)
        into, out = (flat(channels(part, o)) for o in (False, True))
        yield from differs("norms", f"a {side} at position 0", x[..., into], turned[..., out], 0.0,
                           "positions are off by one", "K04")  # fmt: skip


def layout_pair(subject: Subject) -> Iterator[Finding]:
    """Both layouts give the same scores after permutation, and conversion undoes itself, grouped heads too."""
    ropes = rotaries(subject.make())
    if not ropes:
        raise NotApplicable(NO_ROTATION)
    for rope in ropes:
        for search in (_permuted, _projected):
            yield from first(found for count in (1, 2, 6) for found in search(subject, rope, count))


def _other(subject: Subject, rope: Rotary):
    """The same rotation in the other layout; how to get there, back, and there with the rows of a projection."""
    parts, interleaved = subject.parts, rope.layout == "interleaved"
    other = Rotary(subject.head_dim, spectrum=rope.spectrum, layout="half" if interleaved else "interleaved")
    there = parts.to_half, parts.to_interleaved, parts.to_half_weight
    back = parts.to_interleaved, parts.to_half, parts.to_interleaved_weight
    return other, *(there if interleaved else back)


def _permuted(subject: Subject, rope: Rotary, count: int) -> Iterator[Finding]:
    other, there, back, _ = _other(subject, rope)
    where, width = torch.arange(count) + 1, rope.rotary_dim
    q = subject.tokens(1, count).unflatten(-1, (subject.num_heads, subject.head_dim)).transpose(1, 2)
    given = f"queries at position{'s' * (count > 1)} {where.tolist()} in the other layout"
    expected = rope.query(q, rope.at(where))
    got = back(other.query(there(q, width), other.at(where)), width)
    yield from differs("layouts", given, expected, got, turning_error(q, count), "channels paired in another way")


def _projected(subject: Subject, rope: Rotary, count: int) -> Iterator[Finding]:
    other, _, _, convert = _other(subject, rope)
    x, where, width = subject.tokens(1, count), torch.arange(count), rope.rotary_dim
    weights = [(w.T, n) for w, n in zip(subject.projections(), (subject.num_heads, subject.num_kv_heads), strict=False)]
    scores, q, k = [], x, x
    for turn, maps in ((rope, [w for w, _ in weights]), (other, [convert(w, n, width) for w, n in weights])):
        q, k = ((x @ w.T).unflatten(-1, (-1, subject.head_dim)).transpose(1, 2) for w in maps)
        q, k = turn.query(q, turn.at(where)), turn.key(k, turn.at(where)).repeat_interleave(subject.group, 1)
        scores.append(q @ k.transpose(-1, -2) / math.sqrt(subject.head_dim))
    given = f"scores of {counted(count)} with converted projections"
    cause = "rows of a projection permuted by the wrong head count"
    # The projections themselves sum over model_dim channels.
    limit = 2 * score_error(q, k, 0) + rounding(torch.float32, subject.model_dim) * largest(scores[0])
    yield from differs("layouts", given, scores[0], scores[1], limit, cause)


def formula(subject: Subject) -> Iterator[Finding]:
    """inv_freq is base^(-2i / rotary_dim) in float64, and the first pair turns one radian per token."""
    ropes = rotaries(subject.make())
    if not ropes:
        raise NotApplicable(NO_ROTATION)
    ropes = [rope for rope in ropes if rope.base is not None]
    if not ropes:
        raise NotApplicable("its frequencies are given as numbers, not by a base")
    for rope in ropes:
        yield from first(_frequencies(rope))


def _frequencies(rope: Rotary) -> Iterator[Finding]:
    base = rope.base
    assert base is not None

    def powers(width: int) -> Tensor:
        return torch.tensor([base ** (-2 * i / width) for i in range(rope.rotary_dim // 2)], dtype=torch.float64)

    wanted, of_head = powers(rope.rotary_dim), powers(rope.head_dim)
    names = "K09", "the exponent is not 2i / rotary_dim"
    of_width = "K08", "the exponent counts head_dim channels, not those that turn"
    got = torch.tensor(rope.spectrum.inv_freq, dtype=torch.float64)
    is_of_head = rope.rotary_dim < rope.head_dim and bool(((got / of_head - 1).abs() < 1e-6).all())
    kind, cause = of_width if is_of_head else names
    # Python's power and the package's 50 digits: a few roundings of float64.
    limit = rounding(torch.float64)
    yield from differs("formula", f"inv_freq over {base}^(-2i / {rope.rotary_dim})", torch.ones_like(got),
                       got / wanted, limit, cause, kind)  # fmt: skip
    at = rope.at(torch.tensor([1]))
    assert at.cos is not None
    table = at.cos.double()[0]
    limit = table_error(torch.float32)
    is_of_head = rope.rotary_dim < rope.head_dim and bool(((table - of_head.cos()).abs() < limit).all())
    kind, cause = of_width if is_of_head else names
    yield from differs("formula", "cosines at position 1", wanted.cos(), table, limit, cause, kind)


def temperature(subject: Subject) -> Iterator[Finding]:
    """Queries are multiplied by their temperature once, as its rule says; keys by nothing."""
    parts = [part for part in subject.make().modules() if isinstance(part, Temperature)]
    if not parts:
        raise NotApplicable("it has no temperature")
    for part in parts:
        for search in (_warmed, _cool):
            yield from first(found for p in _places(part) for found in search(part, p))


def _places(part: Temperature) -> list[int]:
    length = part.train_len
    return sorted({0, 1, length - 1, length, 2 * length, 10 * length + 1, 2**20})


def _factor(part: Temperature, position: int) -> float:
    """The rule, in Python's floats."""
    if part.rule == "constant":
        return part.factor
    if part.rule == "log":
        return max(1.0, math.log(position + 1) / math.log(part.train_len))
    return 1.0 + part.strength * math.log(1 + (position + part.offset) // part.train_len)


def _warmed(part: Temperature, position: int) -> Iterator[Finding]:
    expected = torch.full((1, 1, 1, 4), _factor(part, position))
    got = part.query(torch.ones(1, 1, 1, 4), part.at(torch.tensor([position])))
    # A logarithm, a quotient and a product, each rounded.
    limit = rounding(torch.float32) * float(expected.max())
    yield from differs("temperature", f"queries at position {position}", expected, got, limit, "another factor")


def _cool(part: Temperature, position: int) -> Iterator[Finding]:
    k = torch.ones(1, 1, 1, 4)
    got = part.key(k, part.at(torch.tensor([position])))
    yield from differs("temperature", f"keys at position {position}", k, got, 0.0, "applied to queries and keys")

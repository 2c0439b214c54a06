"""Laws of the numbers that turn or are added: angles, tables, frequencies, factors."""

import math
from collections.abc import Iterator
from decimal import Decimal, localcontext

import torch

from ropewalk import phases
from ropewalk._shapes import Tensor
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import (
    Subject,
    attention_error,
    counted,
    differs,
    first,
    largest,
    rounding,
    score_error,
    table_error,
)
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import Encoding, Learned, Rotary, Sinusoidal, Trailing
from ropewalk.encodings.axes import MultiAxis

FAR = (0, 1, 255, 257, 1857, 2049, 131_071, 2**24 + 1, 10**9 + 7, 2**40 + 3, -5)
NO_ROTATION = "it has no rotation"
SIDES = ("query", "key")
Turning = Rotary | Trailing | MultiAxis


def rotaries(encoding: Encoding) -> list[Rotary]:
    """Every `Rotary`, those inside other encodings too."""
    return [part for part in encoding.modules() if isinstance(part, Rotary)]


def turning(encoding: torch.nn.Module) -> list[Turning]:
    """The outermost parts that turn channels by an angle."""
    if isinstance(encoding, Turning):
        return [encoding]
    return [part for child in encoding.children() for part in turning(child)]


def required_turns(encoding: Encoding) -> list[Turning]:
    """`turning`, or NotApplicable."""
    parts = turning(encoding)
    if not parts:
        raise NotApplicable("it has no rotation of known frequencies" if encoding.encodes else NO_ROTATION)
    return parts


def channels(part: Turning, out: bool = False) -> tuple[list[int], list[int]]:
    """The first and the second channel of each pair, as they go in or come out."""
    start = part.head_dim - part.rotary_dim if isinstance(part, Trailing) else 0
    whole = list(range(start, start + part.rotary_dim))
    if part.layout == "half" or (out and getattr(part, "deinterleave", False)):
        return whole[: part.rotary_dim // 2], whole[part.rotary_dim // 2 :]
    return whole[::2], whole[1::2]


def flat(pairs: tuple[list[int], list[int]]) -> list[int]:
    """All first channels, then all second ones."""
    return [*pairs[0], *pairs[1]]


def exact_table(part: Turning, positions: tuple[int, ...]) -> Tensor:
    """Cosines, then sines, (positions, 2 pairs): 50 digits reduce the angle before any float sees it."""
    with localcontext(phases.DIGITS):
        turn = 2 * phases.PI
        rows = [[float(Decimal(p) * w % turn) for w in part.spectrum.exact] for p in positions]
    angles = torch.tensor(rows, dtype=torch.float64)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def turned_table(part: Turning, side: str, positions: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What `exact_table` should be: the first channel of each pair turned, as a query or as a key."""
    x = torch.zeros(1, 1, len(positions), part.head_dim, dtype=dtype)
    x[..., channels(part)[0]] = 1.0
    turned = getattr(part, side)(x, part.at(torch.tensor(positions), dtype))[0, 0]
    return turned[:, flat(channels(part, out=True))].double() / part.spectrum.magnitude


def precision(subject: Subject) -> Iterator[Finding]:
    """Angles are right at any position: turned basis vectors against 50-digit arithmetic."""
    for part in required_turns(subject.make()):
        runs = ((side, dtype) for dtype in (torch.float32, torch.float64) for side in SIDES)
        yield from first(found for side, dtype in runs for found in _phases(part, side, dtype))


def _phases(part: Turning, side: str, dtype: torch.dtype) -> Iterator[Finding]:
    """The smallest position at which an angle is off."""

    factor = torch.finfo(dtype).eps / 2 * (part.spectrum.magnitude != 1.0)  # one rounding more

    def off(positions: tuple[int, ...]) -> list[int]:
        gaps = (exact_table(part, positions) - turned_table(part, side, positions, dtype)).abs().amax(-1)
        limits = [table_error(dtype, p) + factor for p in positions]
        return [p for p, gap, limit in zip(positions, gaps.tolist(), limits, strict=True) if not gap <= limit]

    alone = [p for p in FAR if off((p,))]
    together = off(FAR)
    if not alone and not together:
        return
    worst = alone[0] if alone else together[0]
    if alone and worst > 0:
        least = smallest(lambda p: bool(off((p,))), 0, worst)
        worst = worst if least is None else least
    positions = (worst,) if alone else FAR
    expected, got = exact_table(part, positions), turned_table(part, side, positions, dtype)
    where = f"position {worst}" if alone else f"positions {FAR}"
    kind, cause = _cause_of_turn(dtype, worst, expected, got)
    given = f"cosines and sines of a {side} at {where} in {dtype}"
    yield from differs("precision", given, expected, got, table_error(dtype, worst) + factor, cause, kind)


def _cause_of_turn(dtype: torch.dtype, position: int, expected: Tensor, got: Tensor) -> tuple[str, str]:
    """The kind of fault behind a wrong turn, and the likely cause."""
    limit = table_error(dtype, position)
    off = (expected - got).abs() > limit
    still = (torch.arange(got.shape[-1]) < got.shape[-1] // 2).to(got.dtype).expand_as(got)
    if bool((got[off] == still[off]).all()):
        return "K08", "some pairs are left as they were"
    length = got.unflatten(-1, (2, -1)).norm(dim=-2).repeat(1, 2)
    longer = bool(((length - 1).abs() > 4 * limit).any())
    if longer and bool(((got / length - expected).abs() <= 2 * limit).all()):
        return "K10", "the right angle, another magnitude"
    if dtype == torch.float64 and bool(((expected - got).abs() <= table_error(torch.float32, position)).all()):
        return "K02", "tables of float32 for float64 data"
    if abs(position) <= 1:
        return "K09", "another frequency, or channels paired in another way"
    return "K01", "angles computed in a precision that cannot hold position * frequency"


def absolute(subject: Subject) -> Iterator[Finding]:
    """An absolute position is its own row of the learned table, or of the published sines and cosines."""
    parts = [part for part in subject.make().modules() if isinstance(part, Learned | Sinusoidal)]
    if not parts:
        raise NotApplicable("it adds no table to the embeddings")
    for part in parts:
        yield from first(_rows(part) if isinstance(part, Learned) else _sines(part))


def _rows(part: Learned) -> Iterator[Finding]:
    table = part.table.detach()
    for position in (*range(min(8, len(table))), *range(8, len(table), 97), len(table) - 1):
        zero = torch.zeros(1, 1, table.shape[1])
        got = part.embed(zero, part.at(torch.tensor([position])))[0, 0]
        cause = "rows are counted from another start"
        yield from differs("absolute positions", f"position {position}", table[position], got, 0.0, cause)


def _sines(part: Sinusoidal) -> Iterator[Finding]:
    dim, row = part.model_dim, []
    for position in sorted(p for p in FAR if p >= 0):
        with localcontext(phases.DIGITS):
            powers = [Decimal(part.base) ** (Decimal(-2 * (i // 2)) / dim) for i in range(dim)]
            angles = [float(position * w % (2 * phases.PI)) for w in powers]
        row = [math.cos(angle) if i % 2 else math.sin(angle) for i, angle in enumerate(angles)]
        zero = torch.zeros(1, 1, dim)
        got = part.embed(zero, part.at(torch.tensor([position])))[0, 0]
        expected = torch.tensor(row, dtype=torch.float64)
        cause = "sines and cosines of other frequencies, in another order, or of another position"
        limit = table_error(torch.float32, position)
        yield from differs("absolute positions", f"position {position}", expected, got, limit, cause)


def absolute_precision(subject: Subject) -> Iterator[Finding]:
    """The product of two absolute vectors depends on their distance alone, at any position (fixed tables)."""
    encoding = subject.make()
    if not encoding.is_absolute:
        raise NotApplicable("it adds nothing to the embeddings")
    if encoding.max_positions is not None:
        raise NotApplicable("its table is learned")
    zeros = torch.zeros(1, 2, subject.model_dim)
    products = {}
    for place in (0, 1000, 131_071, 2**24 + 1, 10**9 + 7):
        pair = encoding.embed(zeros, encoding.at(torch.tensor([place, place + 3])))[0].double()
        products[place] = pair[0] @ pair[1]
    causes = "angles in float32, or a cosine with a frequency of its own"
    # Each of d / 2 pairs adds cos(distance) from two sines and two cosines that are off: a random walk of 4 d / 2.
    yield from first(
        found
        for place, got in products.items()
        for found in differs("precision of tables", f"positions {place} and {place + 3}", products[0][None], got[None],
                             table_error(torch.float32, place) * (2 * subject.model_dim) ** 0.5, causes)
    )  # fmt: skip


def casts(subject: Subject) -> Iterator[Finding]:
    """Casting a module, autocast or another default dtype change no table and no bias."""
    fresh = subject.make()
    if any(True for _ in fresh.parameters()):
        raise NotApplicable("it learns its numbers, which a cast rounds")
    for length in (2, 6):
        x, where = subject.tokens(1, length), torch.tensor([0, 1, 257, 1857, 2049, 131_071])[:length]
        expected, cases = _hooks(subject, fresh, x, where), []
        for name in ("to(bfloat16)", "half()", "autocast", "default dtype bfloat16"):
            got = _hooks_under(subject, name, x, where)
            cause = "a table or frequency was stored in, or computed with, the low precision"
            for hook, want, have in zip(("embed", "query", "key", "bias"), expected, got, strict=True):
                cases += differs("casts", f"{hook} of {length} tokens after {name}", want, have, 0.0, cause)
        yield from first(cases)
        if cases:
            return


def _hooks(subject: Subject, encoding: Encoding, x: Tensor, where: Tensor) -> list[Tensor]:
    """What each hook makes of float32 data."""
    at = encoding.at(where)
    q = x.unflatten(-1, (subject.num_heads, subject.head_dim)).transpose(1, 2)
    bias = encoding.bias(torch.arange(subject.num_heads)[:, None, None], where[:, None], where)
    none = torch.zeros(())
    return [encoding.embed(x, at), encoding.query(q, at), encoding.key(q, at), none if bias is None else bias]


def _hooks_under(subject: Subject, name: str, x: Tensor, where: Tensor) -> list[Tensor]:
    if name == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return _hooks(subject, subject.make(), x, where)
    if name.startswith("default"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return _hooks(subject, subject.make(), x, where)
        finally:
            torch.set_default_dtype(before)
    encoding = subject.make()
    return _hooks(subject, encoding.to(torch.bfloat16) if "bfloat16" in name else encoding.half(), x, where)


def dtypes(subject: Subject) -> Iterator[Finding]:
    """Each hook and attention give the dtype that they were given, whichever dtype was used before."""
    encoding, where = subject.make(), torch.arange(1)
    for name in ("embed", "query", "key", "attend"):
        yield from first(_other_dtypes(subject, encoding, name, where))


def _other_dtypes(subject: Subject, encoding: Encoding, name: str, where: Tensor) -> Iterator[Finding]:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float16):
        x = subject.tokens(1, len(where), dtype)
        q, k, v = subject.encoded(encoding, x, where)
        if name == "attend" and q.dtype == k.dtype == v.dtype:
            got = subject.attend(q, k, v, encoding, encoded=True)
        else:
            got = {"embed": encoding.embed(x, encoding.at(where, dtype)), "query": q, "key": k}.get(name, v)
        if got.dtype != dtype:
            yield Finding("dtypes", f"{name} of 1 token in {dtype}", str(dtype), str(got.dtype),
                          "tables decide the dtype")  # fmt: skip


def double(subject: Subject) -> Iterator[Finding]:
    """float64 data gets float64 accuracy: the shift of a pair changes its score by what float64 rounds at most, and
    that of a biased pair by nothing, however far."""
    encoding = subject.make()
    by_distance = encoding.distance_only and not turning(encoding)
    if not encoding.relative and not by_distance:
        raise NotApplicable("its scores depend on where a pair stands")
    if encoding.relative:
        yield from first(_shifted(subject, encoding, torch.float64, (1, 1000, 10**9), "double"))
    if by_distance:
        x, where = subject.tokens(1, 2, torch.float64), torch.arange(2)
        near, far = (subject.forward(encoding, x, where + shift) for shift in (0, 2**60))
        limit = attention_error(subject, near, 2, torch.float64)
        cause = "positions rounded to floats before they are subtracted"
        yield from differs("double", "2 tokens shifted by 2^60", near, far, limit, cause, "K15")


def distance(subject: Subject) -> Iterator[Finding]:
    """A relative encoding's scores depend on distance alone: a common shift changes nothing."""
    encoding = subject.make()
    if not encoding.relative:
        raise NotApplicable("its scores depend on where a pair stands")
    yield from first(_shifted(subject, encoding, torch.float32, (1, 1000, 131_072, 2**24, 2**40, -7), "distance"))


def _shifted(
    subject: Subject, encoding: Encoding, dtype: torch.dtype, shifts: tuple[int, ...], law: str
) -> Iterator[Finding]:
    """Tokens whose scores change with a common shift, the fewest and the smallest shift first."""
    for count in (1, 2, 6):
        x, where = subject.tokens(1, count, dtype), torch.arange(count)
        expected = scores(subject, encoding, x, where)
        q, k, _ = subject.encoded(encoding, x, where)

        def moved(shift: int, x=x, where=where, expected=expected, q=q, k=k) -> list[Finding]:
            got = scores(subject, encoding, x, where + shift)
            # float64 is for those who compute an angle as position * frequency in float64: two roundings.
            angle = abs(shift) * torch.finfo(dtype).eps if dtype == torch.float64 else 0.0
            limit = 2 * score_error(q, k, shift, angle) + rounding(dtype) * largest(expected)
            given = f"{counted(len(where))} shifted by {shift} in {dtype}"
            kind = _kind_of_shift(encoding, dtype, shift)
            cause = "the score depends on where the pair stands"
            return list(differs(law, given, expected, got, limit, cause, kind))

        for shift in shifts:
            if moved(shift):
                least = smallest(lambda s, moved=moved: bool(moved(s)), 1, shift) if shift > 1 else None
                yield from moved(shift if least is None else least)


def _kind_of_shift(encoding: Encoding, dtype: torch.dtype, shift: int) -> str:
    if not encoding.encodes:
        return "K15" if encoding.has_bias else ""
    if dtype == torch.float64:
        return "K02"
    return "K09" if abs(shift) <= 7 else "K01"


def scores(subject: Subject, encoding: Encoding, x: Tensor, where: Tensor) -> Tensor:
    """Scores with their bias, for query heads."""
    q, k, _ = subject.encoded(encoding, x, where)
    score = q @ k.repeat_interleave(subject.group, 1).transpose(-1, -2) / math.sqrt(subject.head_dim)
    real = where.to(x.dtype) if x.dtype == torch.float64 else where
    bias = encoding.bias(torch.arange(subject.num_heads)[:, None, None], real[:, None], real)
    return score if bias is None else score + bias

"""Laws of the numbers: angles, tables, slopes, biases, layouts."""

import math
from collections.abc import Iterator
from decimal import Decimal, localcontext

import torch

from ropewalk import phases
from ropewalk._shapes import Tensor
from ropewalk.check.subject import Subject, differs, rounding
from ropewalk.check.verdict import Finding
from ropewalk.encodings import ALiBi, Encoding, Rotary, alibi_slope

FAR = (0, 1, 255, 257, 1857, 2049, 131_071, 2**24 + 1, 10**9 + 7, 2**40 + 3, -5)
TABLE_ERROR = 5e-7  # float32: half an ulp of a turn, of the product and of the cosine


def rotaries(encoding: Encoding) -> list[Rotary]:
    return [part for part in encoding.modules() if isinstance(part, Rotary)]


def alibis(encoding: Encoding) -> list[ALiBi]:
    return [part for part in encoding.modules() if isinstance(part, ALiBi)]


def exact_table(rope: Rotary, positions: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Cosines and sines by decimal arithmetic: 50 digits reduce the angle before any float sees it."""
    rows = []
    with localcontext(phases.DIGITS):
        turn = 2 * phases.PI
        for p in positions:
            rows.append([float(Decimal(p) * w % turn) for w in rope.spectrum.exact])
    angles = torch.tensor(rows, dtype=torch.float64)
    return angles.cos(), angles.sin()


def precision(subject: Subject) -> Iterator[Finding]:
    """Angles are right at any position: turned basis vectors against 50-digit arithmetic."""
    encoding = subject.make()
    for rope in rotaries(encoding):
        cos, sin = exact_table(rope, FAR)
        where = torch.tensor(FAR)
        for dtype, tolerance in ((torch.float32, TABLE_ERROR), (torch.float64, 1e-9)):
            reach = len(FAR) if dtype == torch.float32 else FAR.index(2**40 + 3)  # float64 is promised to 10^9
            first = torch.zeros(1, 1, len(FAR), rope.head_dim, dtype=dtype)
            step, count = (2, rope.rotary_dim) if rope.layout == "interleaved" else (1, rope.rotary_dim // 2)
            first[..., 0:count:step] = 1.0
            at = rope.at(where, dtype)
            turned = rope.query(first, at)[0, 0] / rope.spectrum.magnitude
            a = turned[:, 0:count:step]
            b = turned[:, 1 : rope.rotary_dim : 2] if step == 2 else turned[:, rope.rotary_dim // 2 : rope.rotary_dim]
            cause = "angles computed in a precision that cannot hold position * frequency"
            for name, expected, got in (("cosines", cos, a), ("sines", sin, b)):
                given = f"{name} at positions {FAR[:reach]} in {dtype}"
                yield from differs("precision", given, expected[:reach], got[:reach], tolerance, cause)


def absolute_precision(subject: Subject) -> Iterator[Finding]:
    """The product of two absolute vectors depends on their distance alone, at any position (fixed tables)."""
    encoding = subject.make()
    if encoding.max_positions is not None or encoding.relative:
        return
    zeros = torch.zeros(1, 2, subject.model_dim)
    near = encoding.embed(zeros, encoding.at(torch.tensor([0, 3])))
    for far in (1000, 131_071, 2**24 + 1, 10**9 + 7):
        pair = encoding.embed(zeros, encoding.at(torch.tensor([far, far + 3])))
        expected, got = (x[0, 0] @ x[0, 1] for x in (near, pair))
        tolerance = TABLE_ERROR * subject.model_dim**0.5 * 2
        cause = "angles in float32, or a cosine with a frequency of its own"
        yield from differs(
            "precision of tables", f"positions {far} and {far + 3}", expected[None], got[None], tolerance, cause
        )


def casts(subject: Subject) -> Iterator[Finding]:
    """Casting a module, autocast or another default dtype change no table and no bias."""
    fresh = subject.make()
    if any(True for _ in fresh.parameters()):
        return
    x, where = subject.tokens(1, 6), torch.tensor([0, 1, 257, 1857, 2049, 131_071])
    expected = _hooks(subject, fresh, x, where)
    for name in ("to(bfloat16)", "half()", "autocast", "default dtype bfloat16"):
        for stage, got in enumerate(_hooks_under(subject, name, x, where)):
            cause = "a table or frequency was stored in, or computed with, the low precision"
            yield from differs("casts", f"{('embed', 'query', 'key', 'bias')[stage]} after {name}", expected[stage],
                               got, 0.0, cause)  # fmt: skip


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
    encoding, where = subject.make(), torch.arange(5)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float16):
        x = subject.tokens(1, 5, dtype)
        q, k, v = subject.encoded(encoding, x, where)
        out = subject.attend(q, k, v, encoding, encoded=True)
        for name, got in (("query", q), ("key", k), ("attend", out)):
            if got.dtype != dtype:
                yield Finding("dtypes", f"{name} of {dtype}", str(dtype), str(got.dtype), "tables decide the dtype")


def double(subject: Subject) -> Iterator[Finding]:
    """float64 data gets float64 accuracy: the shift of a pair changes its score by 1e-9 at most, and that of a
    biased pair by nothing, however far."""
    encoding = subject.make()
    if encoding.relative:
        tolerance = 1e-9 * subject.head_dim
        yield from _shifted(subject, encoding, torch.float64, (1000, 10**9), tolerance, "double")
    if encoding.distance_only and not rotaries(encoding):
        x, where = subject.tokens(1, 6, torch.float64), torch.arange(6)
        near, far = (subject.forward(encoding, x, where + shift) for shift in (0, 2**60))
        cause = "positions rounded to floats before they are subtracted"
        yield from differs("double", "6 tokens shifted by 2^60", near, far, 1e-12, cause)


def distance(subject: Subject) -> Iterator[Finding]:
    """A relative encoding's scores depend on distance alone: a common shift changes nothing."""
    encoding = subject.make()
    if encoding.relative:
        tolerance = 8 * TABLE_ERROR * subject.head_dim**0.5
        yield from _shifted(
            subject, encoding, torch.float32, (1, 1000, 131_072, 2**24, 2**40, -7), tolerance, "distance"
        )


def _shifted(
    subject: Subject, encoding: Encoding, dtype: torch.dtype, shifts: tuple[int, ...], tolerance: float, law: str
) -> Iterator[Finding]:
    x, where = subject.tokens(1, 6, dtype), torch.arange(6)
    expected = _scores(subject, encoding, x, where)
    for shift in shifts:
        got = _scores(subject, encoding, x, where + shift)
        cause = "the score depends on where the pair stands"
        yield from differs(law, f"6 tokens shifted by {shift} in {dtype}", expected, got, tolerance, cause)


def _scores(subject: Subject, encoding: Encoding, x: Tensor, where: Tensor) -> Tensor:
    """Scores with their bias, for query heads."""
    q, k, _ = subject.encoded(encoding, x, where)
    k = k.repeat_interleave(subject.num_heads // subject.num_kv_heads, 1)
    score = q @ k.transpose(-1, -2) / math.sqrt(subject.head_dim)
    real = where.to(x.dtype) if x.dtype == torch.float64 else where
    bias = encoding.bias(torch.arange(subject.num_heads)[:, None, None], real[:, None], real)
    return score if bias is None else score + bias


def norms(subject: Subject) -> Iterator[Finding]:
    """Turning keeps the length of what turns, times the spectrum's magnitude, and leaves the other channels
    bit-identical; position 0 turns nothing."""
    encoding = subject.make()
    for rope in rotaries(encoding):
        x = subject.tokens(1, 4)[..., : rope.head_dim][:, None]
        at = rope.at(torch.tensor([0, 1, 4095, 2**30]))
        turned = rope.query(x, at)[..., : rope.rotary_dim].norm(dim=-1) / rope.spectrum.magnitude
        kept = x[..., : rope.rotary_dim].norm(dim=-1)
        yield from differs("norms", "4 positions", kept, turned, 1e-5, "cosine and sine are not of one angle")
        rest = rope.query(x, at)[..., rope.rotary_dim :]
        yield from differs("norms", "channels beyond rotary_dim", x[..., rope.rotary_dim :], rest, 0.0,
                           "channels turn that should not")  # fmt: skip
        if rope.spectrum.magnitude == 1.0:
            still = rope.query(x, at)[:, :, :1]
            yield from differs("norms", "position 0", x[:, :, :1], still, 0.0, "positions are off by one")


def layout_pair(subject: Subject) -> Iterator[Finding]:
    """Both layouts give the same scores after permutation, and conversion undoes itself, grouped heads too."""
    encoding = subject.make()
    parts, head_dim = subject.parts, subject.head_dim
    for rope in rotaries(encoding):
        width, x, where = rope.rotary_dim, subject.tokens(1, 6), torch.arange(6)
        other = Rotary(
            head_dim, spectrum=rope.spectrum, layout="half" if rope.layout == "interleaved" else "interleaved"
        )
        to_other = parts.to_half if rope.layout == "interleaved" else parts.to_interleaved
        back = parts.to_interleaved if rope.layout == "interleaved" else parts.to_half
        convert = parts.to_half_weight if rope.layout == "interleaved" else parts.to_interleaved_weight
        q = x.unflatten(-1, (subject.num_heads, head_dim)).transpose(1, 2)
        expected = rope.query(q, rope.at(where))
        got = back(other.query(to_other(q, width), other.at(where)), width)
        yield from differs("layouts", "queries in the other layout", expected, got, 1e-6, "channels paired wrongly")
        wq, wk, _ = subject.projections()
        scores = []
        for r, change in ((rope, None), (other, convert)):
            weights = [(w.T, n) for w, n in ((wq, subject.num_heads), (wk, subject.num_kv_heads))]
            maps = [w if change is None else change(w, n, width) for w, n in weights]
            qq, kk = ((x @ w.T).unflatten(-1, (-1, head_dim)).transpose(1, 2) for w in maps)
            kk = r.key(kk, r.at(where)).repeat_interleave(subject.num_heads // subject.num_kv_heads, 1)
            scores.append(r.query(qq, r.at(where)) @ kk.transpose(-1, -2))
        cause = "rows of a projection permuted by the wrong head count"
        yield from differs("layouts", "converted projections", scores[0], scores[1], 1e-4, cause)


def formula(subject: Subject) -> Iterator[Finding]:
    """inv_freq is base^(-2i / rotary_dim) in float64, and the first pair turns one radian per token."""
    for rope in rotaries(subject.make()):
        if rope.base is None:
            continue
        expected = [rope.base ** (-2 * i / rope.rotary_dim) for i in range(rope.rotary_dim // 2)]
        got = torch.tensor(rope.spectrum.inv_freq, dtype=torch.float64)
        cause = "the exponent is not 2i / rotary_dim"
        relative = got / torch.tensor(expected, dtype=torch.float64)
        yield from differs("formula", f"base {rope.base}", torch.ones_like(got), relative, 1e-12, cause)
        at = rope.at(torch.tensor([1]))
        assert at.cos is not None
        table = torch.tensor([[math.cos(w) for w in expected]], dtype=torch.float64)
        yield from differs("formula", "the table at position 1", table, at.cos, TABLE_ERROR, cause)


def published_slopes(num_heads: int) -> list[float]:
    """The authors' rule, by recursion: another route than the closed form of `alibi_slope`."""
    if math.log2(num_heads).is_integer():
        start = 2.0 ** (-(2.0 ** -(math.log2(num_heads) - 3)))
        return [start ** (i + 1) for i in range(num_heads)]
    lower = 2 ** math.floor(math.log2(num_heads))
    return published_slopes(lower) + published_slopes(2 * lower)[0::2][: num_heads - lower]


def slopes(subject: Subject) -> Iterator[Finding]:
    """Slopes are the published list for every head count, and a shard's are a slice of it."""
    cause = "slopes by another rule, or from a shard's own head count"
    for part in alibis(subject.make()):
        if part.given is None and part.log_slopes is None:
            head = torch.arange(part.num_heads)
            expected = torch.tensor(published_slopes(part.num_heads))
            # The bias at distance 1 is what attention gets, whatever the class calls its slopes.
            zero = torch.zeros_like(head)
            yield from differs(
                "slopes", f"{part.num_heads} heads", expected, -part.bias(head, zero + 1, zero), 1e-7, cause
            )
            few = head[part.num_heads // 2 :]
            got = -part.bias(few, torch.ones_like(few), torch.zeros_like(few))
            yield from differs("slopes", f"heads {few.tolist()}", expected[few], got, 1e-7, cause)
            for n in range(1, 129):
                all_of_n = alibi_slope(torch.arange(n), n)
                yield from differs("slopes", f"{n} heads", torch.tensor(published_slopes(n)), all_of_n, 1e-6, cause)


def bias_shape(subject: Subject) -> Iterator[Finding]:
    """The bias of distances: zero for a token itself, never positive, alike in both directions and exact far out,
    and never constant over the keys of a decode step."""
    encoding = subject.make()
    if not alibis(encoding):
        return
    where = torch.arange(9)
    head = torch.arange(subject.num_heads)[:, None, None]
    bias = encoding.bias(head, where[:, None], where)
    assert bias is not None
    bias = bias.detach()
    diagonal = bias.diagonal(dim1=-2, dim2=-1)
    yield from differs("bias", "distance 0", torch.zeros_like(diagonal), diagonal, 0.0, "the distance is off by one")
    yield from differs(
        "bias", "9 tokens, both directions", bias.transpose(-1, -2), bias, 0.0, "future keys are rewarded"
    )
    if bool((bias > 0).any()):
        yield Finding("bias", "9 tokens", "at most 0", f"{bias.max().item()}", "the sign of the distance")
    step = encoding.bias(head, where[-1:, None], where)
    assert step is not None
    if bool((step == step[..., :1]).all()):
        yield Finding(
            "bias", "one query, 9 keys", "different values", "one value", "bias built over the query's length"
        )
    far = torch.tensor([0, 1001, 3003])
    reach = encoding.bias(head, far[:, None], far)
    assert reach is not None
    reach = reach.detach()
    expected, got = 3 * reach[:, 0, 1], reach[:, 0, 2]
    tolerance = float(expected.abs().max()) * rounding(torch.float32)
    yield from differs("bias", "distance 3003 against 1001", expected, got, tolerance, "distances in half precision")

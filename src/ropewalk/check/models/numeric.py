"""Laws of a model's numbers: shifts, precision, casts, what was computed before, positions beyond the end."""

from collections.abc import Iterator
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.models.build import ModelSubject
from ropewalk.check.models.compare import OPERATIONS, angle, depth, positions_given, rounding, spread, unequal
from ropewalk.check.verdict import Finding, NotApplicable

COUNT = 10
FAR = 4000  # tokens: far enough for frequencies rounded to bfloat16 to be off by whole turns


def _mask(tokens: Tensor) -> Tensor:
    """All ones: said, so that positions with gaps are not taken for packed documents."""
    return torch.ones_like(tokens)


def _relative(subject: ModelSubject) -> None:
    """NotApplicable unless the model's config says that its scores depend on distances alone."""
    positions_given(subject)
    if subject.readings is None:
        raise NotApplicable(f"its encoding is not known: {subject.refusal}")
    if not all(reading.encoding.relative for reading in subject.readings):
        raise NotApplicable("its encoding is not relative")


def shift(subject: ModelSubject) -> Iterator[Finding]:
    """Moving all tokens by the same distance changes nothing."""
    _relative(subject)
    tokens = subject.tokens(1, COUNT)
    top = subject.max_len or FAR
    if any(reading.depends_on_length for reading in subject.readings or ()):
        top = min(top, min(reading.train_len or top for reading in subject.readings or ()))
    shifts = [by for by in (1, 7, 64, 1000, FAR, 30_000, 130_000) if by + COUNT <= top]
    if not shifts:
        raise NotApplicable(f"its {top} positions leave no room to move {COUNT} tokens")
    first = subject.logits(tokens, position_ids=torch.arange(COUNT)[None], attention_mask=_mask(tokens))
    for by in shifts:
        got = subject.logits(tokens, position_ids=torch.arange(COUNT)[None] + by, attention_mask=_mask(tokens))
        tolerance = rounding(subject, first) + angle(subject, by)
        near = by <= 64
        cause = "the score depends on where the pair stands" if near else "angles lose their precision far out"
        found = list(
            unequal("shift", f"{COUNT} tokens moved by {by}", first, got, tolerance, cause, "K09" if near else "K01")
        )
        yield from found
        if found:
            return


def _far_positions(subject: ModelSubject) -> dict[str, Tensor]:
    if not subject.takes_positions:
        return {}
    top = min(FAR, (subject.max_len or FAR) - COUNT - 1)
    return {"position_ids": spread(COUNT, max(top, 0))}


def _relative_error(expected: Tensor, got: Tensor) -> float:
    """Root mean square of the difference over that of the logits: rounding adds up like noise."""
    return float((expected - got).square().mean().sqrt() / expected.square().mean().sqrt())


def _noise(subject: ModelSubject) -> float:
    """The relative error that roundings of float32 leave, with a margin of four: one of them is eps / sqrt(12) on
    average (uniform within half a unit), independent ones add up by the root of their count."""
    terms = max(64, int(getattr(subject.config, "hidden_size", 64)))
    return 4 * torch.finfo(torch.float32).eps * ((OPERATIONS * depth(subject) + 2) * terms / 12) ** 0.5


def _half_noise(subject: ModelSubject, dtype: torch.dtype) -> float:
    """As `_noise`, for half precision, whose sums are made in float32."""
    return 4 * torch.finfo(dtype).eps * ((OPERATIONS * depth(subject) + 2) / 12) ** 0.5


def _experts(subject: ModelSubject) -> bool:
    from ropewalk.check.models.build import EXPERTS

    return any(isinstance(getattr(subject.config, name, None), int) for name in EXPERTS)


def precision(subject: ModelSubject) -> Iterator[Finding | str]:
    """Every dtype gives the same logits within its rounding, and tokens far apart cost no more of it than near ones."""
    others = [dtype for dtype in subject.dtypes if dtype != subject.dtype]
    if not others:
        raise NotApplicable("one dtype alone was asked for")
    for dtype in others:
        if dtype.itemsize < 4 and _experts(subject):
            yield f"{dtype}: experts are chosen by comparison, and rounding may choose others"
            continue
        try:
            yield from _rounded(subject, dtype)
        except RuntimeError as error:
            yield f"{dtype}: the model does not run ({str(error).splitlines()[0]})"


def _rounded(subject: ModelSubject, dtype: torch.dtype) -> Iterator[Finding]:
    tokens = subject.tokens(1, COUNT)
    cause = "positions, frequencies or tables are rounded to the model's dtype"
    for where in ({}, _far_positions(subject)):
        options = {"attention_mask": _mask(tokens), **where} if where else {}
        expected = subject.logits(tokens, **options)
        error = _relative_error(expected, subject.logits(tokens, subject.model(dtype), **options))
        bound = _noise(subject) + (angle(subject, FAR) if where else 0.0)
        if dtype.itemsize < 4:  # activations are rounded as often as weights, or a few times more
            alone = _relative_error(expected, subject.logits(tokens, _weights_rounded(subject, dtype), **options))
            bound = 4 * alone or _half_noise(subject, dtype)  # weights that were rounded before round to themselves
        if not error <= bound:
            place = f"at {where['position_ids'][0].tolist()}" if where else "in a row"
            given, kind = f"{COUNT} tokens {place} in {dtype}", "K01" if where else "K02"
            yield Finding("precision", given, f"a relative error of at most {bound:.2g}", f"{error:.2g}", cause, kind)
            return


def _weights_rounded(subject: ModelSubject, dtype: torch.dtype) -> Any:
    """The model with weights as coarse as `dtype`, and everything else as it is."""
    model = subject.fresh()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(dtype))
    return model


def casts(subject: ModelSubject) -> Iterator[Finding | str]:
    """A model cast after it was built gives what one built in that dtype gives."""
    tokens = subject.tokens(1, COUNT)
    options = {"attention_mask": _mask(tokens), **_far_positions(subject)}
    others = [dtype for dtype in subject.dtypes if dtype != subject.dtype]
    if not others:
        raise NotApplicable("one dtype alone was asked for")
    for dtype in others:
        cast = subject.fresh().to(dtype)
        try:
            expected = subject.logits(tokens, subject.model(dtype), **options)
        except RuntimeError as error:
            yield f"{dtype}: the model does not run ({str(error).splitlines()[0]})"
            continue
        got = subject.logits(tokens, cast, **options)
        # Equal weights and equal tables leave equal bits; float64 tables may be made in either precision.
        tolerance = 0.0 if dtype.itemsize < 4 else rounding(subject, expected) + angle(subject, FAR)
        given = f"built in {subject.dtype}, then .to({dtype}): {COUNT} tokens at positions up to {FAR}"
        found = list(unequal("casts", given, expected, got, tolerance, _cast(subject.model(dtype), cast)))
        yield from found
        if found:
            return


def _cast(built: Any, cast: Any) -> str:
    """What a cast changed that building in its dtype does not."""
    own = dict(built.named_buffers())
    names = [name for name, buffer in cast.named_buffers() if name in own and own[name].dtype != buffer.dtype]
    return f"the cast rounds the buffers {', '.join(names)}" if names else "a table follows the dtype of the weights"


def history(subject: ModelSubject) -> Iterator[Finding]:
    """Logits depend on the tokens alone: not on longer, shorter or other calls before."""
    tokens = subject.tokens(1, 6)
    top = subject.max_len or FAR
    model = subject.fresh()
    first = subject.logits(tokens, model)
    places = [{}]
    if subject.takes_positions:
        ends = (top - 1, 2 * top, top + top // 2, top + 1)
        places += [
            {"position_ids": torch.arange(6)[None] + max(end - 5, 0), "attention_mask": _mask(tokens)} for end in ends
        ]
    for options in places:
        try:
            alone = subject.logits(tokens, subject.fresh(), **options)
            then = subject.logits(tokens, model, **options)
        except (IndexError, ValueError, RuntimeError):  # beyond the end, refused
            continue
        end = int(options["position_ids"].max()) + 1 if options else 6
        cause = "tables made for an earlier, longer sequence stay"
        found = list(unequal("history", f"a sequence that ends at {end} after others", alone, then, 0.0, cause))
        yield from found
        if found:
            return
    again = subject.logits(tokens, model)
    yield from unequal("history", "6 tokens, before and after longer sequences", first, again, 0.0,
                       "tables made for a longer sequence stay")  # fmt: skip


def beyond(subject: ModelSubject) -> Iterator[Finding | str]:
    """Beyond the longest length of the config a model answers or refuses; it never takes one position for another."""
    positions_given(subject)
    top = subject.max_len
    if top is None:
        raise NotApplicable("its config names no longest length")
    tokens = subject.tokens(1, 4)
    near = {}
    for last in (3, top - 1):  # what wrapping around or stopping at the end would give
        where = torch.tensor([[0, 1, 2, max(3, last)]])
        near[last] = subject.logits(tokens, position_ids=where, attention_mask=_mask(tokens))
    for last in (top, top + 3, 2 * top + 3, 10 * top + 3):
        where = torch.tensor([[0, 1, 2, last]])
        given = f"positions 0, 1, 2 and {last} of {top}"
        try:
            got = subject.logits(tokens, position_ids=where, attention_mask=_mask(tokens))
        except (IndexError, ValueError, RuntimeError) as error:
            yield f"position {last} of {top} is refused ({type(error).__name__})"
            return
        if not bool(got.isfinite().all()):
            yield Finding("beyond", given, "finite logits, or an error", "others", "a position reads beyond its table")
            return
        for other, same in near.items():
            if torch.equal(same, got) and not torch.equal(near[3], near[top - 1]):
                cause = "positions wrap around, or stop at the end"
                yield Finding("beyond", given, "logits of its own, or an error", f"those of position {other}", cause)
                return

"""Laws of backends: every way to compute attention gives what the reference gives."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.attention import attend
from ropewalk.check.subject import Subject, Unbiased, attention_error, counted, differs, first, largest, rounding
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.encodings import Encoding

BLOCK = 128  # queries or keys that kernels take at once
LONGER_THAN_A_BLOCK = 300


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: its sizes, and what it is told besides."""

    q_len: int
    k_len: int
    causal: bool = True
    option: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """What the option's name stands for."""
        keys = torch.arange(self.k_len)
        if self.option == "scale":
            return {"scale": 2.0}
        if self.option == "positions":
            return {"q_positions": keys[self.k_len - self.q_len :] + 5, "k_positions": keys}
        if self.option == "documents":
            return {"documents": keys // 70}
        if self.option == "mask":
            generator = torch.Generator().manual_seed(2)
            return {"mask": torch.rand(self.q_len, self.k_len, generator=generator) > 0.3}
        if self.option == "causal mask":
            return {"mask": keys <= keys[self.k_len - self.q_len :, None]}
        return {}

    def __str__(self) -> str:
        queries = f"{counted(self.q_len, 'query', 'queries')} on {counted(self.k_len, 'key')}"
        return f"{queries}, causal={self.causal}" + (f", {self.option}" if self.option else "")


def _required(subject: Subject) -> None:
    """NotApplicable where the reference would be compared with itself."""
    if subject.backend == "reference" and subject.parts.attend is attend:
        raise NotApplicable("the reference backend is what others are compared with")


def reference(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding, **options: Any) -> Tensor:
    """What others are compared with."""
    out = attend(q, k, v, encoding, **options, backend="reference")
    assert isinstance(out, Tensor)
    return out


def as_reference(subject: Subject) -> Iterator[Finding]:
    """A backend equals the reference, values and gradients, beyond one block of queries."""
    _required(subject)
    yield from first(_unequal(subject, "reference", _cases((3, 40, LONGER_THAN_A_BLOCK))))


def _cases(lengths: tuple[int, ...]) -> Iterator[Case]:
    for length in lengths:
        yield Case(length, length)
        yield Case(length, length, causal=False)
        yield Case(max(length // 7, 1), length)
        yield Case(length, length, option="scale")
        yield Case(length, length, option="positions")
        yield Case(length, length, causal=False, option="documents")
        yield Case(length, length, option="mask")


def blocks(subject: Subject) -> Iterator[Finding]:
    """Whole blocks or not, attention equals the reference, values and gradients; of a cache that is partly filled it
    reads the filled part alone."""
    _required(subject)
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, LONGER_THAN_A_BLOCK)
    cases = (Case(n, n, n % 2 == 0, "" if n % 2 == 0 else "causal mask") for n in lengths)
    yield from first(_unequal(subject, "blocks", cases))
    yield from first(_partly_filled(subject))


def _unequal(subject: Subject, law: str, cases: Iterator[Case]) -> Iterator[Finding]:
    encoding = subject.make()
    for case in cases:
        expected, got = (_results(subject, encoding, case, fast) for fast in (False, True))
        for name, want, have in zip(_NAMES, expected, got, strict=False):
            limit = _limit(subject, case, want)
            found = list(differs(law, f"{name}, {case}", want, have, limit, f"backend {subject.backend}"))
            if found:
                kind, cause = _kind(subject, encoding, case, name)
                yield from (dataclasses.replace(f, kind=kind, cause=f"{f.cause}: {cause}") for f in found)


_NAMES = ("values", "gradient of q", "gradient of k", "gradient of v", "gradient of what is learned")


def _limit(subject: Subject, case: Case, expected: Tensor) -> float:
    """A gradient of a key sums over the queries of its group; all is off by more where scores are larger."""
    terms = case.k_len + case.q_len * subject.group
    sharper = case.options.get("scale", 0.0) * subject.head_dim**0.5
    return attention_error(subject, expected, terms) * max(1.0, sharper) if expected.numel() else 0.0


def _results(subject: Subject, encoding: Encoding, case: Case, fast: bool) -> list[Tensor]:
    """Output and gradients, of the subject's attention or of the reference."""
    learned = [p for p in encoding.parameters() if p.requires_grad]
    generator = torch.Generator().manual_seed(1)
    shapes = ((subject.num_heads, case.q_len), *[(subject.num_kv_heads, case.k_len)] * 2)
    q, k, v = (torch.randn(1, h, n, subject.head_dim, generator=generator).requires_grad_() for h, n in shapes)
    options = {"causal": case.causal, **case.options}
    out: Any = subject.attend(q, k, v, encoding, **options) if fast else reference(q, k, v, encoding, **options)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out)
    grads = torch.autograd.grad((out * weight).sum(), [q, k, v, *learned], allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g
                            for g, x in zip(grads, (q, k, v, *learned), strict=True))]  # fmt: skip


def _kind(subject: Subject, encoding: Encoding, case: Case, name: str) -> tuple[str, str]:
    """What a difference means: tried again without the bias, and with one whole block."""

    def right(encoding: Encoding, case: Case) -> bool:
        pairs = zip(*(_results(subject, encoding, case, fast) for fast in (False, True)), strict=True)
        return not any(any(differs("", "", want, have, _limit(subject, case, want), "")) for want, have in pairs)

    if name == _NAMES[-1]:
        return "K22", "the values are right"
    if encoding.has_bias and right(Unbiased(encoding), case):
        return ("K15", "right without the bias") if name == "values" else ("K22", "the values are right")
    whole = dataclasses.replace(case, q_len=BLOCK, k_len=BLOCK)
    if whole != case and right(encoding, whole):
        return "K17", f"right for one whole block of {BLOCK}"
    return ("K16", "another mask or formula") if name == "values" else ("K22", "the values are right")


def _partly_filled(subject: Subject) -> Iterator[Finding]:
    """Storage for `capacity` keys of which `filled` hold something, the others any finite numbers."""
    encoding = subject.make()
    for filled, capacity in ((1, 2), (3, 8), (100, 2 * BLOCK), (BLOCK, 2 * BLOCK), (200, LONGER_THAN_A_BLOCK)):
        count = min(filled, 3)
        x, where = subject.tokens(1, filled), torch.arange(filled)
        if encoding.max_positions is not None and filled > encoding.max_positions:
            return
        q, k, v = subject.encoded(encoding, x, where)
        q, places = q[:, :, -count:], where[-count:]
        expected = reference(q, k, v, encoding, encoded=True)
        store_k, store_v = (torch.full((*t.shape[:2], capacity, t.shape[3]), 7.0) for t in (k, v))
        store_k[:, :, :filled], store_v[:, :, :filled] = k, v
        slots = torch.arange(capacity)
        for mask in (None, (slots < filled)[None]):  # later slots lie ahead of every query, so either rule hides them
            got = subject.attend(q, store_k, store_v, encoding, encoded=True, mask=mask, q_positions=places,
                                 k_positions=slots)  # fmt: skip
            given = f"{counted(count, 'query', 'queries')} on {filled} of {capacity} slots"
            given += ", hidden by causality" if mask is None else ", hidden by a mask"
            yield from differs("blocks", given, expected, got, attention_error(subject, expected, filled),
                               "slots that hold nothing yet are read")  # fmt: skip


def half_precision(subject: Subject) -> Iterator[Finding]:
    """In half precision the result is the float32 one but for rounding, at long distance too: no bias, table or
    distance is rounded on the way."""
    encoding = subject.make()
    if not encoding.relative:
        raise NotApplicable("its scores depend on where a pair stands")
    cases = ((dtype, count) for count in (2, 8) for dtype in (torch.bfloat16, torch.float16))
    yield from first(found for dtype, count in cases for found in _halved(subject, encoding, dtype, count))


def _halved(subject: Subject, encoding: Encoding, dtype: torch.dtype, count: int) -> Iterator[Finding]:
    generator = torch.Generator().manual_seed(4)
    # Far keys: their biases are large and differ by little, which is where rounding shows.
    where = {"q_positions": 4000 + torch.arange(count), "k_positions": torch.arange(3 * count)}
    shapes = ((subject.num_heads, count), *[(subject.num_kv_heads, 3 * count)] * 2)
    q, k, v = (torch.randn(1, *s, subject.head_dim, generator=generator).bfloat16() for s in shapes)
    expected = subject.attend(q.float(), k.float(), v.float(), encoding, **where)
    got = subject.attend(q.to(dtype), k.to(dtype), v.to(dtype), encoding, **where)
    given = f"{count} queries from 4000 on, keys 0 to {3 * count - 1}, in {dtype}"
    kind = "K15" if encoding.has_bias else "K02"
    limit = rounding(dtype, 4) * max(1.0, largest(expected))
    yield from differs("half precision", given, expected, got, limit, "a bias, table or weight was rounded", kind)

"""How logits of a model are compared, and what counts as equal."""

import math
from collections.abc import Callable, Iterator

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.models.build import ModelSubject
from ropewalk.check.subject import differs
from ropewalk.check.verdict import Finding, NotApplicable

OPERATIONS = 8  # matrix products, norms and sums that a layer puts one after the other
TOLERANCE = (
    "eps(float32, or the model's if coarser) x 8 operations x layers x sqrt(width), relative to the largest logit"
)
WITH_ANGLES = (
    TOLERANCE + "; plus position x 2^-23 radians, what angles in float32 may be off, x layers x sqrt(head_dim)"
)


def rounding(subject: ModelSubject, logits: Tensor, dtype: torch.dtype | None = None) -> float:
    """What rounding may change logits by; float32 even for float64 models, whose norms and softmax stay in float32."""
    eps = max(torch.finfo(dtype or subject.dtype).eps, torch.finfo(torch.float32).eps)
    width = max(64, int(getattr(subject.config, "hidden_size", 64)))
    return eps * OPERATIONS * depth(subject) * math.sqrt(width) * max(1.0, float(logits.abs().max()))


def depth(subject: ModelSubject) -> int:
    return int(getattr(subject.config, "num_hidden_layers", 1))


def angle(subject: ModelSubject, position: int) -> float:
    """What angles in float32 at `position` may change logits by: a score is off by the angle times the length of a
    query and a key, about sqrt(head_dim) after scaling, in each layer."""
    heads = max(1, int(getattr(subject.config, "num_attention_heads", 1) or 1))
    width = getattr(subject.config, "head_dim", None) or getattr(subject.config, "hidden_size", 64) // heads
    return position * 2.0**-23 * math.sqrt(width) * depth(subject)


def unequal(law: str, given: str, expected: Tensor, got: Tensor, tolerance: float, cause: str,
            kind: str = "") -> Iterator[Finding]:  # fmt: skip
    """A finding if logits differ by more than `tolerance`."""
    yield from differs(law, f"{given}, logits", expected, got, tolerance, cause, kind)


def positions_given(subject: ModelSubject) -> None:
    """NotApplicable unless the model takes positions."""
    if not subject.takes_positions:
        raise NotApplicable("the model takes no position_ids")


def spread(count: int, furthest: int) -> Tensor:
    """Positions with gaps, (1, count): few tokens, long distances."""
    steps = torch.linspace(0, 1, count, dtype=torch.float64) ** 3 * furthest
    return (steps.long() + torch.arange(count))[None]


def shortest(fails: Callable[[int], list[Finding]], lengths: range | tuple[int, ...]) -> list[Finding]:
    """The findings at the first of `lengths` that has any."""
    return next((found for length in lengths if (found := fails(length))), [])

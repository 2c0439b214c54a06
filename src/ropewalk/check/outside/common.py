"""What laws of all strangers share: calls before and after other calls, casts, inputs that stay as they are."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.check.adapters import Adapter, Bias, Rotation, fresh, modules_of
from ropewalk.check.shrink import smallest
from ropewalk.check.subject import differs, first
from ropewalk.check.verdict import Finding, NotApplicable


@dataclass(frozen=True)
class Call:
    """One way to use a target: in words, and done.

    Args:
        kind: of fault, if it changes other calls.
        length: of the call, where `of` makes shorter ones.
    """

    given: str
    run: Callable[[Any], Tensor]
    kind: str = "K03"
    length: int = 0
    of: "Callable[[int], Call] | None" = None


def end_of(target: Rotation | Bias, farthest: int = 2**17) -> int:
    """The first position that is refused, as stated or as tried; beyond `farthest` nothing is tried."""
    if target.max_positions is not None:
        return target.max_positions
    copy = fresh(target)

    def refused(position: int) -> bool:
        where = torch.tensor([position])
        try:
            if isinstance(copy, Rotation):
                copy.f(torch.zeros(1, 1, 1, copy.head_dim), where)
            else:
                copy.f(copy.num_heads, where, torch.tensor([0]))
        except Exception:
            return True
        return False

    end = smallest(refused, 0, farthest) if refused(farthest) else None
    return 2**62 if end is None else end


def unchanged_by(law: str, target: Adapter, calls: list[Call], others: list[Call]) -> Iterator[Finding]:
    """The first call whose result another call changes, the shortest that does; modules are copied before each try."""
    for call in calls:
        for other in others:
            found = list(_changed(law, target, call, other))
            of = call.of
            if found and of is not None:
                least = smallest(lambda n, o=other, of=of: any(_changed(law, target, of(n), o)), 1, call.length)
                found = found if least is None else list(_changed(law, target, of(least), other))
            yield from found
            if found:
                return


def _changed(law: str, target: Adapter, call: Call, other: Call) -> Iterator[Finding]:
    with contextlib.suppress(NotApplicable):
        expected, busy = call.run(fresh(target)).clone(), fresh(target)
        with contextlib.suppress(Exception):  # refused: then it should change nothing either
            other.run(busy)
        given, cause = f"{call.given}, after {other.given}", "a table grown, replaced or kept by another call"
        yield from differs(law, given, expected, call.run(busy), 0.0, cause, other.kind)


def inference_between(call: Call) -> Call:
    """The same call, in inference mode."""

    def run(target: Any) -> Tensor:
        with torch.inference_mode():
            return call.run(target)

    return Call(f"{call.given} in inference mode", run)


def under_casts(
    law: str, target: Adapter, call: Call, error: Callable[[Tensor, Tensor], float], kind: str = "K01"
) -> Iterator[Finding]:
    """A call after its modules are cast, under autocast, and under another default dtype, against the call before."""
    expected = call.run(fresh(target))
    modules = modules_of(target)
    if any(parameter.requires_grad for module in modules for parameter in module.parameters()):
        raise NotApplicable("it learns its numbers, which a cast rounds")
    for name in ("to(bfloat16)", "half()", "autocast", "default dtype bfloat16"):
        if modules or name[0] in "ad":
            got = _under(name, target, call)
            cause = "a table or frequency is stored in, or computed with, the low precision"
            yield from differs(law, f"{call.given}, {_when(name)}", expected, got, error(expected, got), cause, kind)


def _when(name: str) -> str:
    return f"under {name}" if name[0] in "ad" else f"after {name}"


def _under(name: str, target: Adapter, call: Call) -> Tensor:
    copy = fresh(target)
    if name == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return call.run(copy)
    if name.startswith("default"):
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            return call.run(copy)
        finally:
            torch.set_default_dtype(before)
    for module in modules_of(copy):
        module.to(torch.bfloat16 if "bfloat16" in name else torch.float16)
    return call.run(copy)


def kept(law: str, given: str, inputs: dict[str, Tensor], run: Callable[[dict[str, Tensor]], Any]) -> Iterator[Finding]:
    """Each input bit for bit as it was before `run`."""
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    run(inputs)
    yield from first(
        found
        for name, tensor in inputs.items()
        for found in differs(law, f"{name} of {given}", before[name], tensor, 0.0, "written in place")
    )


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same each time and, rounded, in each dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

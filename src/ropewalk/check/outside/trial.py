"""Before a law looks: a target that can be called, a copy for each law, keys as well as queries."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import torch

from ropewalk.check.adapters import Adapter, Bias, Rotation, fresh
from ropewalk.check.outside import rotation
from ropewalk.check.outside.common import random
from ropewalk.check.outside.measure import images
from ropewalk.check.verdict import Finding, NotApplicable
from ropewalk.errors import message

OTHERWISE = "frequencies differ from what is stated"
# Laws that compare angles with the stated ones; they would say again what the law of frequencies says.
OF_ANGLES = ("precision", "half_precision", "bounds")


def on_a_copy(find: Callable) -> Callable:
    """The same law on a copy of its target, which no other law has driven."""

    @functools.wraps(find)
    def copied(target: Adapter) -> Iterator[Finding | str]:
        yield from find(fresh(target))

    return copied


@dataclasses.dataclass(frozen=True)
class _Widened:
    """A function that takes float64 alone, given other data: widened, and rounded once afterwards."""

    f: Callable

    def __call__(self, x, positions):
        return self.f(x.double(), positions).to(x.dtype)


def _accepted(target: Rotation, name: str) -> Rotation:
    """The target as laws can ask it: one that takes float64 alone is asked in float64."""
    if name == "dtypes" or _takes(target, torch.float32) or not _takes(target, torch.float64):
        return target
    if name in ("purity", "half_precision"):
        raise NotApplicable("it takes no float32")
    key = None if target.key is None else _Widened(target.key)
    return dataclasses.replace(target, f=_Widened(target.f), key=key)


def _takes(target: Rotation, dtype: torch.dtype) -> bool:
    try:
        return not _tried(fresh(target), dtype)
    except (TypeError, RuntimeError):
        return False
    except Exception:  # refused for another reason than its dtype
        return True


def of_rotation(find: Callable) -> Callable:
    """The same law of what turns queries, and then of what turns keys."""
    name = find.__name__

    @functools.wraps(find)
    def guarded(target: Rotation) -> Iterator[Finding | str]:
        target = _accepted(target, name)
        if _still(target):
            if name != "frequencies":
                raise NotApplicable("positions change nothing")
            yield Finding(name, "unit vectors at positions 0, 1 and 3", "turned", "the same at each",
                          "positions change nothing", "K11")  # fmt: skip
            return
        if name in OF_ANGLES and _otherwise(target):
            raise NotApplicable(OTHERWISE)
        found = list(find(target))
        yield from found
        broken = any(isinstance(f, Finding) for f in found)
        if target.key is None or name == "distance" or broken:
            return
        of_keys = dataclasses.replace(target, f=target.key, key=None)
        with contextlib.suppress(NotApplicable):
            for f in find(of_keys):
                if isinstance(f, Finding):
                    yield dataclasses.replace(f, input=f"keys, {f.input}")

    return guarded


def _still(target: Rotation) -> bool:
    if target.inv_freq is not None and not any(target.inv_freq):
        return False
    try:
        out = images(fresh(target), [0, 1, 3])
    except Exception:  # refused: the law says so
        return False
    return bool((out == out[:1]).all())


def _otherwise(target: Rotation) -> bool:
    try:
        return any(isinstance(f, Finding) and f.kind in ("K08", "K09") for f in rotation.frequencies(fresh(target)))
    except Exception:  # not measured: the law itself says why
        return False


def check_callable(target: Adapter) -> None:
    """Raises ValueError where a target answers no plain input, in float32 or float64, with a tensor of its shape."""
    got = ""
    for dtype in (torch.float32, torch.float64):
        try:
            got = _tried(fresh(target), dtype)
        except Exception as error:
            got = got or f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            continue
        if not got:
            return
    raise ValueError(message("target", "a function that answers a plain input with a tensor of its shape", got))


def _tried(target: Adapter, dtype: torch.dtype) -> str:
    """What is wrong with the answer for two tokens; empty if nothing is."""
    where = torch.arange(1 if getattr(target, "max_positions", None) == 1 else 2)
    n = len(where)
    if isinstance(target, Rotation):
        x = random(1, 1, n, target.head_dim, dtype=dtype)
        outs, shape = [f(x, where) for f in (target.f, target.key) if f is not None], x.shape
    elif isinstance(target, Bias):
        outs, shape = [target.f(target.num_heads, where, where)], (target.num_heads, n, n)
    else:
        counts = (target.num_heads, target.num_kv_heads, target.num_kv_heads)
        q, k, v = (random(1, h, n, target.head_dim, seed=i, dtype=dtype) for i, h in enumerate(counts))
        outs, shape = [target.f(q, k, v, where)], q.shape
    for out in outs:
        if not isinstance(out, torch.Tensor):
            return type(out).__name__
        if out.shape != shape:
            return f"shape {tuple(out.shape)} for {tuple(shape)}"
    return ""

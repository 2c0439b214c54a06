"""Rounds in which everything takes its turn, ratios within a round, peak memory: what all benchmarks share.

Every round times each call once, in an order that rotates from round to round, and a ratio is taken within its
round.  So a machine that slows down for a while slows both sides of a ratio.

Peak memory is what the allocator hands out at once while one call runs, beyond what exists before: on a CPU by
adding up the profiler's allocation events, on a GPU by its peak counter.  It does not depend on what the process
did before, as resident-set figures do, and does not see scratch that a library takes from the system itself.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

from ropewalk import kernels
from ropewalk._version import __version__
from ropewalk.errors import require, require_device

SAMPLE_SECONDS = 0.002
WARM_SECONDS = 0.1
ROUNDS = (3, 31)
FRESH_BYTES = 1 << 26
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}

Call = Callable[[], Any]


@runtime_checkable
class Where(Protocol):
    """All that timing needs to know of a plan."""

    @property
    def device(self) -> str: ...


def check_common(plan: Any) -> None:
    """ValueError unless a plan's device, dtype and budget can be used."""
    require(plan.budget_seconds > 0, "budget_seconds", "positive", plan.budget_seconds)
    require_device(plan.device)
    require(plan.dtype in DTYPES, "dtype", f"one of {', '.join(DTYPES)}", plan.dtype)


def _synchronise(plan: Where) -> None:
    if torch.device(plan.device).type == "cuda":
        torch.cuda.synchronize()


def clock(plan: Where) -> str:
    """What is read: "cpu" time of one thread, which other processes cannot lengthen, else the "wall" clock."""
    return "cpu" if torch.device(plan.device).type == "cpu" and torch.get_num_threads() == 1 else "wall"


def seconds(plan: Where, call: Call, repeats: int = 1, now: Callable[[], float] | None = None) -> float:
    """Time of one call, as the mean of `repeats` in a row, by the plan's clock or by `now`."""
    now = now or (time.process_time if clock(plan) == "cpu" else time.perf_counter)
    _synchronise(plan)
    started = now()
    for _ in range(repeats):
        call()
    _synchronise(plan)
    return (now() - started) / repeats


def peak_bytes(plan: Where, call: Call) -> int:
    """Most bytes that the allocator had handed out at once during one call, beyond what was there before."""
    if torch.device(plan.device).type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # kineto writes its stages to stderr otherwise
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        call()
    events = cast(Any, profiler.profiler).kineto_results.events()
    steps = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate((size for _, size in steps), initial=0))


def _quartiles(values: Sequence[float]) -> list[float]:
    ends = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    return torch.quantile(torch.tensor(values, dtype=torch.float64), ends).tolist()


def medians(ratios: Sequence[float]) -> dict[str, float]:
    """The median with the middle half around it.

    >>> medians([1.0, 2.0, 3.0, 4.0, 10.0])
    {'ratio': 3.0, 'low': 2.0, 'high': 4.0}
    """
    return dict(zip(("ratio", "low", "high"), _quartiles(ratios), strict=True))


class Race:
    """Calls that take turns, and the times gathered so far."""

    def __init__(self, plan: Where, calls: dict[Any, Call]):
        self.plan, self.calls = plan, calls
        self.times: dict[Any, list[float]] = {key: [] for key in calls}
        self.repeats = dict.fromkeys(calls, 1)

    def warm_up(self) -> None:
        """Run everything unmeasured, twice if it is short, and choose how often a short call repeats."""
        for key, call in self.calls.items():
            once = seconds(self.plan, call)
            if once < WARM_SECONDS:
                once = seconds(self.plan, call)
            self.repeats[key] = max(1, math.ceil(SAMPLE_SECONDS / max(once, 1e-7)))

    def round(self, number: int) -> None:
        """Time each call once; each round begins with another one."""
        keys = list(self.calls)
        for key in keys[number % len(keys) :] + keys[: number % len(keys)]:
            self.times[key].append(seconds(self.plan, self.calls[key], self.repeats[key]))

    def run(self, within: float, rounds: tuple[int, int] | None = None) -> int:
        """Warm up and time: at least the fewest rounds, then as many as begin `within` seconds; how many it were."""
        rounds = rounds or ROUNDS
        started = time.perf_counter()
        self.warm_up()
        number = 0
        while number < rounds[0] or (number < rounds[1] and time.perf_counter() - started < within):
            self.round(number)
            number += 1
        return number

    def against(self, key: Any, floor: Any) -> dict[str, float]:
        """Time relative to the call `floor` in the same round, and the median time itself."""
        ratios = [mine / base for mine, base in zip(self.times[key], self.times[floor], strict=True)]
        return {**medians(ratios), "seconds": statistics.median(self.times[key])}

    def beyond(self, key: Any, floor: Any) -> dict[str, float]:
        """Time beyond the call `floor` in the same round, seconds."""
        excess = [mine - base for mine, base in zip(self.times[key], self.times[floor], strict=True)]
        return dict(zip(("median", "low", "high"), _quartiles(excess), strict=True))


def gap(got: Tensor, wanted: Tensor) -> float:
    """Root mean square of the difference relative to that of `wanted`; not a number if either has one."""
    return ((got.double() - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()


def verdict(error: Callable[[], float], allowed: float) -> tuple[str, float]:
    """Why what has this error gets no figure (empty if it gets one), and the error."""
    try:
        far = error()
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as problem:
        first = (str(problem).splitlines() or [""])[0]
        return f"raises {type(problem).__name__}: {first}", math.nan
    # a comparison that is false for nan
    return ("" if far <= allowed else f"is off by {far:.1e}, more than {allowed:.0e} allowed"), far


def section(
    plan: Where,
    title: str,
    calls: dict[str, Call],
    within: float,
    errors: dict[str, float],
    refused: dict[str, str],
    beyond: bool = False,
) -> dict[str, Any]:
    """One table of a result: a row for each call, relative to the first, and what has no row, with its reason."""
    race = Race(plan, calls)
    rounds = race.run(within)
    unit = next(iter(calls))
    rows = []
    for name, call in calls.items():
        row = {"name": name, "time": race.against(name, unit), "bytes": peak_bytes(plan, call)}
        row |= {"error": errors.get(name)} | ({"beyond": race.beyond(name, unit)} if beyond else {})
        rows.append(row)
    return {"title": title, "unit": unit, "rounds": rounds, "rows": rows, "refused": refused}


def fresh_cost(plan: Where) -> float:
    """Time to fill a new tensor of 64 MiB relative to filling one that is there.

    About 1 where the allocator keeps freed memory, 2 to 10 where the system hands out new pages at every call: then
    everything that returns a new tensor is slower by that, and what works in place is not.
    """
    old = torch.zeros(FRESH_BYTES // 4, device=plan.device)
    race = Race(plan, {"fresh": lambda: torch.empty_like(old).fill_(1.0), "old": lambda: old.fill_(1.0)})
    race.run(0.0, (5, 5))
    return race.against("fresh", "old")["ratio"]


def processor() -> str:
    """The processor's name and the vector instructions that torch uses on it."""
    name = platform.processor() or platform.machine()
    listed = pathlib.Path("/proc/cpuinfo")
    if listed.exists():
        named = (line.partition(":")[2] for line in listed.read_text().splitlines() if line.startswith("model name"))
        name = next(named, name).strip()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"


def machine(plan: Where | None = None) -> str:
    """Processor, threads, versions and the rotation at hand: what the figures hold for."""
    where = processor()
    if plan is not None and torch.device(plan.device).type == "cuda":
        where = f"{torch.cuda.get_device_name(plan.device)}, {where}"
    threads = torch.get_num_threads()
    return (
        f"{where}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}, ropewalk {__version__},"
        f" rotation: {running_kernel()}"
    )


def running_kernel() -> str:
    """The fastest rotation that this machine has."""
    return next(f"{name} ({found.note})" for name, found in kernels.available().items() if found.usable)


def setting(plan: Where) -> dict[str, Any]:
    """Where and how time is read."""
    return {"machine": machine(plan), "clock": clock(plan), "fresh": round(fresh_cost(plan), 2)}


def described(what: str, plan: Any, started: float) -> dict[str, Any]:
    """What every result says besides its figures."""
    took = round(time.perf_counter() - started, 2)
    return {"what": what, "format": 1, "settings": dataclasses.asdict(plan), **setting(plan), "seconds": took}

"""What attention costs with each encoding: time and peak memory, relative to attention without an encoding.

One process, one interleaved run: every round times each variant once, in an order that rotates from round to
round, and a ratio is taken within its round.  So a machine that slows down for a while slows both sides of a
ratio.  Reported are medians of ratios with the middle half of the rounds.

Peak memory is what the allocator hands out at once while one step runs, beyond the inputs that exist before: on a
CPU by adding up the profiler's allocation events, on a GPU by its peak counter.  It does not depend on what the
process did before, as resident-set figures do, and does not see scratch that a library takes from the system itself.

An absolute encoding is added once per model and not once per layer; its row adds it to one layer's attention, so it
is an upper bound.
"""

import dataclasses
import functools
import itertools
import math
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk._version import __version__
from ropewalk.attention import attend
from ropewalk.compat import apply_rotary_pos_emb, get_alibi_biases
from ropewalk.encodings import Encoding, Rotary
from ropewalk.errors import require, require_count, require_device
from ropewalk.naming import build

ENCODINGS = ("rotary", "alibi", "rotary+alibi", "sinusoidal", "learned")
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
# largest difference from the reference backend, relative to its largest value
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CHECKED = (48, 640)
SAMPLE_SECONDS = 0.002
WARM_SECONDS = 0.1
PROBED = 512
ROUNDS = (3, 31)
MODES = ("forward", "training")
TUTORIAL = (
    "The tutorial's own comparison: building ALiBi's n x n bias against rotating q and k, neither of which attends."
    " It hides that an n x n bias still has to be read by an attention that holds n x n scores, that rotation grows"
    " with n and the bias with n x n, and that causal ALiBi needs no such bias at all."
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.  `budget_seconds` bounds the whole run: longer lengths are left out, by name, if need be."""

    encodings: tuple[str, ...] = ENCODINGS
    lengths: tuple[int, ...] = LENGTHS
    num_heads: int = 8
    head_dim: int = 64
    batch_size: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    budget_seconds: float = 120.0
    seed: int = 0

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "batch_size"):
            require_count(getattr(self, name), name)
        require(bool(self.lengths), "lengths", "at least one length", "none")
        for seq_len in self.lengths:
            require_count(seq_len, "lengths", at_least=2)
        require(self.budget_seconds > 0, "budget_seconds", "positive", self.budget_seconds)
        require_device(self.device)
        known = {str(dtype).removeprefix("torch."): dtype for dtype in TOLERANCE}
        require(self.dtype in known, "dtype", f"one of {', '.join(sorted(known))}", self.dtype)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def build(self, name: str) -> Encoding:
        """The encoding by its command-line name, with this plan's sizes."""
        dims = {"head_dim": self.head_dim, "num_heads": self.num_heads, "model_dim": self.num_heads * self.head_dim}
        return build(name, num_positions=max(*self.lengths, *CHECKED), **dims).to(self.device)


class Inputs:
    """Seeded queries, keys, values and embeddings of one length, laid out as a projection leaves them."""

    def __init__(self, plan: Plan, seq_len: int):
        generator = torch.Generator().manual_seed(plan.seed)
        shape = (plan.batch_size, seq_len, plan.num_heads, plan.head_dim)

        def draw() -> Tensor:
            return torch.randn(shape, generator=generator).to(plan.device, plan.torch_dtype)

        self.q, self.k, self.v = (draw().transpose(1, 2).requires_grad_() for _ in range(3))
        self.x = draw().flatten(2).requires_grad_()
        self.positions = torch.arange(seq_len, device=plan.device)
        self.grad = draw().transpose(1, 2)


Step = Callable[[Inputs], tuple[Tensor, ...]]


def encoded(plan: Plan, encoding: Encoding | None, backend: str = "auto") -> Step:
    """Attention with this encoding, and the embedding that it adds, where it adds one."""
    adds = encoding is not None and _adds(plan, encoding)

    def step(inputs: Inputs) -> tuple[Tensor, ...]:
        out = attend(inputs.q, inputs.k, inputs.v, encoding, backend=backend)
        assert isinstance(out, Tensor)
        if encoding is None or not adds:
            return (out,)
        return out, encoding.embed(inputs.x, encoding.at(inputs.positions, inputs.x.dtype))

    return step


def _adds(plan: Plan, encoding: Encoding) -> bool:
    """Whether the encoding changes the embedding at all."""
    x = torch.zeros(1, 2, plan.num_heads * plan.head_dim, dtype=plan.torch_dtype, device=plan.device)
    return encoding.embed(x, encoding.at(torch.arange(2, device=plan.device), plan.torch_dtype)) is not x


def plain(inputs: Inputs) -> tuple[Tensor, ...]:
    """torch's own causal attention: the floor under this library's."""
    return (F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True),)


def forward(step: Step, inputs: Inputs) -> tuple[Tensor, ...]:
    """One step as in inference."""
    with torch.no_grad():
        return step(inputs)


def training(step: Step, inputs: Inputs) -> tuple[Tensor, ...]:
    """One step with the gradients of everything that came in."""
    outs = step(inputs)
    wanted = [inputs.q, inputs.k, inputs.v, *([inputs.x] if len(outs) > 1 else [])]
    grads = [inputs.grad, *([torch.ones_like(outs[1])] if len(outs) > 1 else [])]
    return (*outs, *torch.autograd.grad(outs, wanted, grads))


RUN: dict[str, Callable[[Step, Inputs], tuple[Tensor, ...]]] = {"forward": forward, "training": training}


def disagreement(plan: Plan, encoding: Encoding, seq_len: int) -> float:
    """Largest difference between the measured backend and the reference, values and gradients, relative to the
    reference's largest value; not a number if either has one."""
    inputs = Inputs(plan, seq_len)
    worst = 0.0
    measured = training(encoded(plan, encoding), inputs)
    for got, wanted in zip(measured, training(encoded(plan, encoding, "reference"), inputs), strict=True):
        gap = ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1)).item()
        worst = gap if gap > worst or math.isnan(gap) else worst
    return worst


def refusals(plan: Plan) -> dict[str, str]:
    """Encodings whose figures must not be printed, because what would be timed is not what it should be."""
    refused = {}
    for name in plan.encodings:
        encoding = plan.build(name)
        for seq_len in CHECKED:
            gap = disagreement(plan, encoding, seq_len)
            if not gap <= TOLERANCE[plan.torch_dtype]:
                refused[name] = (
                    f"differs from the reference backend by {gap:.1e} of its largest value at {seq_len}"
                    f" tokens, more than {TOLERANCE[plan.torch_dtype]:.0e} allowed in {plan.dtype}"
                )
                break
    return refused


def _synchronise(plan: Plan) -> None:
    if torch.device(plan.device).type == "cuda":
        torch.cuda.synchronize()


def clock(plan: Plan) -> str:
    """What is read: "cpu" time of one thread, which other processes cannot lengthen, else the "wall" clock."""
    return "cpu" if torch.device(plan.device).type == "cpu" and torch.get_num_threads() == 1 else "wall"


def seconds(plan: Plan, call: Callable[[], Any], repeats: int = 1, now: Callable[[], float] | None = None) -> float:
    """Time of one call, as the mean of `repeats` in a row, by the plan's clock or by `now`."""
    now = now or (time.process_time if clock(plan) == "cpu" else time.perf_counter)
    _synchronise(plan)
    started = now()
    for _ in range(repeats):
        call()
    _synchronise(plan)
    return (now() - started) / repeats


def peak_bytes(plan: Plan, call: Callable[[], Any]) -> int:
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


def medians(ratios: Sequence[float]) -> dict[str, float]:
    """The median with the middle half around it.

    >>> medians([1.0, 2.0, 3.0, 4.0, 10.0])
    {'ratio': 3.0, 'low': 2.0, 'high': 4.0}
    """
    ends = torch.quantile(torch.tensor(ratios, dtype=torch.float64), torch.tensor([0.5, 0.25, 0.75]).double())
    return dict(zip(("ratio", "low", "high"), ends.tolist(), strict=True))


def _tutorial_steps(plan: Plan, inputs: Inputs) -> dict[str, Callable[[], Any]]:
    at = Rotary(plan.head_dim).at(inputs.positions)
    assert at.cos is not None and at.sin is not None
    cos, sin = (torch.cat((table, table), -1).to(plan.torch_dtype) for table in (at.cos, at.sin))
    ids = inputs.positions.expand(plan.batch_size, -1)
    seq_len = len(inputs.positions)
    return {
        "build_bias": lambda: get_alibi_biases(plan.num_heads, seq_len),
        "rotate": lambda: apply_rotary_pos_emb(inputs.q.detach(), inputs.k.detach(), cos, sin, ids),
    }


class Length:
    """Everything that is timed at one length, and the ratios gathered so far."""

    def __init__(self, plan: Plan, steps: dict[str, Step], seq_len: int):
        self.plan, self.seq_len = plan, seq_len
        inputs = Inputs(plan, seq_len)
        self.calls: dict[tuple[str, str], Callable[[], Any]] = {
            (name, mode): functools.partial(RUN[mode], step, inputs) for name, step in steps.items() for mode in MODES
        }
        self.tutorial = _tutorial_steps(plan, inputs)
        self.calls |= {(name, "forward"): call for name, call in self.tutorial.items()}
        self.times: dict[tuple[str, str], list[float]] = {key: [] for key in self.calls}
        self.repeats = dict.fromkeys(self.calls, 1)

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

    def against_none(self, key: tuple[str, str]) -> dict[str, float]:
        """Time relative to attention without an encoding in the same mode and round."""
        floor = self.times["none", key[1]]
        ratios = [mine / base for mine, base in zip(self.times[key], floor, strict=True)]
        middle = torch.tensor(self.times[key], dtype=torch.float64).median().item()
        return {**medians(ratios), "seconds": middle}

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row per variant that attends."""
        peaks = {key: peak_bytes(self.plan, call) for key, call in self.calls.items() if key[0] not in self.tutorial}
        for name in dict.fromkeys(key[0] for key in peaks):
            row: dict[str, Any] = {"name": name, "seq_len": self.seq_len, "rounds": len(self.times[name, "forward"])}
            for mode in MODES:
                row[mode] = self.against_none((name, mode))
                peak, base = peaks[name, mode], peaks["none", mode]
                row[f"{mode}_memory"] = {"ratio": peak / base, "bytes": peak}
            yield row

    def tutorial_row(self) -> dict[str, Any]:
        """What the tutorial times, relative to one forward attention without an encoding."""
        bias = self.plan.num_heads * self.seq_len**2 * 4
        parts = {name: self.against_none((name, "forward")) for name in self.tutorial}
        return {"seq_len": self.seq_len, "bias_bytes": bias, **parts}


def run(plan: Plan | None = None, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; the result is plain JSON.

    Args:
        plan: what to measure, by default every encoding at 128 ... 4096 tokens within two minutes.
        progress: called with one line before each length.

    Returns:
        "rows": per encoding and length, for "forward" and "training" (forward + backward) the "ratio" to attention
        without an encoding with the "low" and "high" quartile over rounds and the median "seconds", and under
        "forward_memory" and "training_memory" the peak "bytes" with their "ratio".
        "refused", "skipped": what has no figures, and why.  "tutorial", "tutorial_note": the other comparison.
    """
    plan = plan or Plan()
    started = time.perf_counter()
    refused = refusals(plan)
    steps: dict[str, Step] = {"none": encoded(plan, None), "torch": plain}
    steps |= {name: encoded(plan, plan.build(name)) for name in plan.encodings if name not in refused}
    skipped, measured = {}, {}
    # the longest first: what it leaves is plenty for the others
    for seq_len in sorted(plan.lengths, reverse=True):
        left = plan.budget_seconds - (time.perf_counter() - started)
        length = _measure(plan, steps, seq_len, left, progress)
        if length is None:
            skipped[str(seq_len)] = (
                f"not within {plan.budget_seconds:g} seconds; ropewalk bench --lengths {seq_len} measures it"
            )
        else:
            measured[seq_len] = list(length.rows()), length.tutorial_row()
    rows = [row for seq_len in sorted(measured) for row in measured[seq_len][0]]
    return {
        "format": 1,
        "settings": dataclasses.asdict(plan),
        "machine": machine(),
        "clock": clock(plan),
        "rows": rows,
        "refused": refused,
        "skipped": skipped,
        "tutorial": [measured[seq_len][1] for seq_len in sorted(measured)],
        "tutorial_note": TUTORIAL,
        "seconds": round(time.perf_counter() - started, 2),
    }


def for_study(settings: dict[str, Any], budget_seconds: float = 14.0) -> dict[str, Any]:
    """The cost of a study's encodings at its head sizes, in a few seconds: what its report draws.

    Args:
        settings: `Settings.to_json()` of the study.
        budget_seconds: bound of the whole measurement.
    """
    names = tuple(name for name in settings["encodings"] if name != "nope")
    heads = settings["num_heads"]
    return run(Plan(names, LENGTHS, heads, settings["model_dim"] // heads, budget_seconds=budget_seconds))


def _measure(
    plan: Plan, steps: dict[str, Step], seq_len: int, left: float, progress: Callable[[str], None]
) -> Length | None:
    """All rounds at one length, or None where not even the fewest fit into the seconds that are left."""
    progress(f"{seq_len} tokens")
    if left <= 0:
        return None
    # warm-up, the fewest rounds and the memory pass of all variants; a forward pass is a third of a training pass,
    # what the tutorial does about two of those
    if _expected_seconds(plan, steps["none"], seq_len) * (ROUNDS[0] + 2) * (len(steps) + 1) * 4 / 3 > left:
        return None
    started = time.perf_counter()
    length = Length(plan, steps, seq_len)
    length.warm_up()
    number = 0
    while number < ROUNDS[0] or (number < ROUNDS[1] and time.perf_counter() - started < left / 3):
        length.round(number)
        number += 1
    return length


def _expected_seconds(plan: Plan, step: Step, seq_len: int) -> float:
    """Wall time of one training pass, from a short one: attention grows with the square of the length."""
    probed = min(seq_len, PROBED)
    call = functools.partial(training, step, Inputs(plan, probed))
    call()
    return seconds(plan, call, now=time.perf_counter) * (seq_len / probed) ** 2


def machine() -> str:
    """Processor, threads and torch: what the figures hold for."""
    where = platform.processor() or platform.machine()
    return f"{where}, {torch.get_num_threads()} threads, torch {torch.__version__}, ropewalk {__version__}"


def table(result: dict[str, Any]) -> str:
    """The result as plain text."""
    head = f"{'encoding':<16}{'tokens':>8}{'forward':>22}{'forward + backward':>22}{'memory f':>10}{'memory f+b':>11}"
    lines = ["Attention relative to attention without an encoding: median [middle half of the rounds]", head]
    for row in result["rows"]:
        cells = [f"{row[mode]['ratio']:.2f} [{row[mode]['low']:.2f}, {row[mode]['high']:.2f}]" for mode in MODES]
        peaks = [f"{row[f'{mode}_memory']['ratio']:.2f}" for mode in MODES]
        lines.append(f"{row['name']:<16}{row['seq_len']:>8}{cells[0]:>22}{cells[1]:>22}{peaks[0]:>10}{peaks[1]:>11}")
    lines += [f"{name}: no figures, it {reason}" for name, reason in result["refused"].items()]
    lines += [f"{seq_len} tokens: left out, {reason}" for seq_len, reason in result["skipped"].items()]
    lines += ["", result["tutorial_note"], f"{'tokens':>8}{'build bias':>14}{'rotate q, k':>14}{'bias, MiB':>12}"]
    for row in result["tutorial"]:
        pair = "".join(f"{row[name]['ratio']:>14.3f}" for name in ("build_bias", "rotate"))
        lines.append(f"{row['seq_len']:>8}{pair}{row['bias_bytes'] / 2**20:>12.1f}")
    lines += ["(both relative to one forward attention without an encoding)", ""]
    lines.append(f"{result['clock']} time on {result['machine']}")
    return "\n".join(lines)

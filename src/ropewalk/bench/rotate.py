"""What turning queries and keys costs, relative to copying them, and what the tables of angles cost.

q and k lie either head by head in memory or token by token, as a model's projections leave them.  Under "forward +
backward" the unit is two copies; there q and k come out of a node of the graph that costs nothing, so that they may
be turned in place, and everything that is timed gets them in this way.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ropewalk import kernels
from ropewalk.bench import peers, timing
from ropewalk.bench.peers import Rotate
from ropewalk.encodings import Rotary, rotate, rotate_
from ropewalk.errors import require, require_count

# Largest error relative to the largest input: one rounding for ours; float32 angles and rounded products for others.
OURS = {torch.float64: 1e-8, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 5e-3}
OTHERS = {torch.float64: 5e-4, torch.float32: 5e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
OUR_TABLES, OTHER_TABLES = 5e-7, 2e-2
ORDERS = ("head-major", "token-major")
TOKEN_POSITION = 1000
SECTIONS = 6


@dataclasses.dataclass(frozen=True)
class RotatePlan:
    """What is turned.  `budget_seconds` bounds the rounds; each section is timed three times at least."""

    batch_size: int = 1
    num_heads: int = 32
    num_kv_heads: int = 8
    seq_len: int = 2048
    head_dim: int = 128
    dtype: str = "float32"
    device: str = "cpu"
    token_batch: int = 8
    table_positions: int = 131_072
    compiled: bool = False
    peers: bool = True
    budget_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self):
        for name in ("batch_size", "num_heads", "num_kv_heads", "seq_len", "token_batch", "table_positions"):
            require_count(getattr(self, name), name)
        require(require_count(self.head_dim, "head_dim", at_least=2) % 2 == 0, "head_dim", "even", self.head_dim)
        timing.check_common(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return timing.DTYPES[self.dtype]

    def draw(self, order: str, batch_size: int, seq_len: int) -> list[Tensor]:
        """q, k and a gradient for each, (batch, heads, seq, head_dim), unit normal."""
        generator = torch.Generator().manual_seed(self.seed)
        drawn = []
        for heads in (self.num_heads, self.num_kv_heads) * 2:
            x = torch.randn((batch_size, heads, seq_len, self.head_dim), generator=generator)
            x = x.to(self.device, self.torch_dtype)
            drawn.append(x.transpose(1, 2).contiguous().transpose(1, 2) if order == "token-major" else x)
        return drawn


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to turn q and k, and how far it may be from the exact turn."""

    run: Rotate
    layout: str
    tolerance: dict[torch.dtype, float]
    path: str | None = None
    """Which of this library's kernels it takes."""


def exact(x: Tensor, positions: Tensor, layout: str) -> Tensor:
    """The turn in float64, each pair of channels as a complex number times exp(i position inv_freq)."""
    pairs = x.shape[-1] // 2
    inv_freq = peers.BASE ** (-torch.arange(pairs, dtype=torch.float64, device=x.device) / pairs)
    angles = positions.double()[:, None] * inv_freq
    x = x.double()
    a, b = (x[..., :pairs], x[..., pairs:]) if layout == "half" else (x[..., ::2], x[..., 1::2])
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)
    if layout == "half":
        return torch.cat((turned.real, turned.imag), dim=-1)
    return torch.view_as_real(turned).flatten(-2)


class _Fresh(torch.autograd.Function):
    """`held` as the output of a node of the graph, at no cost: what a projection hands on."""

    @staticmethod
    def forward(ctx, leaf, held):
        return held.detach()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0], None


def leaves_of(held: Sequence[Tensor]) -> list[Tensor]:
    """What gradients are asked of: of the shapes of q and k, and of no size in memory."""
    return [torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape).requires_grad_() for x in held[:2]]


def training(run: Rotate, tensors: Sequence[Tensor], leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Turned q and k, and the gradients with respect to what they were."""
    held, grads = tensors[:2], tensors[2:]
    q, k = (_Fresh.apply(leaf, x) for leaf, x in zip(leaves, held, strict=True))
    outs = run(q, k)  # pyright: ignore[reportArgumentType]
    return (*outs, *torch.autograd.grad(outs, leaves, grads))


def error(way: Way, tensors: Sequence[Tensor], positions: Tensor) -> float:
    """Largest difference of values and gradients from the exact turn; not a number if there is one.

    Raises:
        ValueError: a result has another dtype than the input.
    """
    held = [x.clone() for x in tensors]
    results = training(way.run, held, leaves_of(held))
    worst = 0.0
    for got, x, places in zip(results, tensors, (positions, positions, -positions, -positions), strict=True):
        if got.dtype != x.dtype:
            raise ValueError(f"{str(got.dtype)[6:]} comes out where {str(x.dtype)[6:]} went in")
        gap = (got.double() - exact(x, places, way.layout)).abs().max().item()
        worst = worst if gap <= worst else gap
    return worst


def _ours(plan: RotatePlan, positions: Tensor, q: Tensor) -> dict[str, Way]:
    ways = {}
    for layout in ("half", "interleaved"):
        at = Rotary(plan.head_dim, layout=layout).at(positions, plan.torch_dtype)

        def pair(turn: Callable[..., Tensor], q: Tensor, k: Tensor, at=at, layout=layout) -> tuple[Tensor, Tensor]:
            return turn(q, at, layout), turn(k, at, layout)

        assert at.cos is not None and at.sin is not None
        for name, turn, in_place in (("ropewalk in place", rotate_, True), ("ropewalk", rotate, False)):
            path = kernels.path(q, at.cos, at.sin, layout, in_place)
            ways[f"{name}, {layout}"] = Way(functools.partial(pair, turn), layout, OURS, path)
        if plan.compiled:
            compiled = torch.compile(functools.partial(pair, rotate), fullgraph=True)
            ways[f"ropewalk compiled, {layout}"] = Way(compiled, layout, OURS, "formula")
    return ways


def ways(plan: RotatePlan, positions: Tensor, q: Tensor) -> dict[str, Way]:
    """Everything that can turn here, by the name of its row."""
    found = _ours(plan, positions, q)
    rotations = (peers.ROTATIONS if plan.peers else {}) | (peers.COMPILED if plan.peers and plan.compiled else {})
    missing = peers.missing(rotation.needs for rotation in rotations.values())
    for name, rotation in rotations.items():
        if rotation.needs not in missing:
            run = rotation.prepare(positions, plan.head_dim, plan.torch_dtype)
            found[name] = Way(run, rotation.layout, OTHERS)
    return found


class Field:
    """Some ways and the tensors that they turn: what passes may be timed."""

    def __init__(self, plan: RotatePlan, tensors: Sequence[Tensor], positions: Tensor):
        self.plan, self.tensors = plan, tensors
        self.ways: dict[str, Way] = {}
        self.errors: dict[str, float] = {}
        self.refused: dict[str, str] = {}
        largest = max(x.abs().max().item() for x in tensors)
        for name, way in ways(plan, positions, tensors[0]).items():
            judged = functools.partial(error, way, tensors, positions)
            reason, far = timing.verdict(judged, way.tolerance[plan.torch_dtype] * largest)
            if reason:
                self.refused[name] = reason
            else:
                self.ways[name], self.errors[name] = way, far

    def measure(self, title: str, limits: dict[str, timing.Call], backward: bool, within: float) -> dict[str, Any]:
        """Rows of the limits, the first of which is the unit, and of what passed."""
        calls = dict(limits)
        leaves = leaves_of(self.tensors)
        for name, way in self.ways.items():
            if backward:
                calls[name] = functools.partial(training, way.run, self.tensors, leaves)
            else:
                calls[name] = functools.partial(way.run, *self.pair)
        with torch.set_grad_enabled(backward):
            section = timing.section(self.plan, title, calls, within, self.errors, self.refused)
        paths = {name: way.path for name, way in self.ways.items()}
        section["rows"] = [{**row, "path": paths.get(row["name"])} for row in section["rows"]]
        return section

    @property
    def pair(self) -> tuple[Tensor, Tensor]:
        """q and k."""
        return self.tensors[0], self.tensors[1]

    def scale(self) -> None:
        """q and k multiplied where they are: the least that any turn in place has to do."""
        for x in self.pair:
            x.mul_(1.0)


def _sequence(plan: RotatePlan, order: str, within: float) -> list[dict[str, Any]]:
    field = Field(plan, plan.draw(order, plan.batch_size, plan.seq_len), torch.arange(plan.seq_len, device=plan.device))
    outs = [torch.empty_like(x) for x in field.pair]

    def copy() -> None:
        for out, x in zip(outs, field.pair, strict=True):
            out.copy_(x)

    limits = {
        "copy": copy,
        "multiply in place": field.scale,
        "copy into new tensors": lambda: [x.clone() for x in field.pair],
    }
    bare = functools.partial(training, lambda q, k: (q, k), field.tensors, leaves_of(field.tensors))
    both = {"two copies": lambda: (copy(), copy()), "the graph alone, nothing turned": bare}
    return [
        field.measure(f"{order}, forward", limits, False, within),
        field.measure(f"{order}, forward + backward", both, True, within),
    ]


def _token(plan: RotatePlan, within: float) -> dict[str, Any]:
    positions = torch.tensor([TOKEN_POSITION], device=plan.device)
    field = Field(dataclasses.replace(plan, compiled=False), plan.draw("head-major", plan.token_batch, 1), positions)
    title = f"one token of {plan.token_batch} sequence{'s' if plan.token_batch > 1 else ''}, forward"
    return field.measure(title, {"multiply in place": field.scale}, False, within)


def table_error(tables: Sequence[Tensor], positions: Tensor, pairs: int, step: int = 1 << 14) -> float:
    """Largest error of cosines and sines of any pair and position, against float64."""
    cos, sin = (table.reshape(len(positions), -1)[:, :pairs] for table in tables)
    ones = torch.cat((torch.ones(pairs), torch.zeros(pairs))).to(positions.device)
    worst = 0.0
    for start in range(0, len(positions), step):
        rows = slice(start, start + step)
        wanted = exact(ones.expand(len(positions[rows]), -1), positions[rows], "half")  # (1, 0) turns to (cos, sin)
        worst = max(worst, (torch.cat((cos[rows], sin[rows]), dim=-1).double() - wanted).abs().max().item())
    return worst


def _tables(plan: RotatePlan, within: float) -> dict[str, Any]:
    positions = torch.arange(plan.table_positions, device=plan.device)
    rotary, inv_freq = Rotary(plan.head_dim), peers.inv_freq(plan.head_dim).to(plan.device)

    def floor() -> tuple[Tensor, Tensor]:
        angles = torch.outer(positions.float(), inv_freq)
        return angles.cos(), angles.sin()

    makers: dict[str, tuple[Callable[[], Any], float]] = {
        "angles in float32": (floor, math.inf),
        "ropewalk": (lambda: rotary.at(positions)[1:3], OUR_TABLES),
    }
    if plan.peers and not peers.missing([peers.LLAMA]):
        module, like = peers.llama_rotary(plan.head_dim).to(plan.device), torch.zeros((), device=plan.device)
        makers["transformers, twice as wide"] = (lambda: module(like, positions[None]), OTHER_TABLES)
    refused, errors = {}, {}
    for name, (make, allowed) in makers.items():
        judged = functools.partial(lambda make: table_error(make(), positions, plan.head_dim // 2), make)
        reason, errors[name] = timing.verdict(judged, allowed)
        if reason:
            refused[name] = reason
    calls = {name: make for name, (make, _) in makers.items() if name not in refused}
    return timing.section(plan, f"tables for {plan.table_positions} positions", calls, within, errors, refused)


def run(plan: RotatePlan | None = None, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; the result is plain JSON.

    Returns:
        "sections": each with "title", "unit", "rounds", "rows" and "refused".  A row has its "name", its "time" (the
        "ratio" to the unit with the "low" and "high" quartile over rounds, the median "seconds"), the "bytes" that
        it holds at its peak beyond what is given, and its largest "error" for unit-normal input.
        "absent": peers that are not installed.
    """
    plan = plan or RotatePlan()
    started = time.perf_counter()
    share = plan.budget_seconds / SECTIONS
    sections = []
    for order in ORDERS:
        progress(f"q and k lie {order}")
        sections += _sequence(plan, order, share)
    progress("one token")
    sections.append(_token(plan, share))
    progress("tables")
    with torch.no_grad():
        sections.append(_tables(plan, share))
    rotations = peers.ROTATIONS.items() if plan.peers else ()
    missing = peers.missing(rotation.needs for _, rotation in rotations)
    absent = {name: missing[rotation.needs] for name, rotation in rotations if rotation.needs in missing}
    copied = (plan.num_heads + plan.num_kv_heads) * plan.batch_size * plan.seq_len * plan.head_dim
    return {
        **timing.described("rotate", plan, started),
        "sections": sections,
        "absent": absent,
        "copied_bytes": copied * plan.torch_dtype.itemsize,
    }

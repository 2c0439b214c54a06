"""The ways to attend that are timed, and whether each gives the right numbers."""

import dataclasses
import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention import attend
from ropewalk.attention.attend import BACKENDS
from ropewalk.bench import peers, timing
from ropewalk.bench.distances import T5Like
from ropewalk.encodings import ALiBi, Encoding
from ropewalk.errors import require, require_count
from ropewalk.naming import build

ENCODINGS = ("rotary", "alibi", "rotary+alibi", "sinusoidal", "learned")
SYMMETRIC = ("alibi", "t5-like")
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
# largest difference from the reference backend, relative to its largest value; also the largest root mean square of
# the difference from float64, relative to its own
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
CHECKED = (48, 640)
SAMPLED = 32
MODES = ("forward", "training")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.  `budget_seconds` bounds the whole run: longer lengths are left out, by name, if need be.

    `backends` are those that biases by distance are timed on besides the chosen one, as far as they exist; `floor` is
    the row that is 1, "torch" or "none" (this library's attention without an encoding).
    """

    encodings: tuple[str, ...] = ENCODINGS
    lengths: tuple[int, ...] = LENGTHS
    num_heads: int = 8
    head_dim: int = 64
    batch_size: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    causal: bool = True
    backends: tuple[str, ...] = ("sdpa", "banded")
    modes: tuple[str, ...] = MODES
    peers: bool = True
    floor: str = "torch"
    budget_seconds: float = 240.0
    seed: int = 0

    def __post_init__(self):
        for name in ("num_heads", "head_dim", "batch_size"):
            require_count(getattr(self, name), name)
        require(bool(self.lengths), "lengths", "at least one length", "none")
        for seq_len in self.lengths:
            require_count(seq_len, "lengths", at_least=2)
        require(set(self.modes) <= set(MODES) and bool(self.modes), "modes", f"among {', '.join(MODES)}", self.modes)
        require(self.floor in ("torch", "none"), "floor", "torch or none", repr(self.floor))
        timing.check_common(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return timing.DTYPES[self.dtype]

    def build(self, name: str) -> Encoding:
        """The encoding by its command-line name, with this plan's sizes."""
        if name == "t5-like":
            return T5Like(self.num_heads)
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


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way to attend: what runs, what it is to compute, and what it needs."""

    step: Step
    encoding: Encoding | None = None
    dense: bool = False
    """Holds n x n scores."""
    fresh: Callable[[], Step] | None = None
    """Makes the step anew, where it keeps what it made: memory is measured with nothing kept."""


def encoded(plan: Plan, encoding: Encoding | None, backend: str = "auto") -> Step:
    """Attention with this encoding, and the embedding that it adds, where it adds one."""
    adds = encoding is not None and _adds(plan, encoding)

    def step(inputs: Inputs) -> tuple[Tensor, ...]:
        out = attend(inputs.q, inputs.k, inputs.v, encoding, causal=plan.causal, backend=backend)
        assert isinstance(out, Tensor)
        if encoding is None or not adds:
            return (out,)
        return out, encoding.embed(inputs.x, encoding.at(inputs.positions, inputs.x.dtype))

    return step


def _adds(plan: Plan, encoding: Encoding) -> bool:
    """Whether the encoding changes the embedding at all."""
    x = torch.zeros(1, 2, plan.num_heads * plan.head_dim, dtype=plan.torch_dtype, device=plan.device)
    return encoding.embed(x, encoding.at(torch.arange(2, device=plan.device), plan.torch_dtype)) is not x


def plain(inputs: Inputs, causal: bool = True) -> tuple[Tensor, ...]:
    """torch's own attention: the floor."""
    return (F.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=causal),)


def _foreign(attends: peers.Attends) -> Step:
    return lambda inputs: (attends(inputs.q, inputs.k, inputs.v),)


def variants(plan: Plan) -> dict[str, Variant]:
    """Everything that can be timed here, by the name of its row."""
    found = {
        "none": Variant(encoded(plan, None)),
        "torch": Variant(functools.partial(plain, causal=plan.causal)),
    }
    for name in plan.encodings:
        encoding = plan.build(name)
        found[name] = Variant(encoded(plan, encoding), encoding)
        for backend in plan.backends if isinstance(encoding, ALiBi | T5Like) else ():
            if backend in BACKENDS:
                found[f"{name}, {backend}"] = Variant(encoded(plan, encoding, backend), encoding)
    if plan.peers and plan.causal and "alibi" in plan.encodings:
        missing = peers.missing(needs for needs, _ in peers.ALIBI.values())
        for name, (needs, make) in peers.ALIBI.items():
            if needs not in missing:
                fresh = functools.partial(lambda make: _foreign(make(plan.num_heads)), make)
                found[name] = Variant(fresh(), plan.build("alibi"), dense=True, fresh=fresh)
    return found


def forward(step: Step, inputs: Inputs) -> tuple[Tensor, ...]:
    """One step as in inference."""
    with torch.no_grad():
        return step(inputs)


def training(step: Step, inputs: Inputs, grad: Tensor | None = None) -> tuple[Tensor, ...]:
    """One step with the gradients of everything that came in."""
    outs = step(inputs)
    wanted = [inputs.q, inputs.k, inputs.v, *([inputs.x] if len(outs) > 1 else [])]
    grads = [inputs.grad if grad is None else grad, *([torch.ones_like(outs[1])] if len(outs) > 1 else [])]
    return (*outs, *torch.autograd.grad(outs, wanted, grads))


RUN: dict[str, Callable[[Step, Inputs], tuple[Tensor, ...]]] = {"forward": forward, "training": training}


def disagreement(plan: Plan, variant: Variant, seq_len: int) -> float:
    """Largest difference between a variant and the reference, values and gradients, relative to the reference's
    largest value; not a number if either has one."""
    inputs = Inputs(plan, seq_len)
    worst = 0.0
    measured = training(variant.step, inputs)
    for got, wanted in zip(measured, training(encoded(plan, variant.encoding, "reference"), inputs), strict=True):
        gap = ((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1)).item()
        worst = gap if gap > worst or math.isnan(gap) else worst
    return worst


def refusals(plan: Plan) -> dict[str, str]:
    """Variants whose figures must not be printed, because what would be timed is not what it should be."""
    refused = {}
    for name, variant in variants(plan).items():
        for seq_len in CHECKED:
            reason, gap = timing.verdict(functools.partial(disagreement, plan, variant, seq_len), allowed(plan))
            if reason:
                refused[name] = reason if reason.startswith("raises") else _differs(plan, gap, seq_len)
                break
    return refused


def allowed(plan: Plan) -> float:
    """The largest difference from the reference that a row may have."""
    return TOLERANCE[plan.torch_dtype]


def _differs(plan: Plan, gap: float, seq_len: int) -> str:
    return (
        f"differs from the reference backend by {gap:.1e} of its largest value at {seq_len} tokens, more than"
        f" {allowed(plan):.0e} allowed in {plan.dtype}"
    )


def errors(plan: Plan, variant: Variant, inputs: Inputs) -> dict[str, float]:
    """Root mean square difference from the reference in float64, relative to its own, at the length at hand.

    Measured at a few queries: their outputs, and the gradients when the gradient of all other outputs is 0.
    """
    seq_len = len(inputs.positions)
    rows = torch.linspace(0, seq_len - 1, min(SAMPLED, seq_len)).round().long().to(plan.device)
    grad = torch.zeros_like(inputs.grad)
    grad[:, :, rows] = inputs.grad[:, :, rows]
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q[:, :, rows], inputs.k, inputs.v))
    where, causal = inputs.positions, plan.causal
    out = attend(q, k, v, variant.encoding, q_positions=rows, k_positions=where, causal=causal, backend="reference")
    assert isinstance(out, Tensor)
    if "training" not in plan.modes:
        return {"forward": timing.gap(forward(variant.step, inputs)[0][:, :, rows], out)}
    wanted = torch.autograd.grad(out, (q, k, v), grad[:, :, rows].double())
    got, *rest = training(variant.step, inputs, grad)
    grads = rest[-4:-1] if len(rest) > 3 else rest  # an embedding's gradient comes last
    gaps = [timing.gap(g[:, :, rows] if g.shape != w.shape else g, w) for g, w in zip(grads, wanted, strict=True)]
    return {"forward": timing.gap(got[:, :, rows], out), "training": max(gaps)}

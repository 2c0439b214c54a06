"""What one step of decoding costs over a long cache, relative to torch's attention over the same keys.

A step encodes one query and one key, appends to a `KVCache` and attends.  The unit does none of that: it is torch's
call alone, on the keys that the step ends with.  The cache is cropped after each step, so that all steps see the
same keys.
"""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ropewalk.attention import KVCache, attend
from ropewalk.bench import timing
from ropewalk.bench.variants import TOLERANCE
from ropewalk.encodings import Encoding, NoPE
from ropewalk.errors import require, require_count
from ropewalk.naming import build

ENCODINGS = ("nope", "rotary", "alibi")
FEW = 64
UNIT = "torch's attention alone"


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """The cache and the heads that one token attends with, once for each number of key heads."""

    cached: int = 32_768
    num_heads: int = 32
    num_kv_heads: tuple[int, ...] = (32, 8)
    head_dim: int = 128
    batch_size: int = 1
    encodings: tuple[str, ...] = ENCODINGS
    dtype: str = "float32"
    device: str = "cpu"
    budget_seconds: float = 60.0
    seed: int = 0

    def __post_init__(self):
        for name in ("cached", "num_heads", "head_dim", "batch_size"):
            require_count(getattr(self, name), name)
        require(bool(self.num_kv_heads), "num_kv_heads", "at least one number", "none")
        for count in self.num_kv_heads:
            require_count(count, "num_kv_heads")
            fits = self.num_heads % count == 0
            require(fits, "num_kv_heads", f"divisors of num_heads ({self.num_heads})", count)
        timing.check_common(self)

    @property
    def torch_dtype(self) -> torch.dtype:
        return timing.DTYPES[self.dtype]

    def draw(self, heads: int, length: int, seed: int) -> Tensor:
        """(batch, heads, length, head_dim), unit normal."""
        generator = torch.Generator().manual_seed(self.seed + seed)
        shape = (self.batch_size, heads, length, self.head_dim)
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(self.device, self.torch_dtype)

    def build(self, name: str) -> Encoding:
        """The encoding by its command-line name."""
        dims = {"head_dim": self.head_dim, "num_heads": self.num_heads, "model_dim": self.num_heads * self.head_dim}
        encoding = build(name, num_positions=self.cached + 1, **dims).to(self.device)
        hint = "an absolute encoding changes no step: nope measures it"
        require(not encoding.is_absolute, "encodings", "ones that take part in attention", name, hint=hint)
        return encoding


class Cached:
    """A filled cache and one more token: q, k and v."""

    def __init__(self, plan: DecodePlan, num_kv_heads: int, length: int):
        self.plan, self.length = plan, length
        self.q = plan.draw(plan.num_heads, 1, 1)
        self.k, self.v = (plan.draw(num_kv_heads, 1, seed) for seed in (2, 3))
        self.cache = KVCache()
        # one slot more than is kept: no step has to make the cache grow
        self.cache.append(*(plan.draw(num_kv_heads, length + 1, seed) for seed in (4, 5)))
        self.cache.crop(length)

    def step(self, encoding: Encoding) -> Tensor:
        """Encode, append, attend."""
        cache = self.cache
        at = encoding.at(cache.next_positions(1, self.q.device), self.q.dtype)
        q, k = encoding.query(self.q, at), encoding.key(self.k, at)
        keys, values = cache.append(k, self.v)
        norm = cache.max_key_norm if encoding.has_bias else None
        out = attend(q, keys, values, encoding, encoded=True, max_key_norm=norm)
        cache.crop(self.length)
        assert isinstance(out, Tensor)
        return out

    def alone(self) -> timing.Call:
        """torch's attention over the cached keys and the new one, ready to be called."""
        keys, values = self.cache.append(self.k, self.v)
        self.cache.crop(self.length)
        grouped = keys.shape[1] != self.q.shape[1]
        return lambda: F.scaled_dot_product_attention(self.q, keys, values, enable_gqa=grouped)

    def exact(self, encoding: Encoding) -> Tensor:
        """What a step gives, in float64, head by head."""
        here = torch.tensor([self.length], device=self.q.device)
        at = encoding.at(here, torch.float64)
        q, k = encoding.query(self.q.double(), at), encoding.key(self.k.double(), at)
        group = q.shape[1] // k.shape[1]
        places = torch.arange(self.length + 1, dtype=torch.float64, device=q.device)
        outs = []
        for head in range(q.shape[1]):
            own = slice(head // group, head // group + 1)
            keys, values = (
                torch.cat((old[:, own].double(), new[:, own].double()), dim=2)
                for old, new in ((self.cache.k, k), (self.cache.v, self.v))
            )
            score = q[:, head : head + 1] @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
            bias = encoding.bias(torch.tensor(head, device=q.device), here.double(), places)
            outs.append((score if bias is None else score + bias).softmax(-1) @ values)
        return torch.cat(outs, dim=1)

    def error(self, encoding: Encoding) -> float:
        """Root mean square difference of a step from float64, relative to its own."""
        return timing.gap(self.step(encoding), self.exact(encoding))


def _steps(plan: DecodePlan, num_kv_heads: int, within: float) -> dict[str, Any]:
    cached = Cached(plan, num_kv_heads, plan.cached)
    alone = cached.alone()
    calls: dict[str, timing.Call] = {UNIT: alone}
    refused: dict[str, str] = {}
    errors = {UNIT: timing.gap(alone(), cached.exact(NoPE()))}
    for name in plan.encodings:
        encoding = plan.build(name)
        judged = functools.partial(cached.error, encoding)
        reason, errors[name] = timing.verdict(judged, TOLERANCE[plan.torch_dtype])
        if reason:
            refused[name] = reason
        else:
            calls[name] = functools.partial(cached.step, encoding)
    title = f"{plan.num_heads} heads of {plan.head_dim} on {num_kv_heads} key heads, {plan.cached} cached keys"
    return timing.section(plan, title, calls, within, errors, refused)


def _overhead(plan: DecodePlan, within: float) -> dict[str, Any]:
    """One query over a few keys, where the call itself is what costs."""
    q = plan.draw(plan.num_heads, 1, 1)
    k, v = (plan.draw(plan.num_heads, FEW, seed) for seed in (2, 3))
    calls: dict[str, timing.Call] = {UNIT: functools.partial(F.scaled_dot_product_attention, q, k, v)}
    refused: dict[str, str] = {}
    errors = {UNIT: timing.gap(calls[UNIT](), _reference(q, k, v, NoPE()))}
    for name in plan.encodings:
        encoding = plan.build(name)
        # keys are encoded already, as a cache holds them
        call = functools.partial(attend, q, k, v, encoding, encoded=True)
        judged = functools.partial(lambda call, e: timing.gap(call(), _reference(q, k, v, e)), call, encoding)
        reason, errors[name] = timing.verdict(judged, TOLERANCE[plan.torch_dtype])
        if reason:
            refused[name] = reason
        else:
            calls[f"attend, {name}"], errors[f"attend, {name}"] = call, errors.pop(name)
    title = f"one query over {FEW} keys, {plan.num_heads} heads of {plan.head_dim}"
    return timing.section(plan, title, calls, within, errors, refused, beyond=True)


def _reference(q: Tensor, k: Tensor, v: Tensor, encoding: Encoding) -> Tensor:
    out = attend(q.double(), k.double(), v.double(), encoding, encoded=True, backend="reference")
    assert isinstance(out, Tensor)
    return out


def run(plan: DecodePlan | None = None, progress: Callable[[str], None] = lambda _: None) -> dict[str, Any]:
    """Measure; the result is plain JSON, with "sections" as in `rotate.run`.

    In the last section, the overhead of `attend`, rows also have "beyond": seconds more than the unit, as "median"
    with "low" and "high" quartile.
    """
    plan = plan or DecodePlan()
    started = time.perf_counter()
    share = plan.budget_seconds / (len(plan.num_kv_heads) + 1)
    sections = []
    with torch.no_grad():
        for count in plan.num_kv_heads:
            progress(f"{count} key heads")
            sections.append(_steps(plan, count, share))
        progress("overhead")
        sections.append(_overhead(plan, share))
    return {**timing.described("decode", plan, started), "sections": sections, "absent": {}}

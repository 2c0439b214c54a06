"""Adapters: a stranger's function or module, with what it is meant to be.

What is stated is checked against behaviour; what is left open is measured and reported.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from decimal import Decimal
from typing import Any, Literal, TypeVar

from torch import nn

from ropewalk._shapes import Tensor
from ropewalk.errors import message, require, require_count

Turn = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Rotation:
    """A function that turns vectors by their positions, `f(x, positions) -> x`.

    Args:
        f: x is (batch, heads, seq, head_dim), positions int64 (seq,); a function, a module, or an object that holds a
            module, which the laws copy and cast.
        head_dim: channels of a head, even.
        key: what turns keys, if that is another function; `f` turns queries then.
        base: of the published rule inv_freq = base^(-2i / rotary_dim).
        inv_freq: radians per token of each pair, instead of a base; floats are taken to be rounded to float64,
            `Decimal` numbers to be exact.
        rotary_dim: channels that turn.
        first_channel: where the channels that turn begin, if their number is stated.
        layout: which channels make a pair: "half" or "interleaved".
        direction: "forward" turns the first channel of a pair towards the second, as published; None: measured.
        magnitude: what turned channels are multiplied by.
        max_positions: positions from here on may be refused.
        exact: its angles are right at any position; otherwise they are held to what float32 angles can reach.
        double: float64 data gets float64 accuracy.
        name: what reports call it.

    >>> import ropewalk as rw
    >>> rope = rw.Rotary(16)
    >>> def turn(x, positions): return rope.query(x, rope.at(positions))
    >>> Rotation(turn, 16, base=10_000.0).name
    'turn'
    """

    f: Turn
    head_dim: int
    _: KW_ONLY
    key: Turn | None = None
    base: float | None = None
    inv_freq: Sequence[float | Decimal] | None = None
    rotary_dim: int | None = None
    first_channel: int = 0
    layout: str | None = None
    direction: Literal["forward", "backward"] | None = "forward"
    magnitude: float | None = None
    max_positions: int | None = None
    exact: bool = False
    double: bool = False
    name: str = ""

    def __post_init__(self):
        _require_function(self.f)
        require_count(self.head_dim, "head_dim", 2)
        require(self.head_dim % 2 == 0, "head_dim", "even", self.head_dim)
        if self.max_positions is not None:
            require_count(self.max_positions, "max_positions")
        require(self.layout in (None, "half", "interleaved"), "layout", "half or interleaved", repr(self.layout))
        known = self.direction in (None, "forward", "backward")
        require(known, "direction", "forward or backward", repr(self.direction))
        require(self.base is None or self.inv_freq is None, "base", "None where inv_freq is given", self.base)
        require(self.base is None or self.base > 0, "base", "positive", self.base)
        width = self.rotary_dim
        even = width is None or (0 < width <= self.head_dim and width % 2 == 0)
        require(even, "rotary_dim", "even, from 2 to head_dim = {0}", width, self.head_dim)
        start, room = require_count(self.first_channel, "first_channel", 0), self.head_dim - (width or 0)
        require(start <= room, "first_channel", "at most head_dim - rotary_dim = {0}", start, room)
        object.__setattr__(self, "name", self.name or _named(self.f))


@dataclass(frozen=True)
class Bias:
    """A function that gives what is added to scores, `f(num_heads, q_positions, k_positions) -> bias`.

    Args:
        f: gives (num_heads, queries, keys); positions are int64, (queries,) and (keys,).
        num_heads: heads that it is asked for; it may refuse other counts.
        rule: what is expected: "alibi", "t5", or "any" bias that depends on distance alone.
        symmetric: keys ahead get the bias of keys as far behind (ALiBi); None: they are not judged.
        num_buckets, max_distance, bidirectional: of T5's rule.
        max_positions: positions from here on may be refused.
        name: what reports call it.

    >>> import torch, ropewalk as rw
    >>> def alibi(num_heads, q_positions, k_positions):
    ...     return rw.ALiBi(num_heads).bias(torch.arange(num_heads)[:, None, None], q_positions[:, None], k_positions)
    >>> Bias(alibi, 8, rule="alibi", symmetric=True).name
    'alibi'
    """

    f: Callable[[int, Tensor, Tensor], Tensor]
    num_heads: int
    _: KW_ONLY
    rule: Literal["alibi", "t5", "any"] = "any"
    symmetric: bool | None = None
    num_buckets: int = 32
    max_distance: int = 128
    bidirectional: bool = True
    max_positions: int | None = None
    name: str = ""

    def __post_init__(self):
        _require_function(self.f)
        require_count(self.num_heads, "num_heads")
        if self.max_positions is not None:
            require_count(self.max_positions, "max_positions")
        require(self.rule in ("alibi", "t5", "any"), "rule", "alibi, t5 or any", repr(self.rule))
        buckets = require_count(self.num_buckets, "num_buckets", 4)
        exact = buckets // (4 if self.bidirectional else 2)
        require(self.max_distance > exact, "max_distance", "above {0}, the single tokens", self.max_distance, exact)
        object.__setattr__(self, "name", self.name or _named(self.f))


@dataclass(frozen=True)
class AttentionFunction:
    """Attention with its encoding inside, `f(q, k, v, positions) -> out`.

    Args:
        f: q is (batch, num_heads, queries, head_dim), k and v (batch, num_kv_heads, keys, head_dim), positions int64
            (keys,) those of the keys; queries are the last of them; none is encoded yet.
        causal: a query sees no later key.
        encodes: positions matter; False for attention without an encoding.
        relative: a common shift of positions changes nothing.
        exact: its angles are right at any position; otherwise they are held to what float32 angles can reach.
        window: keys that a query sees, itself among them; None: all.
        name: what reports call it.
    """

    f: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    _: KW_ONLY
    causal: bool = True
    encodes: bool = True
    relative: bool = True
    exact: bool = False
    window: int | None = None
    name: str = ""

    def __post_init__(self):
        _require_function(self.f)
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            require_count(getattr(self, name), name)
        divides = self.num_heads % self.num_kv_heads == 0
        require(divides, "num_kv_heads", "a divisor of num_heads = {0}", self.num_kv_heads, self.num_heads)
        object.__setattr__(self, "name", self.name or _named(self.f))


Adapter = Rotation | Bias | AttentionFunction
Target = TypeVar("Target", bound=Adapter)


def fresh(target: Target) -> Target:
    """The same target with copies of the modules it holds; functions stay what they are."""
    functions = {name: getattr(target, name) for name in ("f", "key") if getattr(target, name, None) is not None}
    try:
        return replace(target, **copy.deepcopy(functions))
    except Exception:  # a tensor with a graph, a lock: what cannot be copied is used as it is
        return target


def modules_of(target: Adapter) -> list[nn.Module]:
    """The modules that a target's functions are, are methods of, or hold."""
    found: list[nn.Module] = []
    for f in (target.f, getattr(target, "key", None)):
        owner = getattr(f, "__self__", f)
        held = [owner, *getattr(owner, "args", ()), *getattr(owner, "__dict__", {}).values()]
        modules = held[:1] if isinstance(owner, nn.Module) else held
        found += [part for part in modules if isinstance(part, nn.Module) and all(part is not seen for seen in found)]
    return found


def _require_function(f: Any) -> None:
    if not callable(f):
        raise TypeError(message("f", "callable", type(f).__name__))


def _named(f: Any) -> str:
    return getattr(f, "__name__", "") or type(f).__name__

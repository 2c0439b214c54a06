"""Adapters for modules of other libraries: what they compute is asked for in the way that their users ask."""

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ropewalk._shapes import Tensor
from ropewalk.check.adapters import Adapter, AttentionFunction, Bias, Rotation
from ropewalk.errors import message, require


def rotary_embedding_torch(module: Any) -> Rotation:
    """A `rotary_embedding_torch.RotaryEmbedding`: consecutive positions by `rotate_queries_or_keys(x, offset=)`, which
    keeps a table; any others by its angles.

    Args:
        module: for text, without xPos, whose keys are scaled otherwise than its queries.
    """
    require(not module.use_xpos, "module", "without xPos: queries and keys are scaled differently", "use_xpos=True")
    require(module.freqs_for == "lang", "module", "made for text", f"freqs_for={module.freqs_for!r}")
    width = 2 * module.freqs.shape[-1]
    return Rotation(_RotaryEmbeddingTorch(module), width, layout="interleaved", rotary_dim=width, name=_name(module))


@dataclass(frozen=True)
class _RotaryEmbeddingTorch:
    module: Any

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        start = int(positions[0])
        if start >= 0 and torch.equal(positions, torch.arange(start, start + len(positions))):
            return self.module.rotate_queries_or_keys(x, offset=start)
        apply = sys.modules[type(self.module).__module__].apply_rotary_emb
        return apply(self.module(positions / self.module.interpolate_factor), x)


def x_transformers_rotary(module: Any, head_dim: int | None = None) -> Rotation:
    """An `x_transformers` `RotaryEmbedding` with the function of its file that applies it.

    Args:
        module: without xPos, whose keys are scaled otherwise than its queries.
        head_dim: channels of a head; those of the module by default.
    """
    require(module.scale is None, "module", "without xPos: queries and keys are scaled differently", "use_xpos=True")
    width = 2 * module.inv_freq.shape[-1]
    return Rotation(
        _XTransformersRotary(module), head_dim or width, layout="interleaved", rotary_dim=width, name=_name(module)
    )


@dataclass(frozen=True)
class _XTransformersRotary:
    module: Any

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        angles, scale = self.module(positions)
        return sys.modules[type(self.module).__module__].apply_rotary_pos_emb(x, angles, scale)


def x_transformers_alibi(module: Any) -> Bias:
    """An `x_transformers` `AlibiPositionalBias`: consecutive positions that end together by `forward(q_len, k_len)`,
    any others by `forward_custom_pos`; other head counts by a new module."""
    return Bias(_XTransformersBias(module), module.total_heads, rule="alibi", symmetric=True, name=_name(module))


def x_transformers_relative(module: Any) -> Bias:
    """An `x_transformers` `RelativePositionBias`, T5's: it only knows positions from 0, with queries at the end."""
    return Bias(
        _XTransformersBias(module),
        module.relative_attention_bias.embedding_dim,
        rule="t5",
        num_buckets=module.num_buckets,
        max_distance=module.max_distance,
        bidirectional=not module.causal,
        name=_name(module),
    )


@dataclass(frozen=True)
class _XTransformersBias:
    module: Any

    def __call__(self, num_heads: int, q_positions: Tensor, k_positions: Tensor) -> Tensor:
        module = self.module
        if hasattr(module, "slopes") and num_heads != module.total_heads:
            module = type(module)(num_heads)
        low = min(int(q_positions.min()), int(k_positions.min()))
        length = int(max(q_positions.max(), k_positions.max())) - low + 1
        ends = torch.arange(low, low + length)
        if torch.equal(k_positions, ends) and torch.equal(q_positions, ends[length - len(q_positions) :]):
            return module(len(q_positions), length)
        if hasattr(module, "forward_custom_pos"):
            return module.forward_custom_pos(q_positions, k_positions)
        first = int(q_positions.min()) - low  # the module's queries are the last ones
        return module(length - first, length)[:, q_positions - low - first][:, :, k_positions - low]


def transformers_rotary(
    module: Any,
    apply: Callable[..., Any] | None = None,
    *,
    head_dim: int | None = None,
    layer_type: str | None = None,
    layout: str | None = None,
) -> Rotation:
    """A rotary module of transformers, `module(x, position_ids) -> cos, sin`, with what applies them.

    Args:
        apply: takes (q, k, cos, sin), or (x, cos, sin); by default `apply_rotary_pos_emb` of the file that defines the
            module.
        head_dim: by default what the module's config says.
        layer_type: for modules with one table per type of layer.
        layout: "half" or "interleaved"; measured if left open.
    """
    config = module.config
    apply = apply or getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if apply is None:
        hint = "pass the function that turns queries and keys by the module's cosines and sines"
        raise ValueError(message("apply", "given", f"a file without one, {type(module).__module__}", hint))
    width = head_dim or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    rope = rope.get(layer_type, rope) if layer_type is not None else rope
    plain = rope.get("rope_type") == "default"
    both = "k" in inspect.signature(apply).parameters
    turns = [_TransformersRotary(module, apply, layer_type, side) for side in ((0, 1) if both else (None,))]
    return Rotation(
        turns[0],
        width,
        key=turns[-1] if both else None,
        base=float(rope["rope_theta"]) if plain else None,
        rotary_dim=int(width * rope.get("partial_rotary_factor", 1.0)) if plain else None,
        layout=layout,
        direction=None,
        name=_name(module),
    )


@dataclass(frozen=True)
class _TransformersRotary:
    """`side`: which of the two results of `apply`; None if it turns one tensor."""

    module: Any
    apply: Callable[..., Any]
    layer_type: str | None
    side: int | None

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        options = {} if self.layer_type is None else {"layer_type": self.layer_type}
        cos, sin = self.module(x, positions[None], **options)
        return self.apply(x, cos, sin) if self.side is None else self.apply(x, x, cos, sin)[self.side]


def flash_attn_rotary(
    apply: Callable[..., Tensor] | None = None,
    head_dim: int = 64,
    *,
    base: float = 10_000.0,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Rotation:
    """flash-attn's `apply_rotary_emb(x, cos, sin, interleaved)`: x is (batch, seq, heads, head_dim), cosines and
    sines are (seq, rotary_dim / 2), made here in float64 and rounded once to the dtype of x.

    Args:
        apply: by default `flash_attn.layers.rotary.apply_rotary_emb`, which has to be installed; if it takes
            `seqlen_offsets`, consecutive positions are asked for by a table from 0 and an offset.
        base, rotary_dim: of the cosines and sines.
        interleaved: channels (0, 1), (2, 3), ... are pairs; otherwise (0, rotary_dim / 2), ...
    """
    if apply is None:
        try:
            from flash_attn.layers.rotary import apply_rotary_emb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            hint = "pass the function itself: flash_attn_rotary(apply_rotary_emb, head_dim)"
            raise ValueError(message("apply", "given where flash-attn is not installed", apply, hint)) from error
        apply = apply_rotary_emb
    assert apply is not None
    width = rotary_dim or head_dim
    name = f"{apply.__name__}, {'interleaved' if interleaved else 'half'}"
    return Rotation(
        _FlashAttnRotary(apply, base, width, interleaved),
        head_dim,
        base=base,
        rotary_dim=width,
        layout="interleaved" if interleaved else "half",
        name=name,
    )


@dataclass(frozen=True)
class _FlashAttnRotary:
    apply: Callable[..., Tensor]
    base: float
    rotary_dim: int
    interleaved: bool

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        start, count = int(positions[0]), len(positions)
        offsets = "seqlen_offsets" in inspect.signature(self.apply).parameters
        follows = torch.equal(positions, torch.arange(start, start + count))
        by_offset = offsets and follows and 0 <= start <= 4096
        rows = torch.arange(start + count) if by_offset else positions
        powers = torch.arange(0, self.rotary_dim, 2, dtype=torch.float64) / self.rotary_dim
        angles = rows[:, None] * self.base**-powers
        options: dict[str, Any] = {"seqlen_offsets": start} if by_offset else {}
        x = x.transpose(1, 2)
        return self.apply(x, angles.cos().to(x.dtype), angles.sin().to(x.dtype), self.interleaved, **options).transpose(
            1, 2
        )


def _name(module: Any) -> str:
    package = type(module).__module__.partition(".")[0]
    return f"{package} {type(module).__name__}"


def adapt(target: Any) -> Adapter | None:
    """The adapter for `target`: itself, if it is one, or that of a module which is recognised; None for all else.

    Recognised are rotary and bias modules of rotary_embedding_torch, x_transformers and transformers.
    """
    if isinstance(target, Rotation | Bias | AttentionFunction):
        return target
    if not isinstance(target, nn.Module):
        return None
    makers = {
        ("rotary_embedding_torch", "RotaryEmbedding"): rotary_embedding_torch,
        ("x_transformers", "RotaryEmbedding"): x_transformers_rotary,
        ("x_transformers", "AlibiPositionalBias"): x_transformers_alibi,
        ("x_transformers", "RelativePositionBias"): x_transformers_relative,
    }
    kind = type(target)
    package = kind.__module__.partition(".")[0]
    if (package, kind.__name__) in makers:
        return makers[package, kind.__name__](target)
    return _of_transformers(target) if hasattr(target, "inv_freq") and hasattr(target, "config") else None


def _of_transformers(module: Any) -> Rotation | None:
    """A module of cosines and sines that answers one position per token, or None."""
    try:
        found = transformers_rotary(module)
        f = copy.deepcopy(found.f)
        for count in (1, 3, 16):  # rows of an image's coordinates pass for tokens at some of these, not at all
            x = torch.zeros(1, 1, count, found.head_dim)
            if f(x, torch.arange(count)).shape != x.shape:
                return None
    except Exception:  # positions of several axes, another signature: not the rotation of text that laws know
        return None
    return found

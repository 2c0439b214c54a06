"""A transformers model with Ropewalk inside: `patch(model)`, per instance, undoable, weights and config untouched.

Rotary models keep their own tables and masks; the rotation goes through `ropewalk.kernels`.  BLOOM and MPT keep their
projections; attention goes through `ropewalk.attend`, so no bias and no mask over queries and keys is ever made.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ropewalk import kernels
from ropewalk._shapes import Tensor
from ropewalk.attention import attend
from ropewalk.encodings import Encoding
from ropewalk.errors import message, require, require_type, shown
from ropewalk.hf.config import from_config

_APPLY = "apply_rotary_pos_emb"
_MASK = "create_causal_mask"


class Patch:
    """What `patch` did; call it, or leave the `with` block, to undo."""

    def __init__(self, changed: list[nn.Module]):
        self._changed = changed

    @property
    def modules(self) -> int:
        """How many modules run through Ropewalk."""
        return len(self._changed)

    def __call__(self) -> None:
        """The model as it was; a second call does nothing."""
        for module in self._changed:
            module.__dict__.pop("forward", None)
        self._changed = []

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self()


def patch(model: nn.Module) -> Patch:
    """Puts Ropewalk into this one model; other models, also of the same class, stay as they are.

    A deep copy of a patched model stays patched, and the undo is the original's: copy first, or undo and copy.

    Rotary models: any whose attention calls `apply_rotary_pos_emb(q, k, cos, sin)`.  ALiBi models: BLOOM and MPT, MPT
    beyond its `max_seq_len` too.  Logits of tokens stay within rounding; those of padding are of no meaning before and
    after.

    Returns:
        Call it to undo, or use it in a `with` statement.

    Raises:
        ValueError: the model is of another kind, or patched already.
    """
    require_type(model, nn.Module, "model", "a model of transformers")
    forwards = _alibi(model) or _rotary(model)
    if not forwards:
        known = f"rotary with {_APPLY}, BLOOM or MPT"
        raise ValueError(message("model", known, type(model).__name__))
    for module in forwards:
        free = "forward" not in module.__dict__
        require(
            free, "model", "without a patch or hook on its attention", type(module.__dict__.get("forward")).__name__
        )
    for module, forward in forwards.items():
        module.forward = forward
    return Patch(list(forwards))


class _Forward:
    """A module's own forward with one global name bound to something else; copies and pickles follow the module."""

    def __init__(self, module: nn.Module, name: str, value: Any):
        self._module, self._name, self._value = module, name, value
        self._bind()

    def _bind(self) -> None:
        own = inspect.unwrap(type(self._module).forward)
        names = {**own.__globals__, self._name: self._value}
        del names["__name__"]  # a compiler would look the replaced name up in the module of that name
        self._function = types.FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
        self._function.__kwdefaults__ = own.__kwdefaults__

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_function"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(self._module, *args, **kwargs)


class _Apply:
    """`apply_rotary_pos_emb` of one module file: the same numbers, by the fast rotation.

    How the file pairs channels and reads its tables is found by asking its own function, once for each width.
    """

    def __init__(self, own: Callable[..., Any], widths: set[tuple[int, int]]):
        self._own = own
        self._found = {pair: found for pair in widths if (found := _probe(own, *pair)) is not None}

    @property
    def understood(self) -> bool:
        """Whether any of the expected widths was."""
        return bool(self._found)

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        found = self._found.get((q.shape[-1], cos.shape[-1]))
        axis = kwargs.get("unsqueeze_dim", args[0] if args else 1)
        if found is None or not set(kwargs) <= {"unsqueeze_dim"} or len(args) > 1:
            return self._own(q, k, cos, sin, *args, **kwargs)
        layout, tables = found
        cos, sin = cos[..., tables].unsqueeze(axis), sin[..., tables].unsqueeze(axis)
        if cos.dtype in (torch.bfloat16, torch.float16):
            cos, sin = cos.float(), sin.float()
        return kernels.turn(q, cos, sin, layout), kernels.turn(k, cos, sin, layout)


def _probe(own: Callable[..., Any], width: int, table: int) -> tuple[str, slice] | None:
    """The layout of heads of `width` channels, and which entries of a table of `table` belong to the pairs.

    A marked table shows which entry each channel is multiplied by, a quarter turn of one channel shows its partner;
    random numbers then prove the answer, or there is none.
    """
    marks, still = torch.arange(2.0, table + 2).view(1, 1, table), torch.zeros(1, 1, table)
    ones = torch.ones(1, 1, 1, width)
    first = torch.zeros(1, 1, 1, width)
    first[..., 0] = 1
    try:
        entry = (own(ones, ones, marks, still)[0].flatten() - 2).round().long().tolist()
        partner = int(own(first, first, still, torch.ones(1, 1, table))[0].flatten().abs().argmax())
    except (RuntimeError, TypeError, IndexError):
        return None
    turning = [channel for channel, index in enumerate(entry) if index >= 0]
    layout = "interleaved" if partner == 1 and len(turning) > 2 else "half"
    pairs = turning[: len(turning) // 2] if layout == "half" else turning[::2]
    step = entry[pairs[1]] - entry[pairs[0]] if len(pairs) > 1 else 1
    tables = slice(0, len(pairs) * step, step) if step > 0 else slice(0, len(pairs))
    return (layout, tables) if pairs and _proved(own, width, table, layout, tables) else None


def _proved(own: Callable[..., Any], width: int, table: int, layout: str, tables: slice) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, 3, width, generator=generator)
    angles = torch.randn(1, 3, len(range(*tables.indices(table))), generator=generator)
    doubled = torch.zeros(1, 3, table)
    for shift in (0, 1) if tables.step == 2 else range(0, table, angles.shape[-1]):
        doubled[..., shift :: tables.step][..., : angles.shape[-1]] = angles
    cos, sin = doubled.cos(), doubled.sin()
    expected = own(q, k, cos, sin)
    got = (kernels.turn(x, angles.cos()[:, None], angles.sin()[:, None], layout) for x in (q, k))
    return all(torch.allclose(a, b, atol=1e-6) for a, b in zip(expected, got, strict=True))


def _rotary(model: nn.Module) -> dict[nn.Module, _Forward]:
    """The attention modules that call `apply_rotary_pos_emb`, with their new forwards."""
    applies: dict[Any, _Apply] = {}
    forwards: dict[nn.Module, _Forward] = {}
    for module in model.modules():
        own = inspect.unwrap(type(module).forward)
        if _APPLY not in own.__code__.co_names or not callable(own.__globals__.get(_APPLY)):
            continue
        if getattr(model.config, "alibi", False):
            raise ValueError(
                message("model", f"rotary with {_APPLY}, BLOOM or MPT", f"{type(model).__name__} with ALiBi")
            )
        others = [n for n in own.__code__.co_names if n.startswith(_APPLY) and n != _APPLY]
        used = [n for n in others if getattr(model.config, "rope_interleave", True)]
        if used:  # which of them runs is the module's own affair: a patch of one might change nothing
            raise ValueError(message("model", f"rotary with {_APPLY} alone", f"{type(model).__name__} with {used[0]}"))
        function = own.__globals__[_APPLY]
        if function not in applies:
            applies[function] = _Apply(function, _widths(model, module))
        if applies[function].understood:
            forwards[module] = _Forward(module, _APPLY, applies[function])
    return forwards


def _widths(model: nn.Module, attention: nn.Module) -> set[tuple[int, int]]:
    """Widths of heads and tables to expect: whole and partial, tables of one entry a channel or a pair."""
    config: Any = model.config
    head_dim = getattr(attention, "head_dim", None) or getattr(attention, "head_size", None)
    head_dim = head_dim or config.hidden_size // config.num_attention_heads
    parts = {head_dim, head_dim // 2, head_dim // 4}
    parts |= {int(value) for name in ("rotary_ndims", "rotary_dim") if (value := getattr(attention, name, None))}
    factor = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    parts |= {int(head_dim * factor)} if factor else set()
    turning = {part for part in parts if part >= 2 and part % 2 == 0}
    return {(width, table) for part in turning for width in (head_dim, part) for table in (part, part // 2)}


def _alibi(model: nn.Module) -> dict[nn.Module, Any]:
    """The body and the attention modules of BLOOM or MPT, with their new forwards."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind not in ("bloom", "mpt"):
        return {}
    config: Any = model.config
    encoding = from_config(config)
    attention = {"bloom": ("BloomModel", "BloomAttention", _Bloom), "mpt": ("MptModel", "MptAttention", _Mpt)}[kind]
    if kind == "bloom":
        plain = not (config.pretraining_tp > 1 and config.slow_but_exact)
        require(plain, "slow_but_exact", "false", config.slow_but_exact)
    forwards: dict[nn.Module, Any] = {}
    for module in model.modules():
        if type(module).__name__ == attention[0]:
            forwards[module] = _Body(module, _MASK, _padding)
        elif type(module).__name__ == attention[1]:
            forwards[module] = attention[2](module, encoding)
    return forwards


class _Body(_Forward):
    """The forward of the decoder, which hands on the padding alone instead of a mask over queries and keys."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("output_attentions") or self._module.config.output_attentions  # type: ignore[union-attr]
        require(not asked, "output_attentions", "off: weights are never made (undo the patch to see them)", True)
        mask = kwargs.get("attention_mask")
        require(mask is None or mask.ndim == 2, "attention_mask", "(batch, k_len)", shown(mask))
        return super().__call__(*args, **kwargs)


def _padding(inputs_embeds: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Tensor:
    """Which tokens are not padding, (batch, k_len); empty where all are."""
    if attention_mask is None:
        return torch.ones(0, dtype=torch.bool, device=inputs_embeds.device)
    mask = attention_mask.bool()
    return mask[:0, 0] if not torch.compiler.is_compiling() and bool(mask.all()) else mask


class _Alibi:
    """Attention with a bias, through `attend`."""

    def __init__(self, module: Any, encoding: Encoding):
        self._module, self._encoding = module, encoding

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Any, padding: Tensor, scale: float | None, dropout: float | int
    ) -> Tensor:
        module = self._module
        still = dropout == 0 or not module.training
        require(still, "attention dropout", "0 in training with a patched model", dropout)
        past = 0
        if cache is not None:
            past = int(cache.get_seq_length(module.layer_idx))
            k, v = cache.update(k, v, module.layer_idx)
        at = q_at = mask = None
        if padding.ndim == 2 or past + q.shape[-2] != k.shape[-2]:  # else they count up, which attend knows to use
            at = torch.arange(k.shape[-2], device=q.device)
            q_at = at[past : past + q.shape[-2]]
        if padding.ndim == 2:
            mask = nn.functional.pad(padding, (0, k.shape[-2] - padding.shape[-1]))[:, None, None, :]
            if self.counts_tokens:
                at = padding.long().cumsum(-1) - 1
                at = nn.functional.pad(at, (0, k.shape[-2] - at.shape[-1]), value=k.shape[-2])
                q_at = at[:, past : past + q.shape[-2]]
        out = attend(q, k, v, self._encoding, q_positions=q_at, k_positions=at, mask=mask, scale=scale)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2).flatten(2)

    counts_tokens = False
    """Whether padding inside a row takes no position."""


class _Bloom(_Alibi):
    counts_tokens = True

    def __call__(self, hidden_states, residual, alibi, attention_mask, layer_past=None, **_):
        module = self._module
        q, k, v = module._reshape(module.query_key_value(hidden_states))
        out = self._attend(q, k, v, layer_past, attention_mask, None, module.attention_dropout.p)
        out = nn.functional.dropout(module.dense(out), p=module.hidden_dropout, training=module.training)
        return residual + out, None


class _Mpt(_Alibi):
    def __call__(self, hidden_states, position_bias, cache=None, *, attention_mask, **_):
        module = self._module
        mixed = module.Wqkv(hidden_states)
        if module.clip_qkv:
            mixed = mixed.clamp(-module.clip_qkv, module.clip_qkv)
        q, k, v = (x.unflatten(-1, (module.n_heads, module.head_dim)).transpose(1, 2) for x in mixed.chunk(3, -1))
        out = self._attend(q, k, v, cache, attention_mask, module.softmax_scale, module.attn_dropout_p)
        return module.out_proj(out), None

"""Losses of long windows under a transformers model, in memory that grows with the length and not with its square."""

import contextlib
import contextvars
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ropewalk._shapes import Tensor
from ropewalk.errors import message

LOGITS_AT_ONCE = 2**24
ROWS_AT_ONCE = 512
_NAME = "ropewalk_blocks"
_HEAD_SHARE = 0.1

Told = Callable[[float], None]
_settings: contextvars.ContextVar[tuple[int | None, str, list[int]]] = contextvars.ContextVar(_NAME)


def blocks(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
           **options: Any) -> tuple[Tensor, None]:  # fmt: skip
    """Causal attention in blocks of queries by the model's own attention function, each query on its last keys only.

    A mask over queries and keys is made for one block at a time.
    """
    window, base, calls = _settings.get()
    calls[0] += 1
    attend = _function(module, base)
    q_len, k_len = query.shape[2], key.shape[2]
    past = k_len - q_len
    parts = []
    for first in range(0, q_len, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, q_len)
        start = 0 if window is None else max(0, past + first - window + 1)
        keys = slice(start, past + last)
        distance = torch.arange(past + first, past + last, device=query.device)[:, None]
        distance = distance - torch.arange(start, past + last, device=query.device)
        seen = (distance >= 0)[None, None] if attention_mask is None else attention_mask[:, :, first:last, keys]
        seen = seen if window is None else seen & (distance < window)
        mask = seen if base == "sdpa" else torch.zeros(()).where(seen, torch.finfo(query.dtype).min).to(query.dtype)
        out, *_ = attend(module, query[:, :, first:last], key[:, :, keys], value[:, :, keys], mask, **options)
        parts.append(out)
    return torch.cat(parts, 1), None


def _function(module: nn.Module, base: str) -> Any:
    if base != "sdpa":
        return sys.modules[type(module).__module__].eager_attention_forward
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return ALL_ATTENTION_FUNCTIONS["sdpa"]


class Scorer:
    """A causal language model of transformers that scores tokens."""

    def __init__(self, model: Any):
        self.model = model
        self.body = model.base_model
        self.base = "sdpa" if getattr(model, "_supports_sdpa", True) else "eager"
        layers = model.config.get_text_config().num_hidden_layers
        lists = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
        self._layers = next(lists, ())

    @torch.inference_mode()
    def nats(self, inputs: Tensor, targets: Tensor, window: int | None = None, told: Told = lambda _: None) -> Tensor:
        """Loss of each target, nats, float64 on the CPU.

        Args:
            inputs, targets: (length,); target i is what follows input i.
            window: how many tokens back attention reaches, the token itself included; None: as far as the model's.
            told: is called with the share that is done.

        Raises:
            ValueError: the model's attention cannot be limited from outside.
        """
        inputs, targets = inputs.to(self.model.device), targets.to(self.model.device)
        with self._attention(window), self._counted(told):
            found = self.body(input_ids=inputs[None], use_cache=False)
        rows = max(1, LOGITS_AT_ONCE // self.model.config.get_text_config().vocab_size)
        losses = []
        for first in range(0, len(inputs), rows):
            part = slice(first, first + rows)
            logits = self._logits(inputs[part], found, part)
            losses.append(F.cross_entropy(logits.float(), targets[part], reduction="none").double().cpu())
            told(1 - _HEAD_SHARE * max(0, 1 - (first + rows) / len(inputs)))
        return torch.cat(losses)

    def _logits(self, inputs: Tensor, found: Any, part: slice) -> Tensor:
        """Logits of some positions, by the model's own head: whatever it does to them belongs to the model."""
        states = type(found)(last_hidden_state=found.last_hidden_state[:, part])
        with _replaced(self.body, lambda *_, **__: states):
            return self.model(input_ids=inputs[None], use_cache=False).logits[0]

    @contextlib.contextmanager
    def _attention(self, window: int | None) -> Iterator[None]:
        """Within it attention is limited to `window`; None leaves it alone where no full mask would be made."""
        if window is None and self.base == "sdpa":
            yield
            return
        _register()
        before, calls = self.model.config._attn_implementation, [0]
        token = _settings.set((window, self.base, calls))
        try:
            self.model.set_attn_implementation(_NAME)
            yield
        finally:
            self.model.set_attn_implementation(before)
            _settings.reset(token)
        if calls[0] == 0:
            condition = "one that uses transformers' attention interface"
            raise ValueError(message("model", condition, type(self.model).__name__))

    @contextlib.contextmanager
    def _counted(self, told: Told) -> Iterator[None]:
        done = 0

        def hook(*_: Any) -> None:
            nonlocal done
            done += 1
            told((1 - _HEAD_SHARE) * done / len(self._layers))

        hooks = [layer.register_forward_hook(hook) for layer in self._layers]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()


@contextlib.contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before


def _register() -> None:
    """Under a name of its own, so no other model is touched."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(_NAME, blocks)
    AttentionMaskInterface.register(_NAME, sdpa_mask)

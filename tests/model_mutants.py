"""Tiny LLaMA models with one fault each, of the kinds that have shipped."""

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ropewalk.check.models import ModelSubject

CONFIG = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
          "num_hidden_layers": 2, "max_position_embeddings": 2048}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class ModelMutant:
    name: str
    kind: str
    law: str
    spoil: Callable[[Any], None]
    config: dict[str, Any]

    def subject(self) -> ModelSubject:
        return Spoiled(self.config, self.spoil)


class Spoiled(ModelSubject):
    """A model that is spoiled each time it is built."""

    def __init__(self, config, spoil):
        self._spoil = spoil
        super().__init__(config)

    def _made(self, dtype):
        model = super()._made(dtype)
        self._spoil(model)
        return model

    def changed(self, config):
        model = super().changed(config)
        self._spoil(model)
        return model


MODEL_MUTANTS: list[ModelMutant] = []


def spoiled(kind: str, law: str, **changes):
    def register(spoil):
        MODEL_MUTANTS.append(ModelMutant(spoil.__name__, kind, law, spoil, {**CONFIG, **changes}))
        return spoil

    return register


def tables(model, make):
    """Lets the rotary module compute its tables by `make(own, x, position_ids)`."""
    rotary = model.model.rotary_emb
    own = rotary.forward
    rotary.forward = lambda x, position_ids, *rest, **options: make(own, x, position_ids)


@spoiled("K04", "decoding")
def positions_of_a_step_start_at_zero(model):
    tables(model, lambda own, x, at: own(x, torch.arange(at.shape[-1])[None].expand_as(at)))


@spoiled("K01", "shift")
def positions_in_bfloat16(model):
    tables(model, lambda own, x, at: own(x, at.bfloat16().long()))


@spoiled("K09", "shift")
def keys_are_not_turned(model):
    for layer in model.model.layers:
        attention = layer.self_attn
        own = type(attention).forward

        def forward(*args, own=own, attention=attention, **options):
            import transformers.models.llama.modeling_llama as file

            kept = file.apply_rotary_pos_emb
            file.apply_rotary_pos_emb = lambda q, k, cos, sin, *rest: (kept(q, k, cos, sin, *rest)[0], k)
            try:
                return own(attention, *args, **options)
            finally:
                file.apply_rotary_pos_emb = kept

        attention.forward = forward


@spoiled("K01", "precision")
def frequencies_follow_the_models_dtype(model):
    inv_freq = model.model.rotary_emb.inv_freq
    model.model.rotary_emb.inv_freq = inv_freq.to(model.dtype).float()


@spoiled("K03", "history")
def tables_remember_the_longest_sequence(model):
    longest = [16]

    def make(own, x, at):
        longest[0] = max(longest[0], int(at.max()) + 1)
        cos, sin = own(x, at)
        return (cos * 1.001, sin * 1.001) if longest[0] > 1000 else (cos, sin)

    tables(model, make)


@spoiled("K03", "neighbours")
def the_longest_row_decides_for_all(model):
    tables(model, lambda own, x, at: own(x, at // (2 if int(at.max()) > 2048 else 1)))


@spoiled("K23", "beyond")
def positions_wrap_around(model):
    tables(model, lambda own, x, at: own(x, at % 2048))


@spoiled("K23", "beyond")
def positions_stop_at_the_end(model):
    tables(model, lambda own, x, at: own(x, at.clamp(max=2047)))


@spoiled("K11", "distinct", num_hidden_layers=1)
def nothing_is_turned(model):
    def still(own, x, at):
        cos, sin = own(x, at)
        return torch.ones_like(cos), torch.zeros_like(sin)

    tables(model, still)


@spoiled("K11", "fields")
def the_base_is_not_read(model):
    rotary = model.model.rotary_emb
    width = 2 * rotary.inv_freq.shape[0]
    rotary.inv_freq = 10_000.0 ** (-torch.arange(0, width, 2) / width)


@spoiled("K11", "reading", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0})
def the_stretch_is_not_applied(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 4.0


def _mask_hook(change):
    """Lets the model see another attention mask than it was handed."""

    def spoil(model):
        own = model.model.forward

        def forward(*args, attention_mask=None, **options):
            return own(*args, attention_mask=change(attention_mask), **options)

        model.model.forward = forward

    return spoil


@spoiled("K05", "padding")
def padding_is_attended(model):
    _mask_hook(lambda mask: None)(model)


@spoiled("K05", "generation")
def padding_of_a_step_is_attended(model):
    _mask_hook(lambda mask: torch.ones_like(mask) if mask is not None and mask.shape[-1] > 5 else mask)(model)


@spoiled("K16", "causality")
def the_future_is_attended(model):
    own = model.model.forward

    def forward(*args, **options):
        ids = options["input_ids"]
        every = torch.ones(ids.shape[0], 1, ids.shape[1], ids.shape[1], dtype=torch.bool)
        return own(*args, **{**options, "attention_mask": every})

    model.model.forward = forward


@spoiled("K16", "implementations")
def one_implementation_scales_otherwise(model):
    for layer in model.model.layers:
        attention = layer.self_attn
        own, scale = attention.forward, attention.scaling

        def forward(*args, own=own, attention=attention, scale=scale, **options):
            attention.scaling = scale * (0.9 if attention.config._attn_implementation == "eager" else 1.0)
            return own(*args, **options)

        attention.forward = forward


@spoiled("K06", "packing")
def other_documents_are_read(model):
    own = model.model.forward

    def forward(*args, **options):
        where = torch.arange(options["input_ids"].shape[1])[None]
        return own(*args, **{**options, "attention_mask": None, "position_ids": where})

    model.model.forward = forward


def fresh(config):
    """The right model."""
    return ModelSubject(copy.deepcopy(config))

"""A causal language model of transformers, small and with random weights, as often and in whatever dtype as needed."""

import contextlib
import copy
import inspect
import logging
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn

from ropewalk._shapes import Tensor
from ropewalk.errors import message, require

WINDOW = 6  # tokens that a sliding or chunked layer of the small model sees, so that a dozen tokens reach beyond
VOCABULARY = 128
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token")
WIDTHS = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "intermediate_size_mlp",
          "moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size")  # fmt: skip
HEADS = ("linear_num_heads", "linear_num_key_heads", "linear_num_value_heads")
LOOPED = ("n_recurrent_layers", "num_layers_per_stack")  # layers that run several times: their count is not free
ONE = ("n_group", "topk_group", "first_k_dense_replace")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the advice that transformers prints about configs and models nobody keeps; random numbers begin anew,
    and go on afterwards as if nothing had been drawn."""
    import warnings

    from transformers.utils import logging as theirs

    level, bars = theirs.get_verbosity(), theirs.is_progress_bar_enabled()
    theirs.set_verbosity(logging.CRITICAL)
    theirs.disable_progress_bar()
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            yield
    finally:
        theirs.set_verbosity(level)
        if bars:
            theirs.enable_progress_bar()


def config_of(target: Any) -> Any:
    """The PretrainedConfig of a config, a dict, a folder or file, a model class or a model.

    Raises:
        ValueError, TypeError: `target` is none of them, or names a family that transformers does not know.
    """
    from transformers import AutoConfig, PretrainedConfig

    if isinstance(target, PretrainedConfig):
        return copy.deepcopy(target)
    if isinstance(target, nn.Module):
        return copy.deepcopy(target.config)
    if isinstance(target, type) and hasattr(target, "config_class"):
        return target.config_class()
    if isinstance(target, (str, os.PathLike)):
        from ropewalk.hf.config_source import load

        target = load(target)
    require(isinstance(target, Mapping), "target", "a model or its config", type(target).__name__)
    keys: dict[str, Any] = copy.deepcopy(dict(cast(Mapping, target)))
    family = keys.pop("model_type", None)
    require(isinstance(family, str), "model_type", "given in the config", repr(family))
    try:
        return AutoConfig.for_model(family, **keys)
    except Exception as error:  # strict configs raise classes of their own
        lines = str(error).strip().splitlines() or [""]
        unknown = "nrecognized" in lines[0]
        what = message("model_type", "one that transformers knows; code from elsewhere is not run", repr(family))
        wrong = message("config", f"one that {family} can be built from", f"{type(error).__name__}: {lines[0]}")
        raise ValueError(what if unknown else wrong) from error


def _text(config: Any) -> Any:
    """The part of a config that describes a language model, as a decoder."""
    text = config if hasattr(config, "num_hidden_layers") else config.get_text_config(decoder=True)
    if getattr(text, "is_decoder", None) is False:  # BERT and its kind see the future otherwise
        text.is_decoder = True
    return text


def _set(config: Any, name: str, value: Any) -> None:
    if getattr(config, name, None) is not None:
        with contextlib.suppress(NotImplementedError, AttributeError):
            setattr(config, name, value)


def _layers(config: Any) -> int:
    """How many layers show every kind of layer that the model has: at least two, where there are as many."""
    total = int(config.num_hidden_layers)
    if any(getattr(config, name, None) for name in LOOPED):
        return total
    kinds = getattr(config, "layer_types", None) or [None] * total
    turning = getattr(config, "no_rope_layers", None) or [None] * total
    seen = list(zip(kinds, turning, strict=False))
    last = max((seen.index(kind) for kind in seen), default=0)
    return min(total, max(2, last + 1))


def shrunk(config: Any) -> Any:
    """The config with few heads, layers, experts and tokens; all that concerns positions stays, but for windows, which
    become short enough to matter.

    Widths of heads stay, since frequencies depend on them.
    """
    small = copy.deepcopy(config)
    heads, hidden = getattr(small, "num_attention_heads", None), getattr(small, "hidden_size", None)
    kv = getattr(small, "num_key_value_heads", None) or getattr(small, "num_kv_heads", None)
    if isinstance(heads, int) and isinstance(hidden, int):
        explicit = getattr(small, "head_dim", None)
        head_dim = explicit or hidden // heads
        few = min(heads, 4)
        _set(small, "num_attention_heads", few)
        _set(small, "hidden_size", few * head_dim if explicit is None or explicit * heads == hidden else 128)
        for name in ("num_key_value_heads", "num_kv_heads"):
            _set(small, name, few if kv == heads else 1 if kv == 1 else max(1, few // 2))
        for name in ("decoder_attention_heads", "encoder_attention_heads"):
            _set(small, name, few)
        for name in ("word_embed_proj_dim", "embedding_size", "lru_width"):
            if getattr(small, name, None) == hidden:
                _set(small, name, small.hidden_size)
    layers, total = _layers(small), int(small.num_hidden_layers)
    for name, value in list(vars(small).items()):
        if isinstance(value, list) and len(value) == total and total > 2 and not name.startswith("_"):
            _set(small, name, value[:layers])
    for name in ("num_hidden_layers", "decoder_layers"):
        _set(small, name, layers)
    for names, most in (
        (EXPERTS, 4),
        (CHOSEN, 2),
        (WIDTHS, 64),
        (ONE, 1),
        (HEADS, 2),
        (("q_lora_rank", "kv_lora_rank"), 16),
    ):
        for name in names:
            value = getattr(small, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                _set(small, name, min(value, most))
    for name in ("sliding_window", "attention_chunk_size"):
        value = getattr(small, name, None)
        if isinstance(value, int):
            _set(small, name, min(value, WINDOW))
    _few_words(small)
    return small


def _few_words(config: Any) -> None:
    if getattr(config, "vocab_size", VOCABULARY) > VOCABULARY:
        _set(config, "vocab_size", VOCABULARY)
    for number, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        value = getattr(config, name, None)
        if value is None or not isinstance(value, int) or not 0 <= value < VOCABULARY:
            with contextlib.suppress(AttributeError):
                setattr(config, name, number)


def sharpen(model: nn.Module) -> None:
    """Random weights that let positions matter: scores near 1 instead of near 0, where all keys weigh the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim < 2:
                parameter.add_((0.1 * noise).to(parameter.dtype))
            else:
                parameter.copy_((noise * parameter.shape[-1] ** -0.5).to(parameter.dtype))


class ModelSubject:
    """A causal model under test.

    Args:
        target: a model, its class, its config (object, dict, path), or a folder with weights.
        dtype: that the laws run in.
        dtypes: those that a law compares, `dtype` among them.

    Raises:
        ValueError, TypeError: it cannot be built; the message says why.
    """

    def __init__(self, target: Any, dtype: torch.dtype = torch.float32, dtypes: tuple[torch.dtype, ...] = ()):
        self.dtype, self.dtypes = dtype, dtypes or (torch.float32, torch.float64, torch.bfloat16)
        self._target, self._models, self._weights = target, {}, None
        with quiet():
            self.config = config_of(target)
            try:
                self._build_first()
            except Exception as error:
                lines = str(error).strip().splitlines() or [""]
                found = f"{self.config.model_type}, which fails: {type(error).__name__}: {lines[0]}"
                raise ValueError(message("target", "a causal model that can be built and run", found)) from error
        self.readings, self.refusal = _read(self.config)
        self.name = f"{self.config.model_type} ({'its own weights' if self.loaded else 'small, random weights'})"

    def _build_first(self) -> None:
        self.loaded = isinstance(self._target, nn.Module) or _has_weights(self._target)
        if not self.loaded:
            self.config = shrunk(_text(self.config))
        first = self._made(self.dtype)
        if isinstance(self._target, nn.Module):
            first.load_state_dict(self._target.state_dict())
        elif not self.loaded:
            sharpen(first)
        self._weights = copy.deepcopy(first.state_dict())
        self._models[self.dtype] = first
        self.logits(self.tokens(1, 4))

    def _made(self, dtype: torch.dtype) -> Any:
        from transformers import AutoModelForCausalLM

        config = copy.deepcopy(self.config)
        if self.loaded and not isinstance(self._target, nn.Module):
            return AutoModelForCausalLM.from_pretrained(self._target, dtype=dtype, local_files_only=True).eval()
        if isinstance(self._target, (nn.Module, type)):
            kind = self._target if isinstance(self._target, type) else type(self._target)
            return kind._from_config(config, dtype=dtype).eval()  # type: ignore[attr-defined]
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()

    def fresh(self, dtype: torch.dtype | None = None) -> Any:
        """A model that nothing has been computed with; equal weights each time."""
        with quiet():
            model = self._made(dtype or self.dtype)
            model.load_state_dict(self._weights)
        return model

    def changed(self, config: Any) -> Any:
        """A model of another config with these weights; RuntimeError if they do not fit."""
        from transformers import AutoModelForCausalLM

        with quiet():
            model = AutoModelForCausalLM.from_config(config, dtype=self.dtype).eval()
            model.load_state_dict(self._weights)
        return model

    def model(self, dtype: torch.dtype | None = None) -> Any:
        """The model in this dtype; built once."""
        dtype = dtype or self.dtype
        if dtype not in self._models:
            self._models[dtype] = self.fresh(dtype)
        return self._models[dtype]

    def tokens(self, batch: int, seq_len: int, seed: int = 0) -> Tensor:
        """Random token ids, (batch, seq); none of the special ones."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(3, min(self.config.vocab_size, VOCABULARY), (batch, seq_len), generator=generator)

    def logits(self, tokens: Tensor, model: Any = None, **options: Any) -> Tensor:
        """What the model gives in one pass without a cache, (batch, seq, vocabulary), in float64."""
        model = model or self.model()
        with torch.no_grad(), quiet():
            return model(input_ids=tokens, use_cache=False, **options).logits.double()

    @property
    def takes_positions(self) -> bool:
        """Whether position_ids can be handed in."""
        return "position_ids" in inspect.signature(self.model().forward).parameters

    @property
    def max_len(self) -> int | None:
        """Tokens that the config names as the longest."""
        for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
            value = getattr(self.config, name, None)
            if isinstance(value, int):
                return value
        return None


def _read(config: Any) -> tuple[Any, str]:
    """What Ropewalk reads from the config, or None and why it refuses."""
    from ropewalk import hf

    try:
        return hf.describe(config.to_dict(), length=1), ""
    except (ValueError, TypeError) as error:
        return None, str(error).splitlines()[0]


def _has_weights(target: Any) -> bool:
    if not isinstance(target, (str, os.PathLike)):
        return False
    folder = pathlib.Path(target)
    return folder.is_dir() and any(folder.glob("*.safetensors"))

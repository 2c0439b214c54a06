"""Other libraries' ways to the same numbers, where they are installed, called as their own models call them.

Each is imported when it is asked for; what is not installed has no row and is named.  None is assumed to be right:
whoever times one compares its values first.
"""

import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

BASE = 10_000.0

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""q and k, (batch, heads, seq, head_dim), turned to their positions."""


class Rotation(NamedTuple):
    """A way to rotate: which channels it pairs, and how it is prepared for consecutive positions."""

    layout: str
    prepare: Callable[[Tensor, int, torch.dtype], Rotate]
    needs: str | None = None
    """The module that has to be importable."""


def _import(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


def missing(needs: Iterable[str | None]) -> dict[str, str]:
    """Which of the modules cannot be imported, and why."""
    found = {}
    for name in dict.fromkeys(needs):
        if name is None:
            continue
        try:
            _import(name)
        except ImportError as error:
            found[name] = "not installed" if isinstance(error, ModuleNotFoundError) else str(error).splitlines()[0]
    return found


def inv_freq(head_dim: int) -> Tensor:
    """Frequencies in float32, radians per token, as most models compute them."""
    return 1.0 / (BASE ** (torch.arange(0, head_dim, 2).float() / head_dim))


def llama_rotary(head_dim: int) -> torch.nn.Module:
    """transformers' module that makes cosines and sines, (1, seq, head_dim), in the dtype of its first argument."""
    config = _import("transformers").LlamaConfig(hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim)
    return _import(LLAMA).LlamaRotaryEmbedding(config)


def _llama_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    like = torch.zeros((), dtype=dtype, device=positions.device)
    return llama_rotary(head_dim).to(positions.device)(like, positions[None])


def _transformers(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    apply = _import(LLAMA).apply_rotary_pos_emb
    cos, sin = _llama_tables(positions, head_dim, dtype)
    return lambda q, k: apply(q, k, cos, sin)


def _transformers_compiled(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    apply = torch.compile(_import(LLAMA).apply_rotary_pos_emb, fullgraph=True)
    cos, sin = _llama_tables(positions, head_dim, dtype)
    return lambda q, k: apply(q, k, cos, sin)


def _rotary_embedding_torch(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    module = _import("rotary_embedding_torch").RotaryEmbedding(head_dim).to(positions.device)
    offset = int(positions[0])

    def rotate(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return module.rotate_queries_or_keys(q, offset=offset), module.rotate_queries_or_keys(k, offset=offset)

    return rotate


def _x_transformers(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    library = _import("x_transformers.x_transformers")
    freqs, scale = library.RotaryEmbedding(head_dim).to(positions.device)(positions)
    apply = library.apply_rotary_pos_emb
    return lambda q, k: (apply(q, freqs, scale), apply(k, freqs, scale))


def _in_token_major(one: Callable[[Tensor], Tensor]) -> Rotate:
    """For forms that want (batch, seq, heads, head_dim): the same memory, seen the other way."""
    return lambda q, k: (one(q.transpose(1, 2)).transpose(1, 2), one(k.transpose(1, 2)).transpose(1, 2))


def _torchtune(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    kind = _import("torchtune.modules").RotaryPositionalEmbeddings
    module = kind(head_dim, max_seq_len=int(positions[-1]) + 1, base=int(BASE)).to(positions.device)
    places = positions[None]
    return _in_token_major(lambda x: module(x, input_pos=places))


def _flash_attn(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    apply = _import("flash_attn.layers.rotary").apply_rotary_emb_torch
    angles = torch.outer(positions.float(), inv_freq(head_dim).to(positions.device))
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return _in_token_major(lambda x: apply(x, cos, sin))


def _complex_view(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotate:
    """Neighbouring channels seen as one complex number, times exp(i angle): the form that LLaMA made known."""
    angles = torch.outer(positions.float(), inv_freq(head_dim).to(positions.device))
    turns = torch.polar(torch.ones_like(angles), angles)[None, :, None]

    def one(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns).flatten(3).type_as(x)

    return _in_token_major(one)


LLAMA = "transformers.models.llama.modeling_llama"
BLOOM = "transformers.models.bloom.modeling_bloom"
ROTATIONS = {
    "transformers": Rotation("half", _transformers, LLAMA),
    "rotary-embedding-torch": Rotation("interleaved", _rotary_embedding_torch, "rotary_embedding_torch"),
    "x-transformers": Rotation("interleaved", _x_transformers, "x_transformers"),
    "torchtune": Rotation("interleaved", _torchtune, "torchtune.modules"),
    "flash-attn, torch form": Rotation("half", _flash_attn, "flash_attn.layers.rotary"),
    "LLaMA's complex view": Rotation("interleaved", _complex_view),
}
COMPILED = {"transformers, compiled": Rotation("half", _transformers_compiled, LLAMA)}


Attends = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal ALiBi attention: q, k, v (batch, heads, seq, head_dim) to values of the same shape."""


def bloom(num_heads: int) -> Attends:
    """BLOOM's attention out of transformers: a bias by key position in the model's dtype, dense float32 weights."""
    build = _import(BLOOM).build_alibi_tensor

    def attends(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, _, seq_len, head_dim = q.shape
        ones = torch.ones(batch, seq_len, device=q.device)
        alibi = build(ones, num_heads, q.dtype)
        wide_q, wide_k, wide_v = (x.reshape(batch * num_heads, seq_len, head_dim) for x in (q, k, v))
        scores = alibi.baddbmm(wide_q, wide_k.transpose(1, 2), beta=1.0, alpha=head_dim**-0.5)
        future = torch.ones(seq_len, seq_len, dtype=torch.bool, device=q.device).triu(1)
        hidden = torch.zeros(seq_len, seq_len, dtype=q.dtype, device=q.device)
        hidden.masked_fill_(future, torch.finfo(q.dtype).min)
        weights = torch.softmax(scores + hidden, dim=-1, dtype=torch.float32).to(q.dtype)
        return torch.bmm(weights, wide_v).view(batch, num_heads, seq_len, head_dim)

    return attends


def x_transformers_alibi(num_heads: int) -> Attends:
    """x-transformers' bias, built once for a length and kept, through its flash attention."""
    bias = _import("x_transformers.x_transformers").AlibiPositionalBias(num_heads)
    attention = _import("x_transformers.attend").Attend(flash=True, causal=True)

    def attends(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, attn_bias=bias.to(q.device)(q.shape[2], k.shape[2]))[0]

    return attends


ALIBI: dict[str, tuple[str, Callable[[int], Attends]]] = {
    "alibi of transformers' BLOOM": (BLOOM, bloom),
    "alibi of x-transformers": ("x_transformers.x_transformers", x_transformers_alibi),
}

"""Multi-head self-attention with any encoding."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from ropewalk import positions as places
from ropewalk._shapes import Bool, Float, Shaped, Tensor
from ropewalk._watch import watched
from ropewalk.attention.attend import attend
from ropewalk.attention.cache import KVCache
from ropewalk.attention.sight import check_mask_dtype
from ropewalk.encodings import Encoding, Placement
from ropewalk.errors import require, require_count, require_type

_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (hooks._global_forward_hooks, hooks._global_backward_hooks, hooks._global_backward_pre_hooks)


class Attention(nn.Module):
    """Queries, keys and values of one sequence, attended and projected back.

    Args:
        model_dim: channels of the embedding, a multiple of `num_heads` unless `head_dim` is given.
        num_heads: query heads.
        encoding: what tells tokens apart by place; shared between layers, since it holds no state of a call.
        num_kv_heads: key and value heads, a divisor of `num_heads` (grouped-query attention).
        head_dim: channels of a head, model_dim / num_heads by default.
        causal: a token attends itself and what came before.

    >>> import ropewalk as rw
    >>> layer = Attention(64, 4, rw.Rotary(16))
    >>> layer(torch.zeros(2, 10, 64)).shape
    torch.Size([2, 10, 64])
    """

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        encoding: Encoding,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
    ):
        super().__init__()
        require_count(model_dim, "model_dim")
        require_count(num_heads, "num_heads")
        num_kv_heads = require_count(num_heads if num_kv_heads is None else num_kv_heads, "num_kv_heads")
        if head_dim is None:
            require(model_dim % num_heads == 0, "model_dim", f"a multiple of num_heads ({num_heads})", model_dim)
            head_dim = model_dim // num_heads
        require(num_heads % num_kv_heads == 0, "num_kv_heads", f"a divisor of num_heads ({num_heads})", num_kv_heads)
        require_type(encoding, Encoding, "encoding", "an Encoding", hint="rw.NoPE() for none")
        _check_made_for(
            encoding, head_dim=require_count(head_dim, "head_dim"), num_heads=num_heads, model_dim=model_dim
        )
        self.num_heads, self.num_kv_heads, self.causal = num_heads, num_kv_heads, causal
        self.head_dim = head_dim
        self.encoding = encoding
        self.q_proj = nn.Linear(model_dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(model_dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(model_dim, num_kv_heads * self.head_dim, bias=False)
        self.out_proj = nn.Linear(num_heads * self.head_dim, model_dim, bias=False)

    def forward(
        self,
        x: Float[Tensor, "batch seq model_dim"],
        positions: Shaped[Tensor, "*#batch seq"] | None = None,
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Shaped[Tensor, "batch k_len"] | None = None,
        cache: KVCache | None = None,
        *,
        documents: Shaped[Tensor, "*#batch k_len"] | None = None,
        at: Placement | None = None,
        counted: bool | None = None,
    ) -> Float[Tensor, "batch seq model_dim"]:
        """Self-attention of `x` over itself and what `cache` holds.

        Args:
            x: embeddings.
            positions: tokens; by default they go on after the cache, and count real tokens only where a
                `key_padding_mask` is given.
            mask: True = may attend, broadcastable to (batch, heads, seq, k_len).
            key_padding_mask: True = a real token, for all keys, the cache's included.
            cache: extended by these tokens.
            documents: ids of the keys' documents, the cache's included; positions start again in each.
            at: `encoding.at(positions)`, where a model made it once for all layers.
            counted: these are the default positions, also if `at` or `positions` says them; by default where neither
                is given.  Attention then goes by index, which is faster.
        """
        past = len(cache) if cache is not None else 0
        seq_len = x.shape[1]
        encoding = self.encoding if cache is None else cache.agree(self.encoding)
        counted = (positions is None and at is None) if counted is None else counted
        own = positions if at is None else at.positions
        if own is None:
            own = default_positions(seq_len, cache, key_padding_mask, documents, x.device)
        if at is None or encoding is not self.encoding:
            at = encoding.at(own, x.dtype)
        own = at.positions
        q, k, v = self._projected(x, encoding, at)
        if key_padding_mask is not None:
            counted = False
            mask = _with_padding(mask, key_padding_mask, past + seq_len)
        out = self._attended(q, k, v, encoding, own, counted, mask, documents, cache)
        return self.out_proj(out.transpose(1, 2).flatten(2))

    def _attended(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        encoding: Encoding,
        own: Tensor,
        counted: bool,
        mask: Tensor | None,
        documents: Tensor | None,
        cache: KVCache | None,
    ) -> Tensor:
        """Attention over the cache and the new tokens, which are appended to it unless that is refused."""
        # Tokens that simply count up need no comparison of positions: attention knows a faster way.  Inside a
        # document distances are differences of indices, whatever positions restart from.
        if cache is None:
            by_index = counted and (documents is None or not encoding.has_bias or encoding.distance_only)
            places = {} if by_index else {"q_positions": own, "k_positions": own}
            out = attend(q, k, v, encoding, causal=self.causal, mask=mask, documents=documents, encoded=True, **places)
            assert isinstance(out, Tensor)
            return out
        counted = counted and documents is None
        if cache.heads is not None:
            plain = counted and mask is None
            require(plain, "mask, documents and positions", "None after keys were dropped", "one of them")
            return cache.heads.extended_and_attended(cache, q, k, v, self.causal)
        with cache.undone_by_errors():
            k, v = cache.append(k, v, None if counted else own)
            places: dict[str, Any] = {"q_positions": own, "k_positions": cache.positions}
            if counted and cache.counts_up:
                places = {"max_key_norm": self._max_key_norm(cache)}
            out = attend(q, k, v, encoding, causal=self.causal, mask=mask, documents=documents, encoded=True, **places)
        assert isinstance(out, Tensor)
        return out

    def _projected(self, x: Tensor, encoding: Encoding, at: Placement) -> tuple[Tensor, Tensor, Tensor]:
        """Encoded queries, encoded keys and values."""
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in maps)
        if self._owns(x):
            return *encoding.encode_(q, k, at), v
        return encoding.query(q, at), encoding.key(k, at), v

    def _max_key_norm(self, cache: KVCache) -> Tensor | None:
        """What tells a decode step how far it has to look, where looking less far saves anything."""
        saves = self.encoding.has_bias and not torch.is_grad_enabled() and not torch.compiler.is_compiling()
        return cache.max_key_norm if saves else None

    def _owns(self, x: Tensor) -> bool:
        """Whether nobody but this layer reads what its projections give, so that it may be written into."""
        maps = (self.q_proj, self.k_proj)
        hooked = any(_GLOBAL_HOOKS) or any(getattr(m, name) for m in maps for name in _HOOKS)
        return all(type(m) is nn.Linear and "forward" not in vars(m) for m in maps) and not hooked and not watched(x)


def _check_made_for(encoding: Encoding, **sizes: int) -> None:
    """ValueError unless each size that a part of `encoding` was made with is the layer's."""
    for part in encoding.modules():
        for name, size in sizes.items():
            own = getattr(part, name, size)
            require(own == size, f"{name} of {type(part).__name__}", f"this attention's ({size})", own)


def default_positions(
    seq_len: int,
    cache: KVCache | None,
    key_padding_mask: Tensor | None,
    documents: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Where new tokens stand: after the cache, counting real tokens only, from 0 in each document."""
    past = len(cache) if cache is not None else 0
    real = None
    if key_padding_mask is not None:
        real = _real(key_padding_mask, past + seq_len)
    if documents is not None:
        whole = documents.shape[-1] == past + seq_len
        require(whole, "documents", "one id per key ({0}), the cache included", tuple(documents.shape), past + seq_len)
        return places.from_documents(documents, real)[..., past:]
    if real is None:
        return torch.arange(seq_len, device=device) if cache is None else cache.next_positions(seq_len, device)
    if cache is None or past == 0:
        return places.from_mask(real)
    # A cache may have been moved or begun anywhere, so counting goes on from what it holds.
    last = torch.where(real[:, :past].any(-1, keepdim=True), cache.positions[..., -1:], -1)
    counted = last + real[:, past:].long().cumsum(-1)
    begun = real.cumsum(-1)[:, past:] > 0
    return torch.where(begun, counted, 0)


def _real(key_padding_mask: Tensor, k_len: int) -> Tensor:
    real = places.as_real(key_padding_mask, "key_padding_mask")
    require(
        real.shape[1] == k_len,
        "key_padding_mask",
        "of shape (batch, {0}), the cache included",
        tuple(real.shape),
        k_len,
    )
    return real


def _with_padding(mask: Tensor | None, key_padding_mask: Tensor | None, k_len: int) -> Tensor | None:
    if key_padding_mask is None:
        return mask
    real = places.packed_mask(_real(key_padding_mask, k_len))
    if mask is None:
        return real
    check_mask_dtype(mask)
    return mask & real

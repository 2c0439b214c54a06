"""A small decoder-only transformer: what the study trains, and an example of how the pieces fit."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from ropewalk._shapes import Bool, Float, Int, Shaped, Tensor
from ropewalk.attention import Attention, KVCache
from ropewalk.attention.module import default_positions
from ropewalk.encodings import Encoding
from ropewalk.errors import message, require, require_count, require_number, require_type


class Block(nn.Module):
    """x += attention(norm(x)), then x += mlp(norm(x)), the MLP with squared ReLU
    (So et al. 2021, arXiv:2109.08668v2), which costs a CPU a fraction of GELU's time."""

    def __init__(self, model_dim: int, num_heads: int, encoding: Encoding, num_kv_heads: int | None, mlp_dim: int):
        super().__init__()
        self.attention_norm = nn.LayerNorm(model_dim, bias=False)
        self.attention = Attention(model_dim, num_heads, encoding, num_kv_heads=num_kv_heads)
        self.mlp_norm = nn.LayerNorm(model_dim, bias=False)
        self.up = nn.Linear(model_dim, mlp_dim, bias=False)
        self.down = nn.Linear(mlp_dim, model_dim, bias=False)

    def forward(self, x: Tensor, **attention) -> Tensor:
        x = x + self.attention(self.attention_norm(x), **attention)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class Transformer(nn.Module):
    """Tokens in, logits of the next token out.

    Args:
        vocab_size: distinct tokens.
        encoding: shared by all layers.
        model_dim, num_layers, num_heads, num_kv_heads: the usual sizes.
        mlp_dim: width of the MLP, 4 model_dim by default.

    >>> import ropewalk as rw
    >>> model = Transformer(256, rw.Rotary(32))
    >>> model(torch.zeros(1, 10, dtype=torch.long)).shape
    torch.Size([1, 10, 256])
    """

    def __init__(
        self,
        vocab_size: int,
        encoding: Encoding,
        *,
        model_dim: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        mlp_dim: int | None = None,
    ):
        super().__init__()
        require_count(vocab_size, "vocab_size")
        require_count(num_layers, "num_layers")
        require_count(model_dim, "model_dim")
        mlp_dim = 4 * model_dim if mlp_dim is None else require_count(mlp_dim, "mlp_dim")
        require_type(encoding, Encoding, "encoding", "an Encoding", hint="rw.NoPE() for none")
        self.encoding = encoding
        self.embedding = nn.Embedding(vocab_size, model_dim)
        # Tokens start small, which trains faster; beside an absolute encoding of size 1 they would drown.
        self.embedding_norm = nn.LayerNorm(model_dim, bias=False) if encoding.is_absolute else nn.Identity()
        blocks = (Block(model_dim, num_heads, encoding, num_kv_heads, mlp_dim) for _ in range(num_layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(model_dim, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fresh weights: embeddings of deviation 0.02, maps half as wide as their fan-in would allow, and those
        that write into the residual stream smaller by the square root of how many do."""
        nn.init.normal_(self.embedding.weight, std=0.02)
        residual = math.sqrt(2 * len(self.blocks))
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.5 / math.sqrt(module.in_features))
            elif isinstance(module, Encoding) and hasattr(module, "reset_parameters"):
                module.reset_parameters()  # pyright: ignore[reportCallIssue]
        with torch.no_grad():
            for block in self.blocks:
                assert isinstance(block, Block)
                block.attention.out_proj.weight.div_(residual)
                block.down.weight.div_(residual)

    def new_cache(self) -> list[KVCache]:
        """An empty cache for each layer."""
        return [KVCache(self.encoding) for _ in self.blocks]

    def head(self, hidden: Float[Tensor, "*lead model_dim"]) -> Float[Tensor, "*lead vocab"]:
        """Logits from last states, through the transposed embedding."""
        return F.linear(hidden, self.embedding.weight)

    def hidden(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Shaped[Tensor, "*#batch seq"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Shaped[Tensor, "batch k_len"] | None = None,
        documents: Shaped[Tensor, "*#batch k_len"] | None = None,
        cache: list[KVCache] | None = None,
    ) -> Float[Tensor, "batch seq model_dim"]:
        """Last states before the output head; arguments as in `forward`."""
        self._check(tokens, cache)
        own = positions
        if own is None:
            first = cache[0] if cache is not None else None
            own = default_positions(tokens.shape[1], first, key_padding_mask, documents, tokens.device)
        at = self.encoding.at(own, self.embedding.weight.dtype)
        x = self.encoding.embed(self.embedding_norm(self.embedding(tokens.long())), at)
        for layer, block in enumerate(self.blocks):
            x = block(
                x,
                positions=positions,
                mask=mask,
                key_padding_mask=key_padding_mask,
                documents=documents,
                cache=cache[layer] if cache is not None else None,
                at=at,
                counted=positions is None,
            )
        return self.norm(x)

    def _check(self, tokens: Tensor, cache: list[KVCache] | None) -> None:
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(message("tokens", "an integer tensor", f"dtype {tokens.dtype}"))
        require(tokens.ndim == 2, "tokens", "of shape (batch, seq)", tuple(tokens.shape))
        if cache is not None:
            require_type(cache, list, "cache", "a list, one KVCache per layer", hint="model.new_cache() makes it")
            require(
                len(cache) == len(self.blocks), "cache", "one KVCache per layer ({0})", len(cache), len(self.blocks)
            )

    def forward(
        self,
        tokens: Int[Tensor, "batch seq"],
        positions: Shaped[Tensor, "*#batch seq"] | None = None,
        *,
        mask: Bool[Tensor, "..."] | None = None,
        key_padding_mask: Shaped[Tensor, "batch k_len"] | None = None,
        documents: Shaped[Tensor, "*#batch k_len"] | None = None,
        cache: list[KVCache] | None = None,
    ) -> Float[Tensor, "batch seq vocab"]:
        """Logits of the token after each token.

        Args:
            tokens: indices below vocab_size.
            positions: by default they go on after the cache, count real tokens under a `key_padding_mask`, and
                start again in each of `documents`.
            mask: True = may attend, broadcastable to (batch, heads, seq, k_len), combined with causality.
            key_padding_mask: True = a real token, for all keys, the cache's included.
            documents: ids of the keys' documents; tokens see their own document only.
            cache: from `new_cache`, extended by these tokens.
        """
        states = self.hidden(
            tokens, positions, mask=mask, key_padding_mask=key_padding_mask, documents=documents, cache=cache
        )
        return self.head(states)

    @torch.no_grad()
    def generate(
        self,
        tokens: Int[Tensor, "batch seq"],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        key_padding_mask: Shaped[Tensor, "batch seq"] | None = None,
        generator: torch.Generator | None = None,
    ) -> Int[Tensor, "batch longer"]:
        """`tokens` followed by `max_new_tokens` more, one at a time through a cache.

        Args:
            tokens: prompts, at least one token each.
            temperature: 0 takes the likeliest token; above 0 draws from softmax(logits / temperature).
            key_padding_mask: True = a real token; prompts may be padded on either side.
        """
        require_count(max_new_tokens, "max_new_tokens", at_least=0)
        require(tokens.shape[1] > 0, "tokens", "at least one per prompt", tuple(tokens.shape))
        usable = require_number(temperature, "temperature") == 0 or 1e-6 <= temperature < math.inf
        require(usable, "temperature", "0, or finite and at least 1e-6", temperature)
        cache, step, real = self.new_cache(), tokens, key_padding_mask
        final = torch.full((tokens.shape[0],), tokens.shape[1] - 1, device=tokens.device)
        if real is not None:
            real = real != 0
            require(
                bool(real.any(-1).all()), "key_padding_mask", "True somewhere in each row", "a row of padding alone"
            )
            index = torch.arange(tokens.shape[1], device=tokens.device)
            final = torch.where(real, index, 0).amax(-1)
        for _ in range(max_new_tokens):
            states = self.hidden(step, key_padding_mask=real, cache=cache)
            logits = self.head(states[torch.arange(len(states)), final][:, None])[:, 0]
            if temperature == 0:
                step = logits.argmax(-1, keepdim=True)
            else:
                step = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)
            tokens = torch.cat((tokens, step), dim=1)
            final = torch.zeros_like(final)
            if real is not None:
                real = torch.cat((real, torch.ones_like(step, dtype=torch.bool)), dim=1)
        return tokens

"""The names that tutorials use, with their signatures and results, over Ropewalk's own functions.

For people who arrive with code such as LLaMA's `apply_rotary_emb` or a tutorial's `get_alibi_biases`.  New code
should use `ropewalk.Rotary` and `ropewalk.ALiBi`, which need no table and no maximal length.
"""

import torch
from torch import nn

from ropewalk import kernels
from ropewalk._shapes import Float, Shaped, Tensor
from ropewalk.encodings import ALiBi, Rotary, alibi_slope
from ropewalk.errors import require, require_count


def precompute_freqs_cis(dim: int, end: int, theta: float | int = 10000.0) -> Shaped[Tensor, "end pairs"]:
    """cos + i sin of every position below `end` and every pair, complex64 (LLaMA's reference code).

    >>> precompute_freqs_cis(4, 2)[1].real
    tensor([0.5403, 0.9999])
    """
    at = Rotary(dim, base=theta, layout="interleaved").at(torch.arange(require_count(end, "end", at_least=0)))
    assert at.cos is not None and at.sin is not None
    return torch.complex(at.cos, at.sin)


def apply_rotary_emb(
    xq: Float[Tensor, "batch seq heads head_dim"],
    xk: Float[Tensor, "batch seq kv_heads head_dim"],
    freqs_cis: Shaped[Tensor, "seq pairs"],
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned, neighbours paired; heads after the sequence, as in LLaMA's reference code."""
    table = (xq.shape[1], xq.shape[-1] // 2)
    require(tuple(freqs_cis.shape) == table, "freqs_cis", "of shape {0}", tuple(freqs_cis.shape), table)
    cos, sin = freqs_cis.real[:, None], freqs_cis.imag[:, None]
    return kernels.turn(xq, cos, sin, "interleaved"), kernels.turn(xk, cos, sin, "interleaved")


class LlamaRotaryEmbedding(nn.Module):
    """`cos, sin` of width `dim` for Hugging Face's early LLaMA code: forward(x, seq_len) -> (seq_len, dim) each.

    `max_position_embeddings` is accepted and not needed: any length is computed exactly.
    """

    def __init__(self, dim: int, max_position_embeddings: int = 2048, base: float | int = 10000.0, device=None):
        super().__init__()
        self.dim, self.max_position_embeddings, self.base = dim, max_position_embeddings, base
        self.rotary = Rotary(dim, base=base)

    @property
    def inv_freq(self) -> Float[Tensor, "pairs"]:
        """Radians per token, as that class shows them; no table is made from it."""
        return torch.tensor(self.rotary.inv_freq)

    def forward(
        self, x: Tensor, seq_len: int | Tensor | None = None, position_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tables in x's dtype for positions 0 ... seq_len - 1, or for `position_ids` (also as second argument)."""
        if isinstance(seq_len, Tensor):
            seq_len, position_ids = None, seq_len
        if position_ids is None:
            position_ids = torch.arange(x.shape[-2] if seq_len is None else seq_len, device=x.device)
        at = self.rotary.at(position_ids, x.dtype)
        assert at.cos is not None and at.sin is not None
        return torch.cat((at.cos, at.cos), -1).to(x.dtype), torch.cat((at.sin, at.sin), -1).to(x.dtype)


def rotate_half(x: Float[Tensor, "*lead head_dim"]) -> Float[Tensor, "*lead head_dim"]:
    """(a, b) halves become (-b, a): a quarter turn of each pair.

    >>> rotate_half(torch.tensor([1., 2., 3., 4.])).tolist()
    [-3.0, -4.0, 1.0, 2.0]
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(
    q: Float[Tensor, "batch heads seq head_dim"],
    k: Float[Tensor, "batch kv_heads seq head_dim"],
    cos: Float[Tensor, "*table head_dim"],
    sin: Float[Tensor, "*table head_dim"],
    position_ids: Shaped[Tensor, "batch seq"] | None = None,
    unsqueeze_dim: int = 1,
) -> tuple[Tensor, Tensor]:
    """Queries and keys turned, halves paired, with rows `position_ids` of the tables, or with tables that
    belong to the tokens already."""
    if position_ids is not None:
        table = cos.reshape(-1, cos.shape[-1])
        inside = bool(((position_ids >= 0) & (position_ids < table.shape[0])).all())
        require(inside, "position_ids", f"in [0, {table.shape[0]}), rows of cos", "others", hint="make longer tables")
        cos, sin = table[position_ids], sin.reshape(-1, sin.shape[-1])[position_ids]
    require(cos.shape[-1] == q.shape[-1], "cos", "as wide as a head ({0})", cos.shape[-1], q.shape[-1])
    pairs = cos.shape[-1] // 2
    cos, sin = cos[..., :pairs], sin[..., :pairs]
    if cos.ndim == 3:
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return kernels.turn(q, cos, sin, "half"), kernels.turn(k, cos, sin, "half")


def get_slopes(n_heads: int) -> Float[Tensor, "heads"]:
    """ALiBi's slopes, head 0 first.

    >>> get_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    return alibi_slope(torch.arange(require_count(n_heads, "n_heads")), n_heads)


def get_alibi_biases(n_heads: int, seq_len: int) -> Float[Tensor, "heads seq seq"]:
    """-slope |i - j| as one dense tensor; `ropewalk.attend` needs none.

    >>> get_alibi_biases(1, 3)[0] * 256
    tensor([[-0., -1., -2.],
            [-1., -0., -1.],
            [-2., -1., -0.]])
    """
    index = torch.arange(require_count(seq_len, "seq_len", at_least=0))
    return ALiBi(n_heads).bias(torch.arange(n_heads)[:, None, None], index[:, None], index)

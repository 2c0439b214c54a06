"""Who sees whom, and with which bias: what every backend is told besides q, k and v."""

from dataclasses import dataclass

import torch

from ropewalk import positions
from ropewalk._shapes import Tensor
from ropewalk.encodings import Encoding
from ropewalk.encodings.base import table_dtype
from ropewalk.errors import message, require, require_type


@dataclass(frozen=True)
class Sight:
    """Queries i and keys j of one call.

    Positions and documents are (1 or batch, length); positions that nobody gave count up by one, with the last
    query on the last key, so that distance = i - j + (k_len - q_len) for the indices themselves.
    """

    q_len: int
    k_len: int
    q_positions: Tensor | None
    k_positions: Tensor | None
    causal: bool
    mask: Tensor | None
    q_documents: Tensor | None
    k_documents: Tensor | None
    known_heads: Tensor | None
    num_heads: int
    device: torch.device
    encoding: Encoding | None

    @property
    def heads(self) -> Tensor:
        """Global indices of the query heads; made where nobody needed them yet."""
        return _all_heads(self.num_heads, self.device) if self.known_heads is None else self.known_heads

    @property
    def aligned(self) -> bool:
        """Positions count up by one, and the last query stands on the last key."""
        return self.q_positions is None and self.k_positions is None

    @property
    def q_pos(self) -> Tensor:
        if self.q_positions is not None:
            return self.q_positions
        if self.k_positions is not None:
            return self.k_positions[:, self.k_len - self.q_len :]
        return positions.last(self.q_len, self.k_len, self.device)[None]

    @property
    def k_pos(self) -> Tensor:
        if self.k_positions is not None:
            return self.k_positions
        return torch.arange(self.k_len, device=self.device)[None]

    @property
    def has_bias(self) -> bool:
        return self.encoding is not None and self.encoding.has_bias

    @property
    def learned(self) -> bool:
        """Whether the encoding has anything that a gradient could reach."""
        return self.encoding is not None and any(p.requires_grad for p in self.encoding.parameters())

    def allowed(self, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor | None:
        """Which keys the queries `rows` may attend among `columns`: bool, broadcastable to (B, H, rows, columns).

        None where nothing is forbidden.
        """
        parts = []
        if self.causal:
            parts.append(self.q_pos[:, None, rows, None] >= self.k_pos[:, None, None, columns])
        if self.q_documents is not None and self.k_documents is not None:
            parts.append(self.q_documents[:, None, rows, None] == self.k_documents[:, None, None, columns])
        if self.mask is not None:
            query_rows = rows if self.mask.shape[-2] > 1 else slice(None)
            key_columns = columns if self.mask.shape[-1] > 1 else slice(None)
            parts.append(self.mask[..., query_rows, key_columns])
        if not parts:
            return None
        both = parts[0]
        for part in parts[1:]:
            both = both & part
        return both

    def bias(self, dtype: torch.dtype, rows: slice = slice(None), columns: slice = slice(None)) -> Tensor | None:
        """The encoding's bias, broadcastable to (B, H, rows, columns), float64 for float64 data, else float32."""
        if self.encoding is None or not self.encoding.has_bias:
            return None
        q_pos, k_pos = self.q_pos[:, None, rows, None], self.k_pos[:, None, None, columns]
        if self.encoding.distance_only:  # subtracted as integers: floats would round far positions first
            q_pos, k_pos = q_pos - k_pos, torch.zeros_like(k_pos)
        if dtype == torch.float64:
            q_pos, k_pos = q_pos.to(dtype), k_pos.to(dtype)
        bias = self.encoding.bias(self.heads[:, None, None], q_pos, k_pos)
        return None if bias is None else bias.to(dtype)

    def bias_by_distance(self, dtype: torch.dtype) -> Tensor:
        """The bias at distances k_len - 1 ... 1 - q_len of an aligned sight: (heads or 1, q_len + k_len - 1).

        Entry (q_len - 1 - i) + j belongs to query row i and key row j.  Causality is in it.
        """
        distance = torch.arange(self.k_len - 1, -self.q_len, -1, device=self.device)
        if self.encoding is None or not self.encoding.has_bias:
            bias = torch.zeros(1, len(distance), dtype=dtype, device=distance.device)
        else:
            counted = distance.to(dtype) if dtype == torch.float64 else distance
            bias = self.encoding.bias(self.heads[:, None], counted, torch.zeros_like(counted))
            if bias is None:
                raise TypeError(message("bias", "a tensor where distance_only is True", None))
            bias = bias.to(dtype).expand(len(self.heads), -1)
        return torch.where(distance >= 0, bias, -torch.inf) if self.causal and self.q_len > 1 else bias


def look(
    q: Tensor,
    k: Tensor,
    encoding: Encoding | None,
    q_positions: Tensor | None,
    k_positions: Tensor | None,
    causal: bool,
    mask: Tensor | None,
    documents: Tensor | None,
    heads: Tensor | None,
) -> Sight:
    """A checked `Sight` from what a caller gave to `attend`."""
    batch, num_heads, q_len = q.shape[:3]
    k_len = k.shape[2]
    q_pos = None if q_positions is None else _rows("q_positions", q_positions, batch, q_len)
    k_pos = None if k_positions is None else _rows("k_positions", k_positions, batch, k_len)
    both = q_pos is not None or k_pos is None
    require(both or q_len <= k_len, "q_positions", "given where queries outnumber positioned keys", None)
    if mask is not None:
        _check_mask(mask, (batch, num_heads, q_len, k_len))
    q_documents = k_documents = None
    if documents is not None:
        k_documents = _rows("documents", documents, batch, k_len)
        require(q_len <= k_len, "documents", "used with at most as many queries as keys ({0})", q_len, k_len)
        q_documents = k_documents[:, k_len - q_len :]
    device = q.device
    if heads is not None:
        heads = _checked_heads(heads, num_heads)
    elif encoding is not None and encoding.has_bias:  # made once: its bias asks for them again and again
        heads = _all_heads(num_heads, device)
    return Sight(q_len, k_len, q_pos, k_pos, causal, mask, q_documents, k_documents, heads, num_heads, device, encoding)


def _all_heads(num_heads: int, device: torch.device) -> Tensor:
    return torch.arange(num_heads, device=device)


def _checked_heads(heads: Tensor, num_heads: int) -> Tensor:
    heads = positions.as_positions(heads, "heads")
    shape = tuple(heads.shape)
    require(shape == (num_heads,), "heads", "of shape ({0},), global indices of the query heads", shape, num_heads)
    return heads


def _rows(name: str, values: Tensor, batch: int, length: int) -> Tensor:
    """(1 or batch, length) from (length,) or (batch, length)."""
    rows = positions.as_positions(values, name)
    rows = rows if rows.ndim == 2 else rows[None]
    fits = rows.shape[-1] == length and (rows.shape[0] == 1 or rows.shape[0] == batch)
    require(fits, name, "of shape ({0},) or ({1}, {0})", tuple(values.shape), length, batch)
    return rows


def check_mask_dtype(mask: Tensor) -> None:
    """TypeError unless `mask` is a bool tensor."""
    require_type(mask, Tensor, "mask", "a bool tensor")
    if mask.dtype != torch.bool:
        hint = "mask >= 0 turns an additive mask into a boolean one; a bias belongs into an encoding"
        raise TypeError(message("mask", "bool (True = may attend)", f"dtype {mask.dtype}", hint))


def _check_mask(mask: Tensor, shape: tuple[int, ...]) -> None:
    check_mask_dtype(mask)
    fits = mask.ndim <= 4 and all(m == 1 or m == s for m, s in zip(reversed(mask.shape), reversed(shape), strict=False))
    require(fits and mask.ndim >= 2, "mask", "broadcastable to {0}", tuple(mask.shape), shape)


def score_dtype(x: Tensor) -> torch.dtype:
    """The precision of scores, biases and softmax for data like `x`."""
    return table_dtype(x.dtype)

"""Keys and values of the tokens so far, with their positions."""

import torch

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings import Encoding, reposition
from ropewalk.errors import message, require, require_count
from ropewalk.positions import as_positions


class KVCache:
    """One layer's past: `k` as its encoding left it, `v`, and the position of each token.

    Storage doubles when it is full, so a step copies nothing but its own token.  Where gradients flow through
    the cache, tensors are joined instead of written into.

    Args:
        encoding: needed by `evict`, which moves keys to other positions.
    """

    def __init__(self, encoding: Encoding | None = None):
        self.encoding = encoding
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._positions: Tensor | None = None
        self._written: Tensor | None = None  # where each stored key was encoded, once some have moved
        self._moved: Tensor | None = None  # the stored keys turned to where they stand now
        self._length = 0
        self.counts_up = True
        """Each token was placed right after the one before it, from 0 on: distances are differences of indices."""

    def __len__(self) -> int:
        return self._length

    @property
    def k(self) -> Float[Tensor, "batch kv_heads k_len head_dim"]:
        """Encoded keys, oldest first."""
        return self._used(self._k if self._moved is None else self._moved)

    @property
    def v(self) -> Float[Tensor, "batch kv_heads k_len value_dim"]:
        """Values, oldest first."""
        return self._used(self._v)

    @property
    def positions(self) -> Int[Tensor, "*batch k_len"]:
        """Position of each key, tokens; (k_len,) or (batch, k_len)."""
        held = self._positions
        require(held is not None, "cache", "filled before it is read", "an empty cache")
        assert held is not None
        return held[..., : self._length]

    def _used(self, buffer: Tensor | None) -> Tensor:
        require(buffer is not None, "cache", "filled before it is read", "an empty cache")
        assert buffer is not None
        return buffer[:, :, : self._length]

    def append(
        self,
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        v: Float[Tensor, "batch kv_heads seq value_dim"],
        positions: Shaped[Tensor, "*#batch seq"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; returns all keys and values, as views that hold until tokens are cropped or evicted.

        Args:
            k: encoded keys (`encoding.key`).
            v: values.
            positions: tokens, (seq,) or (batch, seq); by default the next ones after those held.
        """
        self.counts_up = self.counts_up and positions is None
        if positions is None:
            positions = self.next_positions(k.shape[2], k.device)
        positions = as_positions(positions)
        require(k.shape[:3] == v.shape[:3], "v", "of k's shape {0}", tuple(v.shape[:3]), tuple(k.shape[:3]))
        require(positions.shape[-1] == k.shape[2], "positions", "one per token ({0})", positions.shape[-1], k.shape[2])
        self._check_same_kind(k, v)
        if self._positions is not None and positions.ndim != self._positions.ndim:
            positions = positions.expand(k.shape[0], -1)
            self._positions = self._positions.expand(k.shape[0], -1).contiguous()
        stop = self._length + k.shape[2]
        self._k = self._extended(self._k, k, stop, axis=2)
        self._v = self._extended(self._v, v, stop, axis=2)
        self._positions = self._extended(self._positions, positions, stop, axis=-1)
        if self._written is not None:
            self._written = self._extended(self._written, positions, stop, axis=-1)
            self._moved = self._extended(self._moved, k, stop, axis=2)
        self._length = stop
        return self.k, self.v

    def _check_same_kind(self, k: Tensor, v: Tensor) -> None:
        if self._k is None or self._v is None:
            return
        for name, new, old in (("k", k, self._k), ("v", v, self._v)):
            same = new.shape[:2] == old.shape[:2] and new.shape[3] == old.shape[3]
            require(
                same, name, f"of the cache's shape {tuple(old.shape[:2])} and width {old.shape[3]}", tuple(new.shape)
            )
            if new.dtype != old.dtype:
                raise TypeError(message(name, f"of the cache's dtype ({old.dtype})", new.dtype))

    def _extended(self, buffer: Tensor | None, new: Tensor, stop: int, axis: int) -> Tensor:
        used = 0 if buffer is None else self._length
        if torch.is_grad_enabled() and (new.requires_grad or (buffer is not None and buffer.requires_grad)):
            return new if buffer is None else torch.cat((buffer.narrow(axis, 0, used), new), dim=axis)
        writable = buffer is not None and (torch.is_inference_mode_enabled() or not buffer.is_inference())
        if buffer is None or not writable or stop > buffer.shape[axis]:
            shape = list(new.shape)
            shape[axis] = max(stop, 2 * used)
            grown = new.new_zeros(shape)  # never uninitialised: a masked slot is still multiplied by 0
            if buffer is not None:
                grown.narrow(axis, 0, used).copy_(buffer.narrow(axis, 0, used))
            buffer = grown
        buffer.narrow(axis, used, stop - used).copy_(new)
        return buffer

    def next_positions(self, seq_len: int, device: torch.device | None = None) -> Int[Tensor, "*batch seq"]:
        """Where `seq_len` further tokens stand."""
        ahead = torch.arange(seq_len, device=device)
        return ahead if self._length == 0 else self.positions[..., -1:] + 1 + ahead

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, so that decoding goes on from there."""
        require_count(length, "length", at_least=0)
        require(length <= self._length, "length", f"at most the cache's ({self._length})", length)
        self._length = length

    def evict(self, sinks: int, window: int) -> None:
        """Keep the first `sinks` and the last `window` tokens, and close the gap between their positions
        (StreamingLLM, Xiao et al. 2024, arXiv:2309.17453v4, Sec. 3.2).

        Each key is turned once, from where it was first encoded: repeated eviction adds no error.
        """
        require_count(sinks, "sinks", at_least=0)
        require_count(window, "window")
        if self.encoding is None:
            hint = "KVCache(encoding) knows how to move its keys"
            raise ValueError(message("encoding", "given where keys move", None, hint))
        if self._length <= sinks + window:
            return
        dropped = self._length - sinks - window
        now = self.positions
        keep = torch.cat((torch.arange(sinks), torch.arange(sinks + dropped, self._length))).to(now.device)
        gap = now[..., sinks + dropped : sinks + dropped + 1] - (
            now[..., sinks - 1 : sinks] + 1 if sinks else torch.zeros_like(now[..., :1])
        )
        shifted = torch.cat((now[..., :sinks], now[..., sinks + dropped :] - gap), dim=-1)
        written = (now if self._written is None else self._written[..., : self._length])[..., keep]
        self._k, self._v = self._used(self._k)[:, :, keep], self._used(self._v)[:, :, keep]
        self._positions, self._written = shifted, written
        self._moved = reposition(self._k, self.encoding, written, shifted)
        self._length = sinks + window

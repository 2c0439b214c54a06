"""Keys and values of the tokens so far, with their positions."""

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.attention.sight import score_dtype
from ropewalk.encodings import Encoding, reposition
from ropewalk.errors import message, require, require_count
from ropewalk.positions import as_positions

if TYPE_CHECKING:
    from ropewalk.attention.dropping import HeadCaches

ON_CHANGE = ("refuse", "freeze", "turn")


class KVCache:
    """One layer's past: `k` as its encoding left it, `v`, and the position of each token.

    Storage doubles when it is full, so that a step copies nothing but its own token.  With gradients enabled
    tensors are joined instead, since what a backward pass has saved must not be written into.

    Args:
        encoding: how keys were encoded; `evict` and `drop` need it.
        on_change: what `Attention` does when its own encoding turns at other frequencies than the keys held, as when
            a sequence outgrows a spectrum that depends on length (dynamic NTK, LongRoPE).  "refuse": an error.
            "freeze": this cache goes on as it began.  "turn": its keys are turned to the new frequencies, once.
    """

    def __init__(self, encoding: Encoding | None = None, on_change: str = "refuse"):
        require(on_change in ON_CHANGE, "on_change", "one of " + ", ".join(map(repr, ON_CHANGE)), repr(on_change))
        self.encoding, self.on_change = encoding, on_change
        self.clear()

    def agree(self, encoding: Encoding) -> Encoding:
        """The encoding that further queries and keys need: `encoding`, or this cache's own where it is frozen.

        Raises:
            ValueError: keys were turned at other frequencies, and `on_change` is "refuse".
        """
        if self.encoding is None or self._length == 0:
            self.encoding = encoding
        if self.encoding is encoding or _turns(self.encoding) == _turns(encoding):
            return encoding
        if self.on_change == "freeze":
            return self.encoding
        hint = "KVCache(encoding, on_change='turn') turns the keys, 'freeze' goes on as it began"
        may_turn = self.on_change == "turn"
        require(may_turn, "encoding", "of the frequencies that the cache's keys have", encoding, hint=hint)
        self._require_whole()
        written = _filled(self._places if self._written is None else self._written)[:, : self._length]
        k = _turned_anew(self.k if self._moved is None else _filled(self._k)[:, :, : self._length],
                         self.encoding, encoding, written)  # fmt: skip
        if self._moved is not None:
            self._moved = _turned_anew(self.k, self.encoding, encoding, _filled(self._places)[:, : self._length])
        self._k, self.encoding = k, encoding
        self._norm, self._normed = None, 0
        return encoding

    def clear(self) -> None:
        """Forget everything, sizes and dtype included."""
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._places: Tensor | None = None  # (rows, k_len), one row for all or one per sequence
        self._written: Tensor | None = None  # where each key was encoded, once some have moved
        self._moved: Tensor | None = None  # the keys turned to where they stand now
        self._norm: Tensor | None = None  # largest norm of the first `_normed` keys, (kv_heads,)
        self._normed = 0
        self.heads: "HeadCaches | None" = None
        """What `drop` left, one cache per key head."""
        self._length = 0
        self.counts_up = True
        """Each token was placed right after the one before it, from 0 on: distances are differences of indices."""

    def __len__(self) -> int:
        return self._length

    @property
    def k(self) -> Float[Tensor, "batch kv_heads k_len head_dim"]:
        """Encoded keys, oldest first."""
        self._require_whole()
        return _filled(self._k if self._moved is None else self._moved)[:, :, : self._length]

    @property
    def v(self) -> Float[Tensor, "batch kv_heads k_len value_dim"]:
        """Values, oldest first."""
        self._require_whole()
        return _filled(self._v)[:, :, : self._length]

    @property
    def max_key_norm(self) -> Float[Tensor, "kv_heads"]:
        """At least the norm of every key held, by head: how `attend` knows which keys are too far to matter.

        Each key is looked at once.
        """
        if self._norm is None or self._normed < self._length:
            fresh = self.k[:, :, self._normed :].detach()
            fresh = fresh if fresh.numel() else fresh.new_zeros(1, fresh.shape[1], 1, 1)
            norm = torch.linalg.vector_norm(fresh, dim=-1, dtype=score_dtype(fresh)).amax((0, 2))
            self._norm = norm if self._norm is None else torch.maximum(self._norm, norm)
            self._normed = self._length
        return self._norm

    @property
    def positions(self) -> Int[Tensor, "*batch k_len"]:
        """Position of each key, tokens; (k_len,), or (batch, k_len) where rows differ."""
        rows = _filled(self._places)[:, : self._length]
        return rows[0] if rows.shape[0] == 1 else rows

    def append(
        self,
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        v: Float[Tensor, "batch kv_heads seq value_dim"],
        positions: Shaped[Tensor, "*#batch seq"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Add tokens; returns all keys and values, as views that hold until tokens are cropped or evicted (after
        `drop` those just added).

        Args:
            k: encoded keys (`encoding.key`).
            v: values.
            positions: tokens, (seq,) or (batch, seq); by default the next ones after those held.
        """
        self._check(k, v)
        counted = positions is None
        places = as_positions(self.next_positions(k.shape[2], k.device) if positions is None else positions)
        places = places if places.ndim == 2 else places[None]
        fits = places.shape[-1] == k.shape[2] and (places.shape[0] == 1 or places.shape[0] == k.shape[0])
        require(fits, "positions", "one per token, ({0},) or ({1}, {0})", tuple(places.shape), k.shape[2], k.shape[0])
        rows = max(places.shape[0], 1 if self._places is None else self._places.shape[0])
        places = places.expand(rows, -1)
        stop = self._length + k.shape[2]
        if self._written is not None:
            self._written = self._extended(_with_rows(self._written, rows), places, stop, axis=1)
            self._moved = self._extended(self._moved, k, stop, axis=2)
        self._places = self._extended(_with_rows(self._places, rows), places, stop, axis=1)
        if self.heads is not None:
            require(counted, "positions", "left to count up after keys were dropped", positions)
            self.heads.append(k, v)
            self._length = stop
            return k, v
        self._k = self._extended(self._k, k, stop, axis=2)
        self._v = self._extended(self._v, v, stop, axis=2)
        self._length = stop
        self.counts_up = self.counts_up and counted
        return self.k, self.v

    def next_positions(self, seq_len: int, device: torch.device | None = None) -> Int[Tensor, "*batch seq"]:
        """Where `seq_len` further tokens stand."""
        ahead = torch.arange(seq_len, device=device)
        return ahead if self._length == 0 else self.positions[..., -1:] + 1 + ahead

    def _check(self, k: Tensor, v: Tensor) -> None:
        require(k.shape[:3] == v.shape[:3], "v", "of k's shape {0}", tuple(v.shape[:3]), tuple(k.shape[:3]))
        if self._k is None or self._v is None:
            return
        for name, new, old in (("k", k, self._k), ("v", v, self._v)):
            own = (*old.shape[:2], old.shape[3])
            got = (*new.shape[:2], new.shape[3])
            require(got == own, name, "of the cache's batch, heads and width {0}", got, own)
            if new.dtype != old.dtype:
                raise TypeError(message(name, f"of the cache's dtype ({old.dtype})", new.dtype))

    def _extended(self, buffer: Tensor | None, new: Tensor, stop: int, axis: int) -> Tensor:
        used = 0 if buffer is None else self._length
        if torch.is_grad_enabled():
            held = [] if used == 0 or buffer is None else [buffer.narrow(axis, 0, used)]
            return torch.cat((*held, new), dim=axis)  # a tensor of its own, also of one: the caller's may change
        frozen = (
            buffer is None or buffer.requires_grad or (buffer.is_inference() and not torch.is_inference_mode_enabled())
        )
        if buffer is None or frozen or stop > buffer.shape[axis]:
            shape = list(new.shape)
            shape[axis] = max(stop, 2 * used)
            grown = new.new_zeros(shape)  # never uninitialised: a masked slot is still multiplied by 0
            if buffer is not None:
                grown.narrow(axis, 0, used).copy_(buffer.narrow(axis, 0, used))
            buffer = grown
        buffer.narrow(axis, used, stop - used).copy_(new)
        return buffer

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens, so that decoding goes on from there."""
        require_count(length, "length", at_least=0)
        self._require_whole()
        require(length <= self._length, "length", "at most the cache's ({0})", length, self._length)
        self._length = length
        self._normed = min(self._normed, length)
        if length == 0:
            self.clear()

    @contextlib.contextmanager
    def undone_by_errors(self) -> Iterator[None]:
        """Tokens appended within are forgotten again if an error ends it, so that the step can be repeated."""
        held, counts_up = self._length, self.counts_up
        try:
            yield
        except Exception:
            if self._length > held:
                self.crop(held)
                self.counts_up = counts_up
            raise

    def evict(self, sinks: int, window: int) -> None:
        """Keep the first `sinks` and the last `window` tokens, and close the gap between their positions
        (StreamingLLM, Xiao et al. 2024, arXiv:2309.17453v4, Sec. 3.2).

        Each key is turned once, from where it was first encoded: repeated eviction adds no error.  A later
        `key_padding_mask` has to be cut in the same way.

        Raises:
            ValueError: no encoding was given, or its keys cannot be moved (absolute encodings).
        """
        require_count(sinks, "sinks", at_least=0)
        require_count(window, "window")
        self._require_whole()
        if self.encoding is None:
            raise ValueError(message("encoding", "given where keys move", None, "KVCache(encoding) knows how"))
        dropped = self._length - sinks - window
        if dropped <= 0:
            return
        now = _filled(self._places)[:, : self._length]
        keep = torch.cat((torch.arange(sinks), torch.arange(sinks + dropped, self._length))).to(now.device)
        first = now[:, sinks + dropped, None]
        after_sinks = now[:, sinks - 1, None] + 1 if sinks else torch.zeros_like(first)
        shifted = torch.cat((now[:, :sinks], now[:, sinks + dropped :] - (first - after_sinks)), dim=-1)
        written = (now if self._written is None else self._written[:, : self._length])[:, keep]
        k = _filled(self._k)[:, :, keep]
        moved = reposition(k, self.encoding, written, shifted)  # refuses before anything has changed
        self._k, self._v, self._moved = k, _filled(self._v)[:, :, keep], moved
        self._places, self._written = shifted, written
        self._length = sinks + window
        self._norm, self._normed = None, 0

    def drop(self, max_score: float, eps: float | None = None) -> list[int]:
        """Forget, head by head, the keys that a falling bias (ALiBi) hides from every later query.

        From then on heads hold different lengths, `k` and `v` are gone, and `heads.attend` reads the cache, as
        `Attention` does by itself.  Call it again whenever memory is worth a pass over what is kept.

        Args:
            max_score: no later |q| |k| / sqrt(head_dim) is above it; a query that breaks this is refused.
            eps: what forgotten keys may weigh together in any later query, relative to what it still reads; by
                default half a unit in the last place of the cache's dtype.

        Returns:
            How many keys each key head has forgotten since it was filled.

        Raises:
            ValueError: the bias is not known to fall, or keys do not stand one after the other from 0 on.
        """
        from ropewalk.attention.dropping import HeadCaches

        require(self._length > 0, "cache", "filled before keys are dropped", "an empty cache")
        falls = self.encoding is not None and self.counts_up and self._moved is None
        require(falls, "cache", "given its encoding, and appended to without positions", self.encoding)
        if self.heads is None:
            assert self.encoding is not None
            heads = HeadCaches(self.encoding, self.k.detach(), self.v.detach())
            dropped = heads.drop(max_score, eps)  # refuses before anything has changed
            self.heads, self._k, self._v = heads, None, None
            return dropped
        return self.heads.drop(max_score, eps)

    def _require_whole(self) -> None:
        hint = "cache.heads holds them, head by head; heads.attend reads them"
        require(self.heads is None, "cache", "whole, not dropped from", "heads of different lengths", hint=hint)


def _turns(encoding: Encoding) -> list[tuple[Any, Any]]:
    """Which pairs turn how fast, in the order of an encoding's parts."""
    return [(getattr(part, "plane", None), part.spectrum) for part in encoding.modules() if hasattr(part, "spectrum")]


def _turned_anew(k: Tensor, old: Encoding, new: Encoding, places: Tensor) -> Tensor:
    """Keys at `places` as `new` would have encoded them: turned back to position 0, and from there again."""
    start = torch.zeros_like(places)
    at_start = new.moved(old.moved(k, places, start), start, places)
    ratio = math.prod(spectrum.magnitude for _, spectrum in _turns(new))
    ratio /= math.prod(spectrum.magnitude for _, spectrum in _turns(old))
    return at_start if ratio == 1.0 else at_start * ratio


def _filled(buffer: Tensor | None) -> Tensor:
    if buffer is None:
        raise ValueError(message("cache", "filled before it is read", "an empty cache"))
    return buffer


def _with_rows(buffer: Tensor | None, rows: int) -> Tensor | None:
    return buffer if buffer is None or buffer.shape[0] == rows else buffer.expand(rows, -1).contiguous()

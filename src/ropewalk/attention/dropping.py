"""A cache whose heads forget what their falling bias hides: each key head keeps only what later queries can see."""

import math

import torch

from ropewalk._shapes import Float, Tensor
from ropewalk.attention.attend import attend
from ropewalk.attention.cache import KVCache
from ropewalk.attention.sight import score_dtype
from ropewalk.attention.windows import default_eps, reach_of_slope
from ropewalk.encodings import Encoding
from ropewalk.errors import require, require_number


class HeadCaches:
    """One `KVCache` per key head, each without the tokens that it has forgotten.

    Args:
        encoding: one whose bias falls by a known slope (`Encoding.falloff`).
        k, v: encoded keys and values of tokens 0, 1, 2, ...
    """

    def __init__(
        self,
        encoding: Encoding,
        k: Float[Tensor, "batch kv_heads k_len head_dim"],
        v: Float[Tensor, "batch kv_heads k_len value_dim"],
    ):
        self.encoding = encoding
        self.max_score = math.inf
        self.dropped = [0] * k.shape[1]
        """Tokens that each key head has forgotten, from the first on."""
        self._length = k.shape[2]
        self._norms = [torch.zeros(1, dtype=score_dtype(k), device=k.device) for _ in self.dropped]
        self.caches = [_cache(k[:, [head]], v[:, [head]]) for head in range(k.shape[1])]

    def append(
        self, k: Float[Tensor, "batch kv_heads seq head_dim"], v: Float[Tensor, "batch kv_heads seq value_dim"]
    ) -> None:
        """Add the next tokens to every head."""
        for head, cache in enumerate(self.caches):
            cache.append(k[:, [head]], v[:, [head]])
        self._length += k.shape[2]

    def drop(self, max_score: float, eps: float | None = None) -> list[int]:
        """Forget what no later query can see; see `KVCache.drop`."""
        given = require_number(max_score, "max_score")
        require(math.isfinite(given) and given > 0, "max_score", "finite and positive", max_score)
        first = self.caches[0].k
        eps = default_eps(first.dtype) if eps is None else eps
        require(0 < require_number(eps, "eps") < 1, "eps", "above 0 and below 1", eps)
        num_heads = _heads_of(self.encoding)
        require(num_heads is not None, "encoding", "of a known number of heads (ALiBi)", self.encoding)
        assert num_heads is not None
        slope = self.encoding.falloff(torch.arange(num_heads, device=first.device))
        require(slope is not None, "encoding", "one whose bias falls (ALiBi)", self.encoding)
        assert slope is not None
        # A score lies between -max_score and max_score, so none exceeds another by more than twice that.
        limit = torch.full((num_heads,), math.log(eps) - 2 * given, dtype=torch.float64, device=first.device)
        reach = reach_of_slope(slope.detach().double(), limit, self._length).view(len(self.caches), -1).amax(-1)
        for head, kept in enumerate(reach.tolist()):
            cache, start = self.caches[head], max(self._length - kept, 0)
            if start > self.dropped[head]:
                surplus = start - self.dropped[head]
                self._max_key_norm(head)
                self.caches[head] = _cache(cache.k[:, :, surplus:], cache.v[:, :, surplus:])
                self.dropped[head] = start
        if any(self.dropped):
            self.max_score = min(self.max_score, given)
        return list(self.dropped)

    def extended_and_attended(
        self,
        cache: KVCache,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        v: Float[Tensor, "batch kv_heads seq value_dim"],
        causal: bool = True,
    ) -> Float[Tensor, "batch heads seq value_dim"]:
        """Append to `cache`, which these heads are of, and attend; refused before anything has changed.

        Raises:
            ValueError: a query or a key is longer than was promised to `drop`.
        """
        self._check(q, torch.linalg.vector_norm(k.detach().float(), dim=-1).amax((0, 2)) if k.numel() else None)
        cache.append(k, v)
        return self.attend(q, causal)

    def _max_key_norm(self, head: int) -> Tensor:
        """The largest norm of a key that this head holds or has held, (1,)."""
        self._norms[head] = torch.maximum(self._norms[head], self.caches[head].max_key_norm)
        return self._norms[head]

    def _check(self, q: Tensor, new: Tensor | None = None) -> None:
        """ValueError unless all scores of `q`, also with further keys of norms `new`, keep to what was promised."""
        if q.numel() == 0:
            return
        longest = torch.linalg.vector_norm(q.detach().float(), dim=-1).amax((0, 2)).unflatten(0, (len(self.caches), -1))
        norms = torch.cat([self._max_key_norm(head) for head in range(len(self.caches))]).float()
        norms = norms if new is None else torch.maximum(norms, new)
        most = float((longest.amax(-1) * norms).amax()) / math.sqrt(q.shape[-1])
        hint = "drop keys with a larger max_score, or not at all"
        condition = "at most the max_score ({0}) that keys were dropped for"
        require(most <= self.max_score, "|q| |k| / sqrt(head_dim)", condition, most, self.max_score, hint=hint)

    def attend(
        self, q: Float[Tensor, "batch heads q_len head_dim"], causal: bool = True
    ) -> Float[Tensor, "batch heads q_len value_dim"]:
        """Attention of the last q_len tokens, encoded already, over what each head still holds.

        Raises:
            ValueError: a query or a key is longer than was promised to `drop`.
        """
        self._check(q)
        group = q.shape[1] // len(self.caches)
        outs = []
        for head, cache in enumerate(self.caches):
            own = slice(head * group, (head + 1) * group)
            out = attend(
                q[:, own], cache.k, cache.v, self.encoding, causal=causal, encoded=True,
                heads=torch.arange(own.start, own.stop, device=q.device), max_key_norm=self._max_key_norm(head),
            )  # fmt: skip
            assert isinstance(out, Tensor)
            outs.append(out)
        return torch.cat(outs, dim=1)


def _cache(k: Tensor, v: Tensor) -> KVCache:
    cache = KVCache()
    with torch.no_grad():
        cache.append(k.contiguous(), v.contiguous())
    return cache


def _heads_of(encoding: Encoding) -> int | None:
    """The number of heads that an encoding was made for, from whichever part knows it."""
    return next((part.num_heads for part in encoding.modules() if hasattr(part, "num_heads")), None)  # pyright: ignore

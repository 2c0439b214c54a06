"""`attend`: attention with any encoding, on any backend, with explicit positions."""

import math

import torch

from ropewalk._shapes import Bool, Float, Int, Shaped, Tensor
from ropewalk.attention.reference import reference
from ropewalk.attention.sdpa import by_distance, sdpa
from ropewalk.attention.sight import Sight, look
from ropewalk.attention.windows import default_eps, windows
from ropewalk.encodings import Encoding
from ropewalk.encodings.alibi import check_heads
from ropewalk.errors import message, require, require_number, require_type

BACKENDS = ("auto", "reference", "sdpa", "banded", "flex")
_BACKENDS = ", ".join(map(repr, BACKENDS))


def attend(
    q: Float[Tensor, "batch heads q_len head_dim"],
    k: Float[Tensor, "batch kv_heads k_len head_dim"],
    v: Float[Tensor, "batch kv_heads k_len value_dim"],
    encoding: Encoding | None = None,
    *,
    q_positions: Shaped[Tensor, "*#batch q_len"] | None = None,
    k_positions: Shaped[Tensor, "*#batch k_len"] | None = None,
    causal: bool = True,
    mask: Bool[Tensor, "..."] | None = None,
    documents: Shaped[Tensor, "*#batch k_len"] | None = None,
    scale: float | None = None,
    heads: Int[Tensor, "heads"] | None = None,
    encoded: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
    eps: float | None = None,
    max_key_norm: Float[Tensor, "kv_heads"] | None = None,
) -> Float[Tensor, "batch heads q_len value_dim"] | tuple[Tensor, Tensor]:
    """softmax(scale (encoded q) . (encoded k) + bias) v over the keys that each query may attend.

    Args:
        q: queries.
        k, v: keys and values; kv_heads divides heads, and query head h reads kv head h // (heads / kv_heads).
        encoding: turns q and k and biases the score; absolute ones (Sinusoidal, Learned) do nothing here, for
            `encoding.embed` adds them to the embedding, before q, k and v are projected.
        q_positions, k_positions: tokens, (length,) or (batch, length).  By default keys are 0 ... k_len - 1 and
            queries the last q_len of them.
        causal: a query attends keys at its own position and before.
        mask: True = may attend, broadcastable to (batch, heads, q_len, k_len); combined with all other rules.
            What is masked is multiplied by 0 all the same, so it has to be finite.
        documents: ids of the keys' documents, one run of equal ids each; queries are the last q_len tokens and see
            their own document only.
        scale: of q . k, by default 1 / sqrt(head_dim).  The bias is added after it.
        heads: global indices of the query heads at hand, where a shard holds some of them.
        encoded: q and k went through `encoding.query` and `encoding.key` already.
        return_lse: also return the natural logarithm of each softmax denominator, for merging partial results.
        backend: "reference" is the specification, "sdpa" torch's fused attention over all keys, "banded" the same
            without keys that a falling bias makes too light to matter, "flex" FlexAttention, "auto" the fastest.
        eps: what the keys that "banded" and "auto" skip may weigh together, relative to those they read; by default
            half a unit in the last place of q's dtype.
        max_key_norm: the largest norm of each head's keys, where it is known (`KVCache.max_key_norm`): then a decode
            step need not read a key to see that it is too far.

    Returns:
        The attended values in v's dtype (autocast's where that is on).  A query with nothing to attend gives exactly 0
        (and -inf for its logarithm).

    >>> import torch, ropewalk as rw
    >>> q = k = v = torch.ones(1, 8, 5, 16)
    >>> rw.attend(q, k, v, rw.ALiBi(8)).shape
    torch.Size([1, 8, 5, 16])
    """
    _check(q, k, v, backend)
    if eps is not None:
        require(0 < require_number(eps, "eps") < 1, "eps", "above 0 and below 1", eps)
    if max_key_norm is not None:
        require_type(max_key_norm, Tensor, "max_key_norm", "a tensor")
        fits = max_key_norm.shape == k.shape[1:2]
        require(fits, "max_key_norm", "of shape ({0},), one number per key head", tuple(max_key_norm.shape), k.shape[1])
    if encoding is not None:
        require_type(
            encoding, Encoding, "encoding", "an Encoding", hint="rw.build('rotary+alibi', ...) makes one by name"
        )
    sight = look(q, k, encoding, q_positions, k_positions, causal, mask, documents, heads)
    if encoding is not None:
        check_heads(encoding, q.shape[1], heads)
        if encoding.encodes and not encoded:
            q = encoding.query(q, encoding.at(sight.q_pos, q.dtype))
            k = encoding.key(k, encoding.at(sight.k_pos, k.dtype))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    require(math.isfinite(require_number(scale, "scale")), "scale", "finite", scale)
    device = q.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        low = torch.get_autocast_dtype(device) if q.dtype == torch.float32 else q.dtype
        with torch.autocast(device, enabled=False):  # which would round the bias and the scores too
            out, lse = _run(q.to(low), k.to(low), v.to(low), sight, scale, return_lse, backend, eps, max_key_norm)
    else:
        out, lse = _run(q, k, v, sight, scale, return_lse, backend, eps, max_key_norm)
    if return_lse:
        assert lse is not None
        return out, lse
    return out


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sight: Sight,
    scale: float,
    return_lse: bool,
    backend: str,
    eps: float | None,
    max_key_norm: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    if backend == "reference":
        return reference(q, k, v, sight, scale)
    if backend == "flex":
        from ropewalk.attention.flex import flex  # read by the few who ask for it

        return flex(q, k, v, sight, scale, return_lse, _reach(q, k, sight, scale, eps, max_key_norm))
    skip = {"sdpa": False, "banded": True, "auto": None}[backend]
    return sdpa(q, k, v, sight, scale, return_lse, skip, eps, max_key_norm)


def _reach(
    q: Tensor, k: Tensor, sight: Sight, scale: float, eps: float | None, max_key_norm: Tensor | None
) -> Tensor | None:
    """How far each head sees, where its bias falls with distance alone; then whole tiles need not be read."""
    if not (sight.has_bias and by_distance(sight) and q.numel() and 0 < sight.q_len <= sight.k_len):
        return None
    return torch.maximum(*windows(q, k, sight, scale, eps or default_eps(q.dtype), max_key_norm))


def _check(q: Tensor, k: Tensor, v: Tensor, backend: str) -> None:
    require(backend in BACKENDS, "backend", "one of " + _BACKENDS, repr(backend))
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_type(x, Tensor, name, "a tensor")
        require(x.ndim == 4, name, "of shape (batch, heads, seq, head_dim)", tuple(x.shape))
        if not x.dtype.is_floating_point:
            raise TypeError(message(name, "a floating-point tensor", f"dtype {x.dtype}"))
    if not q.dtype == k.dtype == v.dtype:
        hint = "a cache keeps the dtype it was filled with"
        raise TypeError(message("q, k and v", "of one dtype", f"{q.dtype}, {k.dtype}, {v.dtype}", hint))
    # Read once: a decode step on a short cache takes little longer than its checks.
    queries, keys, values = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    batch, num_heads, _, head_dim = queries
    require(batch == keys[0], "k", "of q's batch size ({0})", keys[0], batch)
    require(head_dim > 0, "q", "at least 1 channel wide", queries)
    require(head_dim == keys[3], "k", "of q's head_dim ({0})", keys[3], head_dim)
    require(keys[:3] == values[:3], "v", "of k's shape {0}", values[:3], keys[:3])
    fits = keys[1] > 0 and num_heads % keys[1] == 0
    require(fits, "q's heads", "a multiple of k's heads ({0})", num_heads, keys[1])

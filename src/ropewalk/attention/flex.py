"""Attention through torch's FlexAttention: bias, causality, documents and masks inside one kernel.

The kernel is handed two functions of indices: one adds the encoding's own `bias` to a score, the other says whether
a query may attend a key.  Positions, documents and heads are looked up by index, so nothing of the size of q_len
times k_len is stored, but for a learned bias that is no function of near distances.  Tiles of BLOCK x BLOCK that
the rules empty are never read; which they are follows from the least and the largest position of each block of
tokens, cheaply enough to be found anew at every call.

The kernel is compiled when it is first needed (seconds) and kept for the process: once for each kind of encoding,
set of rules and dtype, and on a CPU for each pair of lengths.  What cannot be compiled runs unfused, in torch's own
dense form of the same two functions, exact and with O(heads q_len k_len) memory: float64 everywhere; on a CPU also
one query, `return_lse`, and all of it where there is no C++ compiler.  There is no gradient on a CPU.

In the functions of indices b is the row of the batch, h the query head at hand, i the query and j the key.
"""

import functools
import inspect
import math
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from ropewalk._shapes import Tensor
from ropewalk._watch import watched
from ropewalk.attention.reference import block
from ropewalk.attention.sight import Sight, score_dtype
from ropewalk.encodings import ALiBi, Compose, Encoding, Hybrid
from ropewalk.errors import require

BLOCK = 128
"""Queries, and keys, of a tile."""
NARROWEST = 24
"""Channels that kernels are handed at least: a GPU's need 16, and torch 2.13's for CPUs is wrong with 16 or fewer."""
RECOMPILES = 128
"""Kernels that a process keeps: torch's own limit of 8 is soon reached, and what comes after it is not compiled."""

Places = Callable[[Tensor, Tensor], Tensor]


def flex(
    q: Tensor, k: Tensor, v: Tensor, sight: Sight, scale: float, return_lse: bool, windows: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Like `reference`; the logarithm is None unless `return_lse`.

    Args:
        windows: one distance per query head, tokens; keys farther than that are skipped.

    Raises:
        ValueError: a gradient is needed where FlexAttention has none.
    """
    gradient = _needs_gradient(q, k, v, sight)
    hint = "'auto', 'sdpa' and 'reference' have one; under torch.no_grad() none is needed"
    kind = q.device.type.upper()
    require(_is_gpu(q) or not gradient, "backend", "one that has a gradient on a {0}", "'flex'", kind, hint=hint)
    dtype, fused = score_dtype(q), fuses(q, return_lse)
    empty = q.numel() == 0 or k.numel() == 0 or v.numel() == 0
    # torch's dense form loses the gradient of what a bias learns, and is not for traces.
    if empty or (not fused and (gradient or watched(q, k, v))):
        out, lse = block(q, k, v, _cropped(sight, windows), scale, dtype, slice(None), slice(None))
        return out, lse if return_lse else None
    with torch.set_grad_enabled(gradient):  # one kernel in either mode
        arguments = (q, k, v, _score_mod(sight, dtype), _block_mask(sight, windows), scale, return_lse)
        return _fused(*arguments) if fused else _unfused(*arguments)


def fuses(q: Tensor, return_lse: bool) -> bool:
    """Whether `flex` compiles a kernel for such queries.

    On a CPU torch 2.13 has none that returns the logarithm, or that works inside a larger compiled function.  That
    for one query is left alone: a tile with nothing allowed raises its maximum to 0, so that far keys vanish, and a
    query with no key gets what was in memory.
    """
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if _is_gpu(q):
        return torch.compiler.is_compiling() or not watched(q)
    return q.device.type == "cpu" and q.shape[2] > 1 and not return_lse and not watched(q) and _has_compiler()


def _is_gpu(q: Tensor) -> bool:
    return q.device.type in ("cuda", "xpu")


@functools.cache
def _has_compiler() -> bool:
    vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return vectors and sys.platform != "darwin" and shutil.which(os.environ.get("CXX", "g++")) is not None


def _needs_gradient(q: Tensor, k: Tensor, v: Tensor, sight: Sight) -> bool:
    return torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or _learns(sight))


def _learns(sight: Sight) -> bool:
    return sight.has_bias and sight.learned


def _cropped(sight: Sight, windows: Tensor | None) -> Sight:
    """Windows as part of the mask."""
    if windows is None:
        return sight
    near = (sight.q_pos[:, None, :, None] - sight.k_pos[:, None, None]).abs() <= windows[:, None, None]
    return replace(sight, mask=near if sight.mask is None else near & sight.mask)


def _by_index(rows: Tensor) -> Places:
    """From (1 or batch, length): the entry of token i in row b."""
    if rows.shape[0] == 1:
        row = rows[0]
        return lambda b, i: row[i]
    return lambda b, i: rows[b, i]


def _distance(sight: Sight) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if not sight.aligned:
        q_at, k_at = _by_index(sight.q_pos), _by_index(sight.k_pos)
        return lambda b, i, j: q_at(b, i) - k_at(b, j)
    # As a tensor: a number would be compiled in.
    ahead = torch.full((), sight.k_len - sight.q_len, device=sight.device)
    return lambda b, i, j: i + ahead - j


def _score_mod(sight: Sight, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """score + bias, in the form that a kernel does best."""
    encoding, heads = sight.encoding, sight.heads
    if encoding is None or not encoding.has_bias:
        return None
    if _is_linear(encoding):
        one = _counted(torch.ones_like(heads), dtype)
        per_token = encoding.bias(heads, one, torch.zeros_like(one))
        assert per_token is not None
        slopes, distance = per_token.to(dtype), _distance(sight)
        return lambda score, b, h, i, j: score + slopes[h] * distance(b, i, j).abs().to(dtype)
    least, most = _distances(sight)
    if encoding.distance_only and most - least < 4 * (sight.q_len + sight.k_len):
        return _by_distance(sight, dtype, least, most)
    return _by_pair(sight, dtype) if _learns(sight) else _by_formula(sight, dtype)


def _is_linear(encoding: Encoding) -> bool:
    """Whether the bias is known to be |distance| times its value at distance 1."""
    if type(encoding) is Compose:
        return all(map(_is_linear, encoding.parts))
    if type(encoding) is Hybrid:
        return type(encoding.alibi) is ALiBi
    return type(encoding) is ALiBi or not encoding.has_bias


def _counted(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Integers tell `bias` to work in float32."""
    return positions.to(dtype) if dtype == torch.float64 else positions


def _distances(sight: Sight) -> tuple[int, int]:
    """No distance is below the first number, none above the second."""
    if sight.aligned:
        return 1 - sight.q_len, sight.k_len - 1
    if torch.compiler.is_compiling():  # only the data know
        return 0, sys.maxsize
    q_pos, k_pos = sight.q_pos, sight.k_pos
    return int(q_pos.min()) - int(k_pos.max()), int(q_pos.max()) - int(k_pos.min())


def _by_distance(sight: Sight, dtype: torch.dtype, least: int, most: int) -> Callable[..., Tensor] | None:
    """From one vector per head, whatever formula it came from; what it learns gets its gradient through it."""
    assert sight.encoding is not None
    heads = sight.heads
    distances = _counted(torch.arange(least, most + 1, device=heads.device), dtype)
    bias = sight.encoding.bias(heads[:, None], distances, torch.zeros_like(distances))
    if bias is None:
        return None
    vectors, distance = bias.to(dtype).expand(len(heads), -1).contiguous(), _distance(sight)
    first = torch.full((), least, device=heads.device)
    return lambda score, b, h, i, j: score + vectors[h, distance(b, i, j) - first]


def _by_pair(sight: Sight, dtype: torch.dtype) -> Callable[..., Tensor] | None:
    """From a table of all heads, queries and keys: a kernel passes gradients on to entries of a table alone."""
    bias = sight.bias(dtype)
    if bias is None:
        return None
    table = bias.expand(-1, len(sight.heads), sight.q_len, sight.k_len)
    last = torch.full((), table.shape[0] - 1, device=table.device)
    return lambda score, b, h, i, j: score + table[torch.minimum(b, last), h, i, j]


def _by_formula(sight: Sight, dtype: torch.dtype) -> Callable[..., Tensor]:
    """From `bias` itself, compiled into the kernel."""
    encoding, heads = sight.encoding, sight.heads
    assert encoding is not None
    distance_only = encoding.distance_only
    distance, q_at, k_at = _distance(sight), _by_index(sight.q_pos), _by_index(sight.k_pos)

    def biased(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        q_pos = distance(b, i, j).long() if distance_only else q_at(b, i)
        k_pos = torch.zeros_like(q_pos) if distance_only else k_at(b, j)
        bias = encoding.bias(heads[h], _counted(q_pos, dtype), _counted(k_pos, dtype))
        return score if bias is None else score + bias.to(dtype)

    return biased


def _mask_mod(sight: Sight, windows: Tensor | None) -> Callable[..., Tensor]:
    """Whether query i may attend key j."""
    from torch.nn.attention.flex_attention import and_masks, noop_mask

    rules: list[Callable[..., Tensor]] = []
    distance = _distance(sight)
    if sight.causal and sight.aligned:
        rules.append(lambda b, h, i, j: distance(b, i, j) >= 0)
    elif sight.causal:
        q_at, k_at = _by_index(sight.q_pos), _by_index(sight.k_pos)
        rules.append(lambda b, h, i, j: q_at(b, i) >= k_at(b, j))
    if sight.q_documents is not None and sight.k_documents is not None:
        q_document, k_document = _by_index(sight.q_documents), _by_index(sight.k_documents)
        rules.append(lambda b, h, i, j: q_document(b, i) == k_document(b, j))
    if windows is not None:
        rules.append(lambda b, h, i, j: distance(b, i, j).abs() <= windows[h])
    if sight.mask is not None:
        rules.append(_given(sight.mask, sight.k_len))
    return and_masks(*rules) if rules else noop_mask


def _given(mask: Tensor, k_len: int) -> Callable[..., Tensor]:
    """A mask of any shape that broadcasts, by the indices of the axes that it has."""
    mask = mask[(None,) * (4 - mask.ndim)]
    axes = tuple(axis for axis in range(4) if mask.shape[axis] > 1)
    table = mask.squeeze()
    if not axes:
        axes, table = (3,), table.expand(k_len).contiguous()
    return lambda *index: table[tuple(index[axis] for axis in axes)]


def _block_mask(sight: Sight, windows: Tensor | None) -> Any:
    """torch's BlockMask: which tiles are read, and which need no mask.

    Never None: without one torch 2.13's kernel for CPUs gets grouped heads wrong.
    """
    from torch.nn.attention.flex_attention import BlockMask

    some, every = torch.broadcast_tensors(*_tiles(sight, windows))
    partly, wholly = _listed(some & ~every), _listed(some & every)
    lengths, mask_mod = (sight.q_len, sight.k_len), _mask_mod(sight, windows)
    return BlockMask.from_kv_blocks(*partly, *wholly, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=lengths)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many tiles of each row are set, and the columns of these, first of all columns."""
    order = torch.argsort(tiles.to(torch.int8), dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32), order.to(torch.int32)


def _tiles(sight: Sight, windows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Tiles that may hold an allowed pair, and tiles that hold no other: (1 or batch, 1 or heads, rows, columns)."""
    rows, columns = _cut(sight.q_len, sight.device), _cut(sight.k_len, sight.device)
    # As in torch's own block masks a tile that juts out gets its mask.
    every = (rows[:, None, -1] < sight.q_len) & (columns[None, :, -1] < sight.k_len)
    some, every = torch.ones_like(every)[None, None], every[None, None]
    q_low, q_high = _range(sight.q_pos, rows, -1)
    k_low, k_high = _range(sight.k_pos, columns, -2)
    if sight.causal:
        some, every = some & (q_high >= k_low), every & (q_low >= k_high)
    if windows is not None:
        nearest = torch.maximum(q_low - k_high, k_low - q_high)  # negative where the ranges overlap
        farthest = torch.maximum(q_high - k_low, k_high - q_low)
        reach = windows[:, None, None]
        some, every = some & (nearest <= reach), every & (farthest <= reach)
    if sight.q_documents is not None and sight.k_documents is not None:
        q_low, q_high = _range(sight.q_documents, rows, -1)
        k_low, k_high = _range(sight.k_documents, columns, -2)
        some = some & (q_low <= k_high) & (k_low <= q_high)
        every = every & (q_low == k_high) & (q_high == k_low)
    if sight.mask is not None:
        mask = sight.mask[(None,) * (4 - sight.mask.ndim)]
        some = some & _reduced(_reduced(mask, columns, -1, torch.any), rows, -2, torch.any)
        every = every & _reduced(_reduced(mask, columns, -1, torch.all), rows, -2, torch.all)
    return some, every


def _cut(length: int, device: torch.device) -> Tensor:
    """Token indices by block, (blocks, BLOCK); the last block may run beyond the end."""
    blocks = -(-length // BLOCK)
    return torch.arange(blocks * BLOCK, device=device).view(blocks, BLOCK)


def _range(values: Tensor, blocks: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Least and largest value of each block of (1 or batch, length), set up to broadcast over tiles."""
    inside = values[:, blocks.clamp(max=values.shape[-1] - 1)]
    return tuple(x[:, None].unsqueeze(axis) for x in (inside.amin(-1), inside.amax(-1)))  # pyright: ignore[reportReturnType]


def _reduced(mask: Tensor, blocks: Tensor, axis: int, how: Callable[..., Tensor]) -> Tensor:
    """A mask with one axis taken together by blocks."""
    if mask.shape[axis] == 1:
        return mask
    inside = blocks.clamp(max=mask.shape[axis] - 1)
    return how(mask.index_select(axis, inside.flatten()).unflatten(axis, inside.shape), dim=axis)


@functools.cache
def _compiled(fixed: bool) -> Callable[..., Any]:
    """One for lengths that vary, one for lengths that are compiled in: with the former torch 2.13 misspells sizes
    of what is looked up in its code for CPUs."""
    from torch.nn.attention.flex_attention import flex_attention

    def attention(*arguments, **options):  # with a cache of kernels that nobody else fills
        return flex_attention(*arguments, **options)

    options: Any = {"fullgraph": True, "dynamic": False if fixed else None}
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        options["recompile_limit"] = RECOMPILES
    return torch.compile(attention, **options)


def _fused(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, tiles: Any, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    wide: Any = tuple(F.pad(x, (0, max(NARROWEST - x.shape[-1], 0))) for x in (q, k, v))
    grouped, aux = q.shape[1] != k.shape[1], AuxRequest(lse=True) if return_lse else None
    options: Any = {"score_mod": score_mod, "block_mask": tiles, "scale": scale}
    options |= {"enable_gqa": grouped, "return_aux": aux}
    if torch.compiler.is_compiling():
        found = flex_attention(*wide, **options)
    else:
        from torch._dynamo.exc import FailOnRecompileLimitHit

        try:
            found = _compiled(q.device.type == "cpu")(*wide, **options)
        except FailOnRecompileLimitHit:
            if torch.is_grad_enabled():
                raise
            return _unfused(q, k, v, score_mod, tiles, scale, return_lse)
    out, lse = (found[0], found[1].lse) if return_lse else (found, None)
    return out[..., : v.shape[-1]], lse


def _unfused(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, tiles: Any, scale: float, return_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """What FlexAttention runs where it is not compiled, without the compiler that its front door asks for."""
    from torch._higher_order_ops.flex_attention import flex_attention

    dtype = score_dtype(q)
    out, lse, _ = flex_attention(
        q.to(dtype), k.to(dtype), v.to(dtype), score_mod or _unchanged, tiles.as_tuple(), scale, {}
    )
    return out.to(v.dtype), lse * math.log(2) if return_lse else None  # it counts in powers of two


def _unchanged(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score

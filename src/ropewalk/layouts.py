"""Half and interleaved: the two ways to pair channels, and exact conversion between them.

`half` pairs channel i with i + rotary_dim / 2, `interleaved` pairs 2i with 2i + 1.  Scores are equal once queries
and keys are permuted alike; values and everything after attention stay as they are.
"""

from collections.abc import Sequence

import torch

from ropewalk._shapes import Shaped, Tensor
from ropewalk.errors import require, require_count

LAYOUTS = ("half", "interleaved")


def channel_order(width: int, rotary_dim: int | None, to: str) -> Tensor:
    """Which channel of a head in the other layout stands at each place of the layout `to`.

    >>> channel_order(8, 6, "half").tolist()
    [0, 2, 4, 1, 3, 5, 6, 7]
    """
    require(to in LAYOUTS, "to", "'half' or 'interleaved'", repr(to))
    rotary_dim = width if rotary_dim is None else require_count(rotary_dim, "rotary_dim", at_least=2)
    fits = rotary_dim % 2 == 0 and rotary_dim <= width
    require(fits, "rotary_dim", f"even and at most the head's {width} channels", rotary_dim)
    turning = torch.arange(rotary_dim)
    pairs = turning.view(-1, 2).T if to == "half" else turning.view(2, -1).T
    return torch.cat((pairs.reshape(-1), torch.arange(rotary_dim, width)))


def to_half(x: Shaped[Tensor, "*lead head_dim"], rotary_dim: int | None = None) -> Shaped[Tensor, "*lead head_dim"]:
    """Interleaved channels in half order: even ones first, then odd ones.

    Args:
        rotary_dim: the first channels of a head that turn; the others stay.

    >>> to_half(torch.arange(8), rotary_dim=6).tolist()
    [0, 2, 4, 1, 3, 5, 6, 7]
    """
    return x[..., channel_order(x.shape[-1], rotary_dim, "half").to(x.device)]


def to_interleaved(
    x: Shaped[Tensor, "*lead head_dim"], rotary_dim: int | None = None
) -> Shaped[Tensor, "*lead head_dim"]:
    """Half channels in interleaved order; undoes `to_half`.

    >>> to_interleaved(torch.tensor([0, 2, 4, 1, 3, 5, 6, 7]), rotary_dim=6).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    return x[..., channel_order(x.shape[-1], rotary_dim, "interleaved").to(x.device)]


def to_half_weight(
    weight: Shaped[Tensor, "out *rest"],
    num_heads: int,
    rotary_dim: int | None = None,
    turning: Sequence[bool] | None = None,
) -> Shaped[Tensor, "out *rest"]:
    """A query or key projection (weight or bias) whose outputs come in half order.

    Args:
        weight: (num_heads * head_dim, ...) as in `nn.Linear`.
        num_heads: heads of this projection: kv heads for a key projection, never a ratio of counts.
        rotary_dim: channels of a head that turn.
        turning: of a fused projection, which of its heads are queries or keys; values stay as they are.

    >>> fused = torch.arange(12)  # one head of four channels: query, key, value
    >>> to_half_weight(fused, 3, turning=(True, True, False)).tolist()
    [0, 2, 1, 3, 4, 6, 5, 7, 8, 9, 10, 11]
    """
    return _reorder(weight, num_heads, rotary_dim, turning, "half")


def to_interleaved_weight(
    weight: Shaped[Tensor, "out *rest"],
    num_heads: int,
    rotary_dim: int | None = None,
    turning: Sequence[bool] | None = None,
) -> Shaped[Tensor, "out *rest"]:
    """A query or key projection whose outputs come in interleaved order; undoes `to_half_weight`."""
    return _reorder(weight, num_heads, rotary_dim, turning, "interleaved")


def _reorder(weight: Tensor, num_heads: int, rotary_dim: int | None, turning: Sequence[bool] | None, to: str) -> Tensor:
    require_count(num_heads, "num_heads")
    rows = weight.shape[0]
    require(rows % num_heads == 0, "weight", f"of num_heads ({num_heads}) equal heads", f"{rows} rows")
    given = num_heads if turning is None else len(turning)
    require(given == num_heads, "turning", f"one answer for each of num_heads ({num_heads})", given)
    heads = weight.unflatten(0, (num_heads, rows // num_heads))
    turned = heads[:, channel_order(rows // num_heads, rotary_dim, to).to(weight.device)]
    if turning is not None:
        chosen = torch.tensor(turning, dtype=torch.bool, device=weight.device)
        turned = turned.where(chosen.view(-1, *[1] * weight.ndim), heads)
    return turned.flatten(0, 1)

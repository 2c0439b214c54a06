"""Axial rotary encoding of grids: each axis of a picture or a video turns a share of the pairs (as in Pixtral,
Agrawal et al. 2024, arXiv:2410.07073v2, Sec. 2, and Qwen2-VL's vision encoder)."""

import itertools

import torch

from ropewalk import spectra
from ropewalk._shapes import Int, Tensor
from ropewalk.encodings.axes import MultiAxis
from ropewalk.errors import require, require_count
from ropewalk.spectra import Spectrum


class Axial(MultiAxis):
    """score(p, r) depends on p - r alone, axis by axis: pair i of axis a turns by p_a base^(-2i axes / rotary_dim).

    Args:
        head_dim: channels of a head.
        axes: 2 for pictures (rows, columns), 3 for videos (frames, rows, columns).
        base: dimensionless.
        rotary_dim: the first channels that turn, a multiple of 2 * axes; as many as fit by default.
        order: "block", the pairs of one axis after those of another, all axes with the same frequencies; or
            "alternating", one spectrum whose pairs are dealt to the axes in turn and then blocked (Pixtral).
        layout: which channels form a pair, "half" or "interleaved".

    Positions are (axes, batch, seq), such as `grid` makes; (seq,) and (batch, seq) count the same on each axis.

    >>> rope = Axial(8, layout="interleaved")
    >>> rope.inv_freq
    (1.0, 0.01, 1.0, 0.01)
    >>> rope.at(grid(2, 3)).cos.shape
    torch.Size([1, 6, 4])
    """

    def __init__(
        self,
        head_dim: int,
        axes: int = 2,
        *,
        base: float | int = 10_000.0,
        rotary_dim: int | None = None,
        order: str = "block",
        layout: str = "half",
    ):
        require_count(axes, "axes")
        require_count(head_dim, "head_dim", at_least=2 * axes)
        width = head_dim // (2 * axes) * 2 * axes if rotary_dim is None else require_count(rotary_dim, "rotary_dim")
        even = width % (2 * axes) == 0 and width <= head_dim
        require(even, "rotary_dim", f"a multiple of 2 axes ({2 * axes}) and at most head_dim ({head_dim})", width)
        require(order in ("block", "alternating"), "order", "'block' or 'alternating'", repr(order))
        each = width // (2 * axes)
        if order == "block":
            inv_freq = spectra.plain(width // axes, base).exact * axes
        else:
            dealt = spectra.plain(width, base).exact
            inv_freq = tuple(itertools.chain.from_iterable(dealt[axis::axes] for axis in range(axes)))
        axis_of_pair = [axis for axis in range(axes) for _ in range(each)]
        super().__init__(head_dim, Spectrum(inv_freq), axis_of_pair, axes, layout)
        self.base, self.order = base, order

    def extra_repr(self) -> str:
        width = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return f"{self.head_dim}, {self.axes}, base={self.base:g}{width}, order={self.order!r}, layout={self.layout!r}"


def grid(*sizes: int) -> Int[Tensor, "axes one cells"]:
    """Positions of the cells of a grid, the last axis fastest: (axes, 1, cells).

    >>> grid(2, 3)[:, 0].tolist()
    [[0, 0, 0, 1, 1, 1], [0, 1, 2, 0, 1, 2]]
    """
    axes = [torch.arange(require_count(n, "each size")) for n in sizes]
    require(len(axes) > 0, "sizes", "at least one", "none")
    return torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1)[:, None]

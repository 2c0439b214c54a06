"""M-RoPE: one rotary encoding for text, pictures and video (Qwen2-VL, Wang et al. 2024, arXiv:2409.12191v2)."""

from collections.abc import Sequence

from ropewalk import spectra
from ropewalk.encodings.axes import MultiAxis
from ropewalk.encodings.rotary import LAYOUTS
from ropewalk.errors import message, require, require_count, require_type
from ropewalk.spectra import Spectrum

ORDERS = ("block", "interleaved", "alternating", "channels")
_ORDERS = ", ".join(map(repr, ORDERS))


class MRoPE(MultiAxis):
    """Pair i turns by its axis's position times inv_freq_i: time, height or width (Sec. 2.1).

    Args:
        head_dim: channels of a head.
        sections: pairs of each axis, rotary_dim / 2 in sum; by default 2 : 3 : 3, the published [16, 24, 24].
        order: how pairs are given to the axes.
            "block": the first sections[0] pairs to axis 0, and so on (Qwen2-VL).
            "interleaved": pairs 1, 4, 7, ... to axis 1 and 2, 5, 8, ... to axis 2, as many as their sections say,
            all others to axis 0 (Qwen3-VL).
            "alternating": pairs 0, 2, ... to axis 1 and 1, 3, ... to axis 2, the last sections[0] to axis 0
            (ERNIE 4.5 VL, whose config names the sections height, width, time).
            "channels": blocks of 2 * sections[i] channels, not pairs, to axis i (Hunyuan-VL, up to four axes).  The
            two channels of a pair then follow different axes, so that off the diagonal, where positions differ
            between axes, it is no rotation: norms change, and scores depend on more than distances.
        base: dimensionless.
        rotary_dim: the first channels that turn; all by default.
        layout: which channels form a pair, "half" or "interleaved".
        spectrum: frequencies of another kind; replaces `base`.

    Positions are (axes, batch, seq); those of text, (seq,) or (batch, seq), are the same on each axis.

    >>> MRoPE(16, [2, 3, 3]).axis_of_pair, MRoPE(16, [4, 2, 2], order="interleaved").axis_of_pair
    ((0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 2, 0, 0))
    """

    def __init__(
        self,
        head_dim: int,
        sections: Sequence[int] | None = None,
        *,
        order: str = "block",
        base: float | int = 10_000.0,
        rotary_dim: int | None = None,
        layout: str = "half",
        spectrum: Spectrum | None = None,
    ):
        width = require_count(head_dim if rotary_dim is None else rotary_dim, "rotary_dim", at_least=2)
        require(width <= head_dim and width % 2 == 0, "rotary_dim", f"even and at most head_dim ({head_dim})", width)
        if spectrum is None:
            spectrum, self_base = spectra.plain(width, base), base
        else:
            require_type(spectrum, Spectrum, "spectrum", "a Spectrum", hint="rw.Spectrum(inv_freq)")
            self_base = None
        pairs = width // 2
        got = len(spectrum.exact)
        require(got == pairs, "spectrum", f"of {pairs} pairs, half of rotary_dim", f"{got} pairs")
        require(order in ORDERS, "order", "one of " + _ORDERS, repr(order))
        require(layout in LAYOUTS, "layout", "'half' or 'interleaved'", repr(layout))
        sizes = _default(pairs, order) if sections is None else _sections(sections, pairs, order)
        axes, second = _axes(sizes, order, pairs)
        if order == "channels":
            require(layout == "half", "layout", "'half' where channels are given to axes", repr(layout))
        super().__init__(head_dim, spectrum, axes, len(sizes), layout, second)
        self.sections, self.order, self.base = sizes, order, self_base

    def extra_repr(self) -> str:
        source = f"base={self.base:g}" if self.base is not None else repr(self.spectrum)
        width = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        return f"{self.head_dim}, {list(self.sections)}, order={self.order!r}, {source}{width}, layout={self.layout!r}"


def _default(pairs: int, order: str) -> tuple[int, ...]:
    side = pairs // 3 if order == "interleaved" else 3 * pairs // 8
    return pairs - 2 * side, side, side


def _sections(sections: Sequence[int], pairs: int, order: str) -> tuple[int, ...]:
    """Counts of pairs that fit `order`, or ValueError."""
    if isinstance(sections, str) or not isinstance(sections, Sequence):
        raise TypeError(message("sections", "a list of counts, one for each axis", repr(sections)))
    sizes = tuple(require_count(n, "sections", at_least=0) for n in sections)
    require(sum(sizes) == pairs, "sections", f"{pairs} in sum, half of rotary_dim", list(sizes))
    if order in ("interleaved", "alternating"):
        require(len(sizes) == 3, "sections", "three where pairs alternate", list(sizes))
    if order == "interleaved":  # a slot beyond the last pair would silently be no one's
        fits = all(3 * (n - 1) + axis < pairs for axis, n in enumerate(sizes[1:], start=1) if n)
        require(fits, "sections", f"such that pairs 3 i + 1 and 3 i + 2 lie within {pairs}", list(sizes))
    if order == "alternating":
        require(sizes[1] == sizes[2], "sections", "equal for height and width", list(sizes))
    return sizes


def _axes(sizes: tuple[int, ...], order: str, pairs: int) -> tuple[list[int], list[int] | None]:
    """The axis of each pair's first channel, and of its second where that is another."""
    if order == "interleaved":
        third = [3 * n for n in sizes]
        return [i % 3 if i < third[i % 3] else 0 for i in range(pairs)], None
    if order == "alternating":
        return [1 + i % 2 if i < 2 * sizes[1] else 0 for i in range(pairs)], None
    if order == "block":
        return [axis for axis, n in enumerate(sizes) for _ in range(n)], None
    of_channel = [axis for axis, n in enumerate(sizes) for _ in range(2 * n)]
    return of_channel[:pairs], of_channel[pairs:]

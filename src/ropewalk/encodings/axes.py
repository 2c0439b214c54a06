"""Rotation about several axes: what `Axial` and `MRoPE` share."""

from collections.abc import Sequence

import torch
from torch import nn

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement, table_dtype
from ropewalk.encodings.rotary import Rotary, drop_tables, placed_for, rotate
from ropewalk.errors import message, require, require_count, require_type
from ropewalk.positions import as_positions
from ropewalk.spectra import Spectrum


class MultiAxis(Encoding):
    """Pair i turns by positions[axis_i] * inv_freq_i, where a position has one integer for each axis.

    Positions come as (axes, batch, seq).  Those of text, (seq,) or (batch, seq), stand for the same number on
    every axis, where this is `Rotary`, bit for bit.

    Args:
        head_dim: channels of a head; the first 2 * pairs of them turn.
        spectrum: radians per token of each pair.
        axis_of_pair: an index in [0, axes) for each pair.
        axes: how many there are.
        layout: which channels form a pair, "half" or "interleaved".
        axis_of_second: where the second channel of a pair follows another axis than the first; then a pair is
            turned by one angle only where its two axes agree.
    """

    relative = True

    def __init__(
        self,
        head_dim: int,
        spectrum: Spectrum,
        axis_of_pair: Sequence[int],
        axes: int,
        layout: str,
        axis_of_second: Sequence[int] | None = None,
    ):
        super().__init__()
        self.head_dim, self.axes, self.layout = require_count(head_dim, "head_dim", at_least=2), axes, layout
        self._spectrum, self.axis_of_pair = spectrum, tuple(axis_of_pair)
        self.rotary_dim = 2 * len(self.axis_of_pair)
        self.text = Rotary(head_dim, spectrum=spectrum, layout=layout)
        self.first = _Tables(head_dim, spectrum, self.axis_of_pair, layout)
        self.second = None if axis_of_second is None else _Tables(head_dim, spectrum, tuple(axis_of_second), layout)

    @property
    def spectrum(self) -> Spectrum:
        """The frequencies of all pairs."""
        return self._spectrum

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """Radians per token of each pair."""
        return self._spectrum.inv_freq

    @property
    def plane(self) -> tuple[str, int]:
        """Which channels form pairs."""
        return self.layout, self.rotary_dim

    def at(self, positions: Shaped[Tensor, "*axes_batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        positions = self._checked(positions)
        return self._placed(positions, dtype, self.spectrum.magnitude)

    def _checked(self, positions: Tensor) -> Tensor:
        require_type(positions, Tensor, "positions", "an integer tensor", hint="torch.arange(seq_len)")
        if positions.ndim != 3:
            return as_positions(positions)
        shape = tuple(positions.shape)
        require(shape[0] == self.axes, "positions", "of shape ({0}, batch, seq)", shape, self.axes)
        return as_positions(positions.flatten(0, 1)).view(shape)

    def _placed(self, positions: Tensor, dtype: torch.dtype, magnitude: float) -> Placement:
        if positions.ndim != 3:
            at = self.text.at(positions, dtype)
            if magnitude == self.spectrum.magnitude or at.cos is None or at.sin is None:
                return at
            ratio = magnitude / self.spectrum.magnitude
            return at._replace(cos=at.cos * ratio, sin=at.sin * ratio)
        parts = ()
        if self.second is not None:
            parts = (Placement(positions, *self.second.at(positions, dtype, magnitude)),)
        return Placement(positions, *self.first.at(positions, dtype, magnitude), parts)

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        at = placed_for(self, self.head_dim, q, at)
        turned = rotate(q, at, self.layout)
        if not at.parts:
            return turned
        pairs = self.rotary_dim // 2
        return torch.cat((turned[..., :pairs], rotate(q, at.parts[0], self.layout)[..., pairs:]), dim=-1)

    def key(
        self, k: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        return self.query(k, at)

    def moved(
        self,
        k: Float[Tensor, "batch heads seq head_dim"],
        old: Int[Tensor, "*axes_batch seq"],
        new: Int[Tensor, "*axes_batch seq"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """One turn by new - old on each axis; a table's magnitude is not applied twice.

        Raises:
            ValueError: the two channels of a pair follow different axes, so that there is no turn to undo.
        """
        by = self._checked(new - old)
        if self.second is not None and by.ndim == 3:
            raise ValueError(message("positions", "one for all axes where keys are moved", tuple(by.shape)))
        return rotate(k, self._placed(by, table_dtype(k.dtype), 1.0), self.layout)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        drop_tables(state_dict, prefix, self.inv_freq)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.spectrum!r}, axes={self.axes}, layout={self.layout!r}"


class _Tables(nn.Module):
    """Cosines and sines of pairs that follow different axes: those of each axis, put in the order of pairs."""

    def __init__(self, head_dim: int, spectrum: Spectrum, axis_of_pair: tuple[int, ...], layout: str):
        super().__init__()
        self.used = tuple(sorted(set(axis_of_pair)))
        pairs_of = [[i for i, a in enumerate(axis_of_pair) if a == axis] for axis in self.used]
        parts = (Spectrum([spectrum.exact[i] for i in pairs]) for pairs in pairs_of)
        self.turns = tuple(Rotary(head_dim, spectrum=part, layout=layout) for part in parts)
        in_turn = [i for pairs in pairs_of for i in pairs]
        self.place = [in_turn.index(i) for i in range(len(in_turn))]

    def at(self, positions: Tensor, dtype: torch.dtype, magnitude: float) -> tuple[Tensor, Tensor]:
        placed = [turn.at(positions[axis], dtype) for turn, axis in zip(self.turns, self.used, strict=True)]
        cos, sin = (torch.cat([getattr(p, name) for p in placed], dim=-1) for name in ("cos", "sin"))
        if self.place != sorted(self.place):
            order = torch.tensor(self.place, device=cos.device)
            cos, sin = cos.index_select(-1, order), sin.index_select(-1, order)
        return (cos, sin) if magnitude == 1.0 else (cos * magnitude, sin * magnitude)

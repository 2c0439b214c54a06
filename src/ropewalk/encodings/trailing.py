"""Rotary encoding of a head's last channels, as in multi-head latent attention (DeepSeek-V2, DeepSeek-AI 2024,
arXiv:2405.04434v5, Sec. 2.1.3)."""

import torch

from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement, table_dtype
from ropewalk.encodings.rotary import Rotary, drop_tables, placed_for, rotate
from ropewalk.errors import require, require_count
from ropewalk.spectra import Spectrum


class Trailing(Encoding):
    """The last rotary_dim channels of a head turn as in `Rotary`; those before them stay.

    Args:
        head_dim: channels of a head.
        rotary_dim: how many turn, even; half of the head by default, rounded down to pairs.
        base, layout, spectrum: as in `Rotary`.
        deinterleave: turned channels come out in half order, even ones first, though they go in interleaved
            (DeepSeek-V3).  Scores are those of `layout="interleaved"`; cached keys are not.

    >>> still = Trailing(6, 4, layout="interleaved", deinterleave=True)
    >>> still.query(torch.arange(6.0).view(1, 1, 1, 6), still.at(torch.tensor([0]))).flatten().tolist()
    [0.0, 1.0, 2.0, 4.0, 3.0, 5.0]
    """

    relative = True

    def __init__(
        self,
        head_dim: int,
        rotary_dim: int | None = None,
        *,
        base: float | int = 10_000.0,
        layout: str = "half",
        spectrum: Spectrum | None = None,
        deinterleave: bool = False,
    ):
        super().__init__()
        require_count(head_dim, "head_dim", at_least=2)
        width = max(head_dim // 4 * 2, 2) if rotary_dim is None else rotary_dim
        self.rotary = Rotary(head_dim, base=base, rotary_dim=width, layout=layout, spectrum=spectrum)
        self.head_dim, self.rotary_dim, self.layout = head_dim, width, layout
        wanted = "False unless the layout is 'interleaved'"
        require(not deinterleave or layout == "interleaved", "deinterleave", wanted, deinterleave)
        self.deinterleave = deinterleave

    @property
    def spectrum(self) -> Spectrum:
        """The frequencies of the pairs that turn."""
        return self.rotary.spectrum

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """Radians per token of each pair, fastest first."""
        return self.rotary.inv_freq

    @property
    def plane(self) -> tuple[str, int, int, bool]:
        """Which channels form pairs."""
        return self.layout, self.rotary_dim, self.head_dim, self.deinterleave

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        return self.rotary.at(positions, dtype)

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        at = placed_for(self, self.head_dim, q, at)
        still, turning = q.split((self.head_dim - self.rotary_dim, self.rotary_dim), dim=-1)
        if self.deinterleave:
            turning = turning.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return torch.cat((still, rotate(turning, at, "half" if self.deinterleave else self.layout)), dim=-1)

    def key(
        self, k: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        return self.query(k, at)

    def moved(
        self,
        k: Float[Tensor, "batch heads seq head_dim"],
        old: Int[Tensor, "*batch seq"],
        new: Int[Tensor, "*batch seq"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        at = self.rotary.at(new - old, table_dtype(k.dtype))
        assert at.cos is not None and at.sin is not None
        if self.spectrum.magnitude != 1.0:  # applied when the key was encoded
            at = at._replace(cos=at.cos / self.spectrum.magnitude, sin=at.sin / self.spectrum.magnitude)
        still, turning = k.split((self.head_dim - self.rotary_dim, self.rotary_dim), dim=-1)
        return torch.cat((still, rotate(turning, at, "half" if self.deinterleave else self.layout)), dim=-1)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        drop_tables(state_dict, prefix, self.inv_freq)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, {self.rotary_dim}" + (", deinterleave=True" if self.deinterleave else "")

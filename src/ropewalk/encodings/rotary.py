"""RoPE: rotary position embedding (Su et al. 2021, arXiv:2104.09864v5)."""

import torch

from ropewalk import kernels, spectra
from ropewalk._shapes import Float, Int, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement, table_dtype
from ropewalk.errors import message, require, require_count, require_type
from ropewalk.positions import as_positions
from ropewalk.spectra import Spectrum

LAYOUTS = ("half", "interleaved")
_LAYOUTS = " or ".join(map(repr, LAYOUTS))


class Rotary(Encoding):
    """score(i, j) = (R_i q) . (R_j k) = q . R_(j-i) k: each pair of channels turns by position * inv_freq (Eq. 16).

    Args:
        head_dim: channels of a head.
        base: dimensionless; inv_freq[i] = base^(-2i / rotary_dim).
        rotary_dim: the first channels of a head that turn, even; all of them by default.
        layout: "half" pairs channel i with i + rotary_dim / 2 (Hugging Face), "interleaved" pairs 2i with
            2i + 1 (the paper).  Equal up to a permutation of channels.
        spectrum: frequencies of another kind, from `ropewalk.spectra`; replaces `base`.

    >>> rope = Rotary(4, layout="interleaved")
    >>> x = torch.tensor([0.2, 0.1, -0.3, 0.7]).view(1, 1, 1, 4)
    >>> [round(v, 4) for v in rope.query(x, rope.at(torch.tensor([1]))).flatten().tolist()]
    [0.0239, 0.2223, -0.307, 0.697]
    """

    relative = True

    def __init__(
        self,
        head_dim: int,
        *,
        base: float | int = 10_000.0,
        rotary_dim: int | None = None,
        layout: str = "half",
        spectrum: Spectrum | None = None,
    ):
        super().__init__()
        self.head_dim = require_count(head_dim, "head_dim", at_least=2)
        if spectrum is not None:
            require_type(spectrum, Spectrum, "spectrum", "a Spectrum", hint="rw.Spectrum(inv_freq)")
        if rotary_dim is None:
            rotary_dim = 2 * len(spectrum.exact) if spectrum else head_dim
        self.rotary_dim = require_count(rotary_dim, "rotary_dim", at_least=2)
        hint = "rotary_dim=head_dim - 1 leaves the last channel as it is" if rotary_dim == head_dim else ""
        require(rotary_dim % 2 == 0, "rotary_dim", "even", rotary_dim, hint=hint)
        require(rotary_dim <= head_dim, "rotary_dim", f"at most head_dim ({head_dim})", rotary_dim)
        require(layout in LAYOUTS, "layout", _LAYOUTS, repr(layout))
        self.layout = layout
        self._spectrum = spectra.plain(rotary_dim, base) if spectrum is None else spectrum
        pairs = len(self._spectrum.exact)
        require(
            2 * pairs == rotary_dim, "spectrum", f"of {rotary_dim // 2} pairs, half of rotary_dim", f"{pairs} pairs"
        )
        self.base = base if spectrum is None else None
        self._steps = self._spectrum.steps

    @property
    def spectrum(self) -> Spectrum:
        """The frequencies, fixed at construction."""
        return self._spectrum

    @property
    def plane(self) -> tuple[str, int]:
        """Which channels form pairs: two encodings of one plane turn in any order."""
        return self.layout, self.rotary_dim

    @property
    def inv_freq(self) -> tuple[float, ...]:
        """Radians per token of each pair, fastest first."""
        return self._spectrum.inv_freq

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        """Cosines and sines of the angles, times the spectrum's magnitude."""
        positions = as_positions(positions)
        cos, sin = kernels.tables(positions, self._steps, table_dtype(dtype))
        if self.spectrum.magnitude != 1.0:
            cos, sin = cos * self.spectrum.magnitude, sin * self.spectrum.magnitude
        return Placement(positions, cos, sin)

    def query(
        self, q: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        at = placed_for(self, self.head_dim, q, at)
        return rotate(q, at, self.layout)

    def key(
        self, k: Float[Tensor, "batch heads seq head_dim"], at: Placement
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        return self.query(k, at)

    def encode_(
        self,
        q: Float[Tensor, "batch heads seq head_dim"],
        k: Float[Tensor, "batch kv_heads seq head_dim"],
        at: Placement,
    ) -> tuple[Float[Tensor, "batch heads seq head_dim"], Float[Tensor, "batch kv_heads seq head_dim"]]:
        own = type(self).query is Rotary.query and type(self).key is Rotary.key  # a subclass may do something else
        if not own or torch.float64 in (q.dtype, k.dtype):
            return self.query(q, at), self.key(k, at)
        return rotate_(q, at, self.layout), rotate_(k, at, self.layout)

    def moved(
        self,
        k: Float[Tensor, "batch heads seq head_dim"],
        old: Int[Tensor, "*batch seq"],
        new: Int[Tensor, "*batch seq"],
    ) -> Float[Tensor, "batch heads seq head_dim"]:
        """One turn by new - old: a table's magnitude is not applied twice."""
        tables = kernels.tables(new - old, self._steps, table_dtype(k.dtype))
        return rotate(k, Placement(new - old, *tables), self.layout)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        drop_tables(state_dict, prefix, self.inv_freq)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        width = "" if self.rotary_dim == self.head_dim else f", rotary_dim={self.rotary_dim}"
        source = f"base={self.base:g}" if self.base is not None else repr(self.spectrum)
        return f"{self.head_dim}{width}, {source}, layout={self.layout!r}"


def drop_tables(state_dict: dict, prefix: str, inv_freq: tuple[float, ...]) -> None:
    """Accepts the tables that older checkpoints carry, if they hold these frequencies."""
    for name in ("inv_freq", "rope.freqs", "freqs"):
        old = state_dict.pop(prefix + name, None)
        if old is not None:
            same = _holds(old, torch.tensor(inv_freq, dtype=torch.float64))
            require(same, prefix + name, "the frequencies of this encoding", old, hint="build it with that spectrum")


def _holds(old: Tensor, inv_freq: Tensor) -> bool:
    """Whether `old` is `inv_freq`, rounded to float32 or, on the way, to a half precision."""
    if old.shape != inv_freq.shape:
        return False
    old = old.double().cpu()
    rounded = [inv_freq, inv_freq.bfloat16().double(), inv_freq.half().double()]
    return any(torch.allclose(old, candidate, rtol=1e-5, atol=0) for candidate in rounded)


def _tables(x: Tensor, at: Placement, layout: str) -> tuple[Tensor, Tensor]:
    # Plain conditions, and shapes read once: the turn of one token takes little longer than these checks.
    cos, sin = at.cos, at.sin
    if layout not in LAYOUTS:
        raise ValueError(message("layout", _LAYOUTS, repr(layout)))
    if cos is None or sin is None:
        raise TypeError(message("at", "a rotary placement", "one without tables", hint="Rotary(...).at(positions)"))
    shape, table, dtype = x.shape, cos.shape, x.dtype
    if dtype == torch.float64 and cos.dtype != torch.float64:
        hint = "encoding.at(positions, dtype=torch.float64)"
        raise TypeError(message("at", "of float64 for float64 input", str(cos.dtype), hint))
    if not dtype.is_floating_point:
        raise TypeError(message("x", "a floating-point tensor", f"dtype {dtype}"))
    if shape[-2] != table[-2]:
        raise ValueError(message("x", f"as long as its positions ({table[-2]})", shape[-2]))
    if shape[-1] < 2 * table[-1]:
        raise ValueError(message("x", f"at least {2 * table[-1]} channels wide", shape[-1]))
    if len(table) == 3:  # (batch, seq, pairs): one table per row, shared by its heads
        rows = table[0]
        fits = rows == 1 or rows == shape[0]
        require(fits, "positions", "of {0} rows, or of one for all", rows, shape[0])
        for _ in range(len(shape) - 3):
            cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return cos, sin


def placed_for(encoding: Encoding, head_dim: int, x: Tensor, at: Placement) -> Placement:
    """`at` in the precision that `x` needs, once x is seen to be as wide as a head."""
    require(x.shape[-1] == head_dim, "the last axis", "head_dim ({0})", x.shape[-1], head_dim)
    if x.dtype == torch.float64 and at.cos is not None and at.cos.dtype != torch.float64:
        return encoding.at(at.positions, torch.float64)
    return at


def rotate(
    x: Float[Tensor, "*batch seq head_dim"], at: Placement, layout: str = "half"
) -> Float[Tensor, "*batch seq head_dim"]:
    """`x` turned to its positions, in a new tensor of x's dtype; half precision is turned in float32.

    Args:
        at: from `Rotary.at`, of float64 if x is.
        layout: which channels form a pair, "half" or "interleaved".
    """
    cos, sin = _tables(x, at, layout)
    return kernels.turn(x, cos, sin, layout)


def rotate_(
    x: Float[Tensor, "*batch seq head_dim"], at: Placement, layout: str = "half"
) -> Float[Tensor, "*batch seq head_dim"]:
    """`rotate`, written into `x` itself, with a gradient: for queries and keys fresh out of a projection."""
    cos, sin = _tables(x, at, layout)
    return kernels.turn_(x, cos, sin, layout)


def reposition(
    k: Float[Tensor, "batch heads seq head_dim"],
    encoding: Encoding,
    old_positions: Shaped[Tensor, "*batch seq"],
    new_positions: Shaped[Tensor, "*batch seq"],
) -> Float[Tensor, "batch heads seq head_dim"]:
    """Encoded keys moved to other positions, by one turn from where they are.

    Args:
        k: keys as `encoding.key` gave them at `old_positions`.
        encoding: any composition of encodings whose keys can be moved; those that leave keys alone need no move.

    >>> rope = Rotary(8)
    >>> k = torch.ones(1, 1, 1, 8)
    >>> moved = reposition(rope.key(k, rope.at(torch.tensor([3]))), rope, torch.tensor([3]), torch.tensor([9]))
    >>> torch.allclose(moved, rope.key(k, rope.at(torch.tensor([9]))), atol=1e-6)
    True
    """
    old, new = as_positions(old_positions, "old_positions"), as_positions(new_positions, "new_positions")
    require(old.shape[-1] == new.shape[-1] == k.shape[-2], "positions", "one per key ({0})", new.shape[-1], k.shape[-2])
    return encoding.moved(k, old, new)

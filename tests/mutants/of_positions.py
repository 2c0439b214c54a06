"""Absolute positions, several axes and buckets of distances gone wrong."""

import torch
import torch.nn.functional as F

import ropewalk as rw
from mutants.registry import encoding, part
from ropewalk.encodings import Placement
from subjects import T5Like

# K12: sections of M-RoPE


@encoding("K12", "sections", lambda cls: cls(16, [2, 3, 3]))
class SectionsFromTheOtherEnd(rw.MRoPE):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions.flip(0) if positions.ndim == 3 else positions, dtype)


@encoding("K12", "sections", lambda cls: cls(16, [4, 2, 2], order="interleaved"))
class InterleavedTakenForBlocks(rw.MRoPE):
    def at(self, positions, dtype=torch.float32):
        return rw.MRoPE(self.head_dim, self.sections).at(positions, dtype)


@encoding("K12", "axes", lambda cls: cls(16, [2, 3, 3]))
class TextHasNoWidth(rw.MRoPE):
    """Text is given a time and a height, and stays in the first column."""

    def at(self, positions, dtype=torch.float32):
        if positions.ndim < 3:
            first_column = torch.zeros_like(positions)
            positions = torch.stack((positions, positions, first_column)).view(3, -1, positions.shape[-1])
        return super().at(positions, dtype)


@encoding("K12", "axes", lambda cls: cls(16, [2, 3, 3]))
class HeightCountsFromTheTime(rw.MRoPE):
    def at(self, positions, dtype=torch.float32):
        if positions.ndim == 3:
            positions = torch.stack((positions[0], positions[1] * (positions[0] + 1), positions[2]))
        return super().at(positions, dtype)


# K13: rows and columns


@part("K13", "axes", "grid", lambda: rw.Axial(16))
def columns_first(*sizes):
    """Right for a square picture but for its orientation, which no score shows."""
    return torch.stack(torch.meshgrid(*map(torch.arange, sizes), indexing="xy")).flatten(1)[:, None]


@part("K13", "axes", "grid", lambda: rw.Axial(16))
def cells_counted_by_the_height(*sizes):
    """Right for square pictures."""
    cells = torch.arange(sizes[0] * sizes[1])
    return torch.stack((cells // sizes[0], cells % sizes[0]))[:, None]


@encoding("K13", "sections", lambda cls: cls(16))
class RowsTakenForColumns(rw.Axial):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions.flip(0) if positions.ndim == 3 else positions, dtype)


# K20: buckets of distances (T5)


@encoding("K20", "relative bias", lambda cls: cls())
class DecodeRowCountedFromZero(T5Like):
    """The bias of the queries at hand, as if the first of them stood at position 0."""

    distance_only = False

    def bias(self, head, q_pos, k_pos):
        return super().bias(head, q_pos - q_pos.min(), k_pos)


@encoding("K20", "relative bias", lambda cls: cls())
class PastTakenForFuture(T5Like):
    def bucket(self, distance):
        return super().bucket(distance.abs())


@encoding("K20", "relative bias", lambda cls: cls())
class LogarithmOfTheWholeDistance(T5Like):
    """The logarithm starts at 1 instead of at the first distance that has no bucket of its own."""

    def edges(self):
        exact, steps = self.side // 2, self.side - self.side // 2
        return [*range(1, exact + 1), *(round(self.max_distance ** (j / steps)) for j in range(1, steps))]


@encoding("K20", "relative bias", lambda cls: cls())
class EdgesCutOff(T5Like):
    """Edges rounded down: the last distance of a bucket falls into the next."""

    def edges(self):
        exact, steps = self.side // 2, self.side - self.side // 2
        ratio = (self.max_distance / exact) ** (1 / steps)
        return [*range(1, exact + 1), *(int(exact * ratio**j) for j in range(1, steps))]


# K21, K23: absolute positions and the end of their table


@encoding("K21", "absolute positions", lambda cls: cls(64, 128))
class RowsShiftedByThePaddingIndex(rw.Learned):
    """Rows begin after that of the padding token, as in some families of checkpoints, here in others."""

    def embed(self, x, at):
        return x + F.embedding((at.positions + 2).clamp(max=self.max_positions - 1), self.table).to(x.dtype)


@encoding("K21", "absolute positions", lambda cls: cls(128))
class SinesBesideCosines(rw.Sinusoidal):
    """All sines, then all cosines: another table than the one of the paper, with which weights were trained."""

    def embed(self, x, at):
        return (x + torch.cat((at.sin, at.cos), dim=-1)).to(x.dtype)


@encoding("K21", "absolute positions", lambda cls: cls(128))
class SinusoidsCountedFromOne(rw.Sinusoidal):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions + 1, dtype)


@encoding("K21", "precision of tables", lambda cls: cls(128))
class CosineWithFrequencyOfItsOwn(rw.Sinusoidal):
    def at(self, positions, dtype=torch.float32):
        at = super().at(positions, dtype)
        shift = self.base ** (-1 / self.model_dim)
        angles = positions.double().unsqueeze(-1) * torch.tensor(
            [self.base ** (-2 * i / self.model_dim) * shift for i in range(self.model_dim // 2)], dtype=torch.float64
        )
        return at._replace(cos=angles.cos().float())


@encoding("K23", "bounds", lambda cls: cls(64, 128))
class StaysOnTheLastRow(rw.Learned):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions.clamp(max=self.max_positions - 1), dtype)


@encoding("K23", "bounds", lambda cls: cls(64, 128))
class NegativePositionsFromTheEnd(rw.Learned):
    def at(self, positions, dtype=torch.float32):
        return Placement(positions)

    def embed(self, x, at):
        return x + self.table[at.positions].to(x.dtype)

"""State, compilation and bounds gone wrong."""

import torch

import ropewalk as rw
from mutants.registry import encoding

# K18, K19, K23, K11: compile, state, bounds, not applied


@encoding("K19", "state")
class TablesInTheCheckpoint(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.register_buffer("frequencies", torch.tensor(self.spectrum.inv_freq))


@encoding("K19", "state")
class TableUnfilledAfterMeta(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.register_buffer("step", torch.tensor(self._steps), persistent=False)

    def at(self, positions, dtype=torch.float32):
        self._steps = tuple(self.step.tolist())
        return super().at(positions, dtype)


@encoding("K19", "state")
class TableReadFromTheCheckpoint(rw.Rotary):
    """What a model in half precision saved replaces the numbers that the encoding was built with."""

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs):
        old = state_dict.pop(prefix + "inv_freq", None)
        if old is not None:
            self._steps = rw.Spectrum(old.double().tolist()).steps


@encoding("K19", "state")
class OldCheckpointsRefused(rw.Rotary):
    def _load_from_state_dict(self, *args, **kwargs):
        rw.Encoding._load_from_state_dict(self, *args, **kwargs)


@encoding("K19", "state", lambda cls: cls(64, 128))
class TableThatIsNotSaved(rw.Learned):
    """A buffer that no checkpoint holds, filled once, at construction."""

    def __init__(self, num_positions, model_dim):
        super().__init__(num_positions, model_dim)
        fixed = torch.arange(num_positions * model_dim).view(num_positions, model_dim)
        del self.table
        self.register_buffer("table", fixed, persistent=False)

    def reset_parameters(self):
        pass


@encoding("K18", "history")
class AssignsItsTableInForward(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        self.placed = super().at(positions, dtype)
        return self.placed


@encoding("K18", "state")
class ComplexBuffer(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.register_buffer("table", torch.polar(torch.ones(8), torch.arange(8.0)), persistent=False)


@encoding("K18", "compile")
class LengthReadWhileTracing(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return super().at(torch.arange(7) if positions.shape[0] == 7 else positions + 1, dtype)


@encoding("K18", "compile")
class Float64OnTheDevice(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        at = super().at(positions, torch.float64)
        return at._replace(cos=at.cos.to(dtype), sin=at.sin.to(dtype))


@encoding("K23", "bounds", lambda cls: cls(64, 128))
class WrapsBeyondTheTable(rw.Learned):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions % self.max_positions, dtype)


@encoding("K23", "bounds")
class TableEndsTooEarly(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        at = super().at(torch.arange(512), dtype)
        return at._replace(positions=positions, cos=at.cos[positions], sin=at.sin[positions])


@encoding("K11", "distinct")
class AskedForAndNotApplied(rw.Rotary):
    def query(self, q, at):
        return q


@encoding("K11", "distinct", lambda cls: cls(8))
class SlopesSetToZero(rw.ALiBi):
    """An option that other classes read."""

    def bias(self, head, q_pos, k_pos):
        return 0.0 * super().bias(head, q_pos, k_pos)

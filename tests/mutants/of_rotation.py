"""Angles, tables, layouts and caches gone wrong."""

import math

import torch

import ropewalk as rw
from mutants.registry import encoding, part, table
from ropewalk.attention import attend
from ropewalk.encodings import Placement, reposition
from ropewalk.kernels import turn, turn_

# K01: phase precision


@encoding("K01", "precision")
class AnglesInFloat32(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return table(self, positions, dtype)


@encoding("K01", "precision")
class PositionsInBfloat16(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions.bfloat16().long(), dtype)


@encoding("K01", "precision")
class PositionsOf32Bits(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return super().at(positions.int().long(), dtype)


@encoding("K01", "casts")
class FrequenciesInFloatBuffer(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.register_buffer("frequencies", torch.tensor(self.spectrum.inv_freq), persistent=False)

    def at(self, positions, dtype=torch.float32):
        return table(self, positions, inv_freq=self.frequencies.float())


@encoding("K01", "casts")
class AnglesByMatmulUnderAutocast(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        inv_freq = torch.tensor(self.spectrum.inv_freq, dtype=torch.float32)
        angles = (positions.float()[:, None] @ inv_freq[None]).float()
        return Placement(positions, angles.cos(), angles.sin())


@encoding("K01", "casts", lambda cls: cls(128))
class TableInDefaultDtype(rw.Sinusoidal):
    def at(self, positions, dtype=torch.float32):
        at = super().at(positions, dtype)
        return at._replace(cos=at.cos.to(torch.get_default_dtype()), sin=at.sin.to(torch.get_default_dtype()))


# K02: output dtype


@encoding("K02", "dtypes")
class ReturnsItsTablesDtype(rw.Rotary):
    def query(self, q, at):
        return super().query(q.float(), at)


@encoding("K02", "double")
class NeverMoreThanFloat32(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        at = super().at(positions)
        return at._replace(cos=at.cos.to(dtype), sin=at.sin.to(dtype))


@part("K02", "dtypes", "attend")
def answers_in_float32(q, k, v, encoding=None, **options):
    return attend(q, k, v, encoding, **options).float()


# K03, K04, K22: history, caches, aliasing


@encoding("K03", "history")
class BaseGrowsWithTheLongestInput(rw.Rotary):
    longest = 8

    def at(self, positions, dtype=torch.float32):
        self.longest = max(self.longest, int(positions.max()) + 1)
        stretched = self.spectrum.inv_freq[0], *(w * 8 / self.longest for w in self.spectrum.inv_freq[1:])
        return table(self, positions, dtype, torch.tensor(stretched, dtype=dtype))


@encoding("K03", "history")
class DynamicNTKNeverReset(rw.Rotary):
    """The base of the longest input stays: a long prompt changes later answers to short ones."""

    train_len, longest = 8, 8

    def at(self, positions, dtype=torch.float32):
        self.longest = max(self.longest, int(positions.max()) + 1)
        stretched = rw.spectra.dynamic_ntk(16, stretch=2, train_len=self.train_len, length=self.longest)
        return rw.Rotary(16, spectrum=stretched).at(positions, dtype)


@encoding("K03", "history")
class LongFactorsOnceTheyWereNeeded(rw.Rotary):
    """LongRoPE that switches to its long factors and never back."""

    long = False

    def at(self, positions, dtype=torch.float32):
        self.long = self.long or int(positions.max()) >= 16
        slower = torch.tensor(self.inv_freq, dtype=dtype) / torch.arange(1, 9)
        return table(self, positions, dtype, slower) if self.long else super().at(positions, dtype)


@encoding("K04", "history")
class TableKeyedByLengthAlone(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.tables = {}

    def at(self, positions, dtype=torch.float32):
        key = len(positions), dtype
        if key not in self.tables:
            self.tables[key] = super().at(positions, dtype)
        return self.tables[key]


@encoding("K04", "cache")
class OffsetIgnored(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return super().at(torch.arange(positions.shape[-1]), dtype)


@encoding("K22", "purity")
class WritesIntoTheQueries(rw.Rotary):
    def query(self, q, at):
        return rw.rotate_(q.detach(), at, self.layout)


@part("K22", "gradients", "rotate_")
def rotates_without_a_gradient(x, at, layout):
    return rw.rotate_(x.detach(), at, layout)


@part("K22", "gradients", "rotate_")
def turns_the_gradient_forward(x, at, layout):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cos, sin):
            ctx.save_for_backward(cos, sin)
            return turn(x, cos, sin, layout)

        @staticmethod
        def backward(ctx, grad):
            return turn(grad, *ctx.saved_tensors, layout), None, None

    return Wrong.apply(x, at.cos, at.sin)


@part("K04", "moved keys", "cache")
class TurnsMovedKeysAgain(rw.KVCache):
    def evict(self, sinks, window):
        super().evict(sinks, window)
        if self._moved is not None:  # what was moved is taken for what was written
            self._k, self._written = self._moved.bfloat16().float(), self._places


@part("K04", "moved keys", "reposition")
def turns_moved_keys_back(k, encoding, old_positions, new_positions):
    return reposition(k, encoding, new_positions, old_positions)


@part("K04", "cache", "cache")
class ForgetsWhereItStopped(rw.KVCache):
    @property
    def positions(self):
        return super().positions - len(self) + 1


# K07, K08, K09, K10: layout, width, formula, magnitude


@encoding("K07", "layouts")
class LayoutSwapped(rw.Rotary):
    def query(self, q, at):
        return rw.rotate(q, at, "interleaved")


@part("K07", "layouts", "to_interleaved_weight")
def permutes_by_the_ratio_of_heads(weight, num_heads, rotary_dim=None):
    ratio = {8: 8, 2: 4}[num_heads]
    return rw.layouts.to_interleaved_weight(weight, ratio, weight.shape[0] // ratio)


@part("K07", "layouts", "to_interleaved")
def converts_twice_the_same_way(x, rotary_dim=None):
    return rw.layouts.to_half(x, rotary_dim)


@encoding("K08", "norms", lambda cls: cls(16, rotary_dim=6))
class TurnsTheWholeHead(rw.Rotary):
    def query(self, q, at):
        whole = rw.Rotary(self.head_dim)
        return whole.query(q, whole.at(at.positions))


@encoding("K08", "formula", lambda cls: cls(16, rotary_dim=6))
class ExponentOfTheWholeHead(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        inv_freq = [self.base ** (-2 * i / self.head_dim) for i in range(self.rotary_dim // 2)]
        return table(self, positions, inv_freq=torch.tensor(inv_freq))


@encoding("K09", "formula")
class ExponentStartsAtOne(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return table(self, positions, inv_freq=torch.tensor((*self.spectrum.inv_freq[1:], 0.0001)))


@encoding("K09", "precision", lambda cls: cls(16, spectrum=rw.spectra.yarn(16, stretch=4, train_len=512)))
class StretchForgottenForOneToken(rw.Rotary):
    """A fast path for a decode step that does not know of the stretch."""

    def at(self, positions, dtype=torch.float32):
        if positions.shape[-1] > 1:
            return super().at(positions, dtype)
        at = rw.Rotary(16).at(positions, dtype)
        return at._replace(cos=at.cos * self.spectrum.magnitude, sin=at.sin * self.spectrum.magnitude)


@encoding("K10", "norms")
class MagnitudeTwice(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim, spectrum=rw.spectra.yarn(head_dim, stretch=4, train_len=512))

    def at(self, positions, dtype=torch.float32):
        at, factor = super().at(positions, dtype), self.spectrum.magnitude
        return at._replace(cos=at.cos * factor, sin=at.sin * factor)


@encoding("K10", "norms", lambda cls: cls(16, spectrum=rw.spectra.yarn(16, stretch=4, train_len=512)))
class MagnitudeOnQueriesAlone(rw.Rotary):
    def key(self, k, at):
        return super().key(k, at) / self.spectrum.magnitude


@encoding("K10", "temperature", lambda cls: cls("constant", factor=1.6))
class SoftmaxFactorOnQueriesAndKeys(rw.Temperature):
    def key(self, k, at):
        return self.query(k, at)


@encoding("K10", "temperature", lambda cls: cls(train_len=8))
class TemperatureBelowTheTrainedLength(rw.Temperature):
    """log-n scaling that forgets its lower bound of 1."""

    def query(self, q, at):
        factor = ((at.positions + 1).to(q.dtype).log() / math.log(self.train_len)).unsqueeze(-1)
        return q * factor


@encoding("K09", "distance")
class KeysTurnedTheOtherWay(rw.Rotary):
    def key(self, k, at):
        return super().key(k, at._replace(sin=-at.sin))


# The mistakes that a fast rotation invites: signs, rows, batches and channels that a loop forgets


@part("K22", "gradients", "rotate_")
def forgets_the_gradient_of_the_last_row(x, at, layout):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, cos, sin):
            ctx.mark_dirty(x)
            ctx.save_for_backward(cos, sin)
            return turn_(x, cos, sin, layout)

        @staticmethod
        def backward(ctx, grad):
            cos, sin = ctx.saved_tensors
            grad = grad.clone()
            grad[..., :-1, :] = turn(grad[..., :-1, :], cos[..., :-1, :], -sin[..., :-1, :], layout)
            return grad, None, None

    return Wrong.apply(x, at.cos, at.sin)


@encoding("K08", "precision")
class LastRowsOfABlockLeftOut(rw.Rotary):
    def query(self, q, at):
        turned = super().query(q, at)
        end = q.shape[-2] // 8 * 8
        return torch.cat((turned[..., :end, :], q[..., end:, :]), dim=-2)


@encoding("K08", "norms", lambda cls: cls(16, rotary_dim=6))
class RestNotCopied(rw.Rotary):
    def query(self, q, at):
        out = torch.zeros_like(q)
        out[..., : self.rotary_dim] = super().query(q, at)[..., : self.rotary_dim]
        return out


@encoding("K08", "norms", lambda cls: cls(16, rotary_dim=6))
class RestTurnedByTheFirstAngle(rw.Rotary):
    def query(self, q, at):
        turned = super().query(q, at)
        turned[..., self.rotary_dim :] = q[..., self.rotary_dim :] * at.cos[..., :1]
        return turned


@encoding("K08", "precision", lambda cls: cls(16, layout="interleaved"))
class LastPairLeftToTheNextBlock(rw.Rotary):
    def query(self, q, at):
        turned = super().query(q, at)
        turned[..., -2:] = q[..., -2:]
        return turned


@encoding("K05", "padding")
class TableOfTheFirstRowForAll(rw.Rotary):
    def query(self, q, at):
        return super().query(q, at if at.cos.ndim == 2 else at._replace(cos=at.cos[:1], sin=at.sin[:1]))

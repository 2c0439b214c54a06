"""Wrong versions on purpose, each with a fault that some software has shipped.  Each must break the law it names.

A mutant is an encoding, or one function around it, with a single mistake; the kind is that of the bug reports
from which the laws were made.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

import ropewalk as rw
from ropewalk import positions
from ropewalk.attention import attend as right_attend
from ropewalk.check import Parts, Subject
from ropewalk.encodings import Placement, alibi_slope, reposition
from ropewalk.encodings.base import Encoding
from ropewalk.kernels import turn


@dataclasses.dataclass(frozen=True)
class Mutant:
    name: str
    kind: str
    law: str
    subject: Subject


MUTANTS: list[Mutant] = []


def encoding(kind: str, law: str, make: Callable | None = None, **subject):
    """Registers an encoding class as a mutant; `make` builds it, by default for 16 channels."""

    def register(cls):
        build = make or (lambda c=cls: c(16))
        wrong = Subject((lambda b=build, c=cls: b(c)) if make else build, **subject)
        MUTANTS.append(Mutant(cls.__name__, kind, law, wrong))
        return cls

    return register


def part(kind: str, law: str, slot: str, make: Callable = lambda: rw.Rotary(16) + rw.ALiBi(8)):
    """Registers a function, or a cache class, that takes the place of one of `Parts`."""

    def register(wrong):
        subject = Subject(make, parts=dataclasses.replace(Parts(), **{slot: wrong}))
        MUTANTS.append(Mutant(wrong.__name__, kind, law, subject))
        return wrong

    return register


def _table(rope: rw.Rotary, where, dtype=torch.float32, inv_freq=None, positions_dtype=None) -> Placement:
    inv_freq = torch.tensor(rope.spectrum.inv_freq, dtype=torch.float64).to(dtype) if inv_freq is None else inv_freq
    angles = where.to(positions_dtype or dtype).unsqueeze(-1) * inv_freq
    return Placement(where, angles.cos(), angles.sin())


# K01: phase precision


@encoding("K01", "precision")
class AnglesInFloat32(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return _table(self, positions, dtype)


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
        self.register_buffer("inv_freq", torch.tensor(self.spectrum.inv_freq), persistent=False)

    def at(self, positions, dtype=torch.float32):
        return _table(self, positions, inv_freq=self.inv_freq.float())


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


@encoding("K21", "precision of tables", lambda cls: cls(128))
class CosineWithFrequencyOfItsOwn(rw.Sinusoidal):
    def at(self, positions, dtype=torch.float32):
        at = super().at(positions, dtype)
        shift = self.base ** (-1 / self.model_dim)
        angles = positions.double().unsqueeze(-1) * torch.tensor(
            [self.base ** (-2 * i / self.model_dim) * shift for i in range(self.model_dim // 2)], dtype=torch.float64
        )
        return at._replace(cos=angles.cos().float())


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


# K03, K04, K22: history, caches, aliasing


@encoding("K03", "history")
class BaseGrowsWithTheLongestInput(rw.Rotary):
    longest = 8

    def at(self, positions, dtype=torch.float32):
        self.longest = max(self.longest, int(positions.max()) + 1)
        stretched = self.spectrum.inv_freq[0], *(w * 8 / self.longest for w in self.spectrum.inv_freq[1:])
        return _table(self, positions, inv_freq=torch.tensor(stretched))


@encoding("K04", "history")
class TableKeyedByLengthAlone(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.tables = {}

    def at(self, positions, dtype=torch.float32):
        key = len(positions)
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
            self._k, self._written = self._moved.bfloat16().float(), self._positions


@part("K04", "moved keys", "reposition")
def turns_moved_keys_back(k, encoding, old_positions, new_positions):
    return reposition(k, encoding, new_positions, old_positions)


@part("K04", "cache", "cache")
class ForgetsWhereItStopped(rw.KVCache):
    @property
    def positions(self):
        return super().positions - len(self) + 1


# K05, K06: padding, packing, shards


@part("K05", "padding", "from_mask")
def counts_the_padding(mask):
    return torch.arange(mask.shape[1]).expand(mask.shape)


@part("K05", "padding", "from_mask")
def counts_in_bfloat16(mask):
    return (mask.bfloat16().cumsum(-1) * 1.01).long().clamp(min=0)


@part("K06", "packing", "from_documents")
def counts_through_documents(documents):
    return torch.arange(len(documents))


@part("K06", "packing", "attend")
def restarts_but_reads_other_documents(q, k, v, encoding=None, **options):
    return right_attend(q, k, v, encoding, **{**options, "documents": None})


@part("K06", "shards", "shard")
def zigzag_taken_for_contiguous(seq_len, rank, world_size, order="contiguous"):
    own = positions.shard(seq_len, rank, world_size, order)
    return own if order == "contiguous" else own + rank


@part("K06", "shards", "attend")
def local_positions_on_each_shard(q, k, v, encoding=None, **options):
    if options.get("return_lse"):
        options = {**options, "q_positions": torch.arange(q.shape[2]), "k_positions": torch.arange(k.shape[2])}
    return right_attend(q, k, v, encoding, **options)


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
        return _table(self, positions, inv_freq=torch.tensor(inv_freq))


@encoding("K09", "formula")
class ExponentStartsAtOne(rw.Rotary):
    def at(self, positions, dtype=torch.float32):
        return _table(self, positions, inv_freq=torch.tensor((*self.spectrum.inv_freq[1:], 0.0001)))


@encoding("K10", "norms")
class MagnitudeTwice(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim, spectrum=rw.spectra.yarn(head_dim, stretch=4, train_len=512))

    def at(self, positions, dtype=torch.float32):
        at, factor = super().at(positions, dtype), self.spectrum.magnitude
        return at._replace(cos=at.cos * factor, sin=at.sin * factor)


@encoding("K09", "distance")
class KeysTurnedTheOtherWay(rw.Rotary):
    def key(self, k, at):
        return super().key(k, at._replace(sin=-at.sin))


# K14, K15: slopes and bias


@encoding("K14", "slopes", lambda cls: cls(12), num_heads=12, num_kv_heads=2)
class UniformSlopes(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return torch.exp2(-8.0 * (head + 1).to(dtype) / self.num_heads)


@encoding("K14", "slopes", lambda cls: cls(8))
class SlopesOffByOne(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return 2 * super().slope(head, dtype)


@encoding("K14", "shards", lambda cls: cls(8))
class SlopesFromLocalHeads(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return alibi_slope(torch.arange(head.shape[0]).view(head.shape), head.shape[0], dtype)


@encoding("K14", "slopes", lambda cls: cls(12), num_heads=12, num_kv_heads=2)
class SlopesSorted(rw.ALiBi):
    def slope(self, head, dtype=torch.float32):
        return super().slope(torch.arange(self.num_heads), dtype).sort(descending=True).values[head]


@encoding("K15", "bias", lambda cls: cls(8))
class FutureRewarded(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return -self.slope(head) * (q_pos - k_pos)


@encoding("K15", "bias", lambda cls: cls(8))
class KeyIndexedInBfloat16(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return (self.slope(head).bfloat16() * k_pos.bfloat16()).float() + 0.0 * q_pos


@encoding("K15", "bias", lambda cls: cls(8))
class DistanceInBfloat16(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return super().bias(head, (q_pos - k_pos).abs().bfloat16().long(), 0 * k_pos)


@encoding("K15", "bias", lambda cls: cls(8))
class DistanceOffByOne(rw.ALiBi):
    def bias(self, head, q_pos, k_pos):
        return super().bias(head, q_pos + 1, k_pos)


@part("K15", "causality", "attend", lambda: rw.ALiBi(8))
def no_bias_in_a_decode_step(q, k, v, encoding=None, **options):
    return right_attend(q, k, v, None if q.shape[2] == 1 else encoding, **options)


@part("K15", "half precision", "attend", lambda: rw.ALiBi(8))
def bias_in_the_models_dtype(q, k, v, encoding=None, **options):
    class Rounded(Encoding):
        def bias(self, head, q_pos, k_pos):
            return encoding.bias(head, q_pos, k_pos).to(q.dtype).float()

    return right_attend(q, k, v, Rounded(), **options)


@part("K15", "formula of attention", "attend", lambda: rw.ALiBi(8))
def bias_before_scaling(q, k, v, encoding=None, **options):
    class Divided(Encoding):
        def bias(self, head, q_pos, k_pos):
            return encoding.bias(head, q_pos, k_pos) / math.sqrt(q.shape[-1])

    return right_attend(q, k, v, Divided(), **options)


# K16: masks


@part("K16", "causality", "attend", lambda: rw.NoPE())
def top_left_causality(q, k, v, encoding=None, **options):
    if options.get("q_positions") is None:
        options = {**options, "q_positions": torch.arange(q.shape[2]), "k_positions": torch.arange(k.shape[2])}
    return right_attend(q, k, v, encoding, **options)


def _by_sentinels(q, k, v, causal, mask, sentinel):
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        score = score + torch.full_like(score[0, 0], sentinel).triu(1)
    if mask is not None:
        score = score + torch.where(mask, 0.0, sentinel).to(score.dtype)
    return score.softmax(-1) @ v


@part("K16", "empty rows", "attend", lambda: rw.NoPE())
def softmax_over_nothing(q, k, v, encoding=None, *, causal=True, mask=None, **options):
    return _by_sentinels(q, k, v, causal, mask, -math.inf)


@part("K16", "empty rows", "attend", lambda: rw.NoPE())
def sentinel_added_to_sentinel(q, k, v, encoding=None, *, causal=True, mask=None, **options):
    return _by_sentinels(q, k, v, causal, mask, torch.finfo(q.dtype).min)


@part("K16", "formula of attention", "attend")
def mask_replaces_causality(q, k, v, encoding=None, **options):
    causal = options.get("causal", True) and options.get("mask") is None
    return right_attend(q, k, v, encoding, **{**options, "causal": causal})


@part("K16", "positions", "attend", lambda: rw.Rotary(16))
def causality_by_index(q, k, v, encoding=None, **options):
    places = {"q_positions": None, "k_positions": None} if q.shape[2] == k.shape[2] else {}
    return right_attend(q, k, v, encoding, **{**options, **places})


@part("K07", "grouped heads", "attend")
def query_heads_dealt_round(q, k, v, encoding=None, **options):
    group = q.shape[1] // k.shape[1]
    return right_attend(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), encoding, **options)


# K18, K19, K23, K11: compile, state, bounds, not applied


@encoding("K19", "state")
class TablesInTheCheckpoint(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.register_buffer("inv_freq", torch.tensor(self.spectrum.inv_freq))


@encoding("K19", "state")
class TableUnfilledAfterMeta(rw.Rotary):
    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.register_buffer("step", torch.tensor(self._steps), persistent=False)

    def at(self, positions, dtype=torch.float32):
        self._steps = tuple(self.step.tolist())
        return super().at(positions, dtype)


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

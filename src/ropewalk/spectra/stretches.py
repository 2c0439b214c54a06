"""Spectra that treat every pair by one rule: interpolation, a larger base, given factors, a narrower head."""

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal, localcontext

from ropewalk import phases
from ropewalk.errors import message, require, require_count, require_number, require_type
from ropewalk.spectra.spectrum import Number, Spectrum, check_base, check_stretch, plain, powers, published


@published
def linear(rotary_dim: int, base: Number = 10_000.0, *, stretch: Number) -> Spectrum:
    """Position interpolation: inv_freq / stretch   (Chen et al. 2023, arXiv:2306.15595v2, Eq. 4).

    >>> linear(4, stretch=4).inv_freq
    (0.25, 0.0025)
    """
    factor = check_stretch(stretch)
    with localcontext(phases.DIGITS):
        return Spectrum([w / factor for w in plain(rotary_dim, base).exact])


def _with_larger_base(rotary_dim: int, base: Number, growth: Decimal) -> Spectrum:
    """The base growth^(d / (d - 2)) times: the first pair keeps its frequency, the last is divided by `growth`."""
    require_count(rotary_dim, "rotary_dim", at_least=4)
    with localcontext(phases.DIGITS):
        return plain(rotary_dim, check_base(base) * growth ** (Decimal(rotary_dim) / (rotary_dim - 2)))


@published
def ntk(rotary_dim: int, base: Number = 10_000.0, *, stretch: Number) -> Spectrum:
    """A larger base, stretch^(d / (d - 2)) times: the first pair keeps its frequency, the last is stretched in
    full   (YaRN, Peng et al. 2023, arXiv:2309.00071v2, Sec. 3.1, Eq. 16).  Hunyuan's `alpha` is this stretch.

    >>> ntk(128, stretch=4).inv_freq[0]
    1.0
    """
    return _with_larger_base(rotary_dim, base, check_stretch(stretch))


@published
def dynamic_ntk(rotary_dim: int, base: Number = 10_000.0, *, stretch: Number, train_len: int, length: int) -> Spectrum:
    """NTK stretched by what a sequence of `length` tokens needs: stretch * length / train_len - (stretch - 1)
    beyond `train_len`, nothing up to it   (YaRN, Peng et al. 2023, arXiv:2309.00071v2, Sec. 3.3).

    Args:
        stretch: how far the base runs ahead of the length, at least 1 (1 follows it exactly).
        train_len: tokens seen in training.
        length: tokens of the whole sequence, those still to come included: keys turned for one length do not fit
            queries turned for another.

    >>> short = dynamic_ntk(128, stretch=2, train_len=2048, length=2048)
    >>> short == plain(128), short == dynamic_ntk(128, stretch=2, train_len=2048, length=2049)
    (True, False)
    """
    factor = check_stretch(stretch)
    require_count(train_len, "train_len")
    needed = max(require_count(length, "length"), train_len)
    with localcontext(phases.DIGITS):
        return _with_larger_base(rotary_dim, base, factor * needed / train_len - (factor - 1))


@published
def longrope(
    rotary_dim: int,
    base: Number = 10_000.0,
    *,
    short_factors: Sequence[Number],
    long_factors: Sequence[Number],
    train_len: int,
    length: int,
    stretch: Number | None = None,
    magnitude: float | int | None = None,
) -> Spectrum:
    """inv_freq[i] / factors[i], one list of factors up to `train_len` tokens and another beyond
    (LongRoPE, Ding et al. 2024, arXiv:2402.13753v1, Sec. 3).

    Args:
        short_factors, long_factors: a positive number for each pair.
        train_len: tokens seen in training; a sequence of just as many is short.
        length: tokens of the whole sequence.
        stretch: eval_len / train_len, from which the magnitude follows: sqrt(1 + ln(stretch) / ln(train_len)),
            as in the code released with Phi-3.
        magnitude: what the tables are multiplied by, at any length; given instead of `stretch`.

    >>> s = longrope(4, short_factors=[1, 1], long_factors=[2, 4], train_len=16, length=17, stretch=4)
    >>> s.inv_freq, round(s.magnitude, 10)
    ((0.5, 0.0025), 1.2247448714)
    """
    original = plain(rotary_dim, base).exact
    lists = [_factors(n, fs, len(original)) for n, fs in (("short", short_factors), ("long", long_factors))]
    require_count(train_len, "train_len", at_least=2)
    chosen = lists[require_count(length, "length") > train_len]
    if magnitude is None:
        if stretch is None:
            raise ValueError(message("magnitude", "given where stretch is not", None))
        magnitude = math.sqrt(1 + math.log(check_stretch(stretch)) / math.log(train_len))
    with localcontext(phases.DIGITS):
        return Spectrum([w / f for w, f in zip(original, chosen, strict=True)], magnitude)


def _factors(which: str, factors: Sequence[Number], pairs: int) -> list[Decimal]:
    name = f"{which}_factors"
    require_type(factors, Iterable, name, f"{pairs} numbers, one for each pair")
    exact = [Decimal(require_number(f, name)) for f in factors]
    require(len(exact) == pairs, name, f"one number for each of {pairs} pairs", len(exact))
    for f in exact:
        require(f.is_finite() and f > 0, name, "finite and positive throughout", float(f))
    return exact


@published
def proportional(head_dim: int, base: Number = 10_000.0, *, rotary_dim: int, stretch: Number = 1) -> Spectrum:
    """inv_freq[i] = base^(-2i / head_dim) / stretch for i < rotary_dim / 2, and 0, no turn, for the other pairs of
    a head (Hugging Face's rope type "proportional"; Gemma).

    Unlike `plain` on the first channels of a head, pairs span the whole head, and so does the exponent.

    Args:
        head_dim: channels of a head, even; the spectrum has a frequency for each of its pairs.
        rotary_dim: channels that turn, even.

    >>> proportional(8, rotary_dim=4).inv_freq
    (1.0, 0.1, 0.0, 0.0)
    """
    require_count(head_dim, "head_dim", at_least=2)
    require(head_dim % 2 == 0, "head_dim", "even", head_dim, hint="channels turn in pairs")
    fits = require_count(rotary_dim, "rotary_dim", at_least=0) <= head_dim and rotary_dim % 2 == 0
    require(fits, "rotary_dim", f"even and at most head_dim ({head_dim})", rotary_dim)
    factor = check_stretch(stretch)
    with localcontext(phases.DIGITS):
        turning = [w / factor for w in powers(rotary_dim // 2, head_dim, check_base(base))]
    return Spectrum([*turning, *[Decimal(0)] * ((head_dim - rotary_dim) // 2)])

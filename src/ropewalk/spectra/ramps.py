"""Spectra that keep fast pairs and stretch slow ones, with a ramp between: YaRN and Llama 3."""

import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal, localcontext

from ropewalk import phases
from ropewalk.errors import require, require_count, require_number, require_type
from ropewalk.spectra.spectrum import Number, Spectrum, check_base, check_stretch, plain, published


def yarn_magnitude(
    stretch: Number, mscale: float | int | None = None, mscale_all_dim: float | int | None = None
) -> float:
    """0.1 ln(stretch) + 1   (YaRN, Peng et al. 2023, arXiv:2309.00071v2, Sec. 3.4), or with two weights
    (0.1 mscale ln(stretch) + 1) / (0.1 mscale_all_dim ln(stretch) + 1), as DeepSeek's code has it.

    Differs from the code:
        Nothing: there, too, one weight without the other, or a weight of 0, counts as none.

    >>> round(yarn_magnitude(16), 10), yarn_magnitude(16, 1.0, 1.0)
    (1.2772588722, 1.0)
    """
    if not (mscale and mscale_all_dim):
        return _growth(stretch, 1.0)
    return _growth(stretch, mscale) / _growth(stretch, mscale_all_dim)


def yarn_softmax_factor(stretch: Number, mscale_all_dim: float | int) -> float:
    """(0.1 mscale_all_dim ln(stretch) + 1)^2: what DeepSeek multiplies the softmax scale by, which reaches the
    channels that do not turn as well.  `Temperature(factor=...)` applies it to queries.

    >>> round(yarn_softmax_factor(40, 1.0), 10)
    1.8738542071
    """
    return _growth(stretch, mscale_all_dim) ** 2


def _growth(stretch: Number, weight: float | int) -> float:
    weight = require_number(weight, "mscale")
    require(math.isfinite(weight) and weight >= 0, "mscale", "finite and at least 0", weight)
    return 0.1 * weight * math.log(float(check_stretch(stretch))) + 1.0


@published
def yarn(
    rotary_dim: int,
    base: Number = 10_000.0,
    *,
    stretch: Number,
    train_len: int,
    beta_fast: float | int = 32.0,
    beta_slow: float | int = 1.0,
    truncate: bool = True,
    magnitude: float | int | None = None,
) -> Spectrum:
    """Pairs that turn often within `train_len` stay, slow ones are interpolated, with a ramp between
    (YaRN, Peng et al. 2023, arXiv:2309.00071v2, Sec. 3.2 and 3.4).

    Args:
        stretch: eval_len / train_len, at least 1.
        train_len: tokens seen in training.
        beta_fast: turns within `train_len` above which a pair stays as it is.
        beta_slow: turns below which it is stretched in full; less than `beta_fast`.
        truncate: round the ramp's ends outwards to whole pairs, as the released code does.
        magnitude: what the tables are multiplied by; `yarn_magnitude(stretch)` by default.

    >>> s = yarn(64, stretch=4, train_len=4096)
    >>> s.inv_freq[0], round(s.inv_freq[31], 9)
    (1.0, 3.3338e-05)
    """
    factor = check_stretch(stretch)
    require_count(train_len, "train_len")
    ends = math.isfinite(require_number(beta_fast, "beta_fast")) and 0 < require_number(beta_slow, "beta_slow")
    require(ends and beta_slow < beta_fast, "beta_slow", f"positive and below beta_fast ({beta_fast})", beta_slow)
    require(check_base(base) > 1, "base", "above 1", base)
    require_type(truncate, bool, "truncate", "True or False")
    if magnitude is not None:
        require_number(magnitude, "magnitude")
    original = plain(rotary_dim, base).exact
    with localcontext(phases.DIGITS):
        low, high = (_pair_that_turns(t, rotary_dim, check_base(base), train_len) for t in (beta_fast, beta_slow))
        if truncate:
            low, high = low.to_integral_value(ROUND_FLOOR), high.to_integral_value(ROUND_CEILING)
        low, high = max(low, Decimal(0)), min(high, Decimal(rotary_dim - 1))  # the released code's bounds
        spans = "a length within which some pair turns between beta_slow and beta_fast times"
        require(low <= high, "train_len", spans, train_len)
        width = (high - low) or Decimal("0.001")  # the released code's guard against a ramp of no width
        kept = [1 - (i - low) / width for i in range(len(original))]
    return _mixed(original, factor, kept, yarn_magnitude(stretch) if magnitude is None else float(magnitude))


def _pair_that_turns(turns: float | int, rotary_dim: int, base: Decimal, train_len: int) -> Decimal:
    """The index, a real number, of the pair that turns so many times within `train_len`."""
    return rotary_dim * (train_len / (Decimal(turns) * 2 * phases.PI)).ln() / (2 * base.ln())


def _mixed(original: tuple[Decimal, ...], factor: Decimal, kept: list[Decimal], magnitude: float) -> Spectrum:
    """Each frequency divided by `factor`, but for the share in [0, 1] that is kept."""
    with localcontext(phases.DIGITS):
        shares = [min(max(share, Decimal(0)), Decimal(1)) for share in kept]
        mixed = [w - (w - w / factor) * (1 - share) for w, share in zip(original, shares, strict=True)]
    return Spectrum(mixed, magnitude)


@published
def llama3(
    rotary_dim: int,
    base: Number = 500_000.0,
    *,
    stretch: Number,
    train_len: int,
    low_freq_factor: float | int = 1.0,
    high_freq_factor: float | int = 4.0,
) -> Spectrum:
    """Pairs that turn more than `high_freq_factor` times within `train_len` stay, those that turn less than
    `low_freq_factor` times are interpolated, and between them the share kept is linear in the turns (Llama 3.1,
    Meta's released code; Grattafiori et al. 2024, arXiv:2407.21783v3, names the base).

    >>> s = llama3(64, stretch=32, train_len=8192)
    >>> [round(w / p, 10) for w, p in list(zip(s.inv_freq, plain(64, 500_000.0).inv_freq))[14:19]]
    [1.0, 0.6055727545, 0.3037425238, 0.103447609, 0.03125]
    """
    factor = check_stretch(stretch)
    require_count(train_len, "train_len")
    low, high = (Decimal(require_number(f, "low_freq_factor")) for f in (low_freq_factor, high_freq_factor))
    ordered = low.is_finite() and high.is_finite() and 0 <= low < high
    condition = f"at least 0 and below high_freq_factor ({high_freq_factor})"
    require(ordered, "low_freq_factor", condition, low_freq_factor)
    original = plain(rotary_dim, base).exact
    with localcontext(phases.DIGITS):
        turns = [train_len * w / (2 * phases.PI) for w in original]
        kept = [(t - low) / (high - low) for t in turns]
    return _mixed(original, factor, kept, 1.0)

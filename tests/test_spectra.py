"""Every spectrum against its published formula, in 50 digits, and every option that must be refused or must matter."""

import math

import mpmath
import pytest

import ropewalk as rw
from ropewalk import spectra

mpmath.mp.dps = 50
WIDTHS = (2, 4, 64, 80, 128, 256)
BASES = (1e2, 1e4, 5e5, 1e7)
SHORT, LONG = [1.0, 1.25, 1.5, 2.0], [1.0, 3.5, 8.0, 64.0]


def plain(dim, base):
    return [mpmath.mpf(base) ** (-mpmath.mpf(2 * i) / dim) for i in range(dim // 2)]


def ntk(dim, base, stretch):
    return plain(dim, mpmath.mpf(base) * mpmath.mpf(stretch) ** (mpmath.mpf(dim) / (dim - 2)))


def dynamic(dim, base, stretch, train_len, length):
    length = max(length, train_len)
    return ntk(dim, base, mpmath.mpf(stretch) * length / train_len - (mpmath.mpf(stretch) - 1))


def yarn(dim, base, stretch, train_len, fast=32, slow=1, truncate=True):
    def pair(turns):
        return dim * mpmath.log(train_len / (turns * 2 * mpmath.pi)) / (2 * mpmath.log(base))

    low, high = pair(fast), pair(slow)
    if truncate:
        low, high = mpmath.floor(low), mpmath.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or mpmath.mpf("0.001")
    out = []
    for i, w in enumerate(plain(dim, base)):
        ramp = min(max((i - low) / width, 0), 1)
        out.append(w / stretch * ramp + w * (1 - ramp))
    return out


def llama3(dim, base, stretch, train_len, low=1, high=4):
    out = []
    for w in plain(dim, base):
        wavelength = 2 * mpmath.pi / w
        if wavelength > mpmath.mpf(train_len) / low:
            out.append(w / stretch)
        elif wavelength < mpmath.mpf(train_len) / high:
            out.append(w)
        else:
            smooth = (train_len / wavelength - low) / (high - low)
            out.append((1 - smooth) * w / stretch + smooth * w)
    return out


def check(expected, spectrum, tolerance=1e-12):
    assert len(expected) == len(spectrum.inv_freq)
    for want, got in zip(expected, spectrum.exact, strict=True):
        assert abs(mpmath.mpf(str(got)) - want) <= tolerance * abs(want)


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("dim", WIDTHS)
def test_formulas_hold_to_1e_12(dim, base):
    check(plain(dim, base), spectra.plain(dim, base))
    check([w / 4 for w in plain(dim, base)], spectra.linear(dim, base, stretch=4))
    check(llama3(dim, base, 8, 8192), spectra.llama3(dim, base, stretch=8, train_len=8192))
    for truncate in (True, False):
        check(yarn(dim, base, 4, 4096, truncate=truncate),
              spectra.yarn(dim, base, stretch=4, train_len=4096, truncate=truncate))  # fmt: skip
    if dim > 2:
        check(ntk(dim, base, 8), spectra.ntk(dim, base, stretch=8))
        for length in (1, 2048, 2049, 8192):
            check(dynamic(dim, base, 2, 2048, length),
                  spectra.dynamic_ntk(dim, base, stretch=2, train_len=2048, length=length))  # fmt: skip


@pytest.mark.parametrize("rotary_dim", [0, 2, 20, 32, 64])
def test_proportional_keeps_the_exponent_of_the_head(rotary_dim):
    turning = [w / 2 for w in plain(64, 1e6)[: rotary_dim // 2]]
    check([*turning, *[0] * (32 - len(turning))], spectra.proportional(64, 1e6, rotary_dim=rotary_dim, stretch=2))


@pytest.mark.parametrize(("length", "factors"), [(15, SHORT), (16, SHORT), (17, LONG), (10**6, LONG)])
def test_longrope_is_long_beyond_the_trained_length_alone(length, factors):
    """B22: just as many tokens as were trained are short."""
    made = spectra.longrope(8, short_factors=SHORT, long_factors=LONG, train_len=16, length=length, stretch=4)
    check([w / f for w, f in zip(plain(8, 1e4), factors, strict=True)], made)
    assert math.sqrt(1 + math.log(4) / math.log(16)) == pytest.approx(made.magnitude, rel=1e-15)


def test_longrope_magnitudes():
    options = {"short_factors": [1.0], "long_factors": [2.0], "length": 1}
    published = spectra.longrope(2, **options, train_len=4096, stretch=32).magnitude
    assert pytest.approx(1.1902380714, rel=1e-10) == published
    assert spectra.longrope(2, **options, train_len=4096, stretch=1).magnitude == 1.0
    assert spectra.longrope(2, **options, train_len=4096, magnitude=1.3).magnitude == 1.3


@pytest.mark.parametrize(
    ("length", "base"), [(16, 10_000.0), (2048, 10_000.0), (3072, 20221.2616897379), (4096, 30527.7367488067),
                         (8192, 72195.8600865094)],
)  # fmt: skip
def test_dynamic_base_at_each_length(length, base):
    """B15, B17: nothing changes up to the trained length, and no call leaves a trace for the next."""
    made = [spectra.dynamic_ntk(128, stretch=2, train_len=2048, length=n) for n in (16, length, 16)]
    assert made[0] == made[2] == spectra.plain(128)
    assert base ** (-2 / 128) == pytest.approx(made[1].inv_freq[1], rel=1e-12)


@pytest.mark.parametrize(
    ("pair", "ratio"), [(0, 1.0), (14, 1.0), (15, 0.6055727545), (16, 0.3037425238), (17, 0.1034476090), (18, 1 / 32),
                        (31, 1 / 32)],
)  # fmt: skip
def test_llama3_ratios(pair, ratio):
    """B63: dim 64, base 5e5, stretched 32 times from 8192."""
    made = spectra.llama3(64, 5e5, stretch=32, train_len=8192).inv_freq[pair]
    assert ratio == pytest.approx(made / spectra.plain(64, 5e5).inv_freq[pair], rel=1e-9)


@pytest.mark.parametrize(
    ("stretch", "mscale", "all_dim", "magnitude"),
    [
        (16, None, None, 1.2772588722),
        (16, 1.0, 1.0, 1.0),
        (16, 0.707, 1.0, 0.9363975062),
        (40, None, 1.0, 1.3688879454),
        (40, 0.707, 0.707, 1.0),
        (40, 0.707, 1.0, 0.921042),
        (40, 0.0, 1.0, 1.3688879454),
        (64, None, None, 1.4158883084),
        (1, None, None, 1.0),
    ],
)
def test_yarn_magnitude_of_each_pair_of_weights(stretch, mscale, all_dim, magnitude):
    """B67, B68, B71: the tables' own factor; 0 counts as none, and one weight alone changes nothing."""
    assert magnitude == pytest.approx(spectra.yarn_magnitude(stretch, mscale, all_dim), rel=1e-6)


def test_yarn_factors_of_table_and_softmax_multiply_on_what_turns():
    """B70: factor 40; a score gains the square of the table's factor, times that of the softmax, over two keys."""
    assert pytest.approx(1.5896261651, rel=1e-10) == spectra.yarn_softmax_factor(40, 0.707)
    assert pytest.approx(1.8738542071, rel=1e-10) == spectra.yarn_softmax_factor(40, 1.0)
    import torch

    magnitude = spectra.yarn_magnitude(40, 0.707, 1.0)
    stretched = spectra.yarn(8, stretch=40, train_len=64, magnitude=magnitude)
    softmax = spectra.yarn_softmax_factor(40, 1.0)
    both = rw.Rotary(8, spectrum=stretched) + rw.Temperature("constant", factor=softmax)
    bare = rw.Rotary(8, spectrum=rw.Spectrum(stretched.exact))
    q, k = torch.randn(2, 1, 1, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind()
    where = torch.tensor([0, 5, 900])
    score = {e: e.query(q, e.at(where, q.dtype)) @ e.key(k, e.at(where, q.dtype)).mT for e in (both, bare)}
    assert torch.allclose(magnitude**2 * softmax * score[bare], score[both], rtol=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_of_the_released_bounds(truncate):
    """B58: dim 64, base 150000, from 4096: the ramp runs from 8.0928 to 17.398 where it is not rounded."""
    made = spectra.yarn(64, 150_000.0, stretch=32, train_len=4096, truncate=truncate)
    low, high = (8, 18) if truncate else (8.092779115512402, 17.39802450158856)
    for i, w in enumerate(plain(64, 150_000.0)):
        ramp = min(max((i - low) / (high - low), 0), 1)
        assert abs(w / 32 * ramp + w * (1 - ramp) - made.inv_freq[i]) < 1e-12 * w


STRETCHES = {
    "linear": lambda s: spectra.linear(64, stretch=s),
    "ntk": lambda s: spectra.ntk(64, stretch=s),
    "yarn": lambda s: spectra.yarn(64, stretch=s, train_len=4096),
    "llama3": lambda s: spectra.llama3(64, stretch=s, train_len=4096),
    "proportional": lambda s: spectra.proportional(64, rotary_dim=64, stretch=s),
}


@pytest.mark.parametrize("name", STRETCHES)
def test_a_stretch_of_1_is_identity_and_a_larger_one_slows_down(name):
    base = 500_000.0 if name == "llama3" else 10_000.0
    assert spectra.plain(64, base) == STRETCHES[name](1)
    ratios = [a / b for a, b in zip(STRETCHES[name](4).inv_freq, spectra.plain(64, base).inv_freq, strict=True)]
    assert all(0.25 - 1e-12 <= r <= 1 for r in ratios)
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[-1] == pytest.approx(0.25, rel=1e-12)


YARN = {"stretch": 4, "train_len": 4096}


@pytest.mark.parametrize("change", [{"stretch": 5}, {"train_len": 2048}, {"beta_fast": 16}, {"beta_slow": 4},
                                    {"truncate": False}, {"magnitude": 1.0}], ids=lambda c: next(iter(c)))  # fmt: skip
def test_every_option_of_yarn_matters(change):
    assert spectra.yarn(64, **YARN) != spectra.yarn(64, **{**YARN, **change})


@pytest.mark.parametrize("change", [{"stretch": 5}, {"train_len": 2048}, {"low_freq_factor": 2},
                                    {"high_freq_factor": 8}], ids=lambda c: next(iter(c)))  # fmt: skip
def test_every_option_of_llama3_matters(change):
    options = {"stretch": 4, "train_len": 8192}
    assert spectra.llama3(64, **options) != spectra.llama3(64, **{**options, **change})


LONGROPE = {"short_factors": SHORT, "long_factors": LONG, "train_len": 16, "length": 16, "stretch": 4}
REFUSED = [
    ("yarn factor below 1", lambda: spectra.yarn(64, stretch=0.5, train_len=64), r"stretch must be at least 1"),
    ("yarn factor nan", lambda: spectra.yarn(64, stretch=math.nan, train_len=64), r"stretch must be at least 1"),
    ("yarn betas equal", lambda: spectra.yarn(64, **YARN, beta_fast=1), r"beta_slow must be positive and below"),
    ("yarn base 1", lambda: spectra.yarn(64, 1.0, **YARN), r"base must be above 1"),
    ("yarn magnitude 0", lambda: spectra.yarn(64, **YARN, magnitude=0.0), r"magnitude must be finite and positive"),
    ("yarn magnitude", lambda: spectra.yarn(64, **YARN, magnitude=-1.0), r"magnitude must be finite and positive"),
    ("yarn of 3 tokens", lambda: spectra.yarn(64, stretch=4, train_len=3), r"train_len must be a length"),
    ("yarn of ages", lambda: spectra.yarn(64, 10.0, stretch=4, train_len=10**9), r"train_len must be a length"),
    ("mscale negative", lambda: spectra.yarn_magnitude(4, -1.0, 1.0), r"mscale must be finite and at least 0"),
    ("dynamic factor", lambda: spectra.dynamic_ntk(8, stretch=0.9, train_len=8, length=9), r"stretch must be"),
    ("dynamic length", lambda: spectra.dynamic_ntk(8, stretch=2, train_len=8, length=0), r"length must be at least 1"),
    ("dynamic pair", lambda: spectra.dynamic_ntk(2, stretch=2, train_len=8, length=9), r"rotary_dim must be at least"),
    ("llama3 equal", lambda: spectra.llama3(8, stretch=2, train_len=64, low_freq_factor=4), r"low_freq_factor must be"),
    ("llama3 nan", lambda: spectra.llama3(8, stretch=2, train_len=64, low_freq_factor=math.nan), r"low_freq_factor"),
    ("llama3 factor", lambda: spectra.llama3(8, stretch=math.inf, train_len=64), r"stretch must be at least 1"),
    ("long list", lambda: spectra.longrope(8, **{**LONGROPE, "long_factors": [1.0] * 5}), r"long_factors must be one"),
    ("short list", lambda: spectra.longrope(8, **{**LONGROPE, "short_factors": []}), r"short_factors .*got 0"),
    ("zero in list", lambda: spectra.longrope(8, **{**LONGROPE, "long_factors": [1, 1, 0, 1]}), r"long_factors must"),
    ("nan in list", lambda: spectra.longrope(8, **{**LONGROPE, "short_factors": [1, 1, 1, math.nan]}), r"short_f"),
    ("longrope factor", lambda: spectra.longrope(8, **{**LONGROPE, "stretch": 0.5}), r"stretch must be at least 1"),
    ("longrope nothing", lambda: spectra.longrope(8, **{**LONGROPE, "stretch": None}), r"magnitude must be given"),
    ("longrope of 1", lambda: spectra.longrope(8, **{**LONGROPE, "train_len": 1}), r"train_len must be at least 2"),
    ("proportional odd", lambda: spectra.proportional(8, rotary_dim=3), r"rotary_dim must be even and at most"),
    ("proportional wide", lambda: spectra.proportional(8, rotary_dim=10), r"rotary_dim must be even and at most"),
    ("proportional head", lambda: spectra.proportional(7, rotary_dim=2), r"head_dim must be even, got 7"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_numbers_that_cannot_be_right_are_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_spectrum_says_whether_a_length_needs_another():
    """What a cache asks: may keys that were turned for one length meet queries of another?"""
    dynamic_ = spectra.dynamic_ntk(8, stretch=2, train_len=16, length=10)
    longrope = spectra.longrope(8, **LONGROPE)
    assert dynamic_.depends_on_length and longrope.depends_on_length
    assert not spectra.plain(8).depends_on_length and not rw.Spectrum([1.0]).depends_on_length
    assert [True, True, False, False] == [spectra.for_length(dynamic_, n) == dynamic_ for n in (1, 16, 17, 32)]
    assert [True, True, False] == [spectra.for_length(longrope, n) == longrope for n in (1, 16, 17)]
    assert spectra.for_length(dynamic_, 99) == spectra.dynamic_ntk(8, stretch=2, train_len=16, length=99)
    assert spectra.for_length(spectra.plain(8), 99) == spectra.plain(8)

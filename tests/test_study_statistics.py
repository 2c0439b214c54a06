"""The study's arithmetic against numbers reached by another route."""

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.study import statistics
from ropewalk.study.statistics import Document


def documents(losses, tokens=None, prefix="doc"):
    """One document per loss (nats per token), 100 tokens each unless told otherwise."""
    sizes = tokens or [100] * len(losses)
    rows = enumerate(zip(losses, sizes, strict=True))
    return [Document(f"{prefix}{i}", loss * n, n, n) for i, (loss, n) in rows]


def test_perplexity_of_strided_windows_weighs_tokens_not_windows():
    # B150: 20 tokens, window 10, stride 5: the windows score 9, 5 and 5 tokens, each token once
    windows = [[3.0] * 9, [1.0] * 5, [1.0] * 5]
    scored = [nats for window in windows for nats in window]
    assert len(scored) == 20 - 1
    got = statistics.perplexity(sum(scored), len(scored))
    assert got == pytest.approx(7.0102153506, abs=1e-9)
    mean_of_windows = math.exp(sum(sum(window) / len(window) for window in windows) / 3)
    assert mean_of_windows == pytest.approx(5.2944900505, abs=1e-9)
    assert abs(got - mean_of_windows) > 1
    assert abs(got - 7.3890560989) > 0.3  # the fault of weighing the first window with 10


def test_denominator_is_the_number_of_scored_tokens():
    # B152: a long document cut to its first 50 tokens is divided by 50, whatever its own length
    cut = statistics.totals([Document("long", 100.0, 50, 50), Document("short", 30.0, 10, 10)])
    assert (cut.nats, cut.tokens, cut.bytes) == (130.0, 60, 60)
    assert statistics.perplexity(cut.nats, cut.tokens) == pytest.approx(math.exp(130 / 60))


def test_perplexity_is_the_geometric_mean_of_inverse_probabilities():
    probabilities = [0.5, 0.1, 0.9, 0.02, 0.3]
    product = math.prod(probabilities) ** (-1 / len(probabilities))
    nats = -sum(math.log(p) for p in probabilities)
    assert statistics.perplexity(nats, len(probabilities)) == pytest.approx(product, rel=1e-12)


def test_bits_per_byte_of_a_code_with_known_length():
    # 8 tokens over 24 bytes, each one of 64 equally likely tokens: 6 bits a token, 2 bits a byte
    assert statistics.bits_per_byte(8 * math.log(64), 24) == pytest.approx(2.0, rel=1e-12)


def test_infinite_perplexity_is_infinite_not_an_error():
    assert statistics.perplexity(1e6, 1) == math.inf
    low = statistics.perplexity_interval(documents([1e6, 1e6]))
    assert low.estimate == math.inf


ONE, TWO = documents([1.0]), documents([1.0, 2.0])


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: statistics.perplexity(1.0, 0), "tokens must be at least 1, got 0"),
        (lambda: statistics.bits_per_byte(1.0, 0), "num_bytes must be at least 1, got 0"),
        (lambda: statistics.bootstrap_ratio([1.0], [1.0, 2.0]), r"bottoms must be as long as tops \(1\), got 2"),
        (lambda: statistics.bootstrap_ratio([1.0], [0.0]), "sum of bottoms must be positive, got 0"),
        (lambda: statistics.bootstrap_ratio([1.0], [1.0], draws=0), "draws must be at least 1, got 0"),
        (lambda: statistics.loss_interval(ONE, confidence=1.0), "confidence must be between 0 and 1, got 1"),
        (lambda: statistics.wilson_interval(3, 2), r"hits must be between 0 and trials \(2\), got 3"),
        (lambda: statistics.mean_and_sd([]), "number of values must be at least 1, got 0"),
        (lambda: statistics.paired(ONE, documents([1.0], prefix="b")), "documents must be shared by both sides"),
        (lambda: statistics.paired(ONE, documents([1.0], [99])), "doc0 must be scored on the same tokens by both"),
        (lambda: statistics.mean_over_seeds([ONE, TWO]), "documents of every seed must be the same, got .'doc1'"),
        (lambda: statistics.mean_over_seeds([ONE, documents([1.0], [9])]), "doc0 must be scored on the same"),
    ],
)
def test_errors_say_must_and_got(function, message):
    with pytest.raises(ValueError, match=message):
        function()


def exact_percentiles(tops, bottoms, tail):
    """Ends of the percentile interval over all n^n equally likely resamples: no random numbers."""
    n = len(tops)
    drawn = itertools.product(range(n), repeat=n)
    ratios = sorted(sum(tops[i] for i in rows) / sum(bottoms[i] for i in rows) for rows in drawn)
    return ratios[math.floor(tail * (len(ratios) - 1))], ratios[math.ceil((1 - tail) * (len(ratios) - 1))]


def test_bootstrap_matches_the_enumeration_of_every_resample():
    tops, bottoms = [3.0, 1.0, 4.5, 1.5, 6.0], [2.0, 1.0, 2.0, 3.0, 2.5]
    got = statistics.bootstrap_ratio(tops, bottoms, draws=60_000, seed=3)
    low, high = exact_percentiles(tops, bottoms, 0.025)
    assert got.estimate == pytest.approx(sum(tops) / sum(bottoms), rel=1e-12)
    assert got.low == pytest.approx(low, abs=0.03)
    assert got.high == pytest.approx(high, abs=0.03)


def test_bootstrap_is_reproducible_and_depends_on_the_seed_alone():
    rows = documents([1.01, 1.52, 0.73, 2.04, 1.15, 0.46], [50, 61, 72, 83, 94, 105])
    first = statistics.loss_interval(rows, seed=0)
    assert first == statistics.loss_interval(rows, seed=0)
    assert first != statistics.loss_interval(rows, seed=1)


def test_bootstrap_covers_the_truth_about_as_often_as_it_says():
    source = random.Random(5)
    hits = 0
    for trial in range(200):
        rows = documents([source.gauss(1.0, 0.3) for _ in range(30)])
        interval = statistics.loss_interval(rows, draws=300, seed=trial)
        hits += interval.low <= 1.0 <= interval.high
    assert 176 <= hits <= 199  # 190 expected; four standard deviations, and the known bias of percentiles


def test_wider_confidence_gives_a_wider_interval():
    rows = documents([1.0, 1.5, 0.7, 2.0, 1.1, 0.4])
    narrow, wide = (statistics.loss_interval(rows, confidence=share) for share in (0.5, 0.99))
    assert wide.low < narrow.low < narrow.high < wide.high


def test_one_document_has_an_estimate_and_no_interval():
    alone = statistics.loss_interval(documents([1.25]))
    assert alone == (1.25, None, None)
    assert not alone.excludes_zero


def test_pairing_cancels_the_difficulty_of_the_text():
    difficulty = [0.5, 2.5, 1.0, 3.0, 1.8, 0.9]
    better = documents([d - 0.1 for d in difficulty])
    worse = documents(difficulty)
    gap = statistics.paired_interval(better, worse)
    assert gap.estimate == pytest.approx(-0.1)
    assert gap.excludes_zero
    assert gap.high - gap.low < 1e-9
    alone, other = statistics.loss_interval(better), statistics.loss_interval(worse)
    assert alone.high > other.low  # unpaired intervals overlap: they could not have told


def test_pairing_uses_the_shared_documents_whatever_their_order():
    first = documents([1.0, 2.0, 3.0])
    second = list(reversed(documents([1.5, 2.5])))
    assert statistics.paired_interval(first, second).estimate == pytest.approx(-0.5)


def test_paired_interval_weighs_documents_by_their_tokens():
    first, second = documents([1.0, 1.0], [10, 990]), documents([2.0, 1.0], [10, 990])
    assert statistics.paired_interval(first, second).estimate == pytest.approx(-10 / 1000)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=12), st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_swapping_the_sides_mirrors_the_paired_interval(gaps, seed):
    first, second = documents([3.0 + gap for gap in gaps]), documents([3.0] * len(gaps))
    one = statistics.paired_interval(first, second, seed=seed, draws=200)
    two = statistics.paired_interval(second, first, seed=seed, draws=200)
    assert one.estimate == pytest.approx(-two.estimate, abs=1e-9)
    assert one.low == pytest.approx(-two.high, abs=1e-9)
    assert one.high == pytest.approx(-two.low, abs=1e-9)


def test_mean_over_seeds_averages_nats_document_by_document():
    merged = statistics.mean_over_seeds([documents([1.0, 2.0]), documents([3.0, 2.0])])
    assert [row.nats for row in merged] == [200.0, 200.0]
    assert [row.tokens for row in merged] == [100, 100]


def test_mean_and_sd_against_the_shortcut_formula():
    values = [3.74, 3.70, 3.68, 3.67]
    mean, sd = statistics.mean_and_sd(values)
    n = len(values)
    shortcut = math.sqrt((sum(v * v for v in values) - sum(values) ** 2 / n) / (n - 1))
    assert mean == pytest.approx(3.6975)
    assert sd == pytest.approx(shortcut, rel=1e-6)


@pytest.mark.parametrize(("hits", "trials"), [(0, 10), (3, 10), (10, 10), (50, 128)])
def test_wilson_ends_are_where_the_score_test_turns(hits, trials):
    share, low, high = statistics.wilson_interval(hits, trials)
    for end in (low, high):  # |share - p| = z sqrt(p (1 - p) / n) at each end, z = 1.959964
        if 1e-9 < end < 1 - 1e-9:
            assert abs(share - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / trials), rel=1e-5)
    assert 0 <= low <= share <= high <= 1
    assert high - low > 0

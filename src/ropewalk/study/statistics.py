"""What sums of nats allow to be said: perplexity, bits per byte, and intervals over documents.

A loss is always a total divided by the count that it belongs to, never a mean of windows: windows score
different numbers of tokens, and a mean of their means weights them wrongly.  Tokens of one document are
correlated, so documents, not tokens, are what the bootstrap draws (Efron and Tibshirani 1993, chapter 13).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ropewalk.errors import require

Number = int | float
DRAWS = 2000
CONFIDENCE = 0.95


class Document(NamedTuple):
    """The summed loss of one held-out document.

    Args:
        id: the document's name in the corpus.
        nats: summed negative log-likelihood of its scored tokens, nats.
        tokens: how many tokens were scored.
        bytes: how many bytes of text those tokens stand for.
    """

    id: str
    nats: float
    tokens: int
    bytes: int


class Interval(NamedTuple):
    """An estimate with its percentile bootstrap interval; `low` and `high` are None below two documents."""

    estimate: float
    low: float | None
    high: float | None

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


class Proportion(NamedTuple):
    """A share of trials, or a difference of two shares, with the ends of its interval."""

    estimate: float
    low: float
    high: float


def _at_least_one(name: str, value: Number) -> None:
    require(value >= 1, name, "at least 1", value)


def exp(nats: Number) -> float:
    """e ^ nats, infinite where a float overflows instead of an error.

    >>> exp(0.0), exp(1e4)
    (1.0, inf)
    """
    try:
        return math.exp(nats)
    except OverflowError:
        return math.inf


def perplexity(nats: Number, tokens: int) -> float:
    """exp(total nats / scored tokens).

    Windows of 10 tokens with stride 5 over 20 tokens score 9, 5 and 5 of them:

    >>> round(perplexity(9 * 3 + 5 * 1 + 5 * 1, 9 + 5 + 5), 10)
    7.0102153506
    """
    _at_least_one("tokens", tokens)
    return exp(nats / tokens)


def bits_per_byte(nats: Number, num_bytes: int) -> float:
    """Total nats as bits, per byte of text: comparable between tokenizers, which perplexity is not.

    >>> round(bits_per_byte(math.log(2) * 30, 10), 6)
    3.0
    """
    _at_least_one("num_bytes", num_bytes)
    return nats / math.log(2) / num_bytes


def totals(documents: Iterable[Document]) -> Document:
    """Sums over documents, under the id "total"."""
    rows = list(documents)
    nats = math.fsum(row.nats for row in rows)
    return Document("total", nats, sum(row.tokens for row in rows), sum(row.bytes for row in rows))


def mean_and_sd(values: Sequence[Number]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1); the latter is None for a single value.

    >>> mean_and_sd([1.0, 2.0, 3.0]), mean_and_sd([2.0])
    ((2.0, 1.0), (2.0, None))
    """
    _at_least_one("the number of values", len(values))
    mean = math.fsum(values) / len(values)
    if len(values) == 1 or not math.isfinite(mean):
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def bootstrap_ratio(
    tops: Sequence[Number],
    bottoms: Sequence[Number],
    *,
    draws: int = DRAWS,
    seed: int = 0,
    confidence: float = CONFIDENCE,
) -> Interval:
    """sum(tops) / sum(bottoms), with the percentile interval of the same ratio over resampled rows.

    Args:
        tops: one number per document, for example nats.
        bottoms: what it is divided by, for example tokens; same length.
        draws: bootstrap resamples, at least 1.
        seed: of the generator; equal seeds give equal intervals.
        confidence: share of the resamples inside the interval, in (0, 1).

    Raises:
        ValueError: when the two lists differ in length, are empty or divide by 0.
    """
    require(len(tops) == len(bottoms), "bottoms", f"as long as tops ({len(tops)})", len(bottoms))
    _at_least_one("draws", draws)
    require(0 < confidence < 1, "confidence", "between 0 and 1", confidence)
    below = math.fsum(bottoms)
    require(below > 0, "the sum of bottoms", "positive", below)
    estimate = math.fsum(tops) / below
    if len(tops) < 2 or not math.isfinite(estimate):
        return Interval(estimate, None, None)
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(tops), (draws, len(tops)), generator=generator)
    top = torch.tensor(tops, dtype=torch.float64)[drawn].sum(1)
    bottom = torch.tensor(bottoms, dtype=torch.float64)[drawn].sum(1)
    tail = (1 - confidence) / 2
    ends = torch.quantile(top / bottom, torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Interval(estimate, *ends.tolist())


def loss_interval(documents: Sequence[Document], **options: Any) -> Interval:
    """Nats per scored token with its interval over documents."""
    return bootstrap_ratio([row.nats for row in documents], [row.tokens for row in documents], **options)


def perplexity_interval(documents: Sequence[Document], **options: Any) -> Interval:
    """Perplexity with its interval over documents: exp of `loss_interval`, end by end."""
    estimate, low, high = loss_interval(documents, **options)
    return Interval(exp(estimate), None if low is None else exp(low), None if high is None else exp(high))


def paired(first: Sequence[Document], second: Sequence[Document]) -> list[tuple[Document, Document]]:
    """The documents that both lists hold, in the order of the first, checked to score equally many tokens.

    Raises:
        ValueError: when they share no document, or a shared one was scored on different tokens.
    """
    others: Mapping[str, Document] = {row.id: row for row in second}
    pairs = [(row, others[row.id]) for row in first if row.id in others]
    counts = f"{len(first)} and {len(second)} with none in common"
    require(bool(pairs), "documents", "shared by both sides", counts)
    for one, two in pairs:
        condition = "scored on the same tokens by both sides"
        require(one.tokens == two.tokens, one.id, condition, f"{one.tokens} and {two.tokens}")
    return pairs


def paired_interval(first: Sequence[Document], second: Sequence[Document], **options: Any) -> Interval:
    """Loss of the first minus loss of the second, nats per token, over the documents that both scored.

    The text's own difficulty, most of the variance of either side, cancels document by document.
    """
    pairs = paired(first, second)
    gaps = [one.nats - two.nats for one, two in pairs]
    return bootstrap_ratio(gaps, [one.tokens for one, _ in pairs], **options)


def mean_over_seeds(runs: Sequence[Sequence[Document]]) -> list[Document]:
    """One list of documents from several seeds' lists: each document's nats are the mean over seeds.

    Raises:
        ValueError: when a seed scored other documents, or other tokens of one, than the first seed did.
    """
    _at_least_one("the number of runs", len(runs))
    merged = []
    by_id = [{row.id: row for row in run} for run in runs]
    for rows in by_id:
        same_ids = rows.keys() == by_id[0].keys()
        require(same_ids, "the documents of every seed", "the same", sorted(rows.keys() ^ by_id[0].keys()))
    for row in runs[0]:
        same = [rows[row.id] for rows in by_id]
        counts = [other.tokens for other in same]
        require(len(set(counts)) == 1, row.id, "scored on the same tokens by every seed", counts)
        merged.append(row._replace(nats=math.fsum(other.nats for other in same) / len(same)))
    return merged


def wilson_interval(hits: Number, trials: int, *, confidence: float = CONFIDENCE) -> Proportion:
    """A proportion with its score interval (Wilson 1927), which stays inside [0, 1] for 0 and for all hits.

    >>> [round(end, 4) for end in wilson_interval(8, 10)]
    [0.8, 0.4902, 0.9433]
    """
    _at_least_one("trials", trials)
    require(0 <= hits <= trials, "hits", f"between 0 and trials ({trials})", hits)
    share = hits / trials
    z = math.sqrt(2) * float(torch.erfinv(torch.tensor(confidence, dtype=torch.float64)))
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return Proportion(share, min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half)))


def difference(first: Proportion, second: Proportion) -> Proportion:
    """first - second of two independent shares, with the hybrid score interval (Newcombe 1998, method 10).

    >>> change = difference(wilson_interval(56, 70), wilson_interval(48, 80))
    >>> [round(end, 4) for end in change]
    [0.2, 0.0524, 0.3339]
    """
    gap = first.estimate - second.estimate
    below = math.hypot(first.estimate - first.low, second.high - second.estimate)
    above = math.hypot(first.high - first.estimate, second.estimate - second.low)
    return Proportion(gap, gap - below, gap + above)

"""Plain sentences that follow from a study's numbers, each with the numbers and intervals it rests on.

Nothing here knows how a study should come out: every sentence has a form for each way it can.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ropewalk.study import statistics
from ropewalk.study.evidence import STRETCHES, Study
from ropewalk.study.statistics import Interval, Proportion
from ropewalk.study.verdicts import SAME_NATS, few, gate, label, percent, percent_interval, verdict


@dataclass(frozen=True)
class Finding:
    """One statement.  `numbers` are what the text was made from, under names that say what they are."""

    topic: str
    text: str
    numbers: dict[str, Any] = field(default_factory=dict)


def _numbers(interval: Interval, count: int, **more: Any) -> dict[str, Any]:
    ends = {"low": interval.low, "high": interval.high}
    return {"nats_per_token": interval.estimate, **ends, "documents": count, **more}


def _seeds_agree(study: Study, one: tuple[str, str], two: tuple[str, str], eval_len: int) -> bool:
    """Whether every seed that both sides ran puts the same side ahead."""
    first, second = study.perplexities(*one, eval_len), study.perplexities(*two, eval_len)
    signs = {a < b for a, b in zip(first, second, strict=False)}
    return len(signs) == 1


def _ranked(study: Study, eval_len: int, protocol: str = "windows") -> list[str]:
    """Encodings with a number at this length, lowest mean perplexity first."""
    means = {name: study.perplexities(name, protocol, eval_len) for name in study.encodings}
    answered = {name: statistics.mean_and_sd(values)[0] for name, values in means.items() if values}
    return sorted(answered, key=lambda name: answered[name])


def _contrast(study: Study, best: str, other: str, eval_len: int) -> tuple[str, dict[str, Any]] | None:
    """One clause about best against other under the headline protocol."""
    sides = (best, "windows"), (other, "windows")
    interval = study.gap(*sides, eval_len)
    if interval is None:
        return None
    said = verdict(interval)
    if said == "better" and len(study.seeds) > 1 and not _seeds_agree(study, *sides, eval_len):
        said = "undecided"
    form = {
        "better": f"beats {label(other)}",
        "same": f"beats {label(other)}, by less than 1 %"
        if interval.high is not None and interval.high < 0
        else f"is as good as {label(other)} within 1 %",
        "worse": f"is behind {label(other)}",
        "undecided": f"cannot be told apart from {label(other)}",
    }[said]
    count = len(study.documents(other, "windows", eval_len))
    return f"{form} ({percent_interval(interval)})", _numbers(interval, count, verdict=said, other=other)


def ranking(study: Study, eval_len: int, topic: str) -> Iterator[Finding]:
    """Who has the lowest perplexity at one length, and against whom that is certain."""
    order = _ranked(study, eval_len)
    contrasts = [c for c in (_contrast(study, order[0], other, eval_len) for other in order[1:]) if c]
    if not contrasts:
        return
    where = "Within" if topic == "within" else "Beyond"
    clauses = "; ".join(clause for clause, _ in contrasts)
    best = order[0]
    text = f"{where} the training length, at {eval_len} tokens, {label(best)} has the lowest perplexity:"
    text = f"{text} it {clauses}.{few(min(numbers['documents'] for _, numbers in contrasts))}"
    if len(study.seeds) == 1 and topic == "within":
        text += " One seed: the intervals cover the choice of text, not another training run."
    yield Finding(topic, text, {"best": best, "eval_len": eval_len, "contrasts": [n for _, n in contrasts]})


def within(study: Study) -> Iterator[Finding]:
    """Who leads at the training length."""
    yield from ranking(study, study.train_len, "within")


def beyond(study: Study) -> Iterator[Finding]:
    """How each perplexity changes from the training length to the longest, then who leads there."""
    far = max(study.lengths("windows"), default=0)
    if far <= study.train_len:
        return
    for name in study.encodings:
        inside, outside = (study.perplexities(name, "windows", length) for length in (study.train_len, far))
        reason = study.reason(name, "windows", far)
        if not outside and reason:
            text = f"{label(name)} gives no answer at {far} tokens: {reason}."
            yield Finding("beyond", text, {"encoding": name, "reason": reason})
        if inside and outside:
            start, end = (statistics.mean_and_sd(values)[0] for values in (inside, outside))
            ratio = end / start
            moved = "grows" if ratio > 1.01 else "falls" if ratio < 0.99 else "stays within 1 %,"
            text = f"{label(name)}'s perplexity {moved} from {start:.2f} at {study.train_len} tokens"
            numbers = {"encoding": name, "ratio": ratio, "start": start, "end": end, "moved": moved}
            yield Finding("beyond", f"{text} to {end:.2f} at {far} (x {ratio:.2f}).", numbers)
    yield from ranking(study, far, "beyond")


RIVAL = {
    "better": "is even better than ALiBi with all of its context",
    "same": "is as good as ALiBi with all of its context, within 1 %",
    "worse": "is worse than ALiBi with all of its context",
    "undecided": "cannot be told apart from ALiBi with all of its context",
}
OWN = {
    "better": "is better than without the window: what lies beyond it does harm",
    "same": "changes by less than 1 %: what lies beyond it is of no measurable use",
    "worse": "is worse than without the window: what lies beyond it is of use",
    "undecided": "cannot be told apart from the same model without the window",
}


def window(study: Study) -> Iterator[Finding]:
    """Whether RoPE that sees only the training length back rivals ALiBi; what the window does to each."""
    far = max(study.lengths("limited"), default=0)
    if far <= study.train_len:
        return
    for limited, whole in [("rotary", "alibi"), *((name, name) for name in study.encodings)]:
        interval = study.gap((limited, "limited"), (whole, "windows"), far)
        if interval is None:
            continue
        said = verdict(interval)
        text = f"{label(limited)} behind a window of {study.train_len} tokens, at {far},"
        text = f"{text} {(OWN if limited == whole else RIVAL)[said]} ({percent_interval(interval)})"
        closed = None if limited == whole else _closed(study, interval, far)
        if closed is not None:
            text += f"; the window closes {100 * closed:.0f} % of the gap between them in nats"
        count = len(study.documents(limited, "limited", far))
        numbers = _numbers(interval, count, verdict=said, limited=limited, against=whole, closed=closed)
        yield Finding("window", f"{text}.{few(count)}", numbers)


def _closed(study: Study, left: Interval, far: int) -> float | None:
    """The share of RoPE's gap to ALiBi that the window takes away, where there is such a gap."""
    kept = {row.id for row in study.documents("rotary", "limited", far)}
    rows = [row for row in study.documents("rotary", "windows", far) if row.id in kept]
    others = study.documents("alibi", "windows", far)
    gap = statistics.paired_interval(rows, others) if rows else None
    if gap is None or verdict(gap) != "worse" or left.estimate > gap.estimate:
        return None
    return 1 - left.estimate / gap.estimate


def context(study: Study) -> Iterator[Finding]:
    """How much loss the context beyond the training length saves the tokens that have it."""
    far = max(study.lengths("context"), default=0)
    for name in study.encodings:
        added = study.added(name, far)
        if added is None:
            continue
        said = verdict(added)
        form = {
            "better": "lowers the loss of the tokens that have it: this model uses it",
            "same": "changes perplexity by less than 1 %: surviving a long input is not using it",
            "worse": "raises the loss: this model would be better without it",
            "undecided": "has no effect that these documents can show",
        }[said]
        count = len(study.documents(name, "context", far))
        text = f"For {label(name)} at {far} tokens, context beyond {study.train_len} tokens {form}"
        text = f"{text} ({percent_interval(added)}).{few(count)}"
        yield Finding("context", text, _numbers(added, count, verdict=said, encoding=name))


def copying(study: Study) -> Iterator[Finding]:
    """How copy accuracy changes from distances within the training length to the farthest one."""
    for name in study.encodings:
        scores = {distance: accuracy(study, name, distance) for distance in study.lengths("copy")}
        answered = {distance: score for distance, score in scores.items() if score is not None}
        inside = [distance for distance in answered if distance <= study.train_len]
        if not inside or max(answered) <= study.train_len:
            continue
        near, far = max(inside), max(answered)
        one, two = answered[near], answered[far]
        change = statistics.difference(two, one)
        form = "falls" if change.high < 0 else "rises" if change.low > 0 else "does not change measurably"
        text = f"{label(name)}'s accuracy in copying a span {form}:"
        numbers = {"encoding": name, "near": near, "far": far, "form": form}
        numbers |= {"accuracy_near": one.estimate, "accuracy_far": two.estimate}
        text += f" {100 * one.estimate:.0f} % at a distance of {near} tokens, {100 * two.estimate:.0f} % at {far}"
        guessed = unseen(study, name)
        text += "." if guessed is None else f" ({100 * guessed:.0f} % where the span has not been seen)."
        yield Finding("copy", text, numbers)


def accuracy(study: Study, encoding: str, distance: int) -> Proportion | None:
    """Copy accuracy over all seeds' trials, with the score interval of that many independent trials."""
    runs = [e for e in study.runs(encoding, "copy", distance) if e.accuracy is not None and e.trials]
    if not runs:
        return None
    trials = sum(int(e.trials or 0) for e in runs)
    hits = sum(float(e.accuracy or 0) * int(e.trials or 0) for e in runs)
    return statistics.wilson_interval(min(hits, trials), trials)


def unseen(study: Study, encoding: str) -> float | None:
    """The share predicted right where the same spans come for the first time: what needs no copying."""
    runs = [e for distance in study.lengths("copy") for e in study.runs(encoding, "copy", distance)]
    values = [float(e.first_accuracy) for e in runs if e.first_accuracy is not None]
    return sum(values) / len(values) if values else None


def sliding(study: Study) -> Iterator[Finding]:
    """Whether the change with length survives when every scored token has enough context."""
    # at the longest length a document is one window, and both protocols are the same
    lengths = [n for n in study.lengths("sliding") if n in study.lengths("windows")[:-1]]
    if study.train_len not in lengths or max(lengths) == study.train_len:
        return
    far = max(lengths)
    for name in study.encodings:
        plain, slid = (_change(study, name, protocol, far) for protocol in ("windows", "sliding"))
        if plain is None or slid is None:
            continue
        pair = f"{percent(plain)} in separate windows, {percent(slid)} in sliding ones"
        if abs(plain) < SAME_NATS and abs(slid) < SAME_NATS:
            form = "is flat under both protocols"
        elif plain < -SAME_NATS and slid > -SAME_NATS:
            form = "gains only in separate windows: fewer tokens with little context, not use of more"
        elif plain < -SAME_NATS:
            form = "gains under both protocols: more context helps it"
        elif slid > max(plain, SAME_NATS):
            form = "loses more when windows slide: they score only the far positions"
        else:
            form = "loses under both protocols" if slid > SAME_NATS else "loses in separate windows only"
        text = f"From {study.train_len} to {far} tokens {label(name)} {form} (perplexity {pair})."
        yield Finding("sliding", text, {"encoding": name, "windows": plain, "sliding": slid, "form": form})


def _change(study: Study, encoding: str, protocol: str, far: int) -> float | None:
    """Nats per token at `far` minus those at the training length, over the control's documents."""
    kept = {row.id for row in study.documents(encoding, "sliding", far)}
    sums = []
    for length in (study.train_len, far):
        rows = [row for row in study.documents(encoding, protocol, length) if row.id in kept]
        if not rows:
            return None
        total = statistics.totals(rows)
        sums.append(total.nats / total.tokens)
    return sums[1] - sums[0]


def stretches(study: Study) -> Iterator[Finding]:
    """Which inference-time stretch helps an encoding that rotates, length by length."""
    lengths = sorted({n for stretch in STRETCHES for n in study.lengths(stretch) if n > study.train_len})
    for name in study.encodings:
        rows = {n: known for n in lengths if (known := _stretch_gaps(study, name, n))}
        if not rows:
            continue
        bests = {n: min(known, key=lambda stretch: known[stretch].estimate) for n, known in rows.items()}
        clauses = [_best_stretch(n, best, rows[n][best]) for n, best in bests.items()]
        said = {s: {verdict(row[s]) for row in rows.values() if s in row} for s in STRETCHES}
        harmful = [s for s in STRETCHES if said[s] == {"worse"}]
        text = f"Stretching {label(name)} without fine-tuning: {'; '.join(clauses)}."
        if harmful:
            text += f" Worse than doing nothing at each of these lengths: {', '.join(map(label, harmful))}."
        count = min(len(study.documents(name, best, n)) for n, best in bests.items())
        numbers = {
            "encoding": name,
            "harmful": harmful,
            "documents": count,
            "best": {n: (best, verdict(rows[n][best])) for n, best in bests.items()},
        }
        yield Finding("stretch", text + few(count), numbers)


def _stretch_gaps(study: Study, encoding: str, eval_len: int) -> dict[str, Interval]:
    """Each stretch against doing nothing, where it was evaluated."""
    gaps = {s: study.gap((encoding, s), (encoding, "windows"), eval_len) for s in STRETCHES}
    return {s: interval for s, interval in gaps.items() if interval is not None}


def _best_stretch(eval_len: int, best: str, interval: Interval) -> str:
    form = {
        "better": f"{label(best)} helps most",
        "same": f"none helps, {label(best)} changes less than 1 %",
        "worse": f"each one hurts, {label(best)} least",
        "undecided": f"{label(best)} is best, but not certain to help",
    }[verdict(interval)]
    return f"at {eval_len}, {form} ({percent_interval(interval)})"


TOPICS: tuple[Callable[[Study], Iterator[Finding]], ...] = (
    within,
    beyond,
    window,
    context,
    copying,
    sliding,
    stretches,
)


def findings(study: Study) -> list[Finding]:
    """Everything that may be said; behind a closed gate only that nothing may."""
    door = gate(study)
    first = Finding("gate", door.text, {"state": door.state, "ratio": door.ratio})
    if not door.open:
        return [first]
    return [first, *(finding for topic in TOPICS for finding in topic(study))]

"""The report's tables, each from the study's numbers alone."""

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from ropewalk.study import statistics
from ropewalk.study.evidence import STRETCHES, Study
from ropewalk.study.findings import accuracy, unseen
from ropewalk.study.page import Cell, table
from ropewalk.study.statistics import Interval
from ropewalk.study.verdicts import gate, label, signed

DASH = "—"
MANY = 4
SAID = {
    "windows": "separate windows",
    "sliding": "sliding windows",
    "limited": "window of the training length",
    "linear": "linear interpolation",
    "ntk": "NTK",
    "yarn": "YaRN",
}


def _difference(interval: Interval | None) -> str:
    """A difference with its interval under it; a dash for none."""
    if interval is None:
        return DASH
    ends = [signed(end, 3) for end in (interval.low, interval.high) if end is not None]
    return Cell(signed(interval.estimate, 3), " to ".join(ends))


def _spread(values: Sequence[float], interval: Interval | None = None) -> str:
    """A mean over seeds with its deviation; for a single seed the interval under it."""
    if not values:
        return DASH
    mean, sd = statistics.mean_and_sd(values)
    if sd is not None:
        return Cell(f"{mean:.2f}", f"± {sd:.2f}")
    if interval is None or interval.low is None:
        return Cell(f"{mean:.2f}")
    return Cell(f"{mean:.2f}", f"{interval.low:.2f} to {interval.high:.2f}")


def _length_head(first: str, lengths: Sequence[int]) -> list[str]:
    return [first, *(str(length) for length in lengths)]


def headline(study: Study) -> str:
    """Perplexity per token at every length, the lowest of each column set bold unless contrasts mean nothing."""
    lengths = study.lengths("windows")
    best = {n: _lowest(study, n) for n in lengths} if gate(study).open else {}
    rows = []
    for name in study.encodings:
        cells = []
        for length in lengths:
            documents = study.documents(name, "windows", length)
            interval = statistics.perplexity_interval(documents) if documents else None
            text = _spread(study.perplexities(name, "windows", length), interval)
            cells.append(Cell(text, getattr(text, "under", ""), "best") if best.get(length) == name else text)
        rows.append([label(name), *cells])
    many = len(study.seeds) > 1
    under = (
        f"mean ± standard deviation over {len(study.seeds)} seeds"
        if many
        else "under each its unpaired 95 % interval over documents (differences are paired, below)"
    )
    caption = f"Perplexity per token by evaluation length in tokens; {under}."
    return table(caption, _length_head("encoding", lengths), rows)


def _lowest(study: Study, eval_len: int) -> str | None:
    values = {name: study.perplexities(name, "windows", eval_len) for name in study.encodings}
    means = {name: statistics.mean_and_sd(row)[0] for name, row in values.items() if row}
    return min(means, key=lambda name: means[name]) if len(means) > 1 else None


def reasons(study: Study) -> list[str]:
    """Why a table has dashes: one line per encoding and reason."""
    found: dict[tuple[str, str], list[int]] = {}
    for name in study.encodings:
        for length in study.lengths("windows"):
            reason = study.reason(name, "windows", length)
            if reason:
                found.setdefault((name, reason), []).append(length)
    return [
        f"{DASH} {label(name)} at {', '.join(map(str, lengths))} tokens: {reason}."
        for (name, reason), lengths in found.items()
    ]


def bits(study: Study) -> str:
    """Bits per byte: the figure that may be compared across tokenizers."""
    lengths = study.lengths("windows")
    rows = []
    for name in study.encodings:
        sums = [statistics.totals(d) if (d := study.documents(name, "windows", n)) else None for n in lengths]
        rows.append([label(name), *(f"{statistics.bits_per_byte(s.nats, s.bytes):.3f}" if s else DASH for s in sums)])
    return table("Bits per byte of text, mean over seeds.", _length_head("encoding", lengths), rows)


def differences(study: Study) -> str:
    """Paired differences: all pairs of few encodings, of many each against the best at the training length."""
    names, lengths = study.encodings, study.lengths("windows")
    best = _lowest(study, study.train_len)
    pairs = list(combinations(names, 2)) if len(names) <= MANY else [(best, n) for n in names if best and n != best]
    rows = []
    for one, two in pairs:
        gaps = [study.gap((two, "windows"), (one, "windows"), n) for n in lengths]
        rows.append([f"{label(two)} minus {label(one)}", *map(_difference, gaps)])
    if not rows:
        return ""
    caption = (
        "Paired differences in nats per token on the same documents (negative: the first is better), with"
        " 95 % bootstrap intervals over documents."
    )
    return table(caption, _length_head("difference", lengths), rows)


def controls(study: Study) -> str:
    """Every protocol on the control documents, the headline's protocol on the same ones first."""
    lengths = study.lengths("windows")
    rows = []
    for name in study.encodings:
        protocols = [p for p in ("sliding", "limited", *STRETCHES) if any(study.documents(name, p, n) for n in lengths)]
        kept = {row.id for p in protocols for n in lengths for row in study.documents(name, p, n)}
        for protocol in ["windows", *protocols] if protocols else []:
            cells = [_control(study, name, protocol, n, kept) for n in lengths]
            rows.append([f"{label(name)}, {SAID[protocol]}", *cells])
    if not rows:
        return ""
    names = study.encodings
    count = len({row.id for name in names for n in lengths for row in study.documents(name, "limited", n)})
    caption = f"Perplexity per token on the {count} control documents, so that the rows of one encoding compare."
    return table(caption, _length_head("protocol", lengths), rows)


def _control(study: Study, encoding: str, protocol: str, eval_len: int, kept: set[str]) -> str:
    rows = [row for row in study.documents(encoding, protocol, eval_len) if row.id in kept]
    if not rows:
        return DASH
    total = statistics.totals(rows)
    return f"{statistics.perplexity(total.nats, total.tokens):.2f}"


def last_256(study: Study) -> str:
    """Perplexity over the last 256 positions of each window."""
    lengths = [n for n in study.lengths("windows") if any(study.last_256(e, n) for e in study.encodings)]
    lengths = [n for n in lengths if max(lengths) > 256]  # in shorter windows they are all there is
    rows = [[label(name), *(_spread(study.last_256(name, n)) for n in lengths)] for name in study.encodings]
    if not lengths:
        return ""
    caption = (
        "Perplexity per token over the last 256 positions of each window. Other text at each length: compare"
        " encodings in a column, not lengths in a row."
    )
    return table(caption, _length_head("encoding", lengths), rows)


def context(study: Study) -> str:
    """What far context adds to the loss."""
    lengths = study.lengths("context")
    rows = [[label(name), *(_difference(study.added(name, n)) for n in lengths)] for name in study.encodings]
    if not any(cell != DASH for row in rows for cell in row[1:]):
        return ""
    caption = (
        f"What context beyond {study.train_len} tokens adds to the loss of the tokens that have it, nats per"
        " token (negative: it helps), with paired 95 % intervals."
    )
    return table(caption, _length_head("encoding", lengths), rows)


def copying(study: Study) -> str:
    """Copy accuracy over distance, and how well the span is guessed when it has not been seen."""
    distances = study.lengths("copy")
    rows = []
    for name in study.encodings:
        scores = [accuracy(study, name, distance) for distance in distances]
        cells = [
            DASH if s is None else Cell(f"{100 * s.estimate:.0f} %", f"{100 * s.low:.0f} to {100 * s.high:.0f}")
            for s in scores
        ]
        if any(score is not None for score in scores):
            rows.append(
                [label(name), *cells, DASH if (share := unseen(study, name)) is None else f"{100 * share:.0f} %"]
            )
    if not rows:
        return ""
    caption = (
        "Tokens of a repeated span predicted right, by the distance between its copies in tokens, with 95 %"
        " score intervals over trials; last column: the same tokens where the span comes first."
    )
    return table(caption, [*_length_head("encoding", distances), "unseen"], rows)


def cost(study: Study) -> str:
    """Time and memory of attention, and the tutorial's comparison under its own label."""
    if not study.cost or not study.cost["rows"]:
        return ""
    rows = []
    for row in study.cost["rows"]:
        if row["name"] != "none":
            cells = [
                Cell(f"{row[k]['ratio']:.2f}", f"{row[k]['low']:.2f} to {row[k]['high']:.2f}")
                for k in ("forward", "training")
            ]
            peaks = [f"{row[f'{k}_memory']['ratio']:.2f}" for k in ("forward", "training")]
            rows.append([_cost_name(row["name"]), str(row["seq_len"]), *cells, *peaks])
    head = ["attention with", "tokens", "forward", "forward + backward", "peak memory, f", "peak memory, f + b"]
    caption = (
        f"Relative to this library's attention without an encoding; median and middle half of interleaved"
        f" rounds ({study.cost['clock']} time, {study.cost['machine']})."
    )
    return table(caption, head, rows)


def _cost_name(name: str) -> str:
    return "no encoding, torch's own call" if name == "torch" else label(name)


def tutorial(study: Study) -> str:
    """The comparison that leaves attention out."""
    if not study.cost or not study.cost.get("tutorial"):
        return ""
    rows = [
        [
            str(row["seq_len"]),
            f"{row['build_bias']['ratio']:.3f}",
            f"{row['rotate']['ratio']:.3f}",
            f"{row['bias_bytes'] / 2**20:.1f}",
        ]
        for row in study.cost["tutorial"]
    ]
    head = ["tokens", "build the bias", "rotate q and k", "size of the bias, MiB"]
    return table("Relative to one forward attention without an encoding.", head, rows)


CELL_COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "parameters": ("parameters", lambda value: f"{value:,}"),
    "train_loss": ("train loss, nats/token", lambda value: f"{value:.3f}"),
    "heldout_loss_same_length": ("held-out loss, nats/token", lambda value: f"{value:.3f}"),
    "tokens_per_second": ("tokens/s", lambda value: f"{value:,.0f}"),
    "train_seconds": ("training, s", lambda value: f"{value:.0f}"),
    "evaluate_seconds": ("evaluation, s", lambda value: f"{value:.0f}"),
}


def cells(study: Study) -> str:
    """One row per trained model."""
    rows = []
    for name in study.encodings:
        for cell in study.of(name):
            values = [cell.summary.get(key) for key in CELL_COLUMNS]
            said = [DASH if v is None else say(v) for v, (_, say) in zip(values, CELL_COLUMNS.values(), strict=True)]
            rows.append([label(name), str(cell.seed), *said])
    head = ["encoding", "seed", *(title for title, _ in CELL_COLUMNS.values())]
    return table("Trained models. The gap between the two losses shows memorised text.", head, rows)


def facts(caption: str, values: dict[str, Any]) -> str:
    """A table of names and values."""

    def say(value: Any) -> str:
        return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)

    return table(caption, ["name", "value"], [[key, Cell(say(value), kind="words")] for key, value in values.items()])

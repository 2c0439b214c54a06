"""What the losses of `ropewalk extend` say: tables, differences, a recommendation in plain words."""

import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ropewalk.extension.plan import UNCHANGED, WINDOW, Settings, is_unchanged
from ropewalk.study.statistics import Interval, bootstrap_ratio

MARGIN = 0.01
"""Nats per token below which two losses are called alike."""

CUT = "cut"
LEAST_WINDOWS = 4
"""Fewer say too little about each other for an interval."""

Losses = Mapping[str, Mapping[int, float]]


class Recommendation(NamedTuple):
    """A method, or None where none helps, and why."""

    method: str | None
    reason: str


Line = Mapping[str, Any]


def summarise(settings: Settings, lines: Sequence[Line], left_out: Mapping[str, str]) -> dict[str, Any]:
    """Everything that a run found, from the lines of its windows; `left_out` are rows that could not be had."""
    table = {
        row: {length: _of(lines, row if not is_unchanged(settings, row, length) else UNCHANGED, length)
              for length in settings.lengths}
        for row in settings.rows if row not in left_out
    }  # fmt: skip
    losses = {row: {n: _mean(found) for n, found in cells.items()} for row, cells in table.items()}
    changes = {row: _differences(table, row) for row in (UNCHANGED, WINDOW) if row in table}
    within = _within(losses, settings.train_len)
    if within is not None:
        changes[CUT] = _differences_from_cut(table, within)
    chosen = _with_certainty(recommend(losses, settings.train_len), losses, changes, settings.train_len)
    named = settings.stretches.get(chosen.method or "")
    longest = settings.lengths[-1]
    return {
        "model": settings.model.name,
        "model_type": settings.model.config.get("model_type"),
        "train_len": settings.train_len,
        "to": settings.to,
        "lengths": list(settings.lengths),
        "sliding": settings.sliding,
        "dtype": settings.dtype,
        "losses_nats_per_token": {row: {str(n): v for n, v in cells.items()} for row, cells in losses.items()},
        "windows": {str(n): len(table[UNCHANGED][n]) for n in settings.lengths},
        "tokens": sum(line["tokens"] for line in table[UNCHANGED][longest]),
        "difference_from_unchanged": changes[UNCHANGED],
        "difference_from_window": changes.get(WINDOW),
        "difference_from_cut_text": changes.get(CUT),
        "by_position": {row: _by_position(cells[longest]) for row, cells in table.items()},
        "left_out": dict(left_out),
        "recommendation": chosen._asdict(),
        "config": dict(named.block) if named is not None else None,
        "config_without": list(named.dropped) if named is not None else [],
    }


def _of(lines: Iterable[Line], row: str, length: int) -> list[Line]:
    return [line for line in lines if line["row"] == row and line["length"] == length]


def _mean(lines: Sequence[Line]) -> float:
    total = sum(line["nats"] for line in lines)
    return total / sum(line["tokens"] for line in lines)


def _differences(table: Mapping[str, Mapping[int, Sequence[Line]]], other: str) -> dict[str, Any]:
    """Loss of each row minus that of `other` on the same windows, nats per token, with its interval over windows."""
    found: dict[str, Any] = {}
    for row, cells in table.items():
        if row != other:
            pairs = {n: list(zip(cells[n], table[other][n], strict=True)) for n in cells}
            found[row] = {str(n): _difference(both)._asdict() for n, both in pairs.items()}
    return found


def _differences_from_cut(table: Mapping[str, Mapping[int, Sequence[Line]]], within: int) -> dict[str, Any]:
    """Loss of each row in the longest windows minus that of the unchanged model on the same text in shorter ones."""
    longest = max(table[UNCHANGED])
    cut = _blocks(table[UNCHANGED][within], longest)
    blocks = {row: _blocks(cells[longest], longest) for row, cells in table.items()}
    return {
        row: {str(longest): _difference([(mine[place], cut[place]) for place in cut])._asdict()}
        for row, mine in blocks.items()
    }


def _blocks(lines: Iterable[Line], longest: int) -> dict[tuple[str, int], Line]:
    """Sums over the windows that score tokens of the same block of a text."""
    found: dict[tuple[str, int], Any] = {}
    for line in lines:
        block = found.setdefault((line["text"], (line["start"] + line["first"]) // longest), {"nats": 0.0, "tokens": 0})
        block["nats"] += line["nats"]
        block["tokens"] += line["tokens"]
    return found


def _difference(pairs: Sequence[tuple[Line, Line]]) -> Interval:
    gaps = [mine["nats"] - theirs["nats"] for mine, theirs in pairs]
    found = bootstrap_ratio(gaps, [mine["tokens"] for mine, _ in pairs])
    return found if len(pairs) >= LEAST_WINDOWS else Interval(found.estimate, None, None)


def _by_position(lines: Sequence[Line]) -> dict[str, Any]:
    """Loss by the position within the window; None where no token was scored."""
    nats = [sum(column) for column in zip(*(line["position_nats"] for line in lines), strict=True)]
    tokens = [sum(column) for column in zip(*(line["position_tokens"] for line in lines), strict=True)]
    means = [total / count if count else None for total, count in zip(nats, tokens, strict=True)]
    return {"edges": lines[0]["edges"], "nats_per_token": means}


def recommend(losses: Losses, train_len: int) -> Recommendation:
    """What to do with a model whose losses, nats per token by row and length, are these.

    A method has to beat every way of doing without one (`_without`).  Of methods within `MARGIN` of the best, the
    one that costs least within the trained length is taken.
    """
    longest, within = max(losses[UNCHANGED]), _within(losses, train_len)
    if longest <= train_len:
        return Recommendation(None, f"no text longer than the {train_len} tokens of the training was tried")
    bars = _without(losses, train_len)
    said = ", ".join(f"{_in_words(way, train_len, within)} {loss:.3f}" for way, loss in bars.items())
    tried = {m: by[longest] for m, by in losses.items() if m not in (UNCHANGED, WINDOW) and math.isfinite(by[longest])}
    if not tried:
        return Recommendation(None, f"no method gives a finite loss at {longest} tokens; nats per token: {said}")
    near = [m for m, loss in tried.items() if loss <= min(tried.values()) + MARGIN]
    best = min(near, key=lambda m: (losses[m][within] if within else 0.0, tried[m]))
    said = f"at {longest} tokens {best} scores {tried[best]:.3f} nats per token; {said}"
    lowest = _lowest(bars)
    if bars and tried[best] >= bars[lowest] - MARGIN:
        return Recommendation(None, f"no method helps: {said}; {_in_words(lowest, train_len, within)} does as well")
    if within is not None:
        cost = losses[best][within] - losses[UNCHANGED][within]
        said += f"; within the trained length, at {within} tokens, {_cost(cost)}"
    return Recommendation(best, said)


def _within(losses: Losses, train_len: int) -> int | None:
    """The longest length of those tried that training has seen."""
    return max((n for n in losses[UNCHANGED] if n <= train_len), default=None)


def _without(losses: Losses, train_len: int) -> dict[str, float]:
    """Loss of each way to read the longest text without a stretch: as it is, with limited attention, and cut into
    windows that training has seen, where every length scores the same tokens."""
    longest, within = max(losses[UNCHANGED]), _within(losses, train_len)
    found = {row: losses[row][longest] for row in (UNCHANGED, WINDOW) if row in losses}
    if within is not None:
        found[CUT] = losses[UNCHANGED][within]
    return {way: loss for way, loss in found.items() if math.isfinite(loss)}


def _lowest(bars: Mapping[str, float]) -> str:
    """The best way without a stretch; of those alike the simplest, which stands first."""
    return next((way for way, loss in bars.items() if loss <= min(bars.values()) + MARGIN / 2), UNCHANGED)


def _in_words(way: str, train_len: int, within: int | None) -> str:
    return {
        UNCHANGED: "the unchanged model",
        WINDOW: f"attention limited to {train_len} tokens",
        CUT: f"the text cut into windows of {within}",
    }[way]


def _with_certainty(
    found: Recommendation, losses: Losses, changes: Mapping[str, Any], train_len: int
) -> Recommendation:
    """The recommendation, with the interval of what it stands on."""
    bars = _without(losses, train_len)
    if found.method is None or not bars:
        return found
    longest, other = max(losses[UNCHANGED]), min(bars, key=lambda way: bars[way])
    estimate, low, high = changes[other][found.method][str(longest)].values()
    than = f"{estimate:+.3f} against {_in_words(other, train_len, _within(losses, train_len))}"
    if low is None:
        few = f"{than}, without an interval: fewer than {LEAST_WINDOWS} windows of {longest} tokens"
        return Recommendation(found.method, f"{found.reason} ({few}; --windows or more --text gives one)")
    doubt = ", which does not settle it" if high >= 0 else ""
    return Recommendation(found.method, f"{found.reason} ({than}, 95 % interval {low:+.3f} to {high:+.3f}{doubt})")


def _cost(cost: float) -> str:
    if abs(cost) < 0.0005:
        return "it changes nothing"
    if cost < 0:
        return f"it gains {-cost:.3f}"
    short = ", so keep the old config for short texts" if cost > MARGIN else ""
    return f"it costs {cost:.3f}{short}"


def shown(result: Mapping[str, Any]) -> str:
    """A result as plain lines."""
    parts = [_heading(result), _losses(result), *_changes(result), _positions(result), _advice(result)]
    return "\n\n".join(parts)


def _heading(result: Mapping[str, Any]) -> str:
    factor = result["to"] / result["train_len"]
    way = "overlap by three quarters, each token scored once" if result["sliding"] else "do not overlap"
    names = ", ".join("/".join(pathlib.PurePath(name).parts[-2:]) for name in result["texts"])
    return (
        f"{result['model']}: trained to {result['train_len']} tokens, stretched to {result['to']} (factor {factor:g})\n"
        f"{result['tokens']} tokens of {names}, in windows that {way}; {result['dtype']}"
    )


def _losses(result: Mapping[str, Any]) -> str:
    lengths, rows = [str(n) for n in result["lengths"]], result["losses_nats_per_token"]
    head = f"{'loss, nats per token, in windows of':36}" + "".join(f"{n:>9}" for n in lengths)
    body = [f"{_named(row, result):36}" + "".join(f"{cells[n]:9.3f}" for n in lengths) for row, cells in rows.items()]
    counts = f"{'windows':36}" + "".join(f"{result['windows'][n]:9d}" for n in lengths)
    same = [row for row in rows if row in (WINDOW, "dynamic")]
    note = [f"up to {result['train_len']} tokens {' and '.join(same)} is the unchanged model"] if same else []
    missing = [f"no {row}: {why}" for row, why in result["left_out"].items()]
    return "\n".join([head, *body, counts, *note, *missing])


def _named(row: str, result: Mapping[str, Any]) -> str:
    return f"attention limited to {result['train_len']}" if row == WINDOW else row


def _changes(result: Mapping[str, Any]) -> list[str]:
    """Differences that have an interval."""
    rows = []
    for row, cells in result["difference_from_unchanged"].items():
        for length, (mean, low, high) in ((n, tuple(cell.values())) for n, cell in cells.items()):
            if low is not None and (mean, low, high) != (0, 0, 0):
                rows.append(f"{_named(row, result):36}{length:>9}{mean:+9.3f}   {low:+.3f} to {high:+.3f}")
    head = f"{'difference from unchanged':36}{'window':>9}{'mean':>9}   95 % interval over windows"
    return ["\n".join([head, *rows])] if rows else []


def _positions(result: Mapping[str, Any]) -> str:
    """Loss by position in the longest windows."""
    columns = result["by_position"]
    edges = next(iter(columns.values()))["edges"]
    head = f"{'loss by position in the window':36}" + "".join(f"{row:>11}" for row in columns)
    body = []
    for i, (low, high) in enumerate(itertools.pairwise(edges)):
        means = [column["nats_per_token"][i] for column in columns.values()]
        if any(mean is not None for mean in means):
            cells = "".join(f"{'':>11}" if mean is None else f"{mean:11.3f}" for mean in means)
            body.append(f"{f'{low} to {high}':36}{cells}")
    return "\n".join([head, *body])


def _advice(result: Mapping[str, Any]) -> str:
    chosen = result["recommendation"]
    text = f"recommendation: {chosen['method'] or 'leave the config as it is'}\n{chosen['reason']}"
    if result["config"] is not None:
        text += f"\n\nfor config.json:\n{json.dumps(result['config'], indent=2)}"
    if result["config_without"]:
        text += f"\nwithout {', '.join(result['config_without'])}"
    return text

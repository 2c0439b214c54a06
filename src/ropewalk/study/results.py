"""results.json: a row per encoding, seed, protocol and length, made from the finished cells of a folder."""

import math
import pathlib

from ropewalk.study import files, statistics
from ropewalk.study.settings import Settings, cell_name

COLUMNS = (
    "encoding",
    "seed",
    "protocol",
    "eval_len",
    "loss_nats_per_byte",
    "bits_per_byte",
    "perplexity",
    "scored_tokens",
    "ci_low",
    "ci_high",
)


def finished_cells(out: pathlib.Path) -> list[pathlib.Path]:
    """The folders of cells that were trained and evaluated to the end, in the order of the settings."""
    settings = Settings.from_json(files.read_json(out / "study.json")["settings"])
    names = [cell_name(encoding, seed) for encoding in settings.encodings for seed in settings.seeds]
    return [out / "cells" / name for name in names if is_finished(out / "cells" / name)]


def is_finished(cell: pathlib.Path) -> bool:
    """Whether a cell says that it is done and still holds every line that it then had."""
    path = cell / "cell.json"
    return path.exists() and len(files.read_lines(cell / "evaluation.jsonl")) >= files.read_json(path).get("lines", 1)


def row(line: dict) -> dict:
    """One row from a line of evaluation.jsonl: perplexity is per token, its interval drawn over documents.

    A line without an answer gives a row of nulls with its `reason`; the copy task has no documents and no interval.
    """
    values = dict.fromkeys(COLUMNS) | {name: line[name] for name in COLUMNS[:4]}
    if line["reason"] is not None:
        return values | {"reason": line["reason"]}
    if line["documents"] is None:
        return values | _loss(line["nats"], line["tokens"], line["bytes"]) | {"accuracy": line["accuracy"]}
    documents = [
        statistics.Document(*(entry[name] for name in statistics.Document._fields)) for entry in line["documents"]
    ]
    total = statistics.totals(documents)
    interval = statistics.perplexity_interval(documents)
    return values | _loss(total.nats, total.tokens, total.bytes) | {"ci_low": interval.low, "ci_high": interval.high}


def _loss(nats: float, tokens: int, size: int) -> dict:
    return {
        "loss_nats_per_byte": nats / size,
        "bits_per_byte": nats / size / math.log(2),
        "perplexity": statistics.perplexity(nats, tokens),
        "scored_tokens": tokens,
    }


def rows(out: pathlib.Path) -> list[dict]:
    """The rows of all finished cells."""
    return [row(line) for cell in finished_cells(out) for line in files.read_lines(cell / "evaluation.jsonl")]


def write(out: pathlib.Path) -> list[dict]:
    """Write results.json from the finished cells; returns its rows."""
    found = rows(out)
    files.write_json(out / "results.json", found)
    return found

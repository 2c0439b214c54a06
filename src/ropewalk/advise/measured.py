"""The measured numbers that advice quotes: taken from the benchmarks and the study, shipped with the package.

`python -m ropewalk.advise FOLDER` makes `measured.json` anew from a checkout's benchmarks and study.
"""

import functools
import json
import pathlib
from typing import Any

PATH = pathlib.Path(__file__).with_name("measured.json")
_ATTENTION = ("attention-float32", "attention-16384")
_ENCODINGS = ("rotary", "alibi", "rotary+alibi")
_DIGITS = 4


@functools.cache
def shipped() -> dict[str, Any]:
    """The shipped numbers: time of attention by encoding, and the study's perplexities."""
    return json.loads(PATH.read_text())


def made(root: pathlib.Path) -> dict[str, Any]:
    """The same numbers from the JSON files of a checkout.

    Times are relative to attention without an encoding, perplexities and accuracies means over seeds.
    """
    tables = [(f"benchmarks/{name}.json", root / "benchmarks" / f"{name}.json") for name in _ATTENTION]
    tables.append(("docs/study/cost.json", root / "docs" / "study" / "cost.json"))
    settings = json.loads((root / "docs" / "study" / "study.json").read_text())["settings"]
    rows = json.loads((root / "docs" / "study" / "results.json").read_text())
    kept = ("train_len", "model_dim", "num_layers", "num_heads", "seeds", "steps")
    return {
        "attention": [row for name, path in tables for row in _times(name, json.loads(path.read_text()))],
        "study": {"source": "docs/study/results.json", **{k: settings[k] for k in kept}, "rows": _means(rows)},
    }


def _times(name: str, table: dict[str, Any]) -> list[dict[str, Any]]:
    """Forward and training time of each encoding over that of no encoding, in one table."""
    floor = {row["seq_len"]: row for row in table["rows"] if row["name"] == "none"}
    settings = table["settings"]
    where = {"source": name, "machine": table["machine"], "dtype": settings["dtype"],
             "num_heads": settings["num_heads"], "head_dim": settings["head_dim"]}  # fmt: skip
    return [
        {"encoding": row["name"], "seq_len": row["seq_len"], **where, **{
            mode: round(row[mode]["ratio"] / floor[row["seq_len"]][mode]["ratio"], _DIGITS)
            for mode in ("forward", "training")
        }}
        for row in table["rows"]
        if row["name"] in _ENCODINGS and row["seq_len"] in floor
    ]  # fmt: skip


def _means(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    groups: dict[tuple, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["encoding"], row["protocol"], row["eval_len"]), []).append(row)
    means = []
    for (encoding, protocol, eval_len), members in groups.items():
        mean = {"encoding": encoding, "protocol": protocol, "eval_len": eval_len}
        for name in ("perplexity", "accuracy"):
            values = [row[name] for row in members if row.get(name) is not None]
            if values:
                mean[name] = round(sum(values) / len(values), _DIGITS)
        means.append(mean)
    return means


def perplexity(encoding: str, eval_len: int, protocol: str = "windows", found: dict[str, Any] | None = None) -> float:
    """The study's mean perplexity per byte."""
    rows = (found or shipped())["study"]["rows"]
    return next(r["perplexity"] for r in rows
                if (r["encoding"], r["protocol"], r["eval_len"]) == (encoding, protocol, eval_len))  # fmt: skip


def lengths(found: dict[str, Any] | None = None) -> list[int]:
    """The study's evaluation lengths, tokens."""
    return sorted({r["eval_len"] for r in (found or shipped())["study"]["rows"] if r["protocol"] == "windows"})


def time(encoding: str, seq_len: int) -> dict[str, Any]:
    """The row measured at the length nearest to `seq_len`, in the ratio of lengths."""
    rows = [row for row in shipped()["attention"] if row["encoding"] == encoding]
    return min(rows, key=lambda row: max(row["seq_len"] / seq_len, seq_len / row["seq_len"]))

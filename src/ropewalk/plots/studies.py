"""What a study left: its results as a figure, and its trained models, for figures that look into them."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from ropewalk.errors import require
from ropewalk.plots import style
from ropewalk.plots.style import Axes
from ropewalk.study import data, files, statistics, train
from ropewalk.study.figures import MARKERS, plain_log
from ropewalk.study.settings import Settings, cell_name
from ropewalk.study.verdicts import label


def _settings_of(folder: pathlib.Path) -> dict[str, Any]:
    path = folder / "study.json"
    return files.read_json(path).get("settings", {}) if path.exists() else {}


def _rows(results: Any) -> tuple[list[Mapping[str, Any]], dict[str, Any]]:
    """The rows of results.json, from the file, its folder, or themselves; and the study's settings, if known."""
    if not isinstance(results, str | pathlib.Path):
        return list(results), {}
    path = pathlib.Path(results)
    path = path / "results.json" if path.is_dir() else path
    hint = "write one with `ropewalk study --out FOLDER`"
    require(path.exists(), "results", "a study's results.json, or its folder", str(results), hint=hint)
    rows = files.read_json(path)
    whole = isinstance(rows, list) and all(isinstance(r, dict) and {"encoding", "protocol"} <= r.keys() for r in rows)
    require(whole and len(rows) > 0, "results", "rows of a study's results.json", str(path))
    return rows, _settings_of(path.parent)


def length_numbers(
    results: str | pathlib.Path | Sequence[Mapping[str, Any]],
    *,
    protocol: str = "windows",
    train_len: int | None = None,
) -> dict[str, Any]:
    """The numbers of `lengths`: mean perplexity by encoding and evaluation length, with the ends of its bar."""
    rows, known = _rows(results)
    asked = [r for r in rows if r["protocol"] == protocol]
    there = ", ".join(sorted({r["protocol"] for r in rows}))
    require(bool(asked), "protocol", f"one of those in the results ({there})", repr(protocol))
    found: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for row in asked:
        if row.get("perplexity") is not None:
            found.setdefault(row["encoding"], {}).setdefault(int(row["eval_len"]), []).append(row)
    require(bool(found), "results", "with a perplexity under this protocol", "none")
    series = [
        {"encoding": name, "points": [_point(n, runs) for n, runs in sorted(lengths.items())]}
        for name, lengths in found.items()
    ]
    seeds = max(len(runs) for lengths in found.values() for runs in lengths.values())
    train_len = known.get("train_len") if train_len is None else train_len
    per = "byte" if known.get("tokenizer") == "byte" else "token"
    return {"unit": f"perplexity per {per}", "protocol": protocol, "train_len": train_len, "seeds": seeds,
            "series": series}  # fmt: skip


def _point(eval_len: int, runs: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean with one standard deviation over seeds, or the interval over documents of the only seed."""
    mean, sd = statistics.mean_and_sd([run["perplexity"] for run in runs])
    low, high = (mean - sd, mean + sd) if sd is not None else (runs[0].get("ci_low"), runs[0].get("ci_high"))
    return {"eval_len": eval_len, "perplexity": mean, "low": mean if low is None else low,
            "high": mean if high is None else high, "seeds": len(runs)}  # fmt: skip


def draw_lengths(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw `length_numbers`."""
    values, lengths = [], set()
    for index, series in enumerate(numbers["series"]):
        points = series["points"]
        x, y = [p["eval_len"] for p in points], [p["perplexity"] for p in points]
        ends = [[max(0.0, p["perplexity"] - p["low"]) for p in points], [max(0.0, p["high"] - p["perplexity"]) for p in
                points]]  # fmt: skip
        look = style.line(index) | {"marker": MARKERS[index % len(MARKERS)], "markersize": 6}
        axes.errorbar(x, y, yerr=ends, label=spoken(series["encoding"]), capsize=3, elinewidth=1.2, **look)
        values += [v for p in points for v in (p["low"], p["high"])]
        lengths |= set(x)
    plain_log(axes, values)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(lengths), labels=[style.tokens(n) for n in sorted(lengths)])
    axes.minorticks_off()
    if numbers["train_len"] is not None:
        style.mark(axes.axvline(numbers["train_len"], linestyle=":", label="training length"))
    axes.set_xlabel("evaluation length, tokens")
    axes.set_ylabel(numbers["unit"])
    style.legend(axes, columns=2)


def lengths(
    results: str | pathlib.Path | Sequence[Mapping[str, Any]],
    *,
    protocol: str = "windows",
    train_len: int | None = None,
    axes: Axes | None = None,
) -> Axes:
    """A study's perplexity over evaluation length, a line for each encoding: per byte where its tokens are known to be
    bytes, per token else.

    Args:
        results: a study's folder, its results.json, or the rows of one.
        protocol: how it was scored, as in the results ("windows", "sliding", "limited", "linear", ...).
        train_len: tokens seen in training, marked; read from study.json beside the results where it lies there.
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, tokens to the right, perplexity upward.  Bars are one standard deviation over seeds, or for one
        seed the 95 % interval over documents.
    """
    numbers = length_numbers(results, protocol=protocol, train_len=train_len)
    with style.drawing(axes) as own:
        draw_lengths(numbers, own)
    return own


def trained(study: str | pathlib.Path, encodings: Sequence[str] | None, seed: int | None) -> tuple[dict, Any, dict]:
    """Trained models of a study by encoding, the tokens of its first held-out document, and its settings.

    Raises:
        ValueError: the folder holds no such model, or its text has changed since.
    """
    folder = pathlib.Path(study)
    stored = _settings_of(folder)
    require(bool(stored), "study", "a study's folder (with study.json)", str(folder))
    settings = Settings.from_json(stored)
    wanted = list(settings.encodings) if encodings is None else list(encodings)
    seed = settings.seeds[0] if seed is None else seed
    paths = {name: folder / "cells" / cell_name(name, seed) / "model.safetensors" for name in wanted}
    missing = [name for name, path in paths.items() if not path.exists()]
    hint = "a finished `ropewalk study --out FOLDER` keeps them in FOLDER/cells"
    require(not missing, "study", f"one that keeps trained weights of seed {seed}", f"none of {', '.join(missing)}",
            hint=hint)  # fmt: skip
    corpus = data.load(settings)
    before = files.read_json(folder / "study.json").get("corpus", {}).get("fingerprint", corpus.fingerprint)
    require(corpus.fingerprint == before, "the study's text", f"as it was ({before})", corpus.fingerprint)
    models = {}
    for name, path in paths.items():
        models[name] = train.build(settings, name, seed, corpus.vocab_size)
        train.read_weights(path, models[name])
        models[name].eval()
    return models, corpus.held_out[0].tokens, stored


def spoken(name: str) -> str:
    """An encoding's name as one says it, a stranger's class without its module.

    >>> spoken("rotary+alibi"), spoken("my.module:Own+alibi")
    ('RoPE + ALiBi', 'Own + ALiBi')
    """
    return " + ".join(part.rpartition(":")[2] if ":" in part else label(part) for part in name.split("+"))

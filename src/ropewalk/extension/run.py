"""`ropewalk extend`: a model evaluated beyond its trained length, each finished window remembered on the disk."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pathlib
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ropewalk._shapes import Tensor
from ropewalk.errors import message, require
from ropewalk.extension import plan, report, source
from ropewalk.extension.plan import WINDOW, Settings, Text, Unit
from ropewalk.extension.progress import Progress
from ropewalk.extension.score import Scorer
from ropewalk.hf.extending import extend
from ropewalk.study import files
from ropewalk.study.progress import duration
from ropewalk.study.scoring import position_edges
from ropewalk.study.train import faster_dtype

_LINES, _SUMMARY = "windows.jsonl", "summary.json"
_CHARACTERS_PER_TOKEN = 8


def prepare(model: str, **asked: Any) -> Settings:
    """Settings with a dtype instead of "auto"; arguments as in `plan.settings_for`."""
    settings = plan.settings_for(source.opened(model), **asked)
    skeleton = settings.model.skeleton()
    for method in settings.stretches:  # a model that cannot compute it says so now
        extend(skeleton, to=settings.to, method=method, train_len=settings.train_len)()
    if settings.device.startswith("cuda"):
        found = torch.cuda.is_available()
        require(found, "device", "cpu where torch sees no CUDA device", repr(settings.device))
    if settings.dtype == "auto":
        settings = dataclasses.replace(settings, dtype=faster_dtype(settings.device))
    return settings


def run(
    settings: Settings,
    texts: Sequence[str | os.PathLike] = (),
    out: str | os.PathLike | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Evaluates what the folder `out` does not hold yet, and sums up.

    Args:
        texts: files, each read from its beginning; by default a long file of the standard library.
        out: runs/extend-MODEL by default.

    Returns:
        The summary, which lies in `out` as summary.json too.
    """
    progress = progress or Progress(quiet=True)
    started = time.monotonic()
    read = _read(texts)
    folder = folder_of(settings, out)
    with _kept_if_used(folder), files.lock(folder, "run is at work"), _silent():
        parts = _tokenised(settings, read, progress)
        lines, left_out = _evaluate(settings, parts, folder / _LINES, progress)
        result = report.summarise(settings, lines, left_out)
        result |= {"texts": [part.name for part in parts], "out": str(folder)}
        result |= {"seconds": round(time.monotonic() - started, 1), "peak_memory_mib": _peak_memory()}
        files.write_json(folder / _SUMMARY, result)
    return result


def measure(
    settings: Settings,
    texts: Sequence[str | os.PathLike],
    out: str | os.PathLike | None,
    save: pathlib.Path | None,
    quiet: bool,
) -> dict[str, Any]:
    """`run` with progress on stderr; `save` is written if a method helps."""
    result = run(settings, texts, out, Progress(quiet))
    method = result["recommendation"]["method"]
    if save is not None and method is not None:
        write_config(settings, method, save)
    return result | {"saved": str(save) if save is not None and method is not None else None}


def shown(result: Mapping[str, Any]) -> str:
    """`measure`'s result as plain lines."""
    saved = f"\n\nwritten: {result['saved']}" if result["saved"] else ""
    took = f"{duration(result['seconds'])}, at most {result['peak_memory_mib']} MiB of memory"
    return f"{report.shown(result)}{saved}\n\n{took}; windows and summary in {result['out']}"


def folder_of(settings: Settings, out: str | os.PathLike | None) -> pathlib.Path:
    """Where finished windows are remembered."""
    return pathlib.Path(out) if out is not None else pathlib.Path("runs") / f"extend-{settings.model.name}"


def _read(texts: Sequence[str | os.PathLike]) -> dict[str, str]:
    """Each text by its name."""
    found: dict[str, str] = {}
    for given in texts or [source.default_text()]:
        path = pathlib.Path(given)
        try:
            content = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(message("--text", "a readable file of UTF-8", f"{path} ({error})")) from error
        require(str(path) not in found, "--text", "different files", str(path))
        found[str(path)] = content
    return found


def _tokenised(settings: Settings, read: Mapping[str, str], progress: Progress) -> tuple[Text, ...]:
    """The beginning of each text, by the model's own tokenizer."""
    progress.say("reading the tokenizer")
    tokenizer = settings.model.tokenizer()
    needed = plan.needed_tokens(settings)
    tokens: dict[str, list[int]] = {}
    for name, content in read.items():
        found: list[int] = []
        for share in itertools.count(1):
            start = content[: share * _CHARACTERS_PER_TOKEN * needed]
            found = tokenizer(start, add_special_tokens=False, verbose=False)["input_ids"]
            if len(found) >= needed + 8 or len(start) == len(content):
                break
        tokens[name] = found
    marked = tokenizer("", verbose=False)["input_ids"]
    begin = marked[0] if marked and marked[0] == tokenizer.bos_token_id else None
    return plan.texts_of(settings, tokens, begin)


def _evaluate(
    settings: Settings, texts: tuple[Text, ...], path: pathlib.Path, progress: Progress
) -> tuple[list[dict], dict[str, str]]:
    """The lines of all windows, old and new, and the rows that cannot be had, with the reason."""
    known = files.read_lines(path)
    files.keep_lines(path, known)  # half a line at its end is forgotten
    done = {line["key"]: line for line in known}
    wanted = plan.units(settings, texts)
    missing = [unit for unit in wanted if unit.key not in done]
    if len(missing) < len(wanted):
        progress.say(f"{len(wanted) - len(missing)} of {len(wanted)} windows are known from {path.parent}")
    left_out: dict[str, str] = {}
    if missing:
        progress.say(f"loading {settings.model.parameters / 1e6:.0f} million weights as {settings.dtype}")
        model = settings.model.load(getattr(torch, settings.dtype), settings.device)
        scorer = Scorer(model)
        progress.start(len(missing), math.fsum(unit.work for unit in missing))
        for row, units in itertools.groupby(missing, key=lambda unit: unit.row):
            with contextlib.ExitStack() as stack:
                if row in settings.stretches:
                    train_len = settings.train_len
                    stack.enter_context(extend(model, to=settings.to, method=row, train_len=train_len))
                try:
                    for unit in units:
                        done[unit.key] = line = _line(settings, scorer, unit, progress)
                        files.append_line(path, line)
                except _NoControl as error:
                    left_out[row] = str(error)
        progress.clear()
    return [done[unit.key] | _place(unit) for unit in wanted if unit.row not in left_out], left_out


def _place(unit: Unit) -> dict[str, Any]:
    """Where a window lies: a text that repeats itself has one line for windows in several places."""
    return {"row": unit.row, "text": unit.text.name, "start": unit.start}


class _NoControl(Exception):
    """The model's attention cannot be limited from outside."""


def _line(settings: Settings, scorer: Scorer, unit: Unit, progress: Progress) -> dict[str, Any]:
    """One window, scored."""
    started = time.perf_counter()
    progress.begin(f"{unit.row}, {unit.length} tokens", unit.work)
    window = settings.train_len if unit.row == WINDOW else None
    try:
        nats = scorer.nats(unit.inputs, unit.targets, window, progress.tell)
    except ValueError as error:
        if window is None:
            raise
        raise _NoControl(str(error)) from error
    progress.finish()
    scored = nats[unit.first :]
    edges = position_edges(unit.length)
    cut = [nats[max(low, unit.first) : max(high, unit.first)] for low, high in itertools.pairwise(edges)]
    return {
        "key": unit.key,
        **_place(unit),
        "length": unit.length,
        "first": unit.first,
        "nats": scored.sum().item(),
        "tokens": len(scored),
        "edges": edges,
        "position_nats": [part.sum().item() for part in cut],
        "position_tokens": [len(part) for part in cut],
        "seconds": round(time.perf_counter() - started, 3),
    }


def estimate(settings: Settings, texts: Sequence[str | os.PathLike] = ()) -> dict[str, Any]:
    """What a run would do, and how long it would take, from two short measurements; no weight is read."""
    count = len(_read(texts))
    rows, seconds = [], 30.0
    linear, attention = _speeds(settings)
    for row in settings.rows:
        for length in settings.lengths:
            if plan.is_unchanged(settings, row, length):
                continue
            windows = count * len(plan.places(settings, length))
            squares = plan.attention_work(settings, row, length)
            lasts = (plan.work(settings, row, length) - squares) / linear + squares / attention
            rows.append({"row": row, "length": length, "windows": windows, "seconds": round(windows * lasts, 1)})
            seconds += windows * lasts
    return {
        "model": settings.model.name,
        "parameters": settings.model.parameters,
        "train_len": settings.train_len,
        "to": settings.to,
        "dtype": settings.dtype,
        "plan": rows,
        "configs": {name: dict(made.block) for name, made in settings.stretches.items()},
        "estimated_minutes": round(seconds / 60, 1),
    }


def shown_plan(plan: Mapping[str, Any]) -> str:
    """`estimate`'s result as plain lines."""
    head = f"{plan['model']}: trained to {plan['train_len']} tokens, to {plan['to']}; {plan['dtype']}"
    rows = [f"{row['row']:12}{row['windows']:4} windows of {row['length']:7} tokens" for row in plan["plan"]]
    return "\n".join([head, *rows, f"about {plan['estimated_minutes']:g} minutes"])


def _speeds(settings: Settings) -> tuple[float, float]:
    """Operations per second of a matrix product and of causal attention, of the model's sizes."""
    dtype, device = getattr(torch, settings.dtype), settings.device
    reading = next(iter(settings.stretches.values())).readings[0]
    heads, head_dim, rows = reading.num_heads or 1, reading.head_dim, 1024
    x = torch.randn(rows, heads * head_dim, device=device, dtype=dtype)
    weight = torch.randn(heads * head_dim, 4 * heads * head_dim, device=device, dtype=dtype)
    q = torch.randn(1, heads, 2 * rows, head_dim, device=device, dtype=dtype)
    products = _seconds(lambda: x @ weight)
    squares = _seconds(lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True))
    return 2 * rows * weight.numel() / products, 8 * heads * head_dim * rows**2 / squares


def _seconds(call: Any) -> float:
    """The median of a few calls."""
    laps = []
    for _ in range(6):
        started = time.perf_counter()
        found: Tensor = call()
        found.flatten()[0].item()  # a device that runs behind has to arrive
        laps.append(time.perf_counter() - started)
    return statistics.median(laps[1:])


def check_save(save: str | os.PathLike, force: bool) -> pathlib.Path:
    """The file that `--save` will write; known before anything is computed."""
    path = pathlib.Path(save)
    path = path if path.suffix == ".json" else path / "config.json"
    require(force or not path.exists(), "--save", "a new file", str(path), hint="--force replaces it")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    writable = parent.is_dir() and os.access(parent, os.W_OK)
    require(writable, "--save", "in a folder that can be written", str(path))
    return path


def write_config(settings: Settings, method: str, path: pathlib.Path) -> None:
    """The whole config of a method, at once or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps(settings.stretches[method].config, indent=2, sort_keys=True) + "\n"
    files.write_bytes(path, content.encode())


@contextlib.contextmanager
def _kept_if_used(folder: pathlib.Path) -> Iterator[None]:
    """A folder that can be written; one made for a run that is refused goes with it."""
    is_new = not folder.exists()
    files.check_folder(folder, needed_bytes=2**20)
    try:
        yield
    except Exception:
        if is_new and all(path.is_file() and path.stat().st_size == 0 for path in folder.iterdir()):
            shutil.rmtree(folder)
        raise


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Without the progress bars of transformers, beside which ours could not be read."""
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()


def _peak_memory() -> int | None:
    """Of this process so far, MiB."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))

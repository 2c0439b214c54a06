"""What `ropewalk bench` can be asked for: one measurement, all of them into a folder, the page made from them."""

import dataclasses
import json
import pathlib
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ropewalk import bench
from ropewalk.bench import decode, page, rotate, timing, variants
from ropewalk.errors import require, require_count

PLANS = {"rotate": rotate.RotatePlan, "attention": variants.Plan, "decode": decode.DecodePlan}
ONE_LENGTH = {"rotate": "seq_len", "decode": "cached"}
ALL: dict[str, tuple[str, ...]] = {
    "rotate-float32": ("rotate",),
    "rotate-bfloat16": ("rotate", "--dtype", "bfloat16"),
    "rotate-default-allocator": ("rotate", "--default-allocator"),
    "attention-float32": ("attention", "--encodings", "rotary,alibi", "--lengths", "1024,4096"),
    "attention-bfloat16": (
        *("attention", "--encodings", "alibi", "--lengths", "1024,4096", "--dtype", "bfloat16"),
        *("--backends", "none", "--no-peers"),
    ),
    # the other libraries' biases alone take 8 GiB there
    "attention-16384": (
        *("attention", "--encodings", "alibi", "--lengths", "16384"),
        *("--backends", "none", "--no-peers"),
    ),
    "attention-65536": (
        *("attention", "--encodings", "alibi", "--lengths", "65536", "--forward-only"),
        *("--backends", "none", "--no-peers"),
    ),
    "attention-symmetric": ("attention", "--symmetric", "--lengths", "4096"),
    "attention-symmetric-16384": (
        *("attention", "--symmetric", "--encodings", "alibi", "--lengths", "16384", "--forward-only"),
        *("--backends", "none"),
    ),
    "decode-float32": ("decode",),
    "decode-bfloat16": ("decode", "--dtype", "bfloat16"),
    "study": ("study",),
}
SECONDS = {
    "attention-float32": 300,
    "attention-bfloat16": 900,
    "attention-16384": 1800,
    "attention-65536": 300,
    "attention-symmetric": 300,
    "attention-symmetric-16384": 900,
}


def plan_for(what: str, given: dict[str, Any]) -> Any:
    """The plan of one measurement; for study its settings.

    Args:
        what: rotate, attention, decode or study.
        given: the plan's fields by name, None where nothing was said; `lengths` and `num_kv_heads` are tuples, also
            where a plan takes one number.

    Raises:
        ValueError: the measurement knows no such field.
    """
    require(what in (*PLANS, "study"), "what", "attention, rotate, decode, study, all or page", repr(what))
    given = {name: value for name, value in given.items() if value is not None}
    if what == "study":
        return _study_settings(given)
    if what in ONE_LENGTH and "lengths" in given:
        given[ONE_LENGTH[what]] = _one("lengths", given.pop("lengths"))
    if what == "rotate" and "num_kv_heads" in given:
        given["num_kv_heads"] = _one("num_kv_heads", given["num_kv_heads"])
    if what == "attention" and given.get("causal") is False:
        given.setdefault("encodings", variants.SYMMETRIC)
    _check_known(what, given, {field.name for field in dataclasses.fields(PLANS[what])})
    return PLANS[what](**given)


def _study_settings(given: dict[str, Any]) -> Any:
    from ropewalk.study import settings

    _check_known("study", given, {"encodings", "dtype", "device"})
    return settings.customize(settings.preset("quick"), **{"dtype": "float32", "device": "cpu", **given})


def _check_known(what: str, given: dict[str, Any], known: set[str]) -> None:
    for name in given:
        require(name in known, f"options of bench {what}", f"among {', '.join(sorted(known))}", name)


def _one(name: str, values: Sequence[int]) -> int:
    require(len(values) == 1, name, "one number", ", ".join(map(str, values)))
    return values[0]


def prepare(threads: int, default_allocator: bool) -> None:
    """Set this process up for measuring: its threads, and what its C library does with freed memory."""
    torch.set_num_threads(require_count(threads, "threads"))
    if not default_allocator:
        from ropewalk.study.worker import keep_memory

        keep_memory()


def measure(what: str, plan: Any, progress: Callable[[str], None]) -> dict[str, Any]:
    """One measurement; plain JSON."""
    if what == "attention":
        return bench.run(plan, progress)
    if what == "study":
        from ropewalk.study import throughput

        result = throughput.compare(plan, report=lambda done, of: progress(f"round {done}/{of}"))
        return {"what": what, **result, **timing.setting(plan)}
    return (rotate if what == "rotate" else decode).run(plan, progress)


def shown(what: str, result: dict[str, Any]) -> str:
    """A result as plain text."""
    if what == "study":
        from ropewalk.study import throughput

        return throughput.table(result)
    return bench.table(result) if what == "attention" else page.text(result)


def measure_all(
    out: str, given: dict[str, Any], only: Sequence[str] | None, tell: Callable[[str], None]
) -> dict[str, str]:
    """Each measurement in a process of its own, written to its file in `out`, and the page; what failed, and why.

    An earlier file stays as it is until its measurement has ended well.
    """
    given = {name: value for name, value in given.items() if value is not None}
    _check_known("all", given, {"budget_seconds"})
    for name in only or ():
        require(name in ALL, "only", f"among {', '.join(ALL)}", name)
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    failed = {}
    for name in only or ALL:
        limit = given.get("budget_seconds", SECONDS.get(name)) if name != "study" else None
        options = shlex.join(ALL[name] if limit is None else (*ALL[name], "--seconds", f"{limit:g}"))
        tell(f"{name}: ropewalk bench {options}")
        command = [sys.executable, "-m", "ropewalk", "bench", *shlex.split(options), "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            failed[name] = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            continue
        result = {"command": f"ropewalk bench {options}", **json.loads(done.stdout)}
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    if any(folder.glob("*.json")):
        write_page(out, {})
    return failed


def write_page(out: str, given: dict[str, Any]) -> pathlib.Path:
    """README.md of a folder of results."""
    _check_known("page", {name: value for name, value in given.items() if value is not None}, set())
    folder = pathlib.Path(out)
    found = any(folder.glob("*.json"))
    require(found, "out", "a folder with results", repr(out), hint="ropewalk bench all makes them")
    path = folder / "README.md"
    path.write_text(page.page(folder))
    return path

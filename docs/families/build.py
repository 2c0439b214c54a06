"""Checks every causal-model family of the installed transformers; writes families.json, and README.md from it.

    python docs/families/build.py                   all families, about a quarter of an hour on two idle cores
    python docs/families/build.py llama,qwen3       these anew, the others as they are
    python docs/families/build.py --page            the page alone

Each family is built small, from its default config, with random weights, in a process of its own.
"""

import contextlib
import inspect
import io
import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
LIMIT = 90  # seconds for a family
SIDE_BY_SIDE = max(1, (os.cpu_count() or 1))
# Settings that a family's default config leaves out, and without which it cannot be built.
EXTRA = {
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 64, "rope_theta": 10_000.0},
    "hunyuan_v1_moe": {"head_dim": 64, "rope_theta": 10_000.0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 64, "rope_theta": 10_000.0},
    "nemotron": {"num_key_value_heads": 8},
}
# What a script of faults.py, or a closer look, says about a broken law.
CHAOTIC = "not judged: rounding to float32 alone changes this looped model as much"
NORM = "by design: channels are weighed by a norm after they are turned, so the model is not quite relative"
JUDGED: dict[tuple[str, str], str] = {
    ("deepseek_v4", "padding"): "confirmed",
    ("deepseek_v4", "generation"): "follows from padding",
    ("dory", "decoding"): "confirmed",
    **{("dory", law): CHAOTIC for law in ("padding", "generation", "packing", "precision", "implementations")},
    **{(family, "shift"): NORM for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    **{(family, "padding"): "follows from shift" for family in ("hunyuan_v1_dense", "hunyuan_v1_moe")},
    ("jamba", "decoding"): "confirmed",
    ("moshi", "decoding"): "confirmed",
    ("nemotron_h", "decoding"): "not confirmed: 3e-4 of the logits, and rounding in recurrent layers is not excluded",
    ("recurrent_gemma", "padding"): "confirmed",
    ("recurrent_gemma", "generation"): "follows from padding",
    ("roformer", "padding"): "confirmed",
    ("roformer", "generation"): "follows from padding",
}


def judged(name: str, dtypes: list[str]) -> dict:
    """The report of one family, as plain JSON; {"not_built": why} without one."""
    import torch

    from ropewalk.check import Report, render, run

    torch.set_num_threads(1)
    try:
        plan = run.plan_for({"model_type": name, **EXTRA.get(name, {})}, dtypes=dtypes)
    except ValueError as error:
        return {"not_built": str(error).splitlines()[0]}
    source = inspect.getsource(sys.modules[type(plan.subject.model()).__module__]).lower()
    report = Report(plan.name, tuple(law.verdict(plan.subject) for law in plan.laws))
    return {"about": [word for word in ("rotary", "alibi") if word in source], **render.plain(report)}


def side_by_side(names: list[str]) -> Iterator[tuple[str, dict]]:
    """Results as they come, each from a process of its own: forked, so that torch is read once."""
    import transformers  # noqa: F401

    import ropewalk.check.models  # noqa: F401

    context, waiting, running = multiprocessing.get_context("fork"), list(names), {}
    while waiting or running:
        while waiting and len(running) < SIDE_BY_SIDE:
            name = waiting.pop(0)
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, name), daemon=True)
            process.start()
            theirs.close()
            running[name] = process, mine, time.monotonic()
        for name, (process, mine, started) in list(running.items()):
            late = time.monotonic() - started > LIMIT
            if mine.poll(0.05) or not process.is_alive() or late:
                yield name, _received(process, mine, late)
                del running[name]


def _child(pipe, name: str) -> None:
    with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            pipe.send(judged(name, ["float32", "float64", "bfloat16"]))
        except Exception as error:
            pipe.send({"ended": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"})


def _received(process, mine, late: bool) -> dict:
    try:
        found = mine.recv() if mine.poll() else {"ended": f"not done within {LIMIT} seconds"}
    except EOFError:
        found = {"ended": "the process died"}
    process.kill() if late else process.join()
    return found


def families() -> list[str]:
    """The families with a causal model whose code speaks of rotary or ALiBi positions."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    models = pathlib.Path(transformers.__file__).parent / "models"
    found = []
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        files = (models / model_type_to_module_name(name)).glob("modeling_*.py")
        text = "".join(file.read_text().lower() for file in files)
        if "rotary" in text or "alibi" in text:
            found.append(name)
    return sorted(found)


def by_hand() -> list[tuple[str, str, str]]:
    """Each fault's script, what it is for, and what it printed."""
    sys.path.insert(0, str(HERE))
    import faults

    command = [sys.executable, "-W", "ignore", str(HERE / "faults.py")]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    said = dict(line.split(": ", 1) for line in ran.stdout.splitlines())
    return [(f.__name__, " ".join(f.__doc__.split()), said[f.__name__]) for f in faults.FAULTS]


def broken(result: dict) -> list[dict]:
    """The laws that a family breaks."""
    return [verdict for verdict in result["verdicts"] if verdict["status"] == "fail"]


def page(data: dict) -> str:
    """The Markdown page of the results."""
    families, versions = data["families"], data["versions"]
    built = {name: result for name, result in families.items() if "verdicts" in result}
    about = {name: result for name, result in built.items() if result["about"]}
    alone = sum({v["law"] for v in broken(result)} == {"casts"} for result in about.values())
    lines = [
        "# Model families, checked",
        "",
        f"`ropewalk check` on every causal-model family of transformers {versions['transformers']} (torch"
        f" {versions['torch']}) whose code has rotary or ALiBi positions: built small from its default config, with"
        " random weights, laws in float32. Made by `python docs/families/build.py`.",
        "",
        f"{len(about)} families were checked. {sum(not broken(r) for r in about.values())} keep all laws that apply;"
        f" {alone} break one, `casts`: `model.to(torch.bfloat16)` rounds `inv_freq`. The others are below.",
        "",
        "## Confirmed by hand",
        "",
        "Each in a few lines of torch and transformers alone, in [faults.py](faults.py), with what they print:",
        "",
    ]
    lines += [f"- **{words}** `{name}`: {said}" for name, words, said in data["by_hand"]]
    lines += ["", "## Broken laws other than `casts`", ""]
    lines += ["| family | law | input | likely cause | judged |", "|---|---|---|---|---|"]
    for name, result in about.items():
        for verdict in broken(result):
            if verdict["law"] != "casts":
                found = verdict["findings"][0]
                judged = JUDGED.get((name, verdict["law"]), "not confirmed yet")
                cells = (name, verdict["law"], found["input"], found["cause"], judged)
                lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", "## All verdicts", "", "| family | holds | broken | not applicable |", "|---|---|---|---|"]
    for name, result in about.items():
        counts = {s: [v["law"] for v in result["verdicts"] if v["status"] == s] for s in ("pass", "not applicable")}
        names = ", ".join(verdict["law"] for verdict in broken(result))
        lines.append(f"| {name} | {len(counts['pass'])} | {names} | {', '.join(counts['not applicable'])} |")
    lines += ["", "## Not built", "", "These fail from their default config, made small, or take too long:", ""]
    lines += ["| family | why |", "|---|---|"]
    for name, result in families.items():
        if name not in built:
            why = next(iter(result.values())).rpartition(", which fails: ")[2]
            lines.append(f"| {name} | {why[:120].replace('|', ' ')} |")
    return "\n".join(lines) + "\n"


def main(wanted: list[str] | None) -> None:
    kept = HERE / "families.json"
    if wanted != []:
        measure(kept, wanted)
    data = json.loads(kept.read_text())
    data["by_hand"] = by_hand()
    kept.write_text(json.dumps(data, indent=1) + "\n")
    (HERE / "README.md").write_text(page(data))


def measure(kept: pathlib.Path, wanted: list[str] | None) -> None:
    results = json.loads(kept.read_text())["families"] if kept.exists() and wanted else {}
    names = wanted or families()
    for done, (name, result) in enumerate(side_by_side(names), 1):
        results[name] = result
        print(f"{done}/{len(names)} {name}", file=sys.stderr)
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    kept.write_text(json.dumps({"versions": versions, "families": dict(sorted(results.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    page_alone = sys.argv[1:] == ["--page"]
    main([] if page_alone else [name for name in sys.argv[1].split(",") if name] if len(sys.argv) > 1 else None)

"""Checks every causal-model family of the installed transformers; writes families.json, and README.md from it.

    python docs/families/build.py                   all families, about a quarter of an hour on two cores
    python docs/families/build.py llama,qwen3       these anew, the others as they are
    python docs/families/build.py --page            the page alone

Each family is built small, from its default config, with random weights, in a process of its own.
"""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

HERE = pathlib.Path(__file__).parent
LIMIT = 180  # seconds for a family
SIDE_BY_SIDE = max(1, (os.cpu_count() or 1))
ONE = """
import inspect, json, sys
import torch
from ropewalk.check import Report, render, run
torch.set_num_threads(1)
try:
    plan = run.plan_for({"model_type": sys.argv[1]}, dtypes=sys.argv[2].split(","))
except ValueError as error:
    print("RESULT" + json.dumps({"not_built": str(error).splitlines()[0]}))
    raise SystemExit
source = inspect.getsource(inspect.getmodule(type(plan.subject.model()))).lower()
report = Report(plan.name, tuple(law.verdict(plan.subject) for law in plan.laws))
about = [word for word in ("rotary", "alibi") if word in source]
print("RESULT" + json.dumps({"about": about, **render.plain(report)}))
"""


def one(name: str, dtypes: str) -> dict:
    """The report of one family, as plain JSON; {"not_built": why} or {"ended": how} without one."""
    command = [sys.executable, "-W", "ignore", "-c", ONE, name, dtypes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    except subprocess.TimeoutExpired:
        return {"ended": f"not done within {LIMIT} seconds"}
    line = next((line for line in ran.stdout.splitlines() if line.startswith("RESULT")), None)
    if line is None:
        last = (ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"])[-1]
        return {"ended": last}
    return json.loads(line.removeprefix("RESULT"))


def families() -> list[str]:
    """All families that transformers has a causal model for."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def main(wanted: list[str] | None) -> None:
    kept = HERE / "families.json"
    results = json.loads(kept.read_text())["families"] if kept.exists() and wanted else {}
    names = wanted or families()
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        jobs = {pool.submit(one, name, "float32,float64,bfloat16"): name for name in names}
        for done, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            results[jobs[job]] = job.result()
            print(f"{done}/{len(jobs)} {jobs[job]}", file=sys.stderr)
    import torch
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    kept.write_text(json.dumps({"versions": versions, "families": dict(sorted(results.items()))}, indent=1) + "\n")


if __name__ == "__main__":
    main([name for name in sys.argv[1].split(",") if name] if len(sys.argv) > 1 else None)

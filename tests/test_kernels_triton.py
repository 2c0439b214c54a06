"""The Triton kernel without a GPU: interpreted against complex numbers, compiled for three GPUs."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="the extra ropewalk[triton]")
RUNS = pathlib.Path(__file__).with_name("triton_runs.py")
BINARIES = {"cuda 80": ("ptx", "cubin"), "cuda 90": ("ptx", "cubin"), "hip gfx942": ("amdgcn", "hsaco")}


def run(what, tmp_path):
    """The JSON of one run, in a process and with a cache of its own."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, str(RUNS), what], env=environment, capture_output=True, text=True)
    assert 0 == done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_interpreted_kernel_multiplies_complex_numbers(tmp_path):
    found = run("interpret", tmp_path)
    assert 128 < len(found)
    # The interpreter cuts bfloat16 off where a GPU rounds: one unit in the last place instead of half of one.
    ulps = {"bfloat16": 1.0, "float16": 0.5}
    for case in found:
        dtype = case["case"].split()[0]
        assert case["rest"], case
        assert case["error"] < {"float64": 1e-14, "float32": 1e-6}.get(dtype, 0.1), case
        assert case["ulps"] <= ulps.get(dtype, float("inf")) * 1.001 + 0.01, case


@pytest.mark.slow
def test_kernel_compiles_for_nvidia_and_amd(tmp_path):
    found = run("compile", tmp_path)
    assert {"bf16", "fp16", "fp32"} == {case["kind"] for case in found}
    assert set(BINARIES) == {case["target"] for case in found}
    for case in found:
        assert set(BINARIES[case["target"]]) <= set(case["made"]), case

"""Which rotation runs, and what a machine without compiler, GPU or Triton is told."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import threading

import pytest
import torch

import ropewalk as rw
from ropewalk import kernels
from test_kernels import data, needs_native, tables

ROOT = pathlib.Path(__file__).parents[1]


def in_a_process(code, **environment):
    """What `code` prints as its last line, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout.strip().splitlines()[-1]


def test_every_way_says_whether_it_exists_and_why():
    found = kernels.available()
    assert ["triton", "native", "complex", "eager", "formula", "threads"] == list(found)
    assert all(isinstance(entry.usable, bool) and entry.note for entry in found.values())
    assert found["eager"].usable
    assert json.loads(json.dumps(found))["formula"][0] is True
    assert found is not kernels.available()
    assert rw.kernels is kernels


@needs_native
def test_compiled_code_names_its_instructions_and_its_threads():
    found = kernels.available()
    assert found["native"].usable
    assert found["native"].note.split()[-2] in ("avx2", "baseline")
    if sys.platform == "linux":
        assert (True, "torch's OpenMP pool") == found["threads"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_triton_is_not_claimed_without_a_gpu():
    assert (False, "no GPU that torch can use") == kernels.available()["triton"]


def test_a_choice_holds_within_its_block_and_its_thread():
    x, (cos, sin) = data((2, 3, 7, 16)), tables((), 7, 8)
    default = kernels.path(x, cos, sin, "interleaved")
    seen = []
    with kernels.using("eager"):
        assert kernels.path(x, cos, sin, "interleaved") == "complex"
        assert kernels.path(x, cos, sin, "half") == "eager"
        with kernels.using("formula"):
            assert kernels.path(x, cos, sin, "half") == "formula"
        worker = threading.Thread(target=lambda: seen.append(kernels.path(x, cos, sin, "interleaved")))
        worker.start()
        worker.join()
        assert kernels.path(x, cos, sin, "half") == "eager"
    assert [default] == seen
    assert kernels.path(x, cos, sin, "interleaved") == default


def test_a_choice_ends_with_an_exception():
    before = kernels.path(*(data((1, 4)), *tables((), 1, 2)), "half")
    with pytest.raises(RuntimeError, match="stop"), kernels.using("formula"):
        raise RuntimeError("stop")
    assert kernels.path(*(data((1, 4)), *tables((), 1, 2)), "half") == before


def test_an_unknown_choice_is_refused_by_name():
    message = "choice must be 'auto' or 'eager' or 'formula', got 'fast'"
    with pytest.raises(ValueError, match=message), kernels.using("fast"):
        pass


def test_an_environment_variable_chooses_for_a_process():
    code = "import torch, ropewalk as rw; t = torch.ones(1, 2)\nprint(rw.kernels.path(torch.ones(1, 4), t, t, 'half'))"
    assert "eager" == in_a_process(code, ROPEWALK_KERNELS="eager")
    assert "formula" == in_a_process(code, ROPEWALK_KERNELS="formula")
    wrong = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "ROPEWALK_KERNELS": "fast"}, capture_output=True, text=True
    )
    assert "ROPEWALK_KERNELS must be 'auto' or 'eager' or 'formula', got 'fast'" in wrong.stderr


def test_without_compiled_code_everything_runs_and_says_so():
    code = """
import sys, json
sys.modules["ropewalk.kernels._turn"] = None  # what an install without a compiler looks like
import torch, ropewalk as rw
rope = rw.Rotary(16)
x = torch.arange(2 * 5000 * 16.0).view(1, 2, 5000, 16).sin()
at = rope.at(torch.arange(5000))
found = rw.kernels.available()
print(json.dumps([found, rw.kernels.path(x, at.cos, at.sin, "half"), rope.query(x, at)[0, :, -1].tolist()]))
"""
    found, path, last = json.loads(in_a_process(code))
    assert found["native"][0] is False
    assert found["native"][1].startswith("not built (")
    assert path == "eager"
    x = torch.arange(2 * 5000 * 16.0).view(1, 2, 5000, 16).sin()
    rope = rw.Rotary(16)
    expected = rope.query(x[:, :, -1:], rope.at(torch.tensor([4999])))[0, :, 0]
    torch.testing.assert_close(torch.tensor(last), expected, rtol=0, atol=2e-6)


def test_operators_are_registered_when_asked_for_and_not_before():
    code = (
        "import torch, ropewalk as rw; rw.kernels.turn; before = hasattr(torch.ops.ropewalk, 'turn')\n"
        "import ropewalk.kernels.ops; print(before, hasattr(torch.ops.ropewalk, 'turn'))"
    )
    assert "False True" == in_a_process(code)


def build(tmp_path, **environment):
    """The extension built in a copy of the sources: what the build said, and what it made."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("_version.py", "__init__.py"):
        (tmp_path / "src/ropewalk").mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "src/ropewalk" / name, tmp_path / "src/ropewalk")
    shutil.copytree(ROOT / "src/ropewalk/kernels", tmp_path / "src/ropewalk/kernels",
                    ignore=shutil.ignore_patterns("*.so", "*.pyd", "__pycache__"))  # fmt: skip
    done = subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=tmp_path,
                          env={**os.environ, **environment}, capture_output=True, text=True)  # fmt: skip
    return done, [path.name for path in (tmp_path / "src/ropewalk/kernels").glob("_turn*.*") if path.suffix == ".so"]


@pytest.mark.skipif(os.name == "nt", reason="names a compiler by CC")
def test_an_install_without_a_compiler_succeeds(tmp_path):
    done, made = build(tmp_path, CC=shutil.which("false"))
    assert 0 == done.returncode, done.stderr
    assert [] == made
    assert "_turn" in done.stderr


@needs_native
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_compiler_builds_it_without_a_warning(tmp_path):
    done, made = build(tmp_path, CFLAGS="-Wall -Wextra -Wno-unused-parameter -Werror")
    assert 0 == done.returncode, done.stderr
    assert ["_turn.abi3.so"] == made, done.stderr

"""The house stays in order: imports run downward, files and functions stay small, importing stays cheap."""

import ast
import os
import pathlib
import statistics
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "ropewalk"
FLOORS = (
    {"errors", "_lazy", "_shapes", "_version", "_watch"},
    {"positions", "phases", "spectra"},
    {"kernels", "layouts"},
    {"encodings"},
    {"naming", "attention"},
    {"compat", "model"},
    {"check", "bench", "study", "checkpoints", "hf"},
    {"advise", "explain", "extension", "plots"},
    {"cli"},
    {"__main__", "__init__"},
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def _rooms_imported(path):
    """The rooms that a file imports, relative and absolute imports alike."""
    depth = len(path.relative_to(PACKAGE).parts)  # 1 in the package itself
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level == depth:
                names = [node.module.split(".")[0]] if node.module else [a.name for a in node.names]
            elif node.level == 0 and (node.module or "").split(".")[0] == "ropewalk":
                parts = (node.module or "").split(".")
                names = parts[1:2] or [a.name for a in node.names]
            else:
                continue
            yield from (name for name in names if name in FLOOR)


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    room = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    above = {name for name in _rooms_imported(path) if FLOOR[name] > FLOOR[room]}
    assert set() == above


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= 400
    functions = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef))
    long = {f.name: f.end_lineno - f.lineno + 1 for f in functions if f.end_lineno - f.lineno >= 60}
    assert {} == {name: lines for name, lines in long.items() if name != "attend"}  # half of it is its docstring


def _run(code):
    # Bytecode is kept, as it is for users: compiling the sources at every start is another matter.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=kept)
    return done.stdout.strip()


def test_import_takes_nothing_heavy():
    heavy = "{'typer', 'rich', 'matplotlib', 'safetensors', 'transformers', 'triton', 'jaxtyping', 'torch._dynamo'}"
    assert "[]" == _run(f"import torch, sys; before = set(sys.modules); import ropewalk; "
                        f"[getattr(ropewalk, n) for n in ropewalk.__all__]; "
                        f"print(sorted((set(sys.modules) - before) & {heavy}))")  # fmt: skip


def test_import_adds_less_than_60_milliseconds():
    code = (
        "import torch, time; t = time.process_time(); import ropewalk as rw\n"
        "[getattr(rw, name) for name in rw.__all__]; print(time.process_time() - t)"
    )
    _run(code)
    assert statistics.median(float(_run(code)) for _ in range(5)) < 0.060


def test_help_does_not_import_torch():
    code = (
        "import sys; sys.argv = ['ropewalk', '--help']\n"
        "from ropewalk.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('torch' in sys.modules)"
    )
    assert "False" == _run(code).splitlines()[-1]

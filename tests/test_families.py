"""The page on model families says what its results say, and what it calls confirmed is there."""

import importlib.util
import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[1] / "docs" / "families"
DATA = json.loads((FOLDER / "families.json").read_text())
transformers = pytest.importorskip("transformers")


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_page_is_made_of_its_results():
    build = loaded("build")
    assert (FOLDER / "README.md").read_text() == build.page(DATA)


def test_no_broken_law_is_published_unjudged():
    page = (FOLDER / "README.md").read_text()
    assert 0 == page.count("not confirmed yet")
    assert 5 <= page.count("| confirmed |")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [entry[0] for entry in DATA["by_hand"]])
def test_a_confirmed_fault_is_there_without_ropewalk(name):
    if transformers.__version__ != DATA["versions"]["transformers"]:
        pytest.skip("another release of transformers")
    faults = loaded("faults")
    assert "ropewalk" not in (FOLDER / "faults.py").read_text().lower()
    assert getattr(faults, name)().startswith("FAULT")


def test_every_family_of_the_release_has_a_result():
    if transformers.__version__ != DATA["versions"]["transformers"]:
        pytest.skip("another release of transformers")
    assert loaded("build").families() == sorted(DATA["families"])

"""The README tells the truth: its figures are recomputed, its links lead somewhere, its tree names every room."""

import importlib.util
import json
import pathlib
import re

import mpmath
import pytest
import torch

import ropewalk as rw

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_readme_comes_to_the_point():
    before = README.partition("```")[0]
    words = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", before).replace("#", "").split()
    assert 10 < len(words) <= 60
    assert 1 == before.count("![")


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/study/README.md"])
def test_links_lead_somewhere(page):
    path = ROOT / page
    targets = re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text())
    assert [] == [target for target in targets if not (path.parent / target).exists()]


def test_tree_names_every_room():
    tree = README.partition("## Where to find what")[2]
    rooms = {p.name + ("/" if p.is_dir() else "") for p in (ROOT / "src" / "ropewalk").iterdir()}
    rooms = {room for room in rooms if not room.startswith("_") and not room.endswith(".typed")}
    assert set() == {room for room in rooms - {"errors.py"} if f"  {room}" not in tree}


def _worst(cosines, position):
    """Largest error of the cosines of 64 pairs at one position, against 60 digits."""
    with mpmath.workdps(60):
        exact = [mpmath.cos(position * mpmath.mpf(10_000) ** (-mpmath.mpf(i) / 64)) for i in range(64)]
        return max(abs(float(e - mpmath.mpf(float(c)))) for e, c in zip(exact, cosines.flatten(), strict=True))


@pytest.mark.parametrize("position", [10, 131_071, 10**12])
def test_readme_figure_of_our_precision(position):
    assert "within 4e-7 at position 10 and at 10^12" in README
    assert _worst(rw.Rotary(128).at(torch.tensor([position])).cos, position) < 4e-7


def test_readme_figures_of_float32_angles():
    assert "off by 4e-3 at 131 071 and are noise at 2^24" in README
    rates = 1.0 / 10_000.0 ** (torch.arange(0, 128, 2).float() / 128)  # the line that most models have
    assert 3.5e-3 < _worst((131_071 * rates).cos(), 131_071) < 4.5e-3
    assert _worst(((2**24 + 1) * rates).cos(), 2**24 + 1) > 0.5


def test_study_page_says_what_its_results_say():
    folder = ROOT / "docs" / "study"
    spec = importlib.util.spec_from_file_location("build_study_page", folder / "build.py")
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    table = "\n".join(build.table(json.loads((folder / "results.json").read_text())))
    assert table in (folder / "README.md").read_text()
    assert 5 <= table.count("\n") + 1


def test_readme_shows_a_figure_with_seeds_and_spread():
    settings = json.loads((ROOT / "docs" / "study" / "study.json").read_text())["settings"]
    assert len(settings["seeds"]) >= 3

"""What is written is true: figures are recomputed, blocks are fresh, links lead somewhere, both languages agree."""

import importlib.util
import json
import pathlib
import re
import shlex

import mpmath
import pytest
import torch
import typer

import ropewalk as rw
from ropewalk import cli

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()


def test_readme_comes_to_the_point():
    before = README.partition("```")[0]
    words = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", before).replace("#", "").split()
    assert 10 < len(words) <= 60
    assert 1 == before.count("![")


def _module(path):
    spec = importlib.util.spec_from_file_location(path.parent.name + "_" + path.stem, path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


GENERATE = _module(DOCS / "generate.py")
BUILD_STUDY = _module(DOCS / "study" / "build.py")
PAGES = [ROOT / "README.md", ROOT / "README.zh.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", path.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
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
    table = "\n".join(BUILD_STUDY.table(json.loads((DOCS / "study" / "results.json").read_text())))
    assert table in (DOCS / "study" / "README.md").read_text()
    assert 5 <= table.count("\n") + 1


def test_readme_shows_a_figure_with_seeds_and_spread():
    settings = json.loads((ROOT / "docs" / "study" / "study.json").read_text())["settings"]
    assert len(settings["seeds"]) >= 3


def _slug(heading):
    """The anchor that GitHub and MyST give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _code(page):
    return re.findall(r"^```(?!\{).*?^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_generated_blocks_are_fresh():
    assert [] == [str(page.relative_to(ROOT)) for page in GENERATE.stale()], "python docs/generate.py writes them"


def test_a_stale_block_is_found(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("<!-- generated: kinds -->\nold\n<!-- end -->\n")
    monkeypatch.setattr(GENERATE, "HERE", tmp_path)
    assert [page] == GENERATE.stale()
    page.write_text(GENERATE.filled(page))
    assert [] == GENERATE.stale()
    assert "### K01" in page.read_text()


def test_every_law_has_the_section_that_its_findings_name():
    anchors = {_slug(heading) for heading in re.findall(r"^#+ (.*)$", (DOCS / "laws.md").read_text(), re.MULTILINE)}
    pages = [law.page.partition("#") for law in GENERATE.all_laws().values()]
    assert len(pages) > 30
    assert set() == {page for page, _, _ in pages} - {"docs/laws.md"}
    assert set() == {anchor for _, _, anchor in pages} - anchors


def test_every_public_name_has_its_place_in_the_reference():
    text = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    assert [] == [
        name for name in rw.__all__ if not re.search(rf"(:: |\.){re.escape(name)}(\(\))?$", text, re.MULTILINE)
    ]


@pytest.mark.parametrize("page", sorted(p.name for p in (DOCS / "tutorial").glob("*.md")))
def test_chinese_page_has_the_code_and_the_formulas_of_the_english_one(page):
    english, chinese = DOCS / "tutorial" / page, DOCS / "zh" / "tutorial" / page
    assert _code(english) == _code(chinese)
    formulas = [re.findall(r"^\$\$\n.*?^\$\$$", p.read_text(), re.MULTILINE | re.DOTALL) for p in (english, chinese)]
    assert formulas[0] == formulas[1]
    blocks, headings = [], []
    for p in (english, chinese):
        blocks.append(re.findall(r"generated: ([\w-]+)", p.read_text()))
        headings.append([line.split()[0] for line in p.read_text().splitlines() if re.match("#+ ", line)])
    assert blocks[0] == blocks[1]
    assert headings[0] == headings[1]


def test_chinese_readme_has_the_code_of_the_english_one():
    english, chinese = (_code(ROOT / name) for name in ("README.md", "README.zh.md"))
    assert english[:-1] == chinese[:-1]
    assert [line.split()[0] for line in english[-1].splitlines()] == [x.split()[0] for x in chinese[-1].splitlines()]


def test_tutorial_has_the_numbers_that_started_it():
    text = "\n".join(page.read_text() for page in (DOCS / "tutorial").glob("*.md"))
    numbers = (
        *("0.02391336, 0.22232443, -0.30698488, 0.69696505", "-0.17415911, 0.1402448, -0.31393907, 0.6938604"),
        *("0.36050176, 0.09299512, 0.00620351, 0.70096498", "-1.23205081, 1.8660254", "2.23606798, 2.23606798"),
        *("12.3, 18.7, 34.2, 89.5", "13.1, 14.5, 16.8, 21.3", "[2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0]"),
        *("-0.5, -1.5, -2.5, -3.5", "[4.0, 16.0, 64.0, 256.0, 2.0, 8.0]", "torch.Size([4096, 128])"),
    )
    assert [] == [number for number in numbers if number not in text]


def _command_lines():
    """Every command line of this program in pages, with its page."""
    for page in [*PAGES, ROOT / "benchmarks" / "README.md"]:
        for line in re.findall(r"(?:^|`)((?:\.venv/bin/)?ropewalk [a-z-][^`\n#]*)", page.read_text(), re.MULTILINE):
            yield str(page.relative_to(ROOT)), line.strip()


def test_commands_in_pages_exist_with_their_options():
    top, unknown, seen = typer.main.get_command(cli.app), [], 0
    for page, line in _command_lines():
        command, known, seen = top, {"--help", "--version"}, seen + 1
        for word in shlex.split(line)[1:]:
            command = getattr(command, "commands", {}).get(word, command)
            known |= {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
            if word.startswith("--") and word not in known:
                unknown.append((page, line, word))
        if command is top and not line.endswith(("--help", "--version")):
            unknown.append((page, line, "no such command"))
    assert [] == unknown
    assert seen > 50


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(path):
    assert path.read_text().count("\n") <= 60

"""The report: one page that needs nothing else, well formed, and true to the folder it was made from."""

import base64
import json
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from constructed_study import HEADLINE, write_study
from ropewalk.study import evidence, figures, report, tables

VOID = {"meta", "link", "img", "source", "br"}
HOSTILE = "<script>alert('x')</script>&\"quoted\""


def cost_rows(ratio=1.5):
    rows = []
    for name in ("none", "torch", "rotary", "alibi"):
        for seq_len in (128, 512):
            value = 1.0 if name == "none" else ratio
            part = {"ratio": value, "low": value - 0.1, "high": value + 0.1, "seconds": 0.01}
            memory = {"ratio": value, "bytes": 1000}
            rows.append(
                {
                    "name": name,
                    "seq_len": seq_len,
                    "rounds": 5,
                    "forward": part,
                    "training": part,
                    "forward_memory": memory,
                    "training_memory": memory,
                }
            )
    pair = {"ratio": 0.25, "low": 0.2, "high": 0.3, "seconds": 0.01}
    return {
        "rows": rows,
        "refused": {"hybrid": "differs from the reference"},
        "skipped": {"4096": "not in time"},
        "tutorial": [{"seq_len": 128, "bias_bytes": 2**20, "build_bias": pair, "rotate": pair}],
        "tutorial_note": "It never attends.",
        "clock": "cpu",
        "machine": "a machine",
    }


class Page(HTMLParser):
    """Checks that tags nest, and gathers what a browser would fetch, run or read out."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.urls, self.alts, self.words = [], [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], self.open

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        values = dict(attributes)
        assert len(values) == len(attributes), f"{tag} repeats an attribute"
        assert not [name for name in values if name.startswith("on")], tag
        self.urls += [values[name] for name in ("src", "href", "srcset", "data", "action") if name in values]
        if tag == "img":
            self.alts.append(values["alt"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(self.words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    headline = {**HEADLINE, "learned": (6.2, None, None, None, None)}
    path = write_study(
        tmp_path_factory.mktemp("study"),
        headline=headline,
        cost=cost_rows(),
        command=HOSTILE,
        corpus={"name": HOSTILE, "bytes": 5, "documents": 1, "fingerprint": "f"},
    )
    report.write(path)
    return path


@pytest.fixture(scope="module")
def page(folder):
    return Page((folder / "report.html").read_text())


def test_page_holds_no_script_and_asks_for_nothing(page, folder):
    assert "script" not in page.tags
    assert not {"iframe", "object", "embed", "form", "base"} & set(page.tags)
    assert page.urls
    assert all(url.startswith("data:") for url in page.urls)
    text = (folder / "report.html").read_text()
    assert "@import" not in text
    assert "url(" not in text.split("</style>")[0]


def test_embedded_figures_fetch_nothing_either(page):
    for url in page.urls:
        if "base64," in url:
            svg = base64.b64decode(url.partition("base64,")[2]).decode()
            ET.fromstring(svg)
            assert "<script" not in svg
            outside = re.findall(r'(?:href|src)="(?!#|data:)[^"]*"', svg)
            assert outside == []


def test_every_figure_has_words_with_numbers(page):
    assert len(page.alts) == 7
    for alt in page.alts:
        assert len(alt) > 60
        assert re.search(r"\d", alt)


def test_hostile_names_are_text(page):
    assert page.text.count("alert('x')") >= 2
    assert HOSTILE in page.text


def test_sections_stand_in_their_order(page):
    order = [
        "Findings",
        "Perplexity over evaluation length",
        "Where in the window it happens",
        "Controls",
        "Use of context",
        "What trained heads attend to",
        "What attention costs",
        "How these numbers were made",
    ]
    places = [page.text.index(title) for title in order]
    assert places == sorted(places)


def test_page_shows_the_numbers_of_the_folder(page, folder):
    study = evidence.load(folder)
    for name in HEADLINE:
        for length in (256, 4096):
            assert f"{study.perplexities(name, 'windows', length)[0]:.2f}" in page.text
    for said in ("RoPE's perplexity at 2048", "2.13.0", "It never attends.", "not in time", "differs from"):
        assert said in page.text


def test_a_table_that_ends_shows_a_dash_and_the_reason(folder):
    study = evidence.load(folder)
    assert tables.headline(study).count("<td>—</td>") == 4
    assert tables.reasons(study) == ["— Learned at 512, 1024, 2048, 4096 tokens: the learned table has 256 positions."]


def test_lowest_perplexity_of_a_column_is_bold_and_follows_the_numbers(tmp_path):
    swapped = {"rotary": HEADLINE["alibi"][::-1], "alibi": HEADLINE["rotary"]}
    for index, headline in enumerate((HEADLINE, swapped)):
        study = evidence.load(write_study(tmp_path / str(index), headline=headline))
        rows = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', tables.headline(study))
        for column in range(5):
            values = {name: re.findall(r"<td( class=\"best\")?>([\d.]+)", cells)[column] for name, cells in rows}
            lowest = min(values, key=lambda name: float(values[name][1]))
            if index == 0:
                assert values[lowest][0]
                assert sum(bool(mark) for mark, _ in values.values()) == 1
            else:  # an undertrained RoPE: no contrast, no bold
                assert not any(mark for mark, _ in values.values())


def test_undertrained_study_says_so_and_nothing_else(tmp_path):
    folder = write_study(tmp_path, headline={**HEADLINE, "rotary": (3.3, 3.4, 3.5, 3.6, 3.7)})
    html = report.html(evidence.load(folder), {})
    assert "Undertrained: contrasts are not meaningful" in Page(html).text
    assert "has the lowest perplexity" not in Page(html).text
    assert 'class="gate undertrained"' in html


def test_several_seeds_show_their_spread(tmp_path):
    study = evidence.load(write_study(tmp_path, seeds=(0, 1, 2)))
    assert tables.headline(study).count("±") >= 15
    figure = figures.perplexity(study)
    assert "3 seeds" in figure.caption
    assert "standard deviation" in figure.caption


def test_figures_are_the_same_bytes_every_time(folder):
    study = evidence.load(folder)
    for draw in (figures.perplexity, figures.position):
        assert draw(study).light == draw(study).light
    assert "<dc:date>" not in figures.perplexity(study).light


def test_dark_figures_differ_in_colours_alone(folder):
    figure = figures.perplexity(evidence.load(folder))
    assert figure.light != figure.dark
    assert re.sub(r"#[0-9a-f]{6}", "", figure.light) == re.sub(r"#[0-9a-f]{6}", "", figure.dark)


def test_words_of_a_figure_follow_the_numbers(tmp_path):
    study = evidence.load(write_study(tmp_path, headline={"rotary": (2.0, 2.0, 2.0, 8.0, 8.0)}))
    alt = figures.perplexity(study).alt
    near, far = (study.perplexities("rotary", "windows", n)[0] for n in (256, 4096))
    assert f"{near:.2f} at 256" in alt
    assert f"{far:.2f} at 4096" in alt


def test_relative_loss_is_one_for_the_best_in_each_bucket():
    rows = figures.relative_to_best({"a": [1.0, 3.0, None], "b": [2.0, 1.0, None]})
    assert rows["a"] == [1.0, pytest.approx(2.718281828**2), None]
    assert rows["b"] == [pytest.approx(2.718281828), 1.0, None]


def test_missing_parts_leave_their_sections_out(tmp_path):
    folder = write_study(tmp_path, headline={"alibi": HEADLINE["alibi"]}, controls={}, context={}, copies={})
    for cell in (folder / "cells").iterdir():
        (cell / "cell.json").unlink()
    page = Page(report.write(folder).read_text())
    for title in ("Controls", "Use of context", "What trained heads attend to", "What attention costs"):
        assert title not in page.text
    assert "No plain RoPE" in page.text
    assert len(page.alts) == 2


def test_report_is_rebuilt_from_the_folder_alone_and_leaves_no_half_file(folder, tmp_path):
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)
    (moved / "report.html").unlink()
    shutil.rmtree(moved / "figures")
    assert report.write(moved).read_bytes() == (folder / "report.html").read_bytes()
    assert not list(moved.rglob("*.tmp"))
    names = {path.name for path in (moved / "figures").iterdir()}
    assert names == {
        f"{name}.svg" for name in ("perplexity", "position", "context", "copy", "cost-time", "cost-memory", "attention")
    }


def test_failed_drawing_leaves_the_earlier_report(folder, tmp_path, monkeypatch):
    moved = tmp_path / "kept"
    shutil.copytree(folder, moved)
    before = (moved / "report.html").read_bytes()
    monkeypatch.setattr(figures, "perplexity", lambda study: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        report.write(moved)
    assert (moved / "report.html").read_bytes() == before


def test_folder_that_is_no_study_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"folder must be a study's"):
        report.write(tmp_path)


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PROBE = """<body><pre id="said"></pre><iframe id="f" src="report.html" style="width:{width}px;height:900px"></iframe>
<script>document.getElementById('f').onload = e => {{ const d = e.target.contentDocument.documentElement;
document.getElementById('said').textContent = JSON.stringify([d.scrollWidth, d.clientWidth,
[...d.querySelectorAll('img')].filter(i => !i.naturalWidth).length]); }}</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [400, 1280])
def test_page_does_not_overflow_in_a_browser(folder, tmp_path, width):
    (folder / f"probe{width}.html").write_text(PROBE.format(width=width))
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=5000",
        "--dump-dom",
        str(folder / f"probe{width}.html"),
    ]
    out = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    scrolled, visible, broken = json.loads(re.search(r"\[\d+,\d+,\d+\]", out)[0])
    assert visible <= width
    assert scrolled <= visible
    assert broken == 0

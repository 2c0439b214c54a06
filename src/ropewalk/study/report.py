"""report.html: the whole study on one page that needs nothing but a browser, made from its folder alone."""

from html import escape
from pathlib import Path

from ropewalk.study import figures, files, page, pictures, tables
from ropewalk.study.evidence import PROTOCOLS, Study, load
from ropewalk.study.figures import Figure
from ropewalk.study.findings import findings
from ropewalk.study.verdicts import gate, label

TOPICS = {
    "within": "Within the training length",
    "beyond": "Beyond the training length",
    "window": "Behind a window of the training length",
    "context": "Does far context help?",
    "copy": "Does a model find a span again?",
    "sliding": "Separate and sliding windows",
    "stretch": "Stretching frequencies at inference",
}


def write(folder: str | Path) -> Path:
    """Write report.html and figures/*.svg into a study's folder, from what it holds; returns the page's path.

    Raises:
        ValueError: when the folder holds no study, or none of its cells has been evaluated.
    """
    folder = Path(folder)
    study = load(folder)
    drawn = draw(study)
    (folder / "figures").mkdir(exist_ok=True)
    for figure in drawn.values():
        files.write_bytes(folder / "figures" / f"{figure.name}.svg", figure.light.encode())
    path = folder / "report.html"
    files.write_bytes(path, html(study, drawn).encode())
    return path


def draw(study: Study) -> dict[str, Figure]:
    """Every figure that the study has numbers for, by name."""
    made = [figures.perplexity(study), figures.position(study), figures.use_of_context(study), figures.copying(study)]
    made += [pictures.cost(study, "time"), pictures.cost(study, "memory"), pictures.attention(study)]
    return {figure.name: figure for figure in made if figure is not None}


def html(study: Study, drawn: dict[str, Figure]) -> str:
    """The page's text."""
    names = [label(name) for name in study.encodings]
    title = f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]
    return page.document(
        f"{title}: how they hold up beyond {study.train_len} tokens",
        page.paragraph(_subject(study), "soft"),
        _findings(study),
        _headline(study, drawn),
        _positions(study, drawn),
        _controls(study),
        _context(study, drawn),
        page.section(
            "What trained heads attend to",
            page.image(drawn.get("attention")),
            page.bullets([f"{said}." for said in pictures.looks_back(study)]),
        ),
        _cost(study, drawn),
        _origin(study),
    )


def _subject(study: Study) -> str:
    size = study.corpus.get("bytes")
    text = f"Models that differ only in their position encoding, trained on {study.train_len} tokens at a time"
    if size:
        text += f" from {size / 1e6:.2f} MB of text ({study.corpus.get('name', 'text')})"
    documents = max(
        (len(study.documents(name, "windows", n)) for name in study.encodings for n in study.lengths("windows")),
        default=0,
    )
    seeds = f"{len(study.seeds)} seed{'s' if len(study.seeds) > 1 else ''}"
    reach = max(study.lengths("windows"), default=0)
    return f"{text}, evaluated on the first {reach} tokens of each of {documents} held-out documents, {seeds}."


def _findings(study: Study) -> str:
    door = gate(study)
    rest = findings(study)[1:]
    topics = dict.fromkeys(finding.topic for finding in rest)
    lists = [
        page.heading(TOPICS[topic]) + page.bullets([f.text for f in rest if f.topic == topic], "findings")
        for topic in topics
    ]
    kind = door.state.replace(" ", "-")
    note = "Percentages are changes of perplexity; in brackets, 95 % intervals of a paired bootstrap over documents."
    note = note if rest else ""
    return page.section(
        "Findings", f'<div class="gate {kind}">{page.typeset(door.text)}</div>', *lists, page.paragraph(note, "soft")
    )


def _headline(study: Study, drawn: dict[str, Figure]) -> str:
    return page.section(
        "Perplexity over evaluation length",
        tables.headline(study),
        page.bullets(tables.reasons(study)),
        page.image(drawn.get("perplexity")),
        tables.differences(study),
        tables.bits(study),
    )


def _positions(study: Study, drawn: dict[str, Figure]) -> str:
    return page.section("Where in the window it happens", page.image(drawn.get("position")), tables.last_256(study))


def _controls(study: Study) -> str:
    table = tables.controls(study)
    note = page.paragraph(
        "Separate windows give their first tokens little context, and more so the shorter they are: part of any gain"
        " with length is that alone. Sliding windows take it away. Behind a window of the training length a model"
        " never meets an unseen distance: what matches an encoding there needs no encoding that extrapolates. The"
        " window binds each layer, so what a token knows can still come from as many windows back as there are layers."
    )
    return page.section("Controls", note, table) if table else ""


def _context(study: Study, drawn: dict[str, Figure]) -> str:
    parts = [
        page.image(drawn.get("context")),
        tables.context(study),
        page.image(drawn.get("copy")),
        tables.copying(study),
    ]
    note = page.paragraph(
        "Surviving a long input is not using it. Two measures of use: the loss that far context"
        " saves, and finding a repeated span again."
    )
    return page.section("Use of context", note, *parts) if any(parts) else ""


def _cost(study: Study, drawn: dict[str, Figure]) -> str:
    if study.cost is None:
        return ""
    refused = [f"{label(name)} has no figures: it {why}." for name, why in study.cost["refused"].items()]
    skipped = [f"{seq_len} tokens: {why}." for seq_len, why in study.cost["skipped"].items()]
    other = tables.tutorial(study)
    note = page.paragraph(study.cost["tutorial_note"]) if other else ""
    return page.section(
        "What attention costs with each encoding",
        page.image(drawn.get("cost-time")),
        page.image(drawn.get("cost-memory")),
        tables.cost(study),
        page.bullets(refused + skipped),
        note,
        other,
    )


def _origin(study: Study) -> str:
    used = [(name, said) for name, said in PROTOCOLS.items() if study.lengths(name)]
    command = f"<pre><code>{escape(study.command)}</code></pre>" if study.command else ""
    return page.section(
        "How these numbers were made",
        page.paragraph("The command that reproduces this study:") if command else "",
        command,
        page.paragraph(
            "Perplexity is exp(total nats / scored tokens); nothing is prepended to a window (no"
            " token for its beginning), for any encoding. Every length and every encoding scores the"
            " same held-out tokens; no window crosses a document."
        ),
        page.heading("Protocols"),
        page.definitions(used),
        page.heading("Models"),
        tables.cells(study),
        page.heading("Settings"),
        tables.facts("Everything that the results depend on.", study.settings),
        page.heading("Text, software, machine"),
        tables.facts(
            "Where it ran.",
            {
                **{f"text: {key}": value for key, value in study.corpus.items()},
                **study.versions,
                "machine": study.machine or tables.DASH,
            },
        ),
    )

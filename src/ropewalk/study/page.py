"""HTML in small pieces: everything that a table, a figure or a list needs, escaped."""

import base64
import re
from collections.abc import Iterable, Sequence
from html import escape

from ropewalk.study.figures import Figure

STYLE = """
:root { color-scheme: light dark; --ink: #24272b; --soft: #5d636b; --line: #d9dadc; --page: #fdfcfa; --card: #f4f2ee;
  --accent: #0b5f96; --warn: #fff0cf; --warn-ink: #5a3a00; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e6e1; --soft: #a7abb1; --line: #3d4146; --page: #16181b;
  --card: #1f2226; --accent: #7cc0ee; --warn: #4a3600; --warn-ink: #ffe3a3; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: .5rem 0 .3rem; }
h2 { font-size: 1.25rem; margin: 2.6rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
h3 { font-size: 1.02rem; margin: 1.6rem 0 .4rem; }
p, li, figcaption { max-width: 46rem; overflow-wrap: break-word; }
.soft, figcaption { color: var(--soft); font-size: .9rem; }
.gate { background: var(--card); border-left: 4px solid var(--accent); padding: .7rem 1rem; margin: 1rem 0;
  max-width: 46rem; }
.gate.undertrained { background: var(--warn); color: var(--warn-ink); border-color: #c98a00; font-weight: 600; }
ul { padding-left: 1.1rem; margin: .3rem 0 .8rem; } ul.findings li { margin: .3rem 0; }
.scroll { overflow-x: auto; margin: .3rem 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
figure.table { margin: 1rem 0; } figure.table figcaption { margin: 0; }
th, td { padding: .3rem .7rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
@media (max-width: 600px) {
  th, td { padding: .3rem .4rem; }
  tbody th { white-space: normal; min-width: 6.5rem; max-width: 8.5rem; }
}
thead th { color: var(--soft); font-weight: 600; } tbody th { font-weight: 500; }
td small { color: var(--soft); display: block; font-size: .78rem; font-weight: 400; }
td.best { font-weight: 700; }
td.words { white-space: normal; text-align: left; overflow-wrap: anywhere; min-width: 9rem; }
figure { margin: 1rem 0 1.6rem; } figure img { display: block; width: 100%; max-width: 42rem; height: auto; }
figcaption { margin-top: .4rem; }
pre { background: var(--card); padding: .8rem 1rem; overflow-x: auto; font-size: .88rem; }
code { font-family: ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; font-size: .92em; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0 0 0 1.1rem; max-width: 45rem; }
"""


def typeset(text: str) -> str:
    """Escaped text with real minus and multiplication signs, and no line broken before a per cent sign.

    >>> print(typeset("it falls by -0.3 & grows x 2.10"))
    it falls by −0.3 &amp; grows ×\xa02.10
    """
    text = re.sub(r"(?<![\w-])-(?=\d)", "−", escape(text))
    return re.sub(r"(?<!\w)x (?=\d)", "×\u00a0", text).replace(" %", "\u00a0%")


class Cell(str):
    """The text of a table's cell with what stands under it and how it is set."""

    under: str
    kind: str

    def __new__(cls, text: str, under: str = "", kind: str = "") -> "Cell":
        made = super().__new__(cls, text)
        made.under, made.kind = under, kind
        return made


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in a box that scrolls by itself; the first cell of each row is its heading."""
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f'<tr><th scope="row">{escape(row[0])}</th>{"".join(map(_cell, row[1:]))}</tr>' for row in rows)
    return (
        f'<figure class="table"><figcaption>{typeset(caption)}</figcaption><div class="scroll" tabindex="0"><table>'
        f"<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _cell(text: str) -> str:
    under, kind = (text.under, text.kind) if isinstance(text, Cell) else ("", "")
    small = f"<small>{typeset(under)}</small>" if under else ""
    shown = escape(text) if kind == "words" else typeset(text)
    return f"<td{_kind(kind)}>{shown}{small}</td>"


def _kind(name: str) -> str:
    return f' class="{escape(name)}"' if name else ""


def image(figure: Figure | None) -> str:
    """A figure within the page, in the colours of the reader's scheme; nothing for no figure."""
    if figure is None:
        return ""
    light, dark = (
        f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}" for svg in (figure.light, figure.dark)
    )
    return (
        f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{escape(figure.alt, quote=True)}"></picture>'
        f"<figcaption>{typeset(figure.caption)}</figcaption></figure>"
    )


def section(title: str, *parts: str) -> str:
    """A section with a heading; nothing when it would be empty."""
    body = "".join(parts)
    return f"<section><h2>{escape(title)}</h2>{body}</section>" if body else ""


def paragraph(text: str, kind: str = "") -> str:
    """One paragraph; nothing for no text."""
    return f"<p{_kind(kind)}>{typeset(text)}</p>" if text else ""


def bullets(items: Sequence[str], kind: str = "") -> str:
    """A list; nothing for no items."""
    rows = "".join(f"<li>{typeset(item)}</li>" for item in items)
    return f"<ul{_kind(kind)}>{rows}</ul>" if rows else ""


def heading(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{typeset(text)}</h3>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Terms and what they mean."""
    return "<dl>" + "".join(f"<dt>{typeset(term)}</dt><dd>{typeset(said)}</dd>" for term, said in pairs) + "</dl>"


def document(title: str, *parts: str) -> str:
    """The whole page: no script, nothing to fetch."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>"
        f"{''.join(parts)}</main></body></html>\n"
    )

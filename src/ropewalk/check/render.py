"""A report as text, JSON, a Markdown table or JUnit XML."""

import dataclasses
import textwrap
from typing import Any

from ropewalk.check.kinds import KINDS
from ropewalk.check.verdict import Finding, Report, Verdict

WIDTH = 100


def text(report: Report) -> str:
    """Plain words: what is broken first, with what to read; then what does not apply, notes, what holds."""
    lines = [f"{report.target}: {_counts(report)}"]
    for verdict in report.verdicts:
        if verdict.status == "fail":
            lines += ["", *_wrapped("BROKEN  ", f"{verdict.law}: {verdict.sentence}")]
            for finding in verdict.findings:
                lines += _finding(finding)
            lines += _wrapped("  equal means  ", verdict.tolerance) if verdict.tolerance else []
            lines += [f"  read more    {verdict.page}"]
    silent = [(v.law, v.reason) for v in report.verdicts if v.status == "not applicable"]
    noted = [(v.law, note) for v in report.verdicts for note in v.notes]
    for title, pairs in (("not applicable", silent), ("noted", noted)):
        if pairs:
            lines += ["", title]
            lines += [line for law, words in pairs for line in _wrapped(f"  {law}: ", words)]
    held = [v.law for v in report.verdicts if v.status == "pass"]
    return "\n".join([*lines, "", *_wrapped("holds: ", ", ".join(held) or "nothing")])


def _counts(report: Report) -> str:
    counts = {status: sum(v.status == status for v in report.verdicts) for status in ("pass", "fail", "not applicable")}
    found = f"{counts['pass']} laws hold, {counts['fail']} broken, {counts['not applicable']} not applicable"
    return found if report.kinds == () else f"{found} ({'; '.join(kind_in_words(kind) for kind in report.kinds)})"


def kind_in_words(kind: str) -> str:
    """`K04` as a reader sees it."""
    return f"{KINDS[kind].name}, {kind}" if kind in KINDS else kind


def _finding(finding: Finding) -> list[str]:
    rows = {"input": finding.input, "expected": finding.expected, "got": finding.got}
    rows["likely cause"] = f"{finding.cause} ({kind_in_words(finding.kind)})"
    return [line for name, words in rows.items() for line in _wrapped(f"  {name:<13}", words)]


def _wrapped(first: str, words: str) -> list[str]:
    indent = " " * (len(first) if len(first) < 20 else 4)
    return textwrap.wrap(words, WIDTH, initial_indent=first, subsequent_indent=indent) or [first.rstrip()]


def plain(report: Report) -> dict[str, Any]:
    """For JSON: the verdicts with their findings, and whether the target passed."""
    verdicts = [dataclasses.asdict(verdict) for verdict in report.verdicts]
    return {"target": report.target, "passed": report.passed, "kinds": list(report.kinds), "verdicts": verdicts}


def markdown(report: Report) -> str:
    """A table of laws, one row each."""
    lines = [f"### {report.target}", "", "| law | verdict | detail |", "|---|---|---|"]
    for verdict in report.verdicts:
        cells = (verdict.law, verdict.status, _detail(verdict))
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _detail(verdict: Verdict) -> str:
    said = [f"{f.input}: expected {f.expected}, got {f.got}; {f.cause}" for f in verdict.findings]
    return "; ".join([*said, *([verdict.reason] if verdict.reason else []), *verdict.notes])


def junit(reports: list[Report]) -> str:
    """JUnit XML, a suite for each report and a case for each law."""
    from xml.etree import ElementTree

    root = ElementTree.Element("testsuites", name="ropewalk check")
    for report in reports:
        failed = sum(v.status == "fail" for v in report.verdicts)
        skipped = sum(v.status == "not applicable" for v in report.verdicts)
        counts = {"tests": str(len(report.verdicts)), "failures": str(failed), "skipped": str(skipped), "errors": "0"}
        spent = f"{sum(v.seconds for v in report.verdicts):.3f}"
        suite = ElementTree.SubElement(root, "testsuite", {"name": report.target, "time": spent, **counts})
        for verdict in report.verdicts:
            case = {"classname": report.target, "name": verdict.law, "time": f"{verdict.seconds:.3f}"}
            element = ElementTree.SubElement(suite, "testcase", case)
            if verdict.status == "fail":
                failure = ElementTree.SubElement(element, "failure", message=verdict.sentence)
                failure.text = "\n".join(map(str, verdict.findings))
            elif verdict.status == "not applicable":
                ElementTree.SubElement(element, "skipped", message=verdict.reason)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"

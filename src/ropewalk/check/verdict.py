"""What a check says: findings, a verdict for each law, the report of a target."""

import dataclasses
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ropewalk.check.kinds import KINDS

Status = Literal["pass", "fail", "not applicable"]


@dataclass(frozen=True)
class Finding:
    """One broken promise: on this input, the smallest found, this was expected and that came out.

    Args:
        law: the law that is broken.
        cause: the likely one, in plain words.
        kind: of fault, a key of `kinds.KINDS`; empty until the law that found it says.
    """

    law: str
    input: str
    expected: str
    got: str
    cause: str
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.law}: {self.input}: expected {self.expected}, got {self.got} ({self.cause})"


class NotApplicable(Exception):
    """Raised by a law that says nothing about its subject, with the reason."""


@dataclass(frozen=True)
class Verdict:
    """What one law says about a target.

    Args:
        tolerance: what counts as equal, and what that follows from.
        reason: why the law does not apply.
        notes: what the law saw and does not judge.
        page: where the documentation explains the law.
    """

    law: str
    sentence: str
    status: Status
    tolerance: str
    findings: tuple[Finding, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    page: str = ""


@dataclass(frozen=True)
class Law:
    """A promise: `find` yields a Finding for each way in which a subject breaks it, a string for what it only notes.

    Args:
        name: its id, in words.
        kind: of fault that breaks it, where a finding does not name another.
        tolerance: what counts as equal, and what that follows from.
        compiled: whether it compiles, which takes long.
        group: what it is a law of: encoding, rotation, bias, attention, model.
    """

    name: str
    sentence: str
    find: Callable[[Any], Iterable[Finding | str]]
    kind: str
    tolerance: str
    compiled: bool = False
    group: str = "encoding"

    @property
    def page(self) -> str:
        """Where the documentation explains it."""
        return f"docs/laws.md#{self.group}-{self.name.replace(' ', '-')}"

    def __call__(self, subject: Any) -> list[Finding]:
        return list(self.verdict(subject).findings)

    def verdict(self, subject: Any) -> Verdict:
        """The law applied; a crash breaks the promise as well as a wrong number does."""
        started, findings, notes, reason = time.perf_counter(), [], [], ""
        try:
            for found in self.find(subject):
                (notes if isinstance(found, str) else findings).append(found)
        except NotApplicable as why:
            reason = str(why)
        except Exception as error:
            got = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            findings.append(Finding(self.name, "the law's own inputs", "an answer", got, "it fails on valid input"))
        named = tuple(found if found.kind else dataclasses.replace(found, kind=self.kind) for found in findings)
        status: Status = "fail" if named else "not applicable" if reason else "pass"
        spent = time.perf_counter() - started
        return Verdict(self.name, self.sentence, status, self.tolerance, named, reason, tuple(notes), spent, self.page)


@dataclass(frozen=True)
class Report:
    """All verdicts on one target."""

    target: str
    verdicts: tuple[Verdict, ...]

    @property
    def passed(self) -> bool:
        """No law is broken, and at least one applies."""
        statuses = [verdict.status for verdict in self.verdicts]
        return "fail" not in statuses and "pass" in statuses

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(finding for verdict in self.verdicts for finding in verdict.findings)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of all findings, in the order of `KINDS`."""
        seen = {finding.kind for finding in self.findings}
        return tuple(kind for kind in KINDS if kind in seen)

    def __str__(self) -> str:
        from ropewalk.check.render import text

        return text(self)

"""The laws that an encoding and attention with it must keep, as functions that find what breaks them."""

from ropewalk.check.laws import LAWS, broken, law_named
from ropewalk.check.subject import Parts, Subject
from ropewalk.check.verdict import Finding, Law, NotApplicable, Report, Verdict

__all__ = [
    "LAWS",
    "Finding",
    "Law",
    "NotApplicable",
    "Parts",
    "Report",
    "Subject",
    "Verdict",
    "broken",
    "law_named",
]

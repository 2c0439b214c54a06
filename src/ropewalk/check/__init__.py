"""The laws that an encoding and attention with it must keep, as functions that find what breaks them."""

from ropewalk.check.laws import LAWS, broken, law_named
from ropewalk.check.subject import Finding, Law, Parts, Subject

__all__ = ["LAWS", "Finding", "Law", "Parts", "Subject", "broken", "law_named"]

"""The laws that an encoding and attention with it must keep, as functions that find what breaks them."""

from .laws import LAWS, broken, law_named
from .subject import Finding, Law, Parts, Subject

__all__ = ["LAWS", "Finding", "Law", "Parts", "Subject", "broken", "law_named"]

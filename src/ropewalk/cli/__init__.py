"""The command line: parse, call, print; one command, one file, which imports what it runs only when it runs."""

from ropewalk.cli import advise, bench, check, convert, explain, extend, plot, study
from ropewalk.cli.frame import app, main

__all__ = ["advise", "app", "bench", "check", "convert", "explain", "extend", "main", "plot", "study"]

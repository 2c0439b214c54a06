"""The command line: parse, call, print; one command, one file, which imports what it runs only when it runs."""

from ropewalk.cli import bench, convert, extend, study
from ropewalk.cli.frame import app, main

__all__ = ["app", "bench", "convert", "extend", "main", "study"]

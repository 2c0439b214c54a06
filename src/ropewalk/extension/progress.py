"""What a person sees while windows are scored: what, how far, how long still.  Everything goes to stderr."""

import os
import shutil
import sys
import time
from typing import Any

from ropewalk.study.progress import duration

_PLAIN_EVERY, _DRAWN_EVERY = 15.0, 0.2
"""Seconds between lines, and between drawings of a line on a terminal."""


class Progress:
    """Time left is that of the work still to do, at the speed so far."""

    def __init__(self, quiet: bool = False, stream: Any = None):
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._drawn = not quiet and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._width = 0
        self.start(0, 0.0)

    def start(self, units: int, work: float) -> None:
        """`units` windows are to be scored, `work` operations in all."""
        self._units, self._total, self._done, self._finished = units, work, 0.0, 0
        self._label, self._work = "", 0.0
        self._started = self._shown = time.monotonic()

    def begin(self, label: str, work: float) -> None:
        """The next window."""
        self._label, self._work = label, work
        self.tell(0.0, at_once=True)

    def tell(self, share: float, at_once: bool = False) -> None:
        """How much of the window is done."""
        now = time.monotonic()
        every = _DRAWN_EVERY if self._drawn else _PLAIN_EVERY
        if self._quiet or (not at_once and now - self._shown < every):
            return
        self._shown = now
        done = self._done + share * self._work
        elapsed = now - self._started
        left = f", about {duration(elapsed / done * (self._total - done))} left" if done > 0 and elapsed > 1 else ""
        self._write(f"{self._label}: {share:.0%}; window {self._finished + 1} of {self._units}{left}")

    def finish(self) -> None:
        """The window is scored."""
        self._done += self._work
        self._finished += 1

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._quiet:
            self.clear()
            print(text, file=self._stream, flush=True)

    def clear(self) -> None:
        """Away with the line that is drawn over and over."""
        if self._drawn and self._width:
            print("\r" + " " * self._width + "\r", end="", file=self._stream, flush=True)
            self._width = 0

    def _write(self, line: str) -> None:
        if not self._drawn:
            print(line, file=self._stream, flush=True)
            return
        line = line[: shutil.get_terminal_size().columns - 1]
        print("\r" + line.ljust(self._width), end="", file=self._stream, flush=True)
        self._width = len(line)

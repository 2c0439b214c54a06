"""What a person sees while a study runs: a live table, plain lines, or nothing.  Everything goes to stderr."""

import os
import sys
import time

PLAIN_EVERY = 0.1


def display(quiet: bool, stream=None) -> "Quiet | Plain | Live":
    """Nothing when quiet, a live table on a terminal, plain lines elsewhere."""
    stream = stream or sys.stderr
    if quiet:
        return Quiet()
    drawable = stream.isatty() and os.environ.get("TERM") != "dumb"
    return Live(stream) if drawable else Plain(stream)


def duration(seconds: float) -> str:
    """Seconds as minutes and seconds.

    >>> duration(75.2), duration(9)
    ('1 min 15 s', '9 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def describe(fields: dict) -> tuple[str, str, str, str]:
    """What a worker reported, as (what it does, loss, speed, time left)."""
    if fields["phase"] == "train":
        left = (fields["steps"] - fields["step"]) / fields["step"] * fields["elapsed"]
        return (
            f"train {fields['step']}/{fields['steps']}",
            f"{fields['loss']:.3f} nats/token",
            f"{fields['tokens_per_second']:,.0f} tokens/s",
            f"evaluates in {duration(left)}",
        )
    if fields["phase"] == "evaluate":
        return (
            f"evaluate {fields['step'] + 1}/{fields['steps']}",
            f"{fields['protocol']} {fields['eval_len']}",
            "",
            "",
        )
    return (fields.get("error", fields["phase"]), "", "", "")


class Quiet:
    """No display."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def update(self, cell: str, fields: dict) -> None:
        """A worker's report."""

    def say(self, text: str) -> None:
        """A remark about the whole study."""


class Plain(Quiet):
    """A line per tenth of the training, per protocol, and per end of a cell."""

    def __init__(self, stream):
        self.stream = stream
        self.shown: dict[str, object] = {}

    def update(self, cell: str, fields: dict) -> None:
        """Print what is new enough."""
        if fields["phase"] == "train":
            mark = ("train", int(fields["step"] / fields["steps"] / PLAIN_EVERY))
        else:
            mark = (fields["phase"], fields.get("protocol"))
        if self.shown.get(cell) != mark:
            self.shown[cell] = mark
            self.say("  ".join([cell, *filter(None, describe(fields))]))

    def say(self, text: str) -> None:
        """One line."""
        print(text, file=self.stream, flush=True)


class Live(Quiet):
    """A table that is redrawn in place, a row per cell."""

    def __init__(self, stream):
        from rich.console import Console
        from rich.live import Live as Drawing

        self.rows: dict[str, tuple[str, ...]] = {}
        self.started = time.monotonic()
        self.console = Console(file=stream)
        self.drawing = Drawing(console=self.console, get_renderable=self.table, refresh_per_second=4)

    def __enter__(self):
        self.drawing.start()
        return self

    def __exit__(self, *_):
        self.drawing.stop()

    def table(self):
        """The current state as a table."""
        from rich.table import Table

        table = Table(
            "run",
            "doing",
            "loss",
            "speed",
            "left",
            box=None,
            caption=f"{duration(time.monotonic() - self.started)} so far",
            caption_justify="left",
        )
        for cell, row in self.rows.items():
            table.add_row(cell, *row)
        return table

    def update(self, cell: str, fields: dict) -> None:
        """Change a cell's row."""
        self.rows[cell] = describe(fields)

    def say(self, text: str) -> None:
        """A line above the table."""
        self.console.print(text, highlight=False, markup=False)

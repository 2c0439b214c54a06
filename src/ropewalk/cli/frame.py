"""The command line's frame: the program itself, how errors end it, and how lists of values are written."""

import sys
from collections.abc import Callable
from typing import Annotated

import typer

app = typer.Typer(
    name="ropewalk", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        from ropewalk._version import __version__

        print(__version__)
        raise typer.Exit
    return wanted


@app.callback()
def _ropewalk(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Position encodings for transformers: train, compare, measure."""


def main() -> None:
    """Run a command; a user's mistake is told on stderr, with exit code 2."""
    sys.path.insert(0, "")  # module:Class may lie in the current folder, as with `python -m`
    try:
        app()
    except (ValueError, TypeError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def names(text: str | None) -> tuple[str, ...] | None:
    """`a,b` as a tuple."""
    return None if text is None else tuple(name.strip() for name in text.split(","))


def integers(option: str, text: str | None) -> tuple[int, ...] | None:
    """`1,2` as a tuple of integers; `option` is named if they are none."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be integers separated by commas, got {text!r}") from None


def numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """`1,0.5` as a tuple of numbers; `option` is named if they are none."""
    if text is None:
        return None
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be numbers separated by commas, got {text!r}") from None


def teller(quiet: bool) -> Callable[[str], None]:
    """Where a command's progress goes: lines on stderr, or nowhere."""
    return (lambda _: None) if quiet else (lambda line: print(line, file=sys.stderr))

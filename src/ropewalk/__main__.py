"""`python -m ropewalk`, and the entry point of the `ropewalk` command."""

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from ropewalk.cli import main as run
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}\nhint: pip install 'ropewalk[study]'")
    run()


if __name__ == "__main__":
    main()

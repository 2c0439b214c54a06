"""Files that are whole or not there, and lines that are whole or not read."""

import contextlib
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Iterator

from ropewalk.errors import message

# Left free on the disk beyond what the study itself writes
SPARE_BYTES = 16 * 2**20


def write_bytes(path: pathlib.Path, content: bytes) -> None:
    """Replace a file at once: a reader, or a resume after a crash, sees the old content or the new."""
    temporary = path.with_name(path.name + ".tmp")
    if path.exists() and not path.is_file():  # a device or a pipe is written to, not replaced
        temporary = path
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            if temporary != path:
                os.fsync(file.fileno())
        if temporary != path:
            os.replace(temporary, path)
    except OSError as error:
        raise OSError(error.errno, message(path.name, "written whole", error.strerror), str(path)) from error


def write_json(path: pathlib.Path, value) -> None:
    """Replace a JSON file at once."""
    write_bytes(path, (json.dumps(value, indent=1) + "\n").encode())


def read_json(path: pathlib.Path):
    """The value of a JSON file, or a ValueError that names a damaged one."""
    return _parsed(path, path.read_bytes())


def _parsed(path: pathlib.Path, text: bytes):
    try:
        return json.loads(text)
    except ValueError as error:
        hint = "it was damaged from outside; a new --out starts again"
        raise ValueError(message(str(path), "whole JSON", error, hint)) from error


def append_line(path: pathlib.Path, value) -> None:
    """Add one JSON object as one line, in one write that has reached the disk when this returns."""
    line = (json.dumps(value) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        written = os.write(descriptor, line)
        if written != len(line):
            raise OSError(f"{path} must take a line of {len(line)} bytes, got {written} of them written (disk full?)")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(path: pathlib.Path) -> list[dict]:
    """The whole lines of a JSON-lines file; what follows the last newline was cut off by a crash and is left out."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [_parsed(path, line) for line in whole if line.strip()]


def keep_lines(path: pathlib.Path, lines: list[dict]) -> None:
    """Replace a JSON-lines file by these lines."""
    write_bytes(path, b"".join((json.dumps(line) + "\n").encode() for line in lines))


def check_folder(folder: pathlib.Path, needed_bytes: int) -> None:
    """Create the folder and prove that it can take what a study writes, before anything is trained.

    Raises:
        OSError: naming the folder, when it cannot be written or the disk is too full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".probe"
        try:
            write_bytes(probe, b"\0" * 2**20)
        finally:
            for leftover in (probe, probe.with_name(".probe.tmp")):
                with contextlib.suppress(OSError):
                    leftover.unlink()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(message("out", "a folder that can be written", f"{folder} ({reason})")) from error
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPARE_BYTES:
        raise OSError(
            message(
                "out",
                f"on a disk with {(needed_bytes + SPARE_BYTES) / 2**20:.0f} MiB free",
                f"{free / 2**20:.0f} MiB at {folder}",
            )
        )


@contextlib.contextmanager
def lock(folder: pathlib.Path, other: str) -> Iterator[None]:
    """Keep out who else would work in the folder; the system lifts the lock when this process ends, however it ends.

    Args:
        other: who is kept out, as an error says it: "study runs".
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(message("out", f"a folder in which no other {other}", str(folder))) from error
        yield

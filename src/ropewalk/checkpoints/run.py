"""A checkpoint written in the other layout: whole under its name, or not there."""

import contextlib
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

from ropewalk.checkpoints import families, source, turns
from ropewalk.checkpoints.source import Checkpoint
from ropewalk.errors import message, require
from ropewalk.layouts import LAYOUTS, to_half_weight, to_interleaved_weight

SPARE_BYTES = 16 * 2**20
Report = dict[str, Any]
_WEIGHT = {"half": to_half_weight, "interleaved": to_interleaved_weight}


def detect(path: str | pathlib.Path, config: str | pathlib.Path | None = None) -> source.Detection:
    """The layout that a checkpoint is in, with the evidence; None where that is not conclusive.

    Args:
        path: a .safetensors or .gguf file, or a folder with config.json.
        config: where the config lies, if not beside the tensors.
    """
    return source.detected(source.opened(path, config))


def convert(
    path: str | pathlib.Path,
    out: str | pathlib.Path,
    to: str,
    *,
    layout: str | None = None,
    config: str | pathlib.Path | None = None,
    force: bool = False,
    tell: Callable[[str], None] = lambda _: None,
) -> Report:
    """Writes the checkpoint at `path` in the layout `to`; scores and logits stay what they are.

    Query and key projections, their biases, LoRA factors and norms are reordered; every other byte is copied.  A
    folder becomes a folder, a file a file, a GGUF file a folder with config.json and float32 tensors under Hugging
    Face's names.  Everything is written beside `out` as `.OUT.partial` and gets its name when it is whole.

    Args:
        layout: what the checkpoint is in; by default told from its weights.
        config: where the config lies, if not beside the tensors.
        force: replace `out`, and what a killed conversion left.
        tell: given a line about the progress every two seconds.

    Returns:
        What was done: from, to, evidence, tensors, bytes, seconds, notes.

    Raises:
        ValueError: the checkpoint cannot be converted, or its layout is not conclusive and not given.
    """
    began = time.monotonic()
    for name, value in (("to", to), ("from", layout)):
        allowed = value in LAYOUTS or (name == "from" and value is None)
        require(allowed, name, "half or interleaved", repr(value))
    checkpoint, out = source.opened(path, config), pathlib.Path(out)
    evidence, notes = _decided(checkpoint, layout)
    layout = layout or evidence.layout
    if layout is None:
        hint = f"--from {checkpoint.usual_layout} if that is what it is; --detect shows the evidence"
        raise ValueError(message("layout", "told by the checkpoint or given", "no conclusive evidence", hint))
    require(to != layout or checkpoint.is_gguf, "to", "the other layout", f"{to}, which the checkpoint is in")
    turned = checkpoint.turns if to != layout else {}
    _check_out(checkpoint, out, force)
    written = _write(checkpoint, out, to, turned, force, tell)
    notes += [f"left out: {', '.join(checkpoint.left_out)}"] if checkpoint.left_out else []
    if to != checkpoint.usual_layout:
        notes.append(f"readers that know the model by its config expect {checkpoint.usual_layout}")
    return {
        "in": str(path),
        "out": str(out),
        "from": layout,
        "to": to,
        "evidence": evidence.evidence,
        "tensors": len(turned),
        "bytes": written,
        "seconds": round(time.monotonic() - began, 3),
        "notes": notes,
    }


def summary(done: Report) -> str:
    """What `convert` did, in words."""
    line = f"{done['out']}: {done['from']} -> {done['to']}, {done['tensors']} tensors reordered, "
    line += f"{done['bytes'] / 2**20:.1f} MiB in {done['seconds']:.1f} s"
    evidence = [f"  evidence: {said}" for said in done["evidence"]]
    return "\n".join([line, *evidence, *(f"  note: {note}" for note in done["notes"])])


def convert_state(state: dict[str, Any], config: dict[str, Any], to: str) -> dict[str, Any]:
    """A state dict of the other layout put into the layout `to`; tensors that do not change are the same objects.

    Args:
        state: tensors by the names that the checkpoint has.
        config: the content of config.json.
    """
    require(to in LAYOUTS, "to", "half or interleaved", repr(to))
    planned = turns.plan({name: tuple(x.shape) for name, x in state.items()}, families.read(config), adapter=True)
    converted = dict(state)
    for name, turn in planned.items():
        flat = state[name].reshape(turn.rows, -1)
        turned = _WEIGHT[to](flat, len(turn.turning), turn.rotary_dim, turn.turning)
        converted[name] = turned.reshape(state[name].shape)
    return converted


def _decided(checkpoint: Checkpoint, layout: str | None) -> tuple[source.Detection, list[str]]:
    found = source.detected(checkpoint)
    against = layout is not None and found.layout not in (None, layout)
    return found, [f"the checkpoint looks {found.layout}; taken as {layout}, as told"] if against else []


def _check_out(checkpoint: Checkpoint, out: pathlib.Path, force: bool) -> None:
    """`out` can be written, and nothing is lost that is not a checkpoint."""
    require(bool(out.name), "OUT", "a name", str(out))
    require(out.parent.is_dir(), "OUT", "in an existing folder", str(out))
    place, came_from = out.resolve(), checkpoint.path.resolve()
    apart = place != came_from and place not in came_from.parents and came_from not in place.parents
    require(apart, "OUT", "another place than IN, neither around it nor inside it", str(out))
    if not checkpoint.is_folder:
        require(out.suffix == ".safetensors" and not out.is_dir(), "OUT", "a .safetensors file, as IN is", str(out))
    _restore(out)
    if os.path.lexists(out):
        require(force, "OUT", "absent", f"{out}, which exists", hint="--force replaces it")
        if checkpoint.is_folder:
            _check_replaceable(out)
    partial = _partial(out)
    hint = "another conversion is writing it, or was killed; --force removes it"
    require(force or not os.path.lexists(partial), "OUT", f"without {partial.name} beside it", str(out), hint=hint)
    needed = sum(part.size for part in checkpoint.parts) + SPARE_BYTES
    needed += sum(path.stat().st_size for path in checkpoint.companions)
    free = shutil.disk_usage(out.parent).free
    short = f"{free / 2**20:.0f} MiB at {out.parent}"
    require(free >= needed, "OUT", f"on a disk with {needed / 2**20:.0f} MiB free", short)


def _check_replaceable(out: pathlib.Path) -> None:
    inside = list(out.iterdir()) if out.is_dir() and not out.is_symlink() else []
    flat = all(path.is_file() for path in inside) and any(path.suffix == ".safetensors" for path in inside)
    require(flat, "OUT", "a folder of checkpoint files and nothing else to be replaced", str(out))


def _partial(out: pathlib.Path) -> pathlib.Path:
    return out.with_name(f".{out.name}.partial")


def _before(out: pathlib.Path) -> pathlib.Path:
    return out.with_name(f".{out.name}.before")


def _restore(out: pathlib.Path) -> None:
    """A folder that was aside when a conversion was killed gets its name back."""
    if _before(out).is_dir() and not os.path.lexists(out):
        os.rename(_before(out), out)


def _write(
    checkpoint: Checkpoint, out: pathlib.Path, to: str, turned: dict[str, Any], force: bool, tell: Callable[[str], None]
) -> int:
    """Bytes of tensors written; under the name `out` only if all went well."""
    partial = _partial(out)
    if force:
        _remove(partial)
    record = to if to != checkpoint.usual_layout else None
    told = _Progress(sum(part.size for part in checkpoint.parts), tell)
    try:
        with _cleaned(partial):
            if checkpoint.is_folder:
                partial.mkdir()
                for part in checkpoint.parts:
                    part.write(partial / part.out_name, turned, to, record, told)
                for companion in checkpoint.companions:
                    shutil.copyfile(companion, partial / companion.name)
                for name, content in checkpoint.made.items():
                    (partial / name).write_bytes(content)
                _put(partial, out)
            else:
                checkpoint.parts[0].write(partial, turned, to, record, told)
                os.replace(partial, out)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise OSError(message("OUT", "written whole", f"{out} ({reason})")) from error
    return told.done


def _put(partial: pathlib.Path, out: pathlib.Path) -> None:
    """A folder under its name; the one before it is aside until the new one stands, then gone."""
    before = _before(out)
    _remove(before)
    there = out.exists()
    if there:
        os.rename(out, before)
    try:
        os.rename(partial, out)
    finally:
        _restore(out)
    _remove(before)


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def _cleaned(partial: pathlib.Path) -> Iterator[None]:
    """What is left of `partial` is removed, however this ends."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _remove(partial)


class _Progress:
    """Counts bytes and tells about them every two seconds."""

    def __init__(self, total: int, tell: Callable[[str], None]):
        self.done, self._total, self._tell, self._last = 0, max(total, 1), tell, time.monotonic()

    def __call__(self, count: int) -> None:
        self.done += count
        if time.monotonic() - self._last >= 2.0:
            self._last = time.monotonic()
            self._tell(f"{self.done / 2**20:.0f} of {self._total / 2**20:.0f} MiB written")

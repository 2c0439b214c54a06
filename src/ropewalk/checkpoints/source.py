"""What lies at a path: one file, a folder of shards, an adapter or a GGUF file, and what its config says."""

import json
import pathlib
from typing import Any, NamedTuple

from ropewalk.checkpoints import evidence, families, turns
from ropewalk.checkpoints.families import Heads
from ropewalk.checkpoints.ggml import LAYOUT_OF, Gguf
from ropewalk.checkpoints.shards import RECORD, Shard
from ropewalk.checkpoints.turns import Turn
from ropewalk.errors import message, require
from ropewalk.layouts import LAYOUTS

_INDEX = "model.safetensors.index.json"
_CONFIGS = ("config.json", "params.json")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf")


class Checkpoint(NamedTuple):
    """A checkpoint, read as far as its headers; `made` are files that come with it under another form."""

    path: pathlib.Path
    parts: list[Shard] | list[Gguf]
    companions: list[pathlib.Path]
    made: dict[str, bytes]
    left_out: list[str]
    heads: Heads
    turns: dict[str, Turn]

    @property
    def is_gguf(self) -> bool:
        """Whether writing changes the format, not the layout alone."""
        return isinstance(self.parts[0], Gguf)

    @property
    def is_folder(self) -> bool:
        """Whether a folder is written."""
        return self.is_gguf or self.path.is_dir()

    @property
    def usual_layout(self) -> str:
        """What readers of this config expect."""
        return self.heads.family.layout


class Detection(NamedTuple):
    """The layout a checkpoint is in, or None; the evidence in words."""

    layout: str | None
    evidence: list[str]

    def __str__(self) -> str:
        return "\n".join([f"layout: {self.layout or 'not conclusive'}", *(f"  {line}" for line in self.evidence)])


def opened(source: str | pathlib.Path, config: str | pathlib.Path | None = None) -> Checkpoint:
    """The checkpoint at `source`: a .safetensors or .gguf file, or a folder.

    Args:
        config: config.json or params.json, or the folder of it; by default the one that lies beside the tensors.

    Raises:
        ValueError: what lies there is not a whole checkpoint that can be converted.
    """
    path = pathlib.Path(source)
    require(path.exists(), "IN", "an existing file or folder", str(path))
    made: dict[str, bytes] = {}
    if path.suffix == ".gguf":
        parts, companions, left_out = [Gguf(path)], [], ["the tokenizer"]
        said = parts[0].config()
        made = {"config.json": (json.dumps(said, indent=2) + "\n").encode()}
    else:
        parts, companions, left_out = _in_folder(path) if path.is_dir() else ([_shard(path)], [], [])
        said = _config(path if path.is_dir() else path.parent, config)
    shapes: dict[str, tuple[int, ...]] = {}
    for part in parts:
        for name, shape in part.shapes.items():
            require(name not in shapes, name, "in one shard", f"in {part.path.name} too")
            shapes[name] = shape
    heads = families.read(said)
    some = path.suffix == ".safetensors" or any("lora_" in name for name in shapes)
    return Checkpoint(path, parts, companions, made, left_out, heads, turns.plan(shapes, heads, adapter=some))


def detected(checkpoint: Checkpoint) -> Detection:
    """What the checkpoint itself tells about its layout: a record of an earlier conversion, and its weights.

    What is usual for the architecture is named, but proves nothing about this file.
    """
    records = {part.metadata.get(RECORD) for part in checkpoint.parts}
    home: dict[str, Any] = {name: part for part in checkpoint.parts for name in part.shapes}
    measurable = {name: turn for name, turn in checkpoint.turns.items() if home[name].measurable(name)}
    measured = evidence.measure(measurable, lambda name, *rows: home[name].numbers(name, *rows))
    said = [f"metadata: converted to {record}" for record in sorted(map(str, records - {None}))]
    said += [str(measured), _usual(checkpoint)]
    answers = {*(records if records != {None} else ()), *filter(None, [measured.layout])}
    if len(answers) > 1:
        said.append("these contradict each other" if len(records) == 1 else "the shards contradict each other")
    return Detection(answers.pop() if len(answers) == 1 and answers <= set(LAYOUTS) else None, said)


def _usual(checkpoint: Checkpoint) -> str:
    part = checkpoint.parts[0]
    if isinstance(part, Gguf):
        kind, usual = f"{part.architecture} in GGUF", LAYOUT_OF[part.architecture]
    else:
        kind, usual = checkpoint.heads.model_type, checkpoint.usual_layout
        kind = "Meta's files" if kind == "meta" else kind
    return f"usual for {kind}: {usual} (this proves nothing about the file)"


def _shard(path: pathlib.Path) -> Shard:
    require(path.suffix == ".safetensors", "IN", "a .safetensors or .gguf file, or a folder", str(path))
    return Shard(path)


def _json(path: pathlib.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(message(str(path), "whole JSON", error)) from error
    require(isinstance(value, dict), str(path), "a JSON object", type(value).__name__)
    return value


def _config(folder: pathlib.Path, given: str | pathlib.Path | None) -> dict[str, Any]:
    place = pathlib.Path(given) if given is not None else folder
    if place.is_file():
        return _json(place)
    for name in _CONFIGS:
        if (place / name).is_file():
            return _json(place / name)
    raise ValueError(message("config", "config.json or params.json", f"neither in {place}", "--config PATH"))


def _in_folder(folder: pathlib.Path) -> tuple[list[Shard], list[pathlib.Path], list[str]]:
    """The shards of a folder, the other files, and the names of what is not taken along."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    found = [path for path in files if path.suffix == ".safetensors"]
    for path in files:
        foreign = path.suffix in _OTHER_WEIGHTS and path.name != "training_args.bin"
        require(not foreign, str(folder), "a folder of safetensors alone", f"{path.name} beside them")
    index = next((path for path in files if path.name.endswith(".safetensors.index.json")), None)
    if index is not None:
        shards = _indexed(index, found)
    else:
        require(len(found) == 1, str(folder), f"one .safetensors file, or shards with {_INDEX}", f"{len(found)} files")
        shards = [Shard(found[0])]
    companions = [path for path in files if path not in found]
    return shards, companions, sorted(f"{path.name}/" for path in folder.iterdir() if path.is_dir())


def _indexed(index: pathlib.Path, found: list[pathlib.Path]) -> list[Shard]:
    """The shards that an index names, each with the tensors it is said to have, and no other."""
    homes = _json(index).get("weight_map")
    require(isinstance(homes, dict) and bool(homes), str(index), "an index with a weight_map", "none")
    assert isinstance(homes, dict)
    wanted = set(homes.values())
    for name in sorted(wanted ^ {path.name for path in found}):
        raise ValueError(message(name, f"a shard in the folder and in {index.name}", "one of the two"))
    shards = [Shard(path) for path in found]
    for shard in shards:
        said = {name for name, home in homes.items() if home == shard.path.name}
        for name in sorted(said ^ shard.entries.keys()):
            raise ValueError(message(name, f"in {shard.path.name} and so in {index.name}", "in one of the two"))
    return shards

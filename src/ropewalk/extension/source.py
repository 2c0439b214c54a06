"""MODEL of `ropewalk extend`: a folder of Hugging Face, a GGUF file, or a Python package that carries one."""

import hashlib
import importlib.util
import json
import pathlib
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.checkpoints.ggml import LAYOUT_OF, Gguf
from ropewalk.checkpoints.shards import Shard
from ropewalk.checkpoints.source import opened as open_checkpoint
from ropewalk.errors import message, require
from ropewalk.hf.config_source import load
from ropewalk.layouts import channel_order

_PACKAGE = "package:"
_LONG_FILES = ("tkinter/__init__.py", "_pydecimal.py", "typing.py")


@dataclass(frozen=True)
class Model:
    """A model on the disk, read as far as its config and the headers of its weights.

    Args:
        path: the folder, or the GGUF file.
        config: the keys of its config.json, or those that a GGUF file amounts to.
        parameters: how many numbers its weights hold.
        fingerprint: of the config and of the files' sizes and times.
    """

    name: str
    path: pathlib.Path
    config: Mapping[str, Any]
    parameters: int
    fingerprint: str

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"

    def tokenizer(self) -> Any:
        """The model's own."""
        from transformers import AutoTokenizer

        try:
            if self.is_gguf:
                return AutoTokenizer.from_pretrained(self.path.parent, gguf_file=self.path.name, local_files_only=True)
            return AutoTokenizer.from_pretrained(self.path, local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            hint = "copy tokenizer.json and tokenizer_config.json into the folder"
            reason = str(error).splitlines()[0]
            raise ValueError(message("MODEL", "with its tokenizer beside the weights", reason, hint)) from error

    def skeleton(self) -> Any:
        """The model without weights: their shapes alone, and modules that compute from the config."""
        from transformers import AutoConfig, AutoModelForCausalLM

        if self.is_gguf:
            config = AutoConfig.for_model(**self.config)
        else:
            config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)

    def load(self, dtype: torch.dtype, device: str) -> Any:
        """The model with its weights."""
        model: Any
        if self.is_gguf:
            model = _from_gguf(self.path, self.config, dtype)
        else:
            from transformers import AutoModelForCausalLM

            options = {"dtype": dtype, "local_files_only": True, "use_safetensors": True}
            try:
                model = AutoModelForCausalLM.from_pretrained(self.path, **options)
            except RuntimeError as error:  # shapes that the config does not give
                wrong = str(error).strip().splitlines()[0]
                raise ValueError(message("MODEL", "a folder whose weights fit its config.json", wrong)) from error
        return model.to(device).eval()


def opened(model: str) -> Model:
    """What lies at `model`; no weight is read.

    Raises:
        ValueError: nothing lies there, or no model that can be evaluated.
    """
    path = _in_package(model.removeprefix(_PACKAGE)) if model.startswith(_PACKAGE) else pathlib.Path(model)
    require(path.exists(), "MODEL", "a folder, a .gguf file or package:NAME", model)
    if path.is_dir():
        require((path / "config.json").is_file(), "MODEL", "a folder with a config.json", model)
        config = load(path)
        weights = sorted(path.glob("*.safetensors"))
        require(bool(weights), "MODEL", "a folder with .safetensors", model)
        shapes = [shape for file in weights for shape in Shard(file).shapes.values()]
    else:
        require(path.suffix == ".gguf", "MODEL", "a folder, a .gguf file or package:NAME", model)
        file = Gguf(path)
        config, weights, shapes = file.config(), [path], list(file.shapes.values())
    parameters = sum(torch.Size(shape).numel() for shape in shapes)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in weights]
    fingerprint = digest(json.dumps([dict(config), stats], sort_keys=True, default=str).encode())
    return Model(path.absolute().name.removesuffix(".gguf"), path, config, parameters, fingerprint)


def digest(content: bytes) -> str:
    """16 hexadecimal digits that tell contents apart."""
    return hashlib.sha256(content).hexdigest()[:16]


def _in_package(name: str) -> pathlib.Path:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    hint = f"pip install {name.replace('_', '-')}"
    require(bool(folders), "MODEL", "package:NAME of an installed package", f"{_PACKAGE}{name}", hint=hint)
    found = sorted(file for folder in folders for file in pathlib.Path(folder).rglob("*.gguf"))
    require(len(found) == 1, "MODEL", "a package with one .gguf file", f"{len(found)} of them in {name}")
    return found[0]


def _from_gguf(path: pathlib.Path, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A model of the file's architecture, its queries and keys in the order that transformers expects."""
    from transformers import AutoConfig, AutoModelForCausalLM

    made = AutoConfig.for_model(**config)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(made, dtype=dtype)
    checkpoint = open_checkpoint(path)
    file = checkpoint.parts[0]
    assert isinstance(file, Gguf)
    state: dict[str, Tensor] = {}
    for name, shape in file.shapes.items():
        weight, turn = file.numbers(name, 0, shape[0], shape[0]).view(shape), checkpoint.turns.get(name)
        if turn is not None and LAYOUT_OF[file.architecture] != "half":
            heads = weight.view(len(turn.turning), turn.head_dim, -1)
            weight = heads[:, channel_order(turn.head_dim, turn.rotary_dim, "half")].reshape(shape)
        state[name] = weight.to(dtype)
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    tied = {"lm_head.weight"} if made.tie_word_embeddings else set()
    left = sorted({*missing} - tied) + unexpected
    require(not left, path.name, f"a whole {file.architecture}", ", ".join(left[:3]))
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(made)  # its tables are in no checkpoint
    return model


def default_text() -> pathlib.Path:
    """A long file of the standard library."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    found = next((root / name for name in _LONG_FILES if (root / name).is_file()), None)
    if found is None:
        raise ValueError(message("--text", "given where Python comes without its library's source", None))
    return found

"""GGUF files read for the layout: dequantised, under the names that Hugging Face gives.

llama.cpp stores the queries and keys of LLaMA-type models interleaved, those of Qwen half.
"""

import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ropewalk._shapes import Tensor
from ropewalk.checkpoints.shards import PIECE, RECORD, header_of
from ropewalk.checkpoints.turns import Turn
from ropewalk.errors import message, require
from ropewalk.layouts import channel_order

LAYOUT_OF = {"llama": "interleaved", "qwen2": "half", "qwen3": "half"}
_CLASS_OF = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_NUMBERS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "rope.freq_base": "rope_theta",
}
_REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
_KNOWN = {*_NUMBERS, "rope.dimension_count", "attention.value_length", "vocab_size", "tensor_data_layout"}
_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Gguf:
    """One GGUF file of a LLaMA-like model; tensors under Hugging Face's names, in float32."""

    out_name = "model.safetensors"
    metadata: Mapping[str, str] = {}

    def __init__(self, path: pathlib.Path):
        try:
            import gguf
        except ImportError as error:
            hint = "pip install 'ropewalk[gguf]'"
            raise ImportError(message("gguf", "installed to read GGUF files", "no such package", hint)) from error
        self.path, self._gguf = path, gguf
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, IndexError, UnicodeDecodeError) as error:
            raise ValueError(message(str(path), "a whole GGUF file", error)) from error
        self._fields = {name: field for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        parts = self._field("split.count") or 1
        require(parts == 1, "split.count", "1: join the parts first (llama-gguf-split --merge)", parts)
        self.architecture = self._field("general.architecture")
        known = " or ".join(sorted(LAYOUT_OF))
        require(self.architecture in LAYOUT_OF, "general.architecture", known, repr(self.architecture))
        self._stored = {_renamed(tensor.name): tensor for tensor in reader.tensors}
        self.shapes = {name: tuple(map(int, reversed(t.shape.tolist()))) for name, t in self._stored.items()}
        self._tokens = {
            name.removeprefix("tokenizer.ggml."): int(reader.fields[name].contents())
            for name in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id")
            if name in reader.fields
        }

    def _field(self, name: str) -> Any:
        return self._fields[name].contents() if name in self._fields else None

    def config(self) -> dict[str, Any]:
        """The config.json that Hugging Face would have for this model.

        Raises:
            ValueError: a key that would change the result is not understood.
        """
        prefix = self.architecture + "."
        given = {name.removeprefix(prefix): self._field(name) for name in self._fields if name.startswith(prefix)}
        given = {name: value for name, value in given.items() if value not in ("none", "Meta AI original pth")}
        for name, value in given.items():
            require(name in _KNOWN, prefix + name, "absent (it is not supported)", value)
            require(not isinstance(value, list), prefix + name, "one number for all layers", value)
        for name in _REQUIRED:
            require(name in given, prefix + name, "in the file", "none")
        heads = {_NUMBERS[name]: value for name, value in given.items() if name in _NUMBERS}
        width = heads.get("head_dim") or heads["hidden_size"] // heads["num_attention_heads"]
        for name in ("rope.dimension_count", "attention.value_length"):
            require(given.get(name, width) == width, prefix + name, f"head_dim ({width})", given.get(name))
        return {
            "architectures": [_CLASS_OF[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "rope_theta": 10_000.0,
            "rms_norm_eps": 1e-5,
            **heads,
            "head_dim": width,
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self.shapes,
            "torch_dtype": "float32",
            **self._tokens,
        }

    def numbers(self, name: str, first: int, last: int, rows: int) -> Tensor:
        """Rows [first, last) of a tensor, dequantised."""
        stored = self._stored[name]
        try:
            read = self._gguf.dequantize(stored.data[first:last], stored.tensor_type)
        except NotImplementedError as error:
            raise ValueError(
                message(stored.name, "of a type that gguf dequantises", stored.tensor_type.name)
            ) from error
        return torch.tensor(read, dtype=torch.float32).view(last - first, -1)

    def measurable(self, name: str) -> bool:
        """Every tensor can be dequantised."""
        return True

    @property
    def size(self) -> int:
        """Bytes of all tensors in float32."""
        return sum(4 * torch.Size(shape).numel() for shape in self.shapes.values())

    def write(
        self, out: pathlib.Path, turns: Mapping[str, Turn], to: str, record: str | None, told: Callable[[int], None]
    ) -> None:
        """All tensors in the layout `to`, as one safetensors file; see `Shard.write`."""
        entries = {name: ("F32", shape, 4 * torch.Size(shape).numel()) for name, shape in self.shapes.items()}
        header = header_of(entries, {"format": "pt"} | ({RECORD: record} if record else {}))
        with open(out, "wb") as sink:
            sink.write(len(header).to_bytes(8, "little") + header)
            for name, shape in self.shapes.items():
                turn = turns.get(name)
                step = turn.head_dim if turn else max(1, PIECE // (4 * torch.Size(shape[1:]).numel()))
                for first in range(0, shape[0], step):
                    rows = self.numbers(name, first, min(first + step, shape[0]), shape[0])
                    if turn and turn.turning[first // step]:
                        rows = rows[channel_order(turn.head_dim, turn.rotary_dim, to)]
                    sink.write(rows.contiguous().numpy().data)
                    told(rows.nbytes)
            sink.flush()
            os.fsync(sink.fileno())


def _renamed(name: str) -> str:
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    part = _TENSORS.get(found[2]) if found else None
    if found is None or part is None:
        raise ValueError(message(name, "a tensor whose name in Hugging Face's models is known", "an unknown one"))
    layer = f"model.layers.{found[1]}." if found[1] else ""
    return f"{layer}{part}.{found[3]}"

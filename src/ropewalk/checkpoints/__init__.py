"""Whole checkpoints between layouts: safetensors, sharded or not, adapters, and GGUF files as a source."""

from typing import TYPE_CHECKING

from ropewalk import _lazy

if TYPE_CHECKING:
    from ropewalk.checkpoints.run import convert as convert
    from ropewalk.checkpoints.run import convert_state as convert_state
    from ropewalk.checkpoints.run import detect as detect
    from ropewalk.checkpoints.run import summary as summary

__all__ = ["convert", "convert_state", "detect", "summary"]

__getattr__, __dir__ = _lazy.attach(__name__, {"run": __all__})

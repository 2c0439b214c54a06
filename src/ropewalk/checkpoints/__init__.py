"""Whole checkpoints between layouts: safetensors, sharded or not, adapters, and GGUF files as a source."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ropewalk.checkpoints.run import convert as convert
    from ropewalk.checkpoints.run import convert_state as convert_state
    from ropewalk.checkpoints.run import detect as detect
    from ropewalk.checkpoints.run import summary as summary

__all__ = ["convert", "convert_state", "detect", "summary"]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'ropewalk.checkpoints' has no attribute {name!r}")
    from ropewalk.checkpoints import run

    return getattr(run, name)

"""Models of Hugging Face transformers: their configs read as encodings, and written back.

transformers itself is not imported here; names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from ropewalk import _lazy

if TYPE_CHECKING:
    from ropewalk.hf.config import Reading as Reading
    from ropewalk.hf.config import describe as describe
    from ropewalk.hf.config import from_config as from_config
    from ropewalk.hf.config import layers as layers
    from ropewalk.hf.config_write import to_config as to_config
    from ropewalk.hf.extend_config import extended_config as extended_config
    from ropewalk.hf.extending import Extension as Extension
    from ropewalk.hf.extending import extend as extend
    from ropewalk.hf.patching import Patch as Patch
    from ropewalk.hf.patching import patch as patch

_HOME = {
    "config": ("Reading", "describe", "from_config", "layers"),
    "config_write": ("to_config",),
    "extend_config": ("extended_config",),
    "extending": ("Extension", "extend"),
    "patching": ("Patch", "patch"),
}

__all__ = [name for names in _HOME.values() for name in names]  # pyright: ignore[reportUnsupportedDunderAll]


__getattr__, __dir__ = _lazy.attach(__name__, _HOME)

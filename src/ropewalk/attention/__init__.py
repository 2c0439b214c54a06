"""Attention with any encoding: one function, one module, one cache."""

from .attend import attend
from .cache import KVCache
from .module import Attention

__all__ = ["Attention", "KVCache", "attend"]

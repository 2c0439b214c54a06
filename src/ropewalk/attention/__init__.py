"""Attention with any encoding: one function, one module, one cache."""

from ropewalk.attention.attend import attend
from ropewalk.attention.cache import KVCache
from ropewalk.attention.module import Attention

__all__ = ["Attention", "KVCache", "attend"]

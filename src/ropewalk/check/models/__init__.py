"""Whole causal models of transformers under test, by their logits alone."""

from ropewalk.check.models.build import ModelSubject
from ropewalk.check.models.laws import LAWS_OF_MODELS

__all__ = ["LAWS_OF_MODELS", "ModelSubject"]

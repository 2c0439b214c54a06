"""Wrong functions and modules of strangers, each with one fault, for the laws of `check.outside`."""

from outside_mutants import of_attention, of_bias, of_rotation, registry
from outside_mutants.registry import (
    MUTANTS,
    OutsideMutant,
    by_buckets,
    right,
    right_attention,
    right_bias,
)

__all__ = [
    "MUTANTS",
    "OutsideMutant",
    "by_buckets",
    "of_attention",
    "of_bias",
    "of_rotation",
    "registry",
    "right",
    "right_attention",
    "right_bias",
]

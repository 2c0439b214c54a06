"""All wrong versions, in `MUTANTS`."""

from mutants import of_attention, of_backends, of_positions, of_rotation, of_runtime
from mutants.registry import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "of_attention", "of_backends", "of_positions", "of_rotation", "of_runtime"]

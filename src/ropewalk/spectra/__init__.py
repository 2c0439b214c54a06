"""Spectra: how fast each pair of channels turns, as plain numbers.

Every way to stretch a context is a pure function from numbers to a `Spectrum`; the encoding that uses it stays
one class.  What depends on the length of a sequence takes that length as an argument: there is no history, so
nothing can be stale.
"""

from ropewalk.spectra.ramps import llama3, yarn, yarn_magnitude, yarn_softmax_factor
from ropewalk.spectra.spectrum import Number, Spectrum, check_base, plain, powers
from ropewalk.spectra.stretches import dynamic_ntk, linear, longrope, ntk, proportional

__all__ = [
    "Number",
    "Spectrum",
    "check_base",
    "dynamic_ntk",
    "for_length",
    "linear",
    "llama3",
    "longrope",
    "ntk",
    "plain",
    "powers",
    "proportional",
    "yarn",
    "yarn_magnitude",
    "yarn_softmax_factor",
]

_BY_NAME = {f.__name__: f for f in (plain, linear, ntk, dynamic_ntk, yarn, llama3, longrope, proportional)}


def for_length(spectrum: Spectrum, length: int) -> Spectrum:
    """The spectrum that the same rule gives a sequence of `length` tokens: another one only where the rule
    depends on the length.  Keys turned with `spectrum` fit a cache of that length if, and only if, both are equal.

    >>> short = dynamic_ntk(8, stretch=2, train_len=16, length=16)
    >>> for_length(short, 16) == short, for_length(short, 17) == short
    (True, False)
    """
    if spectrum.recipe is None or not spectrum.depends_on_length:
        return spectrum
    name, numbers = spectrum.recipe
    return _BY_NAME[name](**{**dict(numbers), "length": length})

"""Which encodings have an explanation, and what is known of the others."""

import inspect
from collections.abc import Callable

from ropewalk import naming
from ropewalk.errors import message
from ropewalk.explain.biases import alibi, hybrid
from ropewalk.explain.text import Explanation
from ropewalk.explain.turning import rotary, sinusoidal

ENCODINGS: dict[str, Callable[..., Explanation]] = {
    "alibi": alibi,
    "hybrid": hybrid,
    "rotary": rotary,
    "sinusoidal": sinusoidal,
}
"""Explanations by the name of an encoding."""


def explained(name: str, **given) -> Explanation:
    """The explanation of the encoding called `name`; `given` are the arguments of its function, None for none.

    Raises:
        ValueError: an encoding without an explanation, with what is known of it; an argument that has no meaning for
            it, or a missing one.

    >>> print(str(explained("alibi", num_heads=8)).splitlines()[0])
    ALiBi for 8 heads: score(h, i, j) gains -slope_h |i - j|
    """
    name = "hybrid" if name == "rotary+alibi" else name
    if name not in ENCODINGS:
        choices = f"one with an explanation ({', '.join(ENCODINGS)})"
        raise ValueError(message("encoding", choices, repr(name), _known(name)))
    function = ENCODINGS[name]
    parameters = inspect.signature(function).parameters
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if key not in parameters:
            raise ValueError(message(key, f"absent for {name}", repr(value), f"it has {', '.join(parameters)}"))
    if "slopes" in values:  # one for each head, so the list tells how many there are
        values.setdefault("num_heads", len(values["slopes"]))
    for key, parameter in parameters.items():
        if parameter.default is parameter.empty and key not in values:
            raise ValueError(message(key, f"given for {name}", None))
    return function(**values)


def _known(name: str) -> str:
    """The definition of an encoding of this package, as its class states it."""
    if name not in naming.names():
        return ""
    kind = naming._class(name)
    return f"{kind.__name__}: {(inspect.getdoc(kind) or '').partition(chr(10) * 2)[0].replace(chr(10), ' ')}"

"""The list of all laws.  Every encoding, every backend and every wrong version in the tests runs through it."""

from collections.abc import Iterator

from ropewalk.check import attending, numbers, runtime
from ropewalk.check.subject import Finding, Law, Subject


def _law(name: str, find, compiled: bool = False) -> Law:
    return Law(name, " ".join(find.__doc__.split()), find, compiled)


LAWS: tuple[Law, ...] = (
    _law("precision", numbers.precision),
    _law("precision of tables", numbers.absolute_precision),
    _law("casts", numbers.casts),
    _law("dtypes", numbers.dtypes),
    _law("double", numbers.double),
    _law("distance", numbers.distance),
    _law("norms", numbers.norms),
    _law("layouts", numbers.layout_pair),
    _law("formula", numbers.formula),
    _law("slopes", numbers.slopes),
    _law("bias", numbers.bias_shape),
    _law("formula of attention", attending.by_formula),
    _law("reference", attending.as_reference),
    _law("causality", attending.future),
    _law("cache", attending.chunks),
    _law("moved keys", attending.moves),
    _law("padding", attending.padding),
    _law("packing", attending.packing),
    _law("shards", attending.shards),
    _law("empty rows", attending.empty_rows),
    _law("grouped heads", attending.grouped),
    _law("positions", attending.scattered),
    _law("half precision", attending.half_precision),
    _law("distinct", attending.distinct),
    _law("history", runtime.history),
    _law("purity", runtime.purity),
    _law("gradients", runtime.gradients),
    _law("bounds", runtime.bounds),
    _law("state", runtime.state),
    _law("compile", runtime.compiles, compiled=True),
)


def law_named(name: str) -> Law:
    """The law called `name`."""
    return next(law for law in LAWS if law.name == name)


def broken(subject: Subject, *, compiled: bool = False) -> Iterator[Finding]:
    """Findings of every law, those that compile on request."""
    for law in LAWS:
        if compiled or not law.compiled:
            yield from law(subject)

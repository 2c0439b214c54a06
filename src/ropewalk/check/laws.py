"""The list of all laws.  Every encoding, every backend and every wrong version in the tests runs through it."""

from collections.abc import Iterator

from ropewalk.check import attending, numbers, runtime
from ropewalk.check.subject import Subject
from ropewalk.check.verdict import Finding, Law


def _law(name: str, find, kind: str, compiled: bool = False) -> Law:
    return Law(name, " ".join(find.__doc__.split()), find, kind, "", compiled)


LAWS: tuple[Law, ...] = (
    _law("precision", numbers.precision, "K01"),
    _law("precision of tables", numbers.absolute_precision, "K21"),
    _law("casts", numbers.casts, "K01"),
    _law("dtypes", numbers.dtypes, "K02"),
    _law("double", numbers.double, "K02"),
    _law("distance", numbers.distance, "K09"),
    _law("norms", numbers.norms, "K08"),
    _law("layouts", numbers.layout_pair, "K07"),
    _law("formula", numbers.formula, "K09"),
    _law("slopes", numbers.slopes, "K14"),
    _law("bias", numbers.bias_shape, "K15"),
    _law("formula of attention", attending.by_formula, "K16"),
    _law("reference", attending.as_reference, "K15"),
    _law("causality", attending.future, "K16"),
    _law("cache", attending.chunks, "K04"),
    _law("moved keys", attending.moves, "K04"),
    _law("padding", attending.padding, "K05"),
    _law("packing", attending.packing, "K06"),
    _law("shards", attending.shards, "K06"),
    _law("empty rows", attending.empty_rows, "K16"),
    _law("grouped heads", attending.grouped, "K07"),
    _law("positions", attending.scattered, "K16"),
    _law("half precision", attending.half_precision, "K15"),
    _law("distinct", attending.distinct, "K11"),
    _law("history", runtime.history, "K03"),
    _law("purity", runtime.purity, "K22"),
    _law("gradients", runtime.gradients, "K22"),
    _law("bounds", runtime.bounds, "K23"),
    _law("state", runtime.state, "K19"),
    _law("compile", runtime.compiles, "K18", compiled=True),
)


def law_named(name: str) -> Law:
    """The law called `name`."""
    return next(law for law in LAWS if law.name == name)


def broken(subject: Subject, *, compiled: bool = False) -> Iterator[Finding]:
    """Findings of every law, those that compile on request."""
    for law in LAWS:
        if compiled or not law.compiled:
            yield from law(subject)

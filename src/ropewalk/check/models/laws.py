"""The list of all laws of models."""

from ropewalk.check.models import batches, configs, numeric
from ropewalk.check.models.compare import TOLERANCE, WITH_ANGLES
from ropewalk.check.verdict import Law

NOISE = (
    "relative error, root mean square: of half precision 4 times what rounding the weights alone does;"
    " of float32 4 eps / sqrt(12) x sqrt((8 operations x layers + 2) x width), far out plus what its angles are off"
)
EXACT = "bit for bit: the same computation twice"
CAST = f"half precision {EXACT}; otherwise {WITH_ANGLES}"
NONE = "equality of numbers, or an error"


def _law(name: str, find, kind: str, tolerance: str = TOLERANCE) -> Law:
    return Law(name, " ".join(find.__doc__.split()), find, kind, tolerance, group="model")


LAWS_OF_MODELS: tuple[Law, ...] = (
    _law("decoding", batches.decoding, "K04"),
    _law("padding", batches.padding, "K05"),
    _law("generation", batches.generation, "K05"),
    _law("packing", batches.packing, "K06"),
    _law("neighbours", batches.neighbours, "K03"),
    _law("causality", batches.causality, "K16"),
    _law("shift", numeric.shift, "K09", WITH_ANGLES),
    _law("precision", numeric.precision, "K01", NOISE),
    _law("casts", numeric.casts, "K01", CAST),
    _law("history", numeric.history, "K03", EXACT),
    _law("beyond", numeric.beyond, "K23", NONE),
    _law("distinct", configs.distinct, "K11"),
    _law("implementations", configs.implementations, "K16"),
    _law("fields", configs.fields, "K11", EXACT),
    _law("reading", configs.reading, "K11", WITH_ANGLES),
)

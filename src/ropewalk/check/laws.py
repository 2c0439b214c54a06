"""The list of all laws.  Every encoding, every backend and every wrong version in the tests runs through it."""

from collections.abc import Iterator

from ropewalk.check import attending, backends, biases, grids, numbers, packing, rotation, runtime
from ropewalk.check.subject import Subject
from ropewalk.check.verdict import Finding, Law

BITS = "none: equal bit for bit"
EXACT = "none: dtypes, flags and whole numbers are compared"
TABLE = (
    "(3 pi + 1) eps / 2 for each cosine or sine: an angle of at most pi is rounded three times, the result once; "
    "at position p also 2 pi p 2^-65, for a frequency is held to 2^-64 of a turn, and eps / 2 for a magnitude"
)
SCORE = (
    "twice |q| |k| / sqrt(head_dim) times 2 sqrt(2) of a table's error, (3 pi + 1) eps / 2 + 2 pi p 2^-65 at "
    "position p, and sqrt(head_dim) eps for the sum"
)
ATTENTION = (
    "4 eps sqrt(head_dim + keys) of float32 times the largest output: a sum over channels, one over keys, whose "
    "roundings add up like a random walk"
)
GROUP = "a gradient of a key sums over the queries of its group, too"
TURNS = "for each turn two products with a cosine or sine that is off by (3 pi + 1) eps / 2, and two roundings"


def _law(name: str, find, kind: str, tolerance: str, compiled: bool = False) -> Law:
    return Law(name, " ".join(find.__doc__.split()), find, kind, tolerance, compiled)


LAWS: tuple[Law, ...] = (
    _law("precision", numbers.precision, "K01", TABLE),
    _law("absolute positions", numbers.absolute, "K21", f"learned rows: {BITS}; sines and cosines: {TABLE}"),
    _law("precision of tables", numbers.absolute_precision, "K21",
         "sqrt(2 model_dim) errors of a table, (3 pi + 1) eps / 2 + 2 pi p 2^-65 at position p: model_dim products of "
         "two numbers that are off, like a random walk"),
    _law("casts", numbers.casts, "K01", BITS),
    _law("dtypes", numbers.dtypes, "K02", EXACT),
    _law("double", numbers.double, "K02",
         f"eps of float64, and position times eps for an angle that is a product in float64: {SCORE}"),
    _law("distance", numbers.distance, "K09", f"eps of float32: {SCORE}"),
    _law("norms", rotation.norms, "K08",
         "channels that do not turn: none; the length of a pair over what it was: two errors of a table, "
         "(3 pi + 1) eps / 2 each, and 4 eps for the arithmetic of float32"),
    _law("layouts", rotation.layout_pair, "K07",
         f"turned vectors: {TURNS}; scores of projections: {SCORE}, and 4 eps sqrt(model_dim) for the projection"),
    _law("formula", rotation.formula, "K09",
         "frequencies: 4 eps of float64, for a power and a quotient; cosines at position 1: (3 pi + 1) eps / 2 of "
         "float32"),
    _law("temperature", rotation.temperature, "K10",
         "keys: none; queries: 4 eps of float32 times the factor, for a logarithm, a quotient and a product"),
    _law("axes", grids.axes, "K12", f"text and cells: {BITS}; scores: {SCORE}"),
    _law("sections", grids.sections, "K12", TURNS),
    _law("slopes", biases.slopes, "K14", "4 eps of float32: slopes are at most 1, a power of 2 rounded once"),
    _law("bias", biases.bias_shape, "K15",
         "zero, sign and symmetry: none; proportion to the distance: 4 eps of float32 times the bias"),
    _law("relative bias", biases.relative_bias, "K15", BITS),
    _law("formula of attention", attending.by_formula, "K16",
         f"{ATTENTION}; and for tables of float32 against those of float64 the error of a score times twice the "
         "largest value"),
    _law("reference", backends.as_reference, "K16",
         f"{ATTENTION}, and times scale sqrt(head_dim) where another scale makes larger scores; {GROUP}"),
    _law("blocks", backends.blocks, "K17", f"{ATTENTION}; {GROUP}"),
    _law("causality", attending.future, "K16", f"what lies in the future: {BITS}; few queries: {ATTENTION}"),
    _law("cache", attending.chunks, "K04", ATTENTION),
    _law("moved keys", attending.moves, "K04",
         f"times the largest channel: {TURNS}, and 2 pi p 2^-65 at position p; after evictions also 4 eps "
         "sqrt(model_dim), for keys and values were projected one by one"),
    _law("padding", attending.padding, "K05", f"positions: none; outputs: {ATTENTION}"),
    _law("packing", packing.packing, "K06", f"positions: none; outputs: {ATTENTION}"),
    _law("shards", packing.shards, "K06", f"tokens of each rank: none; outputs: {ATTENTION}"),
    _law("empty rows", attending.empty_rows, "K16", "none: exactly 0; gradients only have to be finite"),
    _law("grouped heads", attending.grouped, "K07", ATTENTION),
    _law("positions", attending.scattered, "K16", ATTENTION),
    _law("half precision", backends.half_precision, "K15",
         "8 eps of the half precision times the largest output: the score of a key, its weight, the product with its "
         "value and the result are each rounded"),
    _law("distinct", attending.distinct, "K11", f"equal would be: {ATTENTION}"),
    _law("history", runtime.history, "K03", BITS),
    _law("purity", runtime.purity, "K22", BITS),
    _law("gradients", runtime.gradients, "K22",
         "against finite differences: torch.autograd.gradcheck's own, in float64; in place, times the largest "
         f"channel: {TURNS}, in float64"),
    _law("bounds", runtime.bounds, "K23", EXACT),
    _law("state", runtime.state, "K19", BITS),
    _law("compile", runtime.compiles, "K18",
         "4 eps sqrt(model_dim + head_dim + keys) of float32 times the largest output, for a compiler may order sums "
         "anew", compiled=True),
)  # fmt: skip


def law_named(name: str) -> Law:
    """The law called `name`."""
    return next(law for law in LAWS if law.name == name)


def broken(subject: Subject, *, compiled: bool = False) -> Iterator[Finding]:
    """Findings of every law, those that compile on request."""
    for law in LAWS:
        if compiled or not law.compiled:
            yield from law(subject)

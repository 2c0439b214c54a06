"""Laws of functions and modules from elsewhere: rotations, biases, attention."""

from ropewalk.check.adapters import Adapter, AttentionFunction, Bias, Rotation
from ropewalk.check.outside import attention, bias, rotation, turning
from ropewalk.check.outside.trial import check_callable, of_rotation, on_a_copy
from ropewalk.check.verdict import Law, Verdict

BITS = "none: equal bit for bit"
EXACT = "none: dtypes, flags and whole numbers are compared"
ANGLE = (
    "at position p: p inv_freq (|ln inv_freq| + 11) 2^-24 of float32 angles, for eleven roundings and that of the "
    "exponent of a power, and (3 pi + 1) 2^-24 of the table; the table alone where exact angles are stated"
)
TWICE = "4 eps of float32 times the largest channel: the same cosine or sine computed twice, two products, a sum"
SUMS = (
    "4 eps sqrt(head_dim + keys) of float32 times the largest output: a sum over channels, one over keys, whose "
    "roundings add up like a random walk"
)


def _guarded(group: str, find):
    return on_a_copy(of_rotation(find) if group == "rotation" else find)


def _laws(group: str, rows) -> tuple[Law, ...]:
    return tuple(
        Law(name, " ".join(find.__doc__.split()), _guarded(group, find), kind, tolerance, group=group)
        for name, find, kind, tolerance in rows
    )


LAWS_OF_ROTATION: tuple[Law, ...] = _laws(
    "rotation",
    (
        ("start", rotation.start, "K04", BITS),
        ("layout", rotation.layout, "K07", EXACT),
        ("width", rotation.width, "K08", BITS),
        ("frequencies", rotation.frequencies, "K09",
         "inv_freq (|ln inv_freq| + 11) 2^-24: nine roundings of float32 and that of the exponent of a power, two to "
         "read it from a sine and a cosine"),
        ("magnitude", rotation.magnitude, "K10",
         "two errors of a table, (3 pi + 1) 2^-24 each, and 4 eps of float32 for the arithmetic, times the factor"),
        ("precision", rotation.precision, "K01", ANGLE),
        ("half precision", rotation.half_precision, "K01", f"eps of the half precision, and {ANGLE}"),
        ("distance", rotation.distance, "K09",
         f"|q| |k| times 2 sqrt(2) of: {ANGLE}; and 4 eps sqrt(head_dim) for the sum"),
        ("positions", turning.positions, "K04", TWICE),
        ("neighbours", turning.neighbours, "K05", TWICE),
        ("dtypes", turning.dtypes, "K02", EXACT),
        ("history", turning.history, "K03", BITS),
        ("casts", turning.casts, "K01", TWICE),
        ("purity", turning.purity, "K22", BITS),
        ("gradients", turning.gradients, "K22", TWICE),
        ("bounds", turning.bounds, "K23", ANGLE),
    ),
)  # fmt: skip

LAWS_OF_BIAS: tuple[Law, ...] = _laws(
    "bias",
    (
        ("slopes", bias.slopes, "K14", "4 eps of float32: slopes are at most 1, a power of 2 rounded once"),
        ("shape", bias.shape, "K15", "zero and sign: none; proportion: 4 eps of float32 times the bias"),
        ("rows", bias.rows, "K15", BITS),
        ("shift", bias.shift, "K15",
         "ALiBi: 4 eps of float32 times the largest bias at that position, for two products; otherwise none"),
        ("buckets", bias.buckets, "K20", BITS),
        ("history", bias.history, "K03", BITS),
        ("casts", bias.casts, "K15",
         "3/2 eps of the dtype of the result times the largest bias, if it is another: slope, distance and product "
         "are rounded; none if the dtype stays"),
        ("purity", bias.purity, "K22", BITS),
        ("bounds", bias.bounds, "K23", "ALiBi: 4 eps of float32 times the bias; T5: none"),
    ),
)  # fmt: skip

LAWS_OF_ATTENTION: tuple[Law, ...] = _laws(
    "attention",
    (
        ("causality", attention.causality, "K16", f"weights of later keys: none; the first row: {SUMS}"),
        ("seen", attention.seen, "K17", f"weights of keys that may be seen: above 0; their sum: {SUMS}"),
        ("cache", attention.cache, "K04", f"twice {SUMS}"),
        ("shift", attention.shift, "K09",
         f"twice {SUMS}; and twice the largest value times |q| |k| / sqrt(head_dim) times 2 sqrt(2) of: {ANGLE}"),
        ("distances", attention.distances, "K04", f"equal would be: twice {SUMS}"),
        ("neighbours", attention.neighbours, "K05", f"twice {SUMS}"),
        ("grouped", attention.grouped, "K07", EXACT),
        ("dtypes", attention.dtypes, "K02", EXACT),
        ("history", attention.history, "K03", BITS),
        ("purity", attention.purity, "K22", BITS),
        ("gradients", attention.gradients, "K22",
         "finite differences in float64: 4 sqrt(eps) of float32, steps of sqrt(eps); of values, times sqrt of the "
         f"heads of a group: {SUMS}"),
    ),
)  # fmt: skip


def laws_of(target: Adapter) -> tuple[Law, ...]:
    """The laws that a stranger has to keep."""
    if isinstance(target, Rotation):
        return LAWS_OF_ROTATION
    return LAWS_OF_BIAS if isinstance(target, Bias) else LAWS_OF_ATTENTION


def run_on(target: Adapter) -> tuple[Verdict, ...]:
    """What each law says about a stranger."""
    return tuple(law.verdict(target) for law in laws_of(target))


__all__ = [
    "LAWS_OF_ATTENTION",
    "LAWS_OF_BIAS",
    "LAWS_OF_ROTATION",
    "AttentionFunction",
    "Bias",
    "Rotation",
    "check_callable",
    "laws_of",
    "run_on",
]

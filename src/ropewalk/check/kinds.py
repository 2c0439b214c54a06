"""The kinds of position faults: what all findings are sorted into."""

from typing import NamedTuple


class Kind(NamedTuple):
    """A kind of fault: its name, and in one sentence what goes wrong in programs that have it."""

    name: str
    sentence: str


KINDS: dict[str, Kind] = {
    "K01": Kind(
        "phase precision", "Positions, frequencies or tables are held in a precision that cannot tell them apart."
    ),
    "K02": Kind("dtype", "The result has another dtype than the input, or less accuracy than its dtype promises."),
    "K03": Kind("history", "A result depends on what was computed before, or on how long some other input was."),
    "K04": Kind("cache", "Decoding with cached keys gives other numbers than one pass over the whole sequence."),
    "K05": Kind("padding", "Padding is counted, attended or read, so that a padded row differs from the row alone."),
    "K06": Kind(
        "packing and shards",
        "Documents in one row, or parts of one sequence on several devices, differ from the whole.",
    ),
    "K07": Kind("layout", "Channels or heads are paired in another order than the weights were made for."),
    "K08": Kind("rotary width", "More, fewer or other channels turn than should."),
    "K09": Kind("frequencies", "Frequencies do not follow their published formula, or q and k turn differently."),
    "K10": Kind("magnitude", "The factor on tables or on the softmax is missing, or applied twice."),
    "K11": Kind("config", "What a config says, or what was asked for, is not what is computed."),
    "K12": Kind(
        "multi-axis sections", "Channels of M-RoPE are dealt to the wrong axis, or text is not what RoPE gives."
    ),
    "K13": Kind("axial positions", "Rows and columns of a grid are confused."),
    "K14": Kind("slopes", "Heads have other slopes than published, on a shard or for odd head counts."),
    "K15": Kind("bias", "A bias has the wrong sign, place, scale or precision, or is missing in a decode step."),
    "K16": Kind("mask", "What may not be attended is, or a row with nothing to attend is not 0."),
    "K17": Kind("block masks", "A kernel that works in blocks forgets a rest, an empty slot or a gradient."),
    "K18": Kind(
        "compile and export",
        "A traced program differs from the one that was traced, or needs numbers that devices lack.",
    ),
    "K19": Kind("state", "Saved, loaded, moved or materialised modules have other tables than fresh ones."),
    "K20": Kind(
        "relative bias", "Distances fall into the wrong bucket, or a decode step reads another row than one pass."
    ),
    "K21": Kind(
        "absolute positions", "Embedded positions are shifted, paired wrongly or depend on more than the position."
    ),
    "K22": Kind("purity and gradients", "An input is overwritten, or its gradient is missing or wrong."),
    "K23": Kind("bounds", "A position beyond the end wraps around or reads elsewhere instead of being refused."),
}

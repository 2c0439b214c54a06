"""ALiBi's slopes and how far its heads see, and ALiBi together with RoPE."""

import math
from collections.abc import Sequence

import torch

from ropewalk.attention.windows import SLACK, default_eps, reach_of_slope
from ropewalk.encodings import ALiBi, Hybrid, Rotary
from ropewalk.errors import require, require_number
from ropewalk.explain.exact import dot, turned
from ropewalk.explain.text import Explanation, Section, number, plural, section, table
from ropewalk.explain.turning import _checked, _plain

SHARE = 0.01
FAR = 1 << 62


def alibi(num_heads: int, *, slopes: Sequence[float] | None = None, share: float = SHARE) -> Explanation:
    """Where each slope comes from and how far each head sees (Press et al. 2022, arXiv:2108.12409v2, Sec. 3).

    Args:
        num_heads: of the whole model.
        slopes: instead of the published rule, score units per token.
        share: of the weight of the query's own key, in (0, 1), below which a key counts as unseen.

    >>> alibi(12).numbers["heads"][8]["slope"]
    0.7071067811865476
    """
    require(0 < require_number(share, "share") < 1, "share", "between 0 and 1", share)
    encoding = ALiBi(num_heads, slopes=slopes)
    heads = [_head(i, m, encoding, share) for i, m in enumerate(encoding.slopes)]
    numbers = {"num_heads": num_heads, "share": float(share), "heads": heads}
    columns = ("head", "rule", "slope", f"own share < {share:g}", "read, float32", "read, bfloat16")
    rows = [[str(h["head"]), h["rule"], f"{h['slope']:.8g}", *map(_count, (h["sees"], h["float32"], h["bfloat16"]))]
            for h in heads]  # fmt: skip
    head = f"ALiBi for {plural(num_heads, 'head')}: score(h, i, j) gains -slope_h |i - j|"
    return Explanation(
        head, (_rule(encoding), section("Slopes and sight", table(columns, rows)), _sight(share)), numbers
    )


def _count(tokens: int | None) -> str:
    return "everything" if tokens is None else str(tokens)


def reach(slope: float, share: float) -> int | None:
    """The nearest distance at which exp(-slope distance) is below `share`, tokens; None without a slope."""
    if slope == 0:
        return None
    nearest = max(math.floor(-math.log(share) / slope), 0)
    while math.exp(-slope * nearest) >= share:
        nearest += 1
    return nearest


def _head(i: int, slope: float, encoding: ALiBi, share: float) -> dict:
    bound = {}
    for name in ("float32", "bfloat16"):
        limit = torch.tensor([math.log(default_eps(getattr(torch, name))) - SLACK], dtype=torch.float64)
        read = int(reach_of_slope(torch.tensor([slope], dtype=torch.float64), limit, FAR)[0]) if slope else FAR
        bound[name] = None if read == FAR else read
    return {"head": i, "rule": _origin(i, encoding), "slope": slope, "sees": reach(slope, share), **bound}


def _origin(i: int, encoding: ALiBi) -> str:
    if encoding.given is not None:
        return "given"
    lower = 1 << (encoding.num_heads.bit_length() - 1)
    if i < lower:
        return f"2^(-8 x {i + 1}/{lower})"
    return f"2^(-8 x {2 * (i - lower) + 1}/{2 * lower})"


def _rule(encoding: ALiBi) -> Section:
    n = encoding.num_heads
    lower = 1 << (n.bit_length() - 1)
    if encoding.given is not None:
        return section("The slopes are given, not the published rule's")
    if n == lower:
        return section(f"{n} is a power of two: slope of head h = 2^(-8 (h + 1) / {n})   (Sec. 3)")
    return section(
        f"{n} is not a power of two; the authors' code takes two halves",
        f"heads 0-{lower - 1}: all {lower} slopes of the rule for {lower} heads, 2^(-8 (h + 1) / {lower})",
        f"heads {lower}-{n - 1}: every second slope, from the first, of the rule for {2 * lower} heads",
        "The order is that of checkpoints; it does not fall throughout, so a shard must name its heads.",
    )


def _sight(share: float) -> Section:
    return section(
        "How to read it",
        f"own share < {share:g}: from this distance on, a key as similar as the query's own weighs less than {share:g}",
        "of it: exp(-slope x distance).  A more similar key is seen farther: each score unit adds 1 / slope tokens.",
        "read: keys before its own that banded attention reads at least; all keys beyond together weigh at most half",
        "the rounding of one number: exp(-slope (W + 1)) / (1 - exp(-slope)) <= 2^-24 (float32), 2^-8 (bfloat16).",
        "That is the window where no key is more similar than the own one; attend() adds (max |q| |k| / sqrt(head_dim)",
        "- own score) / slope, computed from the data, so that the bound holds for any input.",
    )


def hybrid(
    vector: Sequence[float],
    num_heads: int,
    *,
    key: Sequence[float] | None = None,
    distance: int = 3,
    base: float = 10_000.0,
    layout: str = "interleaved",
    alpha: float | None = None,
) -> Explanation:
    """RoPE's score and ALiBi's bias for the same two vectors, head by head.

    Args:
        vector: the query, an even number of channels; `key` by default is the same vector.
        num_heads: of the whole model.
        distance: from key to query, tokens, at least 0.
        base, layout: of the rotation.
        alpha: None for the sum, or the weight in alpha * score + (1 - alpha) * bias.

    >>> hybrid([0.2, 0.1, -0.3, 0.7], 8, distance=2).numbers["heads"][0]["bias"]
    -1.0
    """
    q = _checked("vector", vector)
    k = q if key is None else _checked("key", key)
    require(len(k) == len(q), "key", f"as long as vector ({len(q)})", len(k))
    require(isinstance(distance, int) and 0 <= distance < 1 << 40, "distance", "an integer of at least 0", distance)
    rope, bias = Rotary(len(q), base=base, layout=layout), ALiBi(num_heads)
    both = Hybrid(rope, bias, alpha)
    score = dot(turned(rope, q, distance), turned(rope, k, 0)) / math.sqrt(len(q))
    one, zero = torch.tensor(float(distance), dtype=torch.float64), torch.tensor(0.0, dtype=torch.float64)
    added = both.bias(torch.arange(num_heads), one, zero).tolist()
    weight = 1.0 if alpha is None else float(alpha)
    heads = [{"head": i, "bias": b, "sum": weight * score + b} for i, b in enumerate(added)]
    numbers = {"vector": q, "key": k, "distance": distance, "alpha": alpha, "score": score, "heads": heads}
    form = "score + bias" if alpha is None else f"{alpha:g} score + {1 - alpha:g} bias"
    rows = [[str(h["head"]), number(weight * score), number(h["bias"]), number(h["sum"])] for h in heads]
    steps = (
        section(
            "The rotation: q and k turn, and their score depends on the distance only",
            f"q {_plain(q)}, k {_plain(k)}, {distance} tokens apart: q . k / sqrt({len(q)}) = {number(score)}",
            "`ropewalk explain rotary` shows each step.",
        ),
        section(
            f"The bias comes after the scaling: {form}",
            table(("head", "score's part", "bias's part", "sum"), rows),
            "The rotation is the same in every head; the bias makes each head forget at its own pace.",
            *(["A weight of 0 leaves a bias without content, which is not ALiBi."] if alpha is not None else []),
        ),
    )
    return Explanation(f"RoPE and ALiBi in one score, {plural(num_heads, 'head')}", steps, numbers)

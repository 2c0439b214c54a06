"""Figures that do not come from losses: what attention costs, and what trained heads attend to."""

import math
from typing import Any

from ropewalk.study.evidence import Study
from ropewalk.study.figures import Figure, look, make, plain_log, token_axis
from ropewalk.study.verdicts import label

SHOWN_HEADS = 2
COLUMNS = 3
FLOOR = 1e-4
COSTS = {
    "time": ("forward + backward time", "training"),
    "memory": ("extra peak memory, forward + backward", "training_memory"),
}


def cost(study: Study, kind: str) -> Figure | None:
    """Time or memory of attention with each encoding, relative to attention without, over the length."""
    if study.cost is None:
        return None
    said, key = COSTS[kind]
    rows: dict[str, dict[int, tuple[float, float, float]]] = {}
    for row in study.cost["rows"]:
        if row["name"] not in ("none", "torch"):
            middle = row[key]["ratio"]
            ends = row[key].get("low", middle), row[key].get("high", middle)
            rows.setdefault(row["name"], {})[row["seq_len"]] = (middle, *ends)
    if not rows:
        return None
    lengths = sorted({seq_len for row in rows.values() for seq_len in row})

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        axes.axhline(1, color="#888888", linewidth=1.3, zorder=1)
        for index, (name, row) in enumerate(rows.items()):
            middle, low, high = zip(*row.values(), strict=True)
            ends = [
                [m - end for m, end in zip(middle, low, strict=True)],
                [end - m for m, end in zip(middle, high, strict=True)],
            ]
            axes.errorbar(list(row), middle, yerr=ends, label=label(name), capsize=3, elinewidth=1.2, **look(index))
        plain_log(axes, [1.0, *(end for row in rows.values() for ends in row.values() for end in ends)])
        axes.set_ylabel("relative to no encoding")
        token_axis(axes, lengths, None, "sequence length, tokens")

    caption = f"Attention's {said} with each encoding, divided by attention without one (1 = free)."
    if kind == "time":
        caption += " Medians of interleaved rounds; bars: middle half of the rounds."
    words = [
        f"{label(name)}: " + ", ".join(f"{ends[0]:.2f} at {n}" for n, ends in row.items()) for name, row in rows.items()
    ]
    return make(f"cost-{kind}", draw, caption, f"Attention's {said}, relative to no encoding. {'; '.join(words)}.")


def attention(study: Study) -> Figure | None:
    """Attention weights of trained heads, one column per encoding, all on one scale."""
    found = {name: maps for name in study.encodings if (maps := trained_maps(study, name))}
    if not found:
        return None
    panels = [(name, entry) for name, maps in found.items() for entry in maps[-SHOWN_HEADS:]]
    longest = max(entry["seq_len"] for _, entry in panels)
    columns = min(COLUMNS, len(found))
    rows = math.ceil(len(found) / columns) * SHOWN_HEADS

    def draw(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat:
            axes.set_visible(False)
        image = None
        for index, name in enumerate(found):
            for head, entry in enumerate(found[name][-SHOWN_HEADS:]):
                axes = grid[index // columns * SHOWN_HEADS + head][index % columns]
                image = _one_map(axes, entry, study.train_len, longest, LogNorm(FLOOR, 1))
                where = f"layer {entry['layer']}, head {entry['head']}"
                axes.set_title(f"{label(name)}\n{where}" if head == 0 else where, fontsize=12)
        figure.supxlabel("key position, tokens", fontsize=12)
        figure.supylabel("query position, tokens", fontsize=12)
        bar = figure.colorbar(image, ax=grid, shrink=0.9 / math.sqrt(rows / 2), pad=0.02, label="weight per key")
        bar.set_ticks([1, 0.1, 0.01, 0.001, FLOOR], labels=["1", "0.1", "0.01", "0.001", "≤ 0.0001"])

    caption = (
        f"Attention weights of trained heads on {longest} tokens of held-out text (counted from 0), one"
        f" logarithmic scale for all. Dashed: the training length, {study.train_len}."
    )
    alt = f"Attention maps. {'; '.join(looks_back(study))}."
    return make("attention", draw, caption, alt, (1.6 + 1.9 * columns, 0.6 + 2.2 * rows))


def _one_map(axes: Any, entry: dict[str, Any], train_len: int, longest: int, norm: Any) -> Any:
    seq_len = entry["seq_len"]
    keys = seq_len / len(entry["weights"])
    # what lies ahead stays unpainted
    weights = [
        [max(value / keys, FLOOR) if key <= query else math.nan for key, value in enumerate(line)]
        for query, line in enumerate(entry["weights"])
    ]
    image = axes.imshow(weights, norm=norm, cmap="magma_r", extent=(0, seq_len, seq_len, 0), interpolation="nearest")
    axes.grid(False)
    axes.set_visible(True)
    axes.set_xlim(0, longest)
    axes.set_ylim(longest, 0)
    axes.set_xticks([0, longest // 2])
    axes.set_yticks([0, longest // 2])
    axes.axvline(train_len, color="#888888", linestyle="--", linewidth=0.8)
    axes.axhline(train_len, color="#888888", linestyle="--", linewidth=0.8)
    return image


def trained_maps(study: Study, encoding: str) -> list[dict[str, Any]]:
    """The attention maps of the first seed that kept some: dicts with layer, head, seq_len, weights."""
    for cell in study.of(encoding):
        kept = cell.summary.get("attention") or {}
        if kept.get("maps"):
            return [{"seq_len": kept["seq_len"], **entry} for entry in kept["maps"]]
    return []


def looks_back(study: Study) -> list[str]:
    """Per encoding, how far back its mapped heads look on average, in tokens."""
    found = {name: trained_maps(study, name) for name in study.encodings}
    return [
        f"{label(name)} looks back on average "
        + ", ".join(f"{m['mean_distance']:.0f} tokens in layer {m['layer']} head {m['head']}" for m in maps)
        for name, maps in found.items()
        if maps
    ]

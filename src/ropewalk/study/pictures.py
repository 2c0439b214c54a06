"""Figures that do not come from losses: what attention costs, and what trained heads attend to."""

from typing import Any

from ropewalk.study.evidence import Study
from ropewalk.study.figures import Figure, look, make, plain_log, token_axis
from ropewalk.study.verdicts import label

SHOWN_HEADS = 2
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
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for row in study.cost["rows"]:
        if row.get(key) and row["name"] not in ("none", "torch"):
            rows.setdefault(row["name"], {})[row["seq_len"]] = row[key]
    if not rows:
        return None
    lengths = sorted({seq_len for row in rows.values() for seq_len in row})

    def draw(figure: Any, dark: bool) -> None:
        axes = figure.add_subplot()
        axes.axhline(1, color="#888888", linewidth=1.3, zorder=1)
        for index, (name, row) in enumerate(rows.items()):
            middle = [cell["ratio"] for cell in row.values()]
            ends = [[cell["ratio"] - cell["low"] for cell in row.values()],
                    [cell["high"] - cell["ratio"] for cell in row.values()]]
            axes.errorbar(list(row), middle, yerr=ends, label=label(name), capsize=3, elinewidth=1.2,
                          **look(index, dark))
        plain_log(axes, [1.0, *(v for row in rows.values() for cell in row.values() for v in cell.values())])
        axes.set_ylabel("relative to no encoding")
        token_axis(axes, lengths, None, "sequence length, tokens")

    caption = f"Attention's {said} with each encoding, divided by attention without one (1 = free)."
    if kind == "time":
        caption += " Medians of interleaved rounds; bars: middle half of the rounds."
    words = [f"{label(name)}: " + ", ".join(f"{cell['ratio']:.2f} at {n}" for n, cell in row.items())
             for name, row in rows.items()]
    return make(f"cost-{kind}", draw, caption, f"Attention's {said}, relative to no encoding. {'; '.join(words)}.")


def attention(study: Study) -> Figure | None:
    """Attention weights of trained heads, one column per encoding, all on one scale."""
    found = {name: maps for name in study.encodings if (maps := trained_maps(study, name))}
    if not found:
        return None
    rows = min(SHOWN_HEADS, *(len(maps) for maps in found.values()))
    shown = {name: maps[-rows:] for name, maps in found.items()}
    longest = max(entry["seq_len"] for maps in shown.values() for entry in maps)

    def draw(figure: Any, dark: bool) -> None:
        from matplotlib.colors import LogNorm

        grid = figure.subplots(rows, len(shown), squeeze=False, sharex=True, sharey=True)
        for column, (name, maps) in enumerate(shown.items()):
            for row, entry in enumerate(maps):
                image = _one_map(grid[row][column], entry, study.train_len, longest, LogNorm(FLOOR, 1), dark)
                where = f"layer {entry['layer']}, head {entry['head']}"
                grid[row][column].set_title(f"{label(name)}\n{where}" if row == 0 else where, fontsize=11)
        grid[-1][len(shown) // 2].set_xlabel("key position, tokens")
        grid[rows // 2][0].set_ylabel("query position, tokens", y=1.0 if rows == 2 else 0.5)
        bar = figure.colorbar(image, ax=grid, shrink=0.7, pad=0.02, label="weight per key")
        bar.set_ticks([1, 0.1, 0.01, 0.001, FLOOR], labels=["1", "0.1", "0.01", "0.001", "0"])

    caption = (f"Attention weights of trained heads on {longest} tokens of held-out text (counted from 0), one"
               f" logarithmic scale for all. Dashed: the training length, {study.train_len}.")
    alt = f"Attention maps. {'; '.join(looks_back(study))}."
    return make("attention", draw, caption, alt, (1.2 + 2.0 * len(shown), 0.9 + 2.1 * rows))


def _one_map(axes: Any, entry: dict[str, Any], train_len: int, longest: int, norm: Any, dark: bool) -> Any:
    seq_len = entry["seq_len"]
    keys = seq_len / len(entry["weights"])
    weights = [[max(value / keys, FLOOR) for value in line] for line in entry["weights"]]
    image = axes.imshow(weights, norm=norm, cmap="magma" if dark else "magma_r",
                        extent=(0, seq_len, seq_len, 0), interpolation="nearest")
    axes.grid(False)
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

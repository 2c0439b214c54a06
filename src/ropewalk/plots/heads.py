"""What heads attend to with each encoding: maps of scores or weights, side by side on one scale."""

import math
import pathlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import ropewalk as rw
from ropewalk import naming
from ropewalk.encodings import Encoding
from ropewalk.errors import require, require_count
from ropewalk.plots import style
from ropewalk.plots.scores import chosen, square
from ropewalk.plots.studies import spoken, trained
from ropewalk.plots.style import Axes, LogNorm, Normalize

ENCODINGS = ("rotary", "alibi", "rotary+alibi")
KINDS = ("weights", "scores")
FLOOR = 1e-4
HEADS = 2
MOST = 1024


def built(name: str, *, num_heads: int, head_dim: int, seq_len: int) -> Encoding:
    """The encoding called `name`, large enough for `seq_len` tokens."""
    sizes = {"head_dim": head_dim, "num_heads": num_heads, "num_positions": seq_len}
    return naming.build(name, **sizes, model_dim=num_heads * head_dim)


def layer_scores(layer: rw.Attention, x: Tensor) -> Tensor:
    """q . k / sqrt(head_dim) + bias of one layer for x (1, seq, model_dim): (heads, seq, seq), the future included."""
    seq_len = x.shape[1]
    positions = torch.arange(seq_len)
    at = layer.encoding.at(positions)
    q, k = (m(x).unflatten(-1, (-1, layer.head_dim)).transpose(1, 2) for m in (layer.q_proj, layer.k_proj))
    q, k = layer.encoding.query(q, at), layer.encoding.key(k, at)
    k = k.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
    score = (q @ k.mT)[0].float() / math.sqrt(layer.head_dim)
    heads = torch.arange(layer.num_heads)[:, None, None]
    bias = layer.encoding.bias(heads, positions[:, None], positions)
    return score if bias is None else score + bias


def _random(name: str, num_heads: int, head_dim: int, seq_len: int, seed: int) -> tuple[rw.Attention, Tensor]:
    """One layer and its input, all numbers normal, such that scores without an encoding have deviation 1."""
    encoding = built(name, num_heads=num_heads, head_dim=head_dim, seq_len=seq_len)
    layer = rw.Attention(num_heads * head_dim, num_heads, encoding)
    width = num_heads * head_dim
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for project in (layer.q_proj, layer.k_proj):
            project.weight.copy_(torch.randn(width, width, generator=generator) / math.sqrt(width))
        x = torch.randn(1, seq_len, width, generator=generator)
        return layer, encoding.embed(x, encoding.at(torch.arange(seq_len)))


def _trained(model: rw.Transformer, tokens: Tensor, number: int) -> tuple[rw.Attention, Tensor]:
    """A layer of a trained model and the input that it gets for these tokens."""
    modules = [module for module in model.modules() if isinstance(module, rw.Attention)]
    index = number if number >= 0 else len(modules) + number
    require(0 <= index < len(modules), "layer", f"below {len(modules)}", number)
    seen: list[Tensor] = []
    hook = modules[index].register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    try:
        model.hidden(tokens[None])
    finally:
        hook.remove()
    return modules[index], seen[0]


@torch.no_grad()
def attention_numbers(
    encodings: Sequence[str] | None = None,
    *,
    of: str = "weights",
    heads: Sequence[int] | None = None,
    seq_len: int = 64,
    num_heads: int = 8,
    head_dim: int = 64,
    seed: int | None = None,
    study: str | pathlib.Path | None = None,
    layer: int = -1,
) -> dict[str, Any]:
    """The numbers of `attention`: a map for each encoding and head, None where a query looks at its future."""
    require(of in KINDS, "of", " or ".join(map(repr, KINDS)), repr(of))
    require(require_count(seq_len, "seq_len", at_least=2) <= MOST, "seq_len", f"at most {MOST} in a map", seq_len)
    require(encodings is None or len(encodings) > 0, "encodings", "at least one", "none")
    if study is None:
        wanted = ENCODINGS if encodings is None else encodings
        layers = {name: _random(name, num_heads, head_dim, seq_len, seed or 0) for name in wanted}
    else:
        models, tokens, _ = trained(study, encodings, seed)
        require(seq_len <= len(tokens), "seq_len", f"at most {len(tokens)}, as many as the study's text has", seq_len)
        layers = {name: _trained(model, tokens[:seq_len], layer) for name, model in models.items()}
    panels = []
    for name, (module, x) in layers.items():
        scores = layer_scores(module, x)
        for head in chosen(heads, module.num_heads, HEADS):
            panels.append({"encoding": name, "head": head, **_map(scores[head], of)})
    return {"unit": "weight per key" if of == "weights" else "score units", "of": of, "seq_len": seq_len,
            "origin": "random" if study is None else "trained", "panels": panels}  # fmt: skip


def _map(scores: Tensor, of: str) -> dict[str, Any]:
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    places = torch.arange(len(scores))
    back = (weights * (places[:, None] - places)).sum().item() / len(scores)
    values = weights if of == "weights" else scores
    rows = [row[: query + 1] + [None] * (len(row) - query - 1) for query, row in enumerate(values.tolist())]
    return {"mean_distance": back, "values": rows}


def grid_of(numbers: dict[str, Any]) -> tuple[int, int]:
    """Rows (heads) and columns (encodings) of the page; one encoding has its heads side by side."""
    columns = len(dict.fromkeys(panel["encoding"] for panel in numbers["panels"]))
    rows = len(numbers["panels"]) // columns
    return (1, rows) if columns == 1 else (rows, columns)


def draw_attention(numbers: dict[str, Any], panels: Sequence[Axes]) -> None:
    """Draw `attention_numbers`, panels in reading order of `grid_of`."""
    entries = _in_reading_order(numbers)
    weights = numbers["of"] == "weights"
    maps = [[[math.nan if v is None else max(v, FLOOR) if weights else v for v in row] for row in entry["values"]]
            for entry in entries]  # fmt: skip
    seen = [v for rows in maps for row in rows for v in row if v == v]
    norm = LogNorm(FLOOR, 1) if weights else Normalize(min(seen), max(seen))
    rows, columns = grid_of(numbers)
    image = None
    for index, (axes, entry, values) in enumerate(zip(panels, entries, maps, strict=True)):
        image = axes.imshow(values, norm=norm, cmap=style.MAP if weights else "viridis", interpolation="nearest")
        title = spoken(entry["encoding"]) if index < columns else ""
        said = f"head {entry['head']}\n{entry['mean_distance']:.1f} back"
        axes.text(0.98, 0.98, said, transform=axes.transAxes, ha="right", va="top", fontsize=style.SMALL - 1)
        square(axes, numbers["seq_len"], title, first=index % columns == 0, last=index >= (rows - 1) * columns)
    ticks = {1: "1", 0.1: "0.1", 0.01: "0.01", 0.001: "0.001", FLOOR: "≤ 0.0001"} if weights else None
    style.colour_bar(image, panels, "weight per key" if weights else "score", ticks, 24 if rows > 1 else 14)


def _in_reading_order(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Encodings side by side, heads below one another."""
    rows, columns = grid_of(numbers)
    entries = numbers["panels"]
    return [entries[column * rows + row] for row in range(rows) for column in range(columns)]


def attention(
    encodings: Sequence[str] | None = None,
    *,
    of: str = "weights",
    heads: Sequence[int] | None = None,
    seq_len: int = 64,
    num_heads: int = 8,
    head_dim: int = 64,
    seed: int | None = None,
    study: str | pathlib.Path | None = None,
    layer: int = -1,
    axes: Sequence[Axes] | None = None,
) -> list[Axes]:
    """What causal heads attend to with each encoding, side by side on one scale: softmax weights, or the scores
    q . k / sqrt(head_dim) + bias.

    Args:
        encodings: names; RoPE, ALiBi and their sum by default, or all that `study` trained.
        of: "weights" or "scores".
        heads: which to show; the first and the last by default.
        seq_len: tokens, at most 1024.
        num_heads, head_dim: of random heads: one layer with normal weights and inputs, the same numbers for each
            encoding, scores of deviation 1 without one.
        seed: of the random numbers, or of the study's models; the first by default.
        study: the folder of a study; its trained heads are shown instead, on its first held-out document.
        layer: of the trained models; -1 is the last.
        axes: one for each panel, row by row (a row for each head); a figure of its own by default.

    Returns:
        The axes.  Each map says how many tokens its head looks back on average, weighted by its weights.
    """
    numbers = attention_numbers(
        encodings, of=of, heads=heads, seq_len=seq_len, num_heads=num_heads, head_dim=head_dim, seed=seed,
        study=study, layer=layer,
    )  # fmt: skip
    if axes is not None:
        count = len(numbers["panels"])
        require(len(axes) == count, "axes", f"one for each panel ({count})", len(axes))
        draw_attention(numbers, axes)
        return list(axes)
    with style.looks():
        figure = style.page(page_size(numbers))
        panels = page_axes(numbers, figure)
        draw_attention(numbers, panels)
        figure.draw_without_rendering()
    return panels


def page_size(numbers: dict[str, Any]) -> tuple[float, float]:
    """Inches, for as many panels."""
    rows, columns = grid_of(numbers)
    return (1.4 + 1.27 * columns, 0.5 + 1.28 * rows)


def page_axes(numbers: dict[str, Any], figure: Any) -> list[Axes]:
    """The panels of a page, row by row."""
    return list(figure.subplots(*grid_of(numbers), squeeze=False).flat)

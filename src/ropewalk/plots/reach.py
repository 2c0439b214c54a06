"""How far back the output of a stack of layers depends on its input, measured by its gradients."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import ropewalk as rw
from ropewalk.errors import require, require_count, require_number
from ropewalk.plots import style
from ropewalk.plots.heads import built
from ropewalk.plots.studies import spoken, trained
from ropewalk.plots.style import Axes

ENCODINGS = ("nope", "rotary", "alibi", "rotary+alibi")


def jacobian_norms(model: rw.Transformer, x: Tensor) -> Tensor:
    """|d y[last] / d x[j]|, Frobenius, for each token j, mean over the batch: y the last states that the layers make
    of the embeddings x (batch, seq, model_dim)."""
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        at = model.encoding.at(torch.arange(x.shape[1]))
        y = model.encoding.embed(x, at)
        for block in model.blocks:
            y = block(y, at=at, counted=True)
        last = model.norm(y)[:, -1].sum(0)  # rows of a batch do not mix, so one pass serves them all
        squares = torch.zeros(x.shape[:2], dtype=torch.float64)
        for channel in last:
            (row,) = torch.autograd.grad(channel, x, retain_graph=True)
            squares += row.double().square().sum(-1)
    return squares.sqrt().mean(0)


def _fresh(encodings: Sequence[str], num_layers: int, num_heads: int, head_dim: int, seq_len: int, seed: int) -> dict:
    """Models of the study's kind with fresh weights, the same ones for each encoding."""
    sizes = {"model_dim": num_heads * head_dim, "num_layers": num_layers, "num_heads": num_heads}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        plain = rw.Transformer(1, rw.NoPE(), **sizes)
        models = {}
        for name in encodings:
            encoding = built(name, num_heads=num_heads, head_dim=head_dim, seq_len=seq_len)
            models[name] = rw.Transformer(1, encoding, **sizes)
            models[name].load_state_dict(plain.state_dict(), strict=False)
    return models


def receptive_numbers(
    encodings: Sequence[str] | None = None,
    *,
    num_layers: int = 4,
    seq_len: int = 256,
    num_heads: int = 4,
    head_dim: int = 8,
    samples: int = 2,
    share: float | int = 0.99,
    seed: int | None = None,
    study: str | pathlib.Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """The numbers of `receptive`: gradient norms by distance, and the distance that holds `share` of their sum."""
    require_count(seq_len, "seq_len", at_least=2)
    require(0 < require_number(share, "share") <= 1, "share", "above 0 and at most 1", share)
    require(encodings is None or len(encodings) > 0, "encodings", "at least one", "none")
    if study is None:
        for name, value in {"num_layers": num_layers, "num_heads": num_heads, "samples": samples}.items():
            require_count(value, name)
        wanted = ENCODINGS if encodings is None else encodings
        models = _fresh(wanted, num_layers, num_heads, head_dim, seq_len, seed or 0)
        generator = torch.Generator().manual_seed(seed or 0)
        x = torch.randn(samples, seq_len, num_heads * head_dim, generator=generator)
        inputs = dict.fromkeys(models, x)
    else:
        models, tokens, _ = trained(study, encodings, seed)
        require(seq_len <= len(tokens), "seq_len", f"at most {len(tokens)}, as many as the study's text has", seq_len)
        inputs = {n: m.embedding_norm(m.embedding(tokens[None, :seq_len].long())) for n, m in models.items()}
    rows = []
    for count, (name, model) in enumerate(models.items(), 1):
        norms = jacobian_norms(model, inputs[name]).flip(0)
        held = norms.cumsum(0) / norms.sum()
        rows.append({"encoding": name, "norms": norms.tolist(), "reach": int((held >= share - 1e-12).nonzero()[0])})
        tell(f"{name}, {count} of {len(models)}")
    return {"unit": "norm of d output / d input", "origin": "fresh" if study is None else "trained",
            "num_layers": len(next(iter(models.values())).blocks), "share": share,
            "distances": list(range(seq_len)), "encodings": rows}  # fmt: skip


def draw_receptive(numbers: dict[str, Any], axes: Axes) -> None:
    """Draw `receptive_numbers`."""
    for index, row in enumerate(numbers["encodings"]):
        label = f"{spoken(row['encoding'])}: {100 * numbers['share']:g} % within {row['reach']}"
        axes.plot(numbers["distances"], row["norms"], label=label, **style.line(index))
    style.log_ticks(axes, [n for row in numbers["encodings"] for n in row["norms"] if n > 0])
    axes.set_xlim(0, numbers["distances"][-1])
    axes.set_xlabel("distance, tokens")
    axes.set_ylabel("norm of d output / d input")
    style.legend(axes, columns=2)


def receptive(
    encodings: Sequence[str] | None = None,
    *,
    num_layers: int = 4,
    seq_len: int = 256,
    num_heads: int = 4,
    head_dim: int = 8,
    samples: int = 2,
    share: float | int = 0.99,
    seed: int | None = None,
    study: str | pathlib.Path | None = None,
    axes: Axes | None = None,
) -> Axes:
    """How far gradients reach: |d y[last] / d x[j]| (Frobenius norm of the exact Jacobian) over the distance from
    the last token to token j, y the last states of a stack of causal layers and x its embeddings.

    The receptive field of Chi et al. 2023 (arXiv:2212.10356v2), who cumulate such norms, as the legend does.

    Args:
        encodings: names; none, RoPE, ALiBi and their sum by default, or all that `study` trained.
        num_layers, num_heads, head_dim: of a model with fresh weights, the same ones for each encoding.
        seq_len: tokens.
        samples: random inputs, over which norms are averaged.
        share: of the summed norms; the legend says within which distance it lies.
        seed: of the random numbers, or of the study's models; the first by default.
        study: the folder of a study; its trained models on its first held-out document instead.
        axes: where to draw; a figure of its own by default.

    Returns:
        The axes, distance in tokens to the right, norms upward (logarithmic), a line for each encoding.
    """
    numbers = receptive_numbers(
        encodings, num_layers=num_layers, seq_len=seq_len, num_heads=num_heads, head_dim=head_dim, samples=samples,
        share=share, seed=seed, study=study,
    )  # fmt: skip
    with style.drawing(axes) as own:
        draw_receptive(numbers, own)
    return own

"""Where the heads of a trained model look: their softmax weights on held-out text, by the plain formula."""

import math

import torch
from torch import Tensor

import ropewalk as rw
from ropewalk.study.data import Block
from ropewalk.study.settings import Settings

MAP_SIZE = 128


@torch.inference_mode()
def maps(model: rw.Transformer, block: Block, settings: Settings) -> dict:
    """Weights of a few heads (first and last head of the first and last layer) over twice the training length.

    Each map is at most 128 x 128: rows average neighbouring queries, columns add up neighbouring keys, so that a
    row still sums to 1.  `mean_distance` is the weighted mean of q_pos - k_pos over the whole map, tokens.
    """
    seq_len = min(2 * settings.train_len, len(block.tokens), model.encoding.max_positions or math.inf)
    tokens = block.tokens[None, :seq_len].to(settings.device)
    layers = sorted({0, settings.num_layers - 1})
    heads = sorted({0, settings.num_heads - 1})
    found = []
    for layer, weights in zip(layers, attention_weights(model, tokens, layers), strict=True):
        for head in heads:
            found.append(
                {
                    "layer": layer,
                    "head": head,
                    "mean_distance": mean_distance(weights[head]),
                    "weights": [
                        [float(f"{value:.3g}") for value in row] for row in shrink(weights[head], MAP_SIZE).tolist()
                    ],
                }
            )
    return {"document": block.id, "seq_len": seq_len, "train_len": settings.train_len, "maps": found}


def attention_weights(model: rw.Transformer, tokens: Tensor, layers: list[int]) -> list[Tensor]:
    """Softmax weights (heads, seq, seq) of the asked layers for one sequence, tokens (1, seq)."""
    inputs: dict[int, Tensor] = {}
    modules = [module for module in model.modules() if isinstance(module, rw.Attention)]

    def keep(layer: int):
        def hook(_module, arguments) -> None:
            inputs[layer] = arguments[0]

        return hook

    hooks = [modules[layer].register_forward_pre_hook(keep(layer)) for layer in layers]
    try:
        model.hidden(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return [layer_weights(modules[layer], inputs[layer]) for layer in layers]


def layer_weights(layer: rw.Attention, x: Tensor) -> Tensor:
    """softmax(q . k / sqrt(head_dim) + bias) of one causal layer, (heads, seq, seq), from its input (1, seq, dim)."""
    seq_len = x.size(1)
    positions = torch.arange(seq_len, device=x.device)
    at = layer.encoding.at(positions)
    q = layer.q_proj(x).view(1, seq_len, layer.num_heads, -1).transpose(1, 2)
    k = layer.k_proj(x).view(1, seq_len, layer.num_kv_heads, -1).transpose(1, 2)
    q, k = layer.encoding.query(q, at), layer.encoding.key(k, at)
    k = k.repeat_interleave(layer.num_heads // layer.num_kv_heads, dim=1)
    score = (q @ k.mT)[0].float() / math.sqrt(q.size(-1))
    heads = torch.arange(layer.num_heads, device=x.device)[:, None, None]
    bias = layer.encoding.bias(heads, positions[:, None], positions)
    if bias is not None:
        score = score + bias
    future = positions[:, None] < positions
    return score.masked_fill(future, -math.inf).softmax(-1).cpu()


def mean_distance(weights: Tensor) -> float:
    """The weighted mean of q_pos - k_pos, tokens, over all queries."""
    positions = torch.arange(weights.size(0))
    return (weights * (positions[:, None] - positions)).sum().item() / weights.size(0)


def shrink(weights: Tensor, size: int) -> Tensor:
    """Square weights brought to at most `size` rows and columns; rows are means, columns sums of what they cover.

    >>> shrink(torch.tensor([[1.0, 0.0], [0.25, 0.75]]), 1)
    tensor([[1.]])
    """
    step = math.ceil(weights.size(0) / size)
    lost = -weights.size(0) % step
    padded = torch.nn.functional.pad(weights, (0, lost, 0, lost))
    rows = padded.unflatten(0, (-1, step))
    counts = torch.full((rows.size(0), 1), step)
    counts[-1] -= lost
    return rows.sum(1).div(counts).unflatten(1, (-1, step)).sum(2)

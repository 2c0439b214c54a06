"""How fast the study's model trains with each encoding, beside the plainest equivalent in PyTorch.

The equivalent has the same sizes, one fused projection for queries, keys and values, torch's causal attention and
no encoding at all; all models take turns within one process, each with fused AdamW.
"""

import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropewalk.study import train
from ropewalk.study.settings import Settings

PLAIN = "plain PyTorch, no encoding"


class _PlainBlock(nn.Module):
    def __init__(self, model_dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.attention_norm = nn.LayerNorm(model_dim, bias=False)
        self.qkv = nn.Linear(model_dim, 3 * model_dim, bias=False)
        self.out = nn.Linear(model_dim, model_dim, bias=False)
        self.mlp_norm = nn.LayerNorm(model_dim, bias=False)
        self.up = nn.Linear(model_dim, 4 * model_dim, bias=False)
        self.down = nn.Linear(4 * model_dim, model_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class PlainTransformer(nn.Module):
    """The study's model as one would write it for one purpose: causal, without positions."""

    def __init__(self, vocab_size: int, model_dim: int, num_layers: int, num_heads: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, model_dim)
        self.blocks = nn.Sequential(*(_PlainBlock(model_dim, num_heads) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(model_dim, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.norm(self.blocks(self.embedding(tokens))), self.embedding.weight)


def _stepper(model: nn.Module, tokens: Tensor, settings: Settings) -> Callable[[], float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    clock = time.process_time if torch.get_num_threads() == 1 and settings.device == "cpu" else time.perf_counter

    def step() -> float:
        start = clock()
        with train.autocast(settings):
            logits = model(tokens[:, :-1])
            F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if settings.device.startswith("cuda"):
            torch.cuda.synchronize()
        return clock() - start

    return step


def compare(settings: Settings, rounds: int = 20, report: Callable[[int, int], None] = lambda *_: None) -> dict:
    """Seconds per training step of each model, and its speed relative to the plain one.

    Args:
        settings: sizes, encodings and dtype of a study.
        rounds: in each, every model makes one step; the first two are not counted.

    Returns:
        `rows` with `name`, `tokens_per_second`, `speed` (median over rounds of plain seconds / own seconds) and its
        quartiles `low` and `high`; `machine`; `tokens_per_step`.
    """
    vocab_size = 256
    sizes = (settings.model_dim, settings.num_layers, settings.num_heads)
    torch.manual_seed(0)
    models: dict[str, nn.Module] = {PLAIN: PlainTransformer(vocab_size, *sizes)}
    models |= {name: train.build(settings, name, 0, vocab_size) for name in settings.encodings}
    shape = (settings.batch_size, settings.train_len + 1)
    tokens = torch.randint(vocab_size, shape, device=settings.device)
    steps = {name: _stepper(model.to(settings.device), tokens, settings) for name, model in models.items()}
    laps: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            seconds = step()
            if number >= 2:
                laps[name].append(seconds)
        report(number + 1, rounds + 2)
    per_step = settings.batch_size * settings.train_len
    return {
        "rows": [_row(name, laps[name], laps[PLAIN], per_step) for name in laps],
        "tokens_per_step": per_step,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread(s), torch {torch.__version__}",
    }


def _row(name: str, own: list[float], plain: list[float], per_step: int) -> dict:
    low, speed, high = statistics.quantiles([p / o for p, o in zip(plain, own, strict=True)], n=4)
    per_second = per_step / statistics.median(own)
    return {"name": name, "tokens_per_second": round(per_second), "speed": speed, "low": low, "high": high}


def table(result: dict) -> str:
    """`compare`'s result as plain lines."""
    lines = [f"{'model':30} {'tokens/s':>9} {'speed against plain':>20}   quartiles"]
    for row in result["rows"]:
        speed = f"{row['speed']:.3f}"
        lines.append(
            f"{row['name']:30} {row['tokens_per_second']:9d} {speed:>20}   {row['low']:.3f} to {row['high']:.3f}"
        )
    return "\n".join([*lines, f"training steps of {result['tokens_per_step']} tokens on {result['machine']}"])

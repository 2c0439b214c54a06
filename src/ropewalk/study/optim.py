"""Muon for the matrices, AdamW for everything else, and their common schedule.

Muon: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon.  `torch.optim.Muon` does the same but always
in bfloat16, which costs more than the rest of the step on CPUs without bfloat16 instructions; here the
Newton-Schulz iteration runs in a dtype of choice, and matrices of one shape run as one batch.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
FINAL_RATE = 0.05


def orthogonalize(matrices: Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> Tensor:
    """Every singular value brought near 1 by X <- (aI + bA + cA^2) X with A = XX^T.

    Args:
        matrices: a batch (count, rows, columns) of one shape.
        steps: iterations.
        dtype: of the iteration, and of the result.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(dtype)
    x = x.mT if tall else x
    x = x / x.flatten(1).norm(dim=1).clamp(min=1e-7)[:, None, None]
    # oblong matrices cost half as much if only the small square A is iterated, which bfloat16 is too coarse for
    if dtype != torch.bfloat16 and x.size(-1) >= 2 * x.size(-2):
        x = _iterate_gram(x, steps)
    else:
        for _ in range(steps):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, _polynomial(gram), x, beta=COEFFICIENTS[0])
    return x.mT if tall else x


def _polynomial(gram: Tensor) -> Tensor:
    """bA + cA^2."""
    return torch.baddbmm(gram, gram, gram, beta=COEFFICIENTS[1], alpha=COEFFICIENTS[2])


def _iterate_gram(x: Tensor, steps: int) -> Tensor:
    """The same iteration on A alone: with P = aI + bA + cA^2, X <- PX turns A into PAP; the Ps are multiplied up."""
    gram = torch.bmm(x, x.mT)
    identity = torch.eye(gram.size(-1), dtype=x.dtype, device=x.device)
    product = None
    for step in range(steps):
        factor = _polynomial(gram) + COEFFICIENTS[0] * identity
        product = factor if product is None else torch.bmm(factor, product)
        if step < steps - 1:
            gram = torch.bmm(torch.bmm(factor, gram), factor)
    return x if product is None else torch.bmm(product, x)


class Muon(torch.optim.Optimizer):
    """Momentum whose step is orthogonalized; lr is multiplied by sqrt(max(1, rows / columns)) per matrix.

    Args:
        params: matrices.
        lr: step length per unit of spectral norm.
        momentum: of the running mean of gradients, Nesterov form.
        weight_decay: decoupled, times lr.
        dtype: of the Newton-Schulz iteration.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float = 0.02,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        # an attribute, since a dtype in a group would have to be pickled into the checkpoint
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        """One step over all matrices that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for matrices in shapes.values():
                self._step(matrices, group["lr"], group["momentum"], group["weight_decay"])
        return loss

    def _step(self, matrices: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        ahead = [self._gather(matrix, momentum) for matrix in matrices]
        updates = orthogonalize(torch.stack(ahead), dtype=self.dtype).to(matrices[0].dtype)
        rows, columns = matrices[0].shape
        for matrix, update in zip(matrices, updates, strict=True):
            matrix.mul_(1 - lr * weight_decay).add_(update, alpha=-lr * math.sqrt(max(1.0, rows / columns)))

    def _gather(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        """The gradient mixed with the running mean that it has just entered."""
        assert matrix.grad is not None
        state = self.state[matrix]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(matrix)
        state["momentum_buffer"].lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(state["momentum_buffer"], momentum)


def optimizers(
    model: nn.Module, *, matrix_rate: float, vector_rate: float, weight_decay: float, dtype: torch.dtype = torch.float32
) -> list[torch.optim.Optimizer]:
    """Muon on the weights of linear layers, AdamW on embeddings (decayed) and on norms and the rest (not decayed)."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    linear = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)} - embeddings
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if id(p) in embeddings], "weight_decay": weight_decay},
        {"params": [p for p in parameters if id(p) not in embeddings | linear], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    found: list[torch.optim.Optimizer] = []
    matrices = [p for p in parameters if id(p) in linear]
    if matrices:
        found.append(Muon(matrices, lr=matrix_rate, weight_decay=weight_decay, dtype=dtype))
    if groups:
        found.append(torch.optim.AdamW(groups, lr=vector_rate, betas=(0.9, 0.98), fused=True))
    for optimizer in found:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return found


def rate(step: int, steps: int, warmup_steps: int) -> float:
    """The share of the peak rate at a step: linear warm-up, then a cosine down to 5 %.

    >>> rate(0, 100, 10), rate(9, 100, 10), round(rate(99, 100, 10), 3)
    (0.1, 1.0, 0.05)
    """
    warmup_steps = min(warmup_steps, steps // 2)
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step + 1 - warmup_steps) / max(1, steps - warmup_steps)
    return FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2


def set_rate(optimizers: list[torch.optim.Optimizer], share: float) -> None:
    """Every group's learning rate as a share of its peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share

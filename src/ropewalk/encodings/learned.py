"""Learned absolute encoding (Gehring et al. 2017, arXiv:1705.03122v3, Sec. 3.1; BERT, GPT)."""

import torch
import torch.nn.functional as F
from torch import nn

from ropewalk._shapes import Float, Shaped, Tensor
from ropewalk.encodings.base import Encoding, Placement, check_embedding
from ropewalk.errors import require, require_count
from ropewalk.positions import as_positions


class Learned(Encoding):
    """x[p] += table[p], a vector learned for each position below `num_positions`.

    Args:
        num_positions: length of the table, tokens; a position beyond it is refused, never wrapped or clamped.
        model_dim: channels of the embedding.
    """

    def __init__(self, num_positions: int, model_dim: int):
        super().__init__()
        self.max_positions = require_count(num_positions, "num_positions")
        self.table = nn.Parameter(torch.empty(num_positions, require_count(model_dim, "model_dim")))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal numbers of standard deviation 0.02, as BERT and GPT-2 start."""
        nn.init.normal_(self.table, std=0.02)

    def at(self, positions: Shaped[Tensor, "*batch seq"], dtype: torch.dtype = torch.float32) -> Placement:
        positions = as_positions(positions)
        limit = self.table.shape[0]
        if torch.compiler.is_compiling():
            # No tensor may be read while tracing; the check runs inside the compiled program.
            inside = ((positions >= 0) & (positions < limit)).all()
            torch.ops.aten._assert_async.msg(inside, f"positions must be in [0, {limit})")
        elif positions.numel() and positions.device.type != "meta":
            least, most = positions.min().item(), positions.max().item()
            hint = (
                f"rw.Learned(num_positions={most + 1}, ...) has to be trained for that length" if most >= limit else ""
            )
            require(least >= 0 and most < limit, "positions", f"in [0, {limit})", f"{least} to {most}", hint=hint)
        return Placement(positions)

    def embed(self, x: Float[Tensor, "batch seq model_dim"], at: Placement) -> Float[Tensor, "batch seq model_dim"]:
        check_embedding(x, at, self.table.shape[1])
        return x + F.embedding(at.positions, self.table).to(x.dtype)

    def extra_repr(self) -> str:
        return f"num_positions={self.max_positions}, model_dim={self.table.shape[1]}"

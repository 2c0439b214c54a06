"""Attention as in BLOOM, from the parts: one fused projection with biases, ALiBi, a padding mask.

A batch with padding on the left must give each row what the row gives alone.
"""

import torch
from torch import nn

import ropewalk as rw


class BloomAttention(nn.Module):
    """ALiBi needs no table and no maximal length: the bias is made for the distances at hand."""

    def __init__(self, model_dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, model_dim // num_heads
        self.encoding = rw.ALiBi(num_heads)
        self.query_key_value = nn.Linear(model_dim, 3 * model_dim)  # head by head: query, key, value
        self.dense = nn.Linear(model_dim, model_dim)

    def forward(self, x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
        """`real` is (batch, seq), True for a token, False for padding."""
        fused = self.query_key_value(x).unflatten(-1, (self.num_heads, 3, self.head_dim))
        q, k, v = (part.transpose(1, 2) for part in fused.unbind(-2))
        places = rw.positions.from_mask(real)  # real tokens are counted, padding is not
        mask = rw.positions.packed_mask(real)  # (batch, 1, 1, seq): who may be attended
        out = rw.attend(q, k, v, self.encoding, q_positions=places, k_positions=places, mask=mask)
        return self.dense(out.transpose(1, 2).flatten(2))


torch.manual_seed(0)
layer = BloomAttention(model_dim=96, num_heads=12).eval()
print("slopes:", ", ".join(f"{m:.4g}" for m in layer.encoding.slopes))

row = torch.randn(1, 5, 96)
padded = torch.cat((torch.zeros(1, 3, 96), row), dim=1)
real = torch.tensor([[False] * 3 + [True] * 5])
with torch.no_grad():
    alone = layer(row, torch.ones(1, 5, dtype=torch.bool))
    together = layer(padded, real)[:, 3:]
print(f"padded on the left against alone: {float((alone - together).abs().max()):.0e}")
assert torch.allclose(alone, together, atol=1e-5)

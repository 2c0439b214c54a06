"""Attention as in LLaMA, from the parts: grouped heads, RoPE, a cache that holds turned keys.

The layer is written out here; `rw.Attention` is the same with more care.  Checked against it at the end.
"""

import torch
from torch import nn

import ropewalk as rw


class LlamaAttention(nn.Module):
    """Project, turn, put the past in front, attend, project back."""

    def __init__(self, model_dim: int, num_heads: int, num_kv_heads: int, base: float = 10_000.0):
        super().__init__()
        self.head_dim = model_dim // num_heads
        self.encoding = rw.Rotary(self.head_dim, base=base, layout="half")
        self.q_proj = nn.Linear(model_dim, num_heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(model_dim, num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(model_dim, num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.head_dim, model_dim, bias=False)

    def forward(self, x: torch.Tensor, past: tuple | None = None):
        past_len = 0 if past is None else past[0].shape[2]
        positions = torch.arange(past_len, past_len + x.shape[1])  # they go on after the past
        at = self.encoding.at(positions, x.dtype)
        maps = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in maps)
        q, k = self.encoding.query(q, at), self.encoding.key(k, at)  # values are not turned
        if past is not None:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        out = rw.attend(q, k, v, self.encoding, encoded=True)  # queries are the last tokens of the keys
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


torch.manual_seed(0)
layer = LlamaAttention(model_dim=64, num_heads=8, num_kv_heads=2).eval()
x = torch.randn(1, 10, 64)
with torch.no_grad():
    whole, _ = layer(x)
    first, past = layer(x[:, :7])
    steps = [first]
    for i in range(7, 10):
        step, past = layer(x[:, i : i + 1], past)
        steps.append(step)
    print(f"prompt and three steps against one pass: {float((whole - torch.cat(steps, 1)).abs().max()):.0e}")

    ours = rw.Attention(64, 8, rw.Rotary(8), num_kv_heads=2).eval()
    ours.load_state_dict({name.replace("o_proj", "out_proj"): w for name, w in layer.state_dict().items()})
    print(f"against rw.Attention: {float((whole - ours(x)).abs().max()):.0e}")
    assert torch.allclose(whole, ours(x), atol=1e-5)

"""Documents packed into one row, read in one pass and then token by token: each equals its own run."""

import torch

import ropewalk as rw

torch.manual_seed(0)
encoding = rw.Rotary(16) + rw.ALiBi(4)
layer = rw.Attention(64, 4, encoding).eval()
positions, documents = rw.positions.from_lengths([5, 3])  # 0 1 2 3 4 0 1 2 and 0 0 0 0 0 1 1 1
x = torch.randn(1, 8, 64)

with torch.no_grad():
    packed = layer(x, documents=documents)  # one document id per key: what a token may read, and where it stands
    alone = torch.cat((layer(x[:, :5]), layer(x[:, 5:])), dim=1)
    print(f"packed against separate runs: {float((packed - alone).abs().max()):.0e}")

    cache = rw.KVCache(encoding)
    steps = [layer(x[:, i : i + 1], cache=cache) for i in range(8)]
    print(f"token by token against one pass: {float((torch.cat(steps, 1) - layer(x)).abs().max()):.0e}")

    cache.evict(sinks=1, window=4)  # keep the first token and the last four; their positions close up
    print("positions after eviction:", cache.positions.tolist())

"""A stream longer than its cache: the first tokens stay as sinks, the newest 32 slide, positions close up.

Memory stays bounded, no distance grows beyond what the cache holds, and what was evicted cannot matter: the last
step equals attention over the kept tokens, placed anew, without any cache.
"""

import torch

import ropewalk as rw

SINKS, WINDOW, STREAM = 4, 32, 400
torch.manual_seed(0)
encoding = rw.Rotary(16)
layer = rw.Attention(64, 4, encoding).eval()
stream = torch.randn(1, STREAM, 64)

cache = rw.KVCache(encoding)
longest = 0
with torch.no_grad():
    for i in range(STREAM):
        out = layer(stream[:, i : i + 1], cache=cache)
        longest = max(longest, len(cache))
        cache.evict(SINKS, WINDOW)  # does nothing until there are more than 36 tokens
    print(f"{STREAM} tokens read, at most {longest} held; positions {cache.positions[0]} to {cache.positions[-1]}")

    held = torch.cat((stream[:, :SINKS], stream[:, -WINDOW - 1 :]), dim=1)  # what the last step could see
    anew = layer(held)[:, -1:]  # the same tokens at positions 0 ... 36, each turned once
    print(f"last step against the kept tokens in one pass: {float((out - anew).abs().max()):.0e}")
    assert torch.allclose(out, anew, atol=1e-5)

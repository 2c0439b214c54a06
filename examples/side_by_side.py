"""RoPE and ALiBi on the same queries and keys: which keys the last of 16 tokens looks at, as bars.

Random vectors first, then queries and keys that agree (all ones), where RoPE's preference for near keys shows.
"""

import torch

import ropewalk as rw

SEQ_LEN, HEAD_DIM, NUM_HEADS = 16, 32, 4
torch.manual_seed(0)
random_q, random_k = torch.randn(2, 1, NUM_HEADS, SEQ_LEN, HEAD_DIM)
ones = torch.ones(1, NUM_HEADS, SEQ_LEN, HEAD_DIM) * 0.7
one_hot = torch.eye(SEQ_LEN).expand(1, NUM_HEADS, SEQ_LEN, SEQ_LEN)  # as values: the output is the weights

for title, q, k in (("random vectors", random_q, random_k), ("vectors that agree", ones, ones)):
    print(title)
    for name, encoding in (
        ("none", rw.NoPE()),
        ("RoPE", rw.Rotary(HEAD_DIM)),
        ("ALiBi", rw.ALiBi(NUM_HEADS)),
        ("both", rw.Rotary(HEAD_DIM) + rw.ALiBi(NUM_HEADS)),
    ):
        weights = rw.attend(q, k, one_hot, encoding)[0, 0, -1]  # head 0, last query
        bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * w / weights.max()))] for w in weights)
        print(f"  {name:<6} {bars}  nearest four keys: {float(weights[-4:].sum()):.0%}")
    assert torch.allclose(weights.sum(), torch.tensor(1.0))

"""The README's example: the same attention with three encodings, at a position that float32 angles get wrong."""

import torch

import ropewalk as rw

q = torch.randn(1, 8, 5, 64)  # batch, heads, tokens, channels of a head
k, v = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64)  # grouped: four query heads share a key head
far = 10**12 + torch.arange(5)  # positions are explicit integers, of any size

for encoding in (rw.Rotary(64), rw.ALiBi(8), rw.Rotary(64) + rw.ALiBi(8)):
    near = rw.attend(q, k, v, encoding)
    there = rw.attend(q, k, v, encoding, q_positions=far, k_positions=far)
    print(f"moved by 10^12 tokens, the output changes by {float((near - there).abs().max()):.0e}")

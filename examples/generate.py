"""Prompts of different lengths, padded on the left, decoded through a cache: each row equals its run alone."""

import torch

import ropewalk as rw

torch.manual_seed(0)
model = rw.Transformer(256, rw.Rotary(32) + rw.ALiBi(4)).eval()
prompts = [b"position", b"is where a token stands"]
width = max(map(len, prompts))
tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
real = torch.tensor([[False] * (width - len(p)) + [True] * len(p) for p in prompts])

together = model.generate(tokens, 12, key_padding_mask=real)
for row, prompt in zip(together, prompts, strict=True):
    alone = model.generate(torch.tensor([list(prompt)]), 12)[0]
    assert torch.equal(row[-12:], alone[-12:])
    print(prompt.decode(), "->", row[-12:].tolist())

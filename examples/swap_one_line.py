"""One small model, four encodings: the line that names the encoding is the only one that changes.

Each is trained for a moment to repeat a phrase, on 32 tokens, and then read at 32 and at 128.
"""

import torch
import torch.nn.functional as F

import ropewalk as rw

torch.set_num_threads(1)  # so small a model gains nothing from more
PHRASE = torch.tensor(list(b"the rope is laid in a long straight lane; "))


def loss(model, tokens):
    """Mean loss of the next token, nats."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def batch(seq_len, rows, generator):
    """Windows of the phrase, repeated, from random starts."""
    start = torch.randint(len(PHRASE), (rows, 1), generator=generator)
    return PHRASE[(start + torch.arange(seq_len + 1)) % len(PHRASE)]


for encoding in (
    rw.NoPE(),
    rw.Rotary(16),
    rw.ALiBi(4),
    rw.Rotary(16) + rw.ALiBi(4),
):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = rw.Transformer(256, encoding, model_dim=64, num_layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss(model, batch(32, 8, generator)).backward()
        optimizer.step()
    with torch.no_grad():
        near, far = (float(loss(model, batch(n, 8, generator))) for n in (32, 128))
    name = " + ".join(type(part).__name__ for part in getattr(encoding, "parts", (encoding,)))
    print(f"{name:<16} loss at 32 tokens {near:.2f} nats, at 128 tokens {far:.2f}")

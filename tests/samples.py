"""Small seeded inputs and one encoding of each kind, shared by the tests of public bugs and of the model."""

import torch

import ropewalk as rw

NAMES = ("rotary", "alibi", "rotary+alibi", "hybrid", "nope", "sinusoidal", "learned")
HEAD_DIM, NUM_HEADS, MODEL_DIM = 8, 4, 32
VOCABULARY = 61


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def tokens(*shape, seed=0):
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(seed))


def leaves(placement):
    """The tensors of a placement."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(placement) if leaf is not None]


def peak_extra_bytes(action):
    """The most bytes that were held at once during `action`, beyond what was there before, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        kept = action()
    held = peak = 0
    events = (event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]")
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert kept is not None
    return peak


def encoding(name, num_positions=64):
    torch.manual_seed(5)
    return rw.build(name, head_dim=HEAD_DIM, num_heads=NUM_HEADS, model_dim=MODEL_DIM, num_positions=num_positions)


def model(name, num_kv_heads=None, num_layers=2, dtype=torch.float32):
    """A two-layer transformer whose weights are large enough that attention is far from uniform."""
    made = rw.Transformer(
        VOCABULARY,
        encoding(name),
        model_dim=MODEL_DIM,
        num_layers=num_layers,
        num_heads=NUM_HEADS,
        num_kv_heads=num_kv_heads,
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25, generator=generator)
    return made.to(dtype).eval()


def attention(name, num_kv_heads=None):
    torch.manual_seed(9)
    return rw.Attention(MODEL_DIM, NUM_HEADS, encoding(name), num_kv_heads=num_kv_heads).eval()

"""`Attention` writes the rotation into its own projections only, and never into what somebody else may read."""

import copy

import pytest
import torch

import ropewalk as rw


def layer(encoding):
    torch.manual_seed(0)
    return rw.Attention(64, 4, encoding)


def tokens():
    return torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("make", [lambda: rw.Rotary(16), lambda: rw.Rotary(16) + rw.ALiBi(4),
                                  lambda: rw.Hybrid(rw.Rotary(16), rw.ALiBi(4), alpha=0.3)])  # fmt: skip
def test_turning_in_place_changes_no_value_and_no_gradient(make):
    encoding, x = make(), tokens().requires_grad_()
    own, pure = layer(encoding), layer(encoding)
    pure.q_proj.register_forward_hook(lambda module, given, out: out)  # somebody reads what it gives
    results = []
    for module in (pure, own):
        out = module(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *module.parameters()])
        results.append([out, *grads])
    for expected, got in zip(*results, strict=True):
        assert float((expected - got).detach().abs().max()) <= 1e-5


def test_a_hook_sees_queries_as_they_were_projected():
    module, x, seen = layer(rw.Rotary(16)), tokens(), []
    module.q_proj.register_forward_hook(lambda module, given, out: seen.append(out))
    module(x)
    assert torch.equal(torch.nn.functional.linear(x, module.q_proj.weight), seen[0])


def test_a_replaced_projection_may_give_its_input():
    module, x = layer(rw.Rotary(16)), tokens()
    module.q_proj = torch.nn.Identity()
    before = x.clone()
    module(x)
    assert torch.equal(before, x)


def test_a_subclass_that_encodes_otherwise_is_heard():
    class Doubled(rw.Rotary):
        def query(self, q, at):
            return 2 * super().query(q, at)

    module = layer(Doubled(16))
    plain = copy.deepcopy(module)
    plain.encoding = rw.Rotary(16)
    with torch.no_grad():
        plain.q_proj.weight.mul_(4)  # Rotary turns keys as it turns queries: both are doubled
    assert float((plain(tokens()) - module(tokens())).detach().abs().max()) <= 1e-5


def test_packed_documents_need_no_positions_to_be_read_apart():
    """Default positions in documents take the fast way; given ones the general one: the same result."""
    documents = torch.repeat_interleave(torch.tensor([4, 2, 7]), torch.tensor([5, 3, 4]))
    for encoding in (rw.ALiBi(4), rw.Rotary(16), rw.Rotary(16) + rw.ALiBi(4)):
        module, x = layer(encoding), tokens()
        given = module(x, rw.positions.from_documents(documents), documents=documents)
        assert float((given - module(x, documents=documents)).detach().abs().max()) <= 1e-5


@pytest.mark.parametrize("register", [
    lambda m: m.register_full_backward_hook(lambda *a: None),
    lambda m: m.register_full_backward_pre_hook(lambda *a: None),
    lambda m: torch.nn.modules.module.register_module_full_backward_hook(lambda *a: None),
])  # fmt: skip
def test_backward_hooks_work_as_on_any_layer(register):
    module, x = layer(rw.Rotary(16)), tokens().requires_grad_()
    expected = torch.autograd.grad(module(x).square().sum(), x)[0]
    handle = register(module.q_proj)
    try:
        got = torch.autograd.grad(module(x).square().sum(), x)[0]
    finally:
        handle.remove()
    assert float((expected - got).abs().max()) <= 1e-5


def test_a_replaced_forward_keeps_what_it_returned():
    module, x, kept = layer(rw.Rotary(16)), tokens(), []
    plain = module.q_proj.forward
    module.q_proj.forward = lambda given: kept.append(plain(given)) or kept[-1]
    module(x)
    assert torch.equal(plain(x), kept[0])


def test_a_placement_alone_says_where_tokens_stand():
    """Positions that come as a placement count for bias and causality as they do as numbers."""
    where = torch.tensor([0, 5, 9, 30, 31, 40, 41, 42, 43, 44, 60, 61])
    module, x = layer(rw.ALiBi(4)), tokens()
    expected = module(x, where)
    assert float((expected - module(x, at=module.encoding.at(where))).detach().abs().max()) <= 1e-6
    assert float((expected - module(x)).detach().abs().max()) > 1e-3


@torch.no_grad()
def test_a_refused_step_can_be_repeated():
    module, x = layer(rw.ALiBi(4)), tokens()
    cache = rw.KVCache(module.encoding)
    whole = module(x)
    module(x[:, :5], cache=cache)
    with pytest.raises(ValueError, match="mask must be broadcastable"):
        module(x[:, 5:6], mask=torch.ones(3, 99, dtype=torch.bool), cache=cache)
    assert 5 == len(cache)
    assert float((whole[:, 5:6] - module(x[:, 5:6], cache=cache)).abs().max()) <= 1e-5


@torch.no_grad()
def test_padding_goes_on_from_negative_positions():
    module, x = layer(rw.Rotary(16) + rw.ALiBi(4)), tokens()[:, :8]
    where, real = torch.arange(-100, -92), torch.ones(2, 8, dtype=torch.bool)
    outputs = []
    for padded in (False, True):
        cache = rw.KVCache(module.encoding)
        module(x[:, :7], where[:7], cache=cache)
        outputs.append(module(x[:, 7:], key_padding_mask=real if padded else None, cache=cache))
        assert -93 == int(cache.positions.flatten()[-1])
    assert float((outputs[0] - outputs[1]).abs().max()) <= 1e-6


@torch.no_grad()
def test_a_layer_takes_no_tokens_at_all():
    for encoding in (rw.ALiBi(4), rw.Rotary(16)):
        assert (2, 0, 64) == tuple(layer(encoding)(tokens()[:, :0], cache=rw.KVCache(encoding)).shape)

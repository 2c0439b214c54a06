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

"""Laws behind public bug reports on masks, absolute encodings, purity and bounds (K16, K21, K22, K23)."""

import pytest
import torch

import oracles
import ropewalk as rw
from samples import NAMES, attention, encoding, leaves, model, normal, tokens

BACKENDS = ("reference", "sdpa", "auto")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def qkv(dtype=torch.float32, q_len=6, k_len=6):
    return [normal(2, 4, length, 8, seed=seed).to(dtype) for seed, length in enumerate((q_len, k_len, k_len))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_with_nothing_to_attend_is_exactly_zero(name, backend, dtype):
    """B107: mask [[1, 0], [0, 0]]: row 1 gives 0, gradients stay finite."""
    q, k, v = (x.requires_grad_() for x in qkv(dtype, 2, 2))
    mask = torch.tensor([[True, False], [False, False]])
    out = rw.attend(q, k, v, encoding(name), causal=False, mask=mask, backend=backend)
    assert torch.equal(torch.zeros_like(out[:, :, 1]), out[:, :, 1])
    torch.testing.assert_close(out[:, :, 0], v[:, :, 0], atol=1e-6, rtol=1e-2 if dtype.itemsize == 2 else 1e-6)
    out.float().square().sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
    assert torch.equal(torch.zeros_like(v[:, :, 1]), v.grad[:, :, 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_pads_do_not_spread_through_two_layers(name, dtype):
    """B108, B112: two layers, 3 left pads: every real row and every gradient is finite in every dtype."""
    made = model(name).to(dtype)
    mask = torch.tensor([[False] * 3 + [True] * 4, [True] * 7])
    logits = made(tokens(2, 7), rw.positions.from_mask(mask), key_padding_mask=mask)
    assert torch.isfinite(logits).all()
    logits[mask].float().square().mean().backward()
    gradients = [parameter.grad for parameter in made.parameters()]
    assert all(torch.isfinite(gradient).all() for gradient in gradients)
    assert any(gradient.abs().max() > 0 for gradient in gradients)


@pytest.mark.parametrize("backend", BACKENDS)
def test_content_of_masked_slots_is_irrelevant(backend):
    """B109: large finite garbage in masked keys and values changes no bit of the result."""
    q, k, v = qkv()
    mask = torch.ones(2, 1, 1, 6, dtype=torch.bool)
    mask[:, :, :, 2:4] = False
    expected = rw.attend(q, k, v, rw.ALiBi(4), mask=mask, backend=backend)
    k[:, :, 2:4], v[:, :, 2:4] = 3e4, -7e8
    assert torch.equal(expected, rw.attend(q, k, v, rw.ALiBi(4), mask=mask, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_one_query_attends_every_cached_key(name, backend):
    """B110: one query, five keys: torch's own is_causal returns the first value only."""
    made = encoding(name)
    q, k, v = qkv(torch.float64, 1, 5)
    got = rw.attend(q, k, v, made, backend=backend)
    assert (got - v[:, :, :1]).abs().max() > 1e-2
    weights = rw.attend(q, k, torch.eye(5, dtype=torch.float64).expand(2, 4, 5, 5), made, backend=backend)
    assert (weights > 0).all()
    torch.testing.assert_close(weights @ v, got, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fewer_queries_than_keys_line_up_at_the_end(backend):
    """B110, B113: query rows of a short call are the last rows of the long one, also with a mask."""
    q, k, v = qkv(torch.float64)
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    for rule in (None, mask):
        whole = rw.attend(q, k, v, mask=rule, backend=backend)
        rows = None if rule is None else rule[-3:]
        tail = rw.attend(q[:, :, -3:], k, v, mask=rows, backend=backend)
        torch.testing.assert_close(tail, whole[:, :, -3:], atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_causality_and_padding_meet_without_nan(backend, dtype):
    """B112, B113: a cell forbidden twice stays forbidden once; rows with no key left are 0, gradients finite."""
    q, k, v = (x.requires_grad_() for x in qkv(dtype))
    padding = torch.tensor([[False] * 3 + [True] * 3, [True] * 6])[:, None, None, :]
    out = rw.attend(q, k, v, rw.ALiBi(4), mask=padding, backend=backend)
    assert torch.equal(torch.zeros_like(out[0, :, :3]), out[0, :, :3])
    assert torch.isfinite(out).all()
    out.float().square().sum().backward()
    for x in (q, k, v):
        assert torch.isfinite(x.grad).all()
    assert k.grad[0, :, :3].abs().max() == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_mask_and_causality_equal_loops(name, backend):
    """B106, B113: a random mask, causality and the bias together, against loops."""
    made = encoding(name)
    q, k, v = (normal(1, 4, 5, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    mask = torch.rand(5, 5, generator=torch.Generator().manual_seed(4)) < 0.5
    got = rw.attend(q, k, v, made, mask=mask, backend=backend)
    for head, slope in enumerate(oracles.slopes(4)):
        queries, keys = q[0, head].tolist(), k[0, head].tolist()
        if "rotary" in name or name == "hybrid":
            queries = [oracles.rotated(row, i) for i, row in enumerate(queries)]
            keys = [oracles.rotated(row, j) for j, row in enumerate(keys)]
        slope = slope if "alibi" in name or name == "hybrid" else 0.0
        expected = oracles.attention(
            queries,
            keys,
            v[0, head].tolist(),
            allowed=lambda i, j: j <= i and bool(mask[i, j]),
            bias=lambda i, j, slope=slope: -slope * abs(i - j),
        )
        for row in range(5):
            assert expected[row] == pytest.approx(got[0, head, row].tolist(), abs=1e-12)


def test_pads_never_take_a_learned_row_away_from_tokens():
    """B139, B140: family offsets are explicit: real tokens at rows 2, 3, 4 when 2 is added, pads wherever."""
    mask = torch.tensor([[True, True, True, False, False]])
    made = rw.Learned(514, 32)
    positions = rw.positions.from_mask(mask) + 2
    assert positions[0, :3].tolist() == [2, 3, 4]
    got = made.embed(torch.zeros(1, 5, 32), made.at(positions))
    assert torch.equal(made.table[2:5], got[0, :3])
    full = torch.arange(512) + 2
    assert torch.equal(made.table[2:], made.embed(torch.zeros(1, 512, 32), made.at(full))[0])


@pytest.mark.parametrize("model_dim", [1, 5, 29, 30])
def test_sinusoidal_of_odd_width_has_one_more_sine(model_dim):
    """B141: 29 channels: 15 sines and 14 cosines at exponents of 29."""
    made = rw.Sinusoidal(model_dim)
    got = made.embed(torch.zeros(1, 4, model_dim), made.at(torch.tensor([0, 1, 7, 100])))[0]
    for row, position in enumerate((0, 1, 7, 100)):
        assert oracles.sinusoidal(position, model_dim) == pytest.approx(got[row].tolist(), abs=5e-7)


def test_products_of_sinusoidal_rows_depend_on_distance_alone():
    """B143: pe(p) . pe(q) is a band: sum of cos(inv_freq (p - q))."""
    made = rw.Sinusoidal(16)
    positions = torch.arange(40)
    table = made.embed(torch.zeros(1, 40, 16, dtype=torch.float64), made.at(positions, dtype=torch.float64))[0]
    products = table @ table.T
    for i in range(40):
        for j in range(40):
            expected = sum(oracles.exact_cos_sin(i - j, pair, 16)[0] for pair in range(8))
            assert expected == pytest.approx(products[i, j].item(), abs=1e-10)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_inputs_are_the_same_bits_afterwards(layout):
    """B144: the pure rotation leaves its input alone; only the one with the underscore writes into it."""
    made = rw.Rotary(8, layout=layout)
    x = normal(1, 2, 5, 8)
    kept, at = x.clone(), made.at(torch.arange(5))
    turned = rw.rotate(x, at, layout)
    made.query(x, at)
    made.key(x, at)
    assert torch.equal(kept, x)
    rw.rotate_(x, at, layout)
    torch.testing.assert_close(x, turned, atol=1e-6, rtol=0.0)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_attention_leaves_its_inputs_alone(name, backend):
    """B144, B106: q, k, v, positions, mask and documents after the call are the same bits."""
    q, k, v = qkv()
    mask = torch.rand(6, 6, generator=torch.Generator().manual_seed(2)) < 0.8
    positions, documents = rw.positions.from_lengths([2, 4])
    inputs = (q, k, v, mask, positions, documents)
    before = [x.clone() for x in inputs]
    places = {"q_positions": positions, "k_positions": positions, "documents": documents}
    rw.attend(q, k, v, encoding(name), mask=mask, backend=backend, **places)
    rw.attend(q, k, v, encoding(name), backend=backend)
    for old, new in zip(before, inputs, strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("name", NAMES)
def test_two_training_steps_and_none_of_the_tables_keeps_a_graph(name):
    """B145: "backward a second time" came from a graph kept in a cached table."""
    made = attention(name).train()
    x = normal(1, 6, 32)
    at = made.encoding.at(torch.arange(6))
    losses = []
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for _ in range(3):
        loss = made(made.encoding.embed(x, at), at=at).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]
    assert not any(leaf.requires_grad for leaf in leaves(at))


@pytest.mark.parametrize("name", NAMES)
def test_training_works_after_inference_mode(name):
    """B145, K22: nothing made in inference mode is left behind for autograd to stumble over."""
    made = attention(name)
    x = normal(1, 6, 32)
    with torch.inference_mode():
        before = made(x)
    out = made.train()(x)
    out.square().mean().backward()
    torch.testing.assert_close(out.detach(), before.clone(), atol=1e-6, rtol=0.0)
    assert all(parameter.grad is not None for parameter in (made.q_proj.weight, made.v_proj.weight))


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_gradient_of_a_turn_is_the_turn_back(layout, in_place):
    """B147: the gradient of the rotation by p is the incoming gradient turned by -p."""
    made = rw.Rotary(8, rotary_dim=6, layout=layout)
    positions = [3, 1000, 70_000]
    x = normal(1, 1, 3, 8, dtype=torch.float64).requires_grad_()
    incoming = normal(1, 1, 3, 8, seed=1, dtype=torch.float64)
    at = made.at(torch.tensor(positions), dtype=torch.float64)
    turned = rw.rotate_(x * 1.0, at, layout) if in_place else rw.rotate(x, at, layout)
    turned.backward(incoming)
    for row, position in enumerate(positions):
        expected = oracles.rotated(incoming[0, 0, row].tolist(), -position, layout=layout, rotary_dim=6)
        assert expected == pytest.approx(x.grad[0, 0, row].tolist(), abs=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_pass_gradcheck(name, backend):
    """B144, B147: analytic gradients of attention equal finite differences."""
    made = encoding(name)
    inputs = [normal(1, 4, 3, 8, seed=s, dtype=torch.float64).requires_grad_() for s in range(3)]
    assert torch.autograd.gradcheck(lambda q, k, v: rw.attend(q, k, v, made, backend=backend), inputs, fast_mode=True)


@pytest.mark.parametrize("position", [-1, 16, 17, 10**9, -(2**62)])
def test_learned_positions_beyond_the_table_are_refused(position):
    """B149: a Python error, never a wrapped or clamped row."""
    made = rw.Learned(16, 32)
    with pytest.raises(ValueError, match=r"positions must be in \[0, 16\)"):
        made.at(torch.tensor([0, position]))


@pytest.mark.parametrize("seed", range(5))
def test_any_position_is_answered_right_or_refused(seed):
    """B149: random positions around the limit of the table."""
    made = rw.Learned(16, 32)
    positions = torch.randint(-4, 24, (3,), generator=torch.Generator().manual_seed(seed))
    if all(0 <= position < 16 for position in positions.tolist()):
        got = made.embed(torch.zeros(1, 3, 32), made.at(positions))
        assert torch.equal(made.table[positions], got[0])
    else:
        with pytest.raises(ValueError, match=r"positions must be in \[0, 16\)"):
            made.at(positions)


@pytest.mark.parametrize("name", ["rotary", "sinusoidal"])
@pytest.mark.parametrize("position", [-(2**40), -1, 2**40 + 3, 2**62])
def test_encodings_without_a_table_answer_any_position(name, position):
    """B149, B19: finite and, where 64 bits of a turn allow it, exact."""
    made = encoding(name)
    at = made.at(torch.tensor([position]))
    assert torch.isfinite(at.cos).all()
    if abs(position) <= 2**40 + 3:
        width = 8 if name == "rotary" else 32
        expected = [oracles.exact_cos_sin(position, pair, width)[0] for pair in range(width // 2)]
        assert expected == pytest.approx(at.cos.flatten().tolist(), abs=5e-7)

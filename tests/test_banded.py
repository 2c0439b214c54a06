"""Attention that skips keys: nothing that matters is left out, whatever the data, and gradients come out alike."""

import math

import pytest
import torch

import ropewalk as rw
from ropewalk.attention.banded import Bands, banded
from ropewalk.attention.reference import reference
from ropewalk.attention.sight import look
from ropewalk.attention.windows import default_eps, windows

SEED = 5


def data(q_len, k_len, num_heads=8, num_kv_heads=8, head_dim=16, batch=1, dtype=torch.float64, size=1.0):
    generator = torch.Generator().manual_seed(SEED)
    shapes = ((num_heads, q_len), (num_kv_heads, k_len), (num_kv_heads, k_len))
    draws = (torch.randn(batch, h, n, head_dim, generator=generator, dtype=torch.float64) for h, n in shapes)
    return [(x * size).to(dtype).requires_grad_() for x in draws]


def both(q, k, v, encoding, backend="banded", **options):
    """Values and gradients of the reference and of `backend`."""
    results = []
    learned = list(encoding.parameters()) if encoding is not None else []
    for name in ("reference", backend):
        out = rw.attend(q, k, v, encoding, backend=name, **(options if name == backend else _known(options)))
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        results.append([out, *torch.autograd.grad(out, [q, k, v, *learned], weight)])
    return results


def _known(options):
    return {name: value for name, value in options.items() if name not in ("eps", "max_key_norm")}


def assert_close(expected, got, tolerance=1e-10):
    for name, want, have in zip(("values", "dq", "dk", "dv", "d slopes"), expected, got, strict=False):
        gap = float(((want - have).abs().max() / want.abs().max().clamp_min(1)).detach())
        assert gap <= tolerance, name


def weight_of_skipped_keys(q, k, encoding, causal, eps):
    """By brute force in float64: per head the largest share, over queries, of keys outside the windows."""
    sight = look(q, k, encoding, None, None, causal, None, None, None)
    before, after = (w.tolist() for w in windows(q, k, sight, 1 / math.sqrt(q.shape[-1]), eps))
    group = q.shape[1] // k.shape[1]
    score = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) / math.sqrt(q.shape[-1])
    score = score + sight.bias(torch.float64)
    if causal:
        score = score.masked_fill(~sight.allowed(), -torch.inf)
    distance = sight.q_pos[0, :, None] - sight.k_pos[0]
    shares = []
    for head, (b, a) in enumerate(zip(before, after, strict=True)):
        skipped = (distance > b) | (distance < -a)
        weights = score[:, head].softmax(-1)
        shares.append(float((weights * skipped).sum(-1).max().detach()))
    return shares, before


FALLING = {
    "alibi": lambda: rw.ALiBi(8),
    "learned": lambda: rw.ALiBi(8, learned=True),
    "steep and flat": lambda: rw.ALiBi(8, slopes=[50.0, 8.0, 1.0, 0.3, 0.1, 0.01, 1e-6, 0.0]),
    "hybrid": lambda: rw.Hybrid(rw.Rotary(16), rw.ALiBi(8)),
    "weighted": lambda: rw.Hybrid(rw.Rotary(16), rw.ALiBi(8), alpha=0.3),
    "sum": lambda: rw.Rotary(16) + rw.ALiBi(8),
}


class Root(rw.ALiBi):
    """Falls with the root of the distance: the parent's slope would promise too much."""

    def bias(self, head, q_pos, k_pos):
        return -self.slope(head, torch.float64) * (q_pos - k_pos).abs().double().sqrt()


@pytest.mark.parametrize("size", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*FALLING, "root"])
def test_skipped_keys_weigh_at_most_eps(name, causal, size):
    q, k, _ = data(400, 400, size=size)
    encoding = Root(8) if name == "root" else FALLING[name]()
    for eps in (1e-3, 1e-9):
        shares, _ = weight_of_skipped_keys(q.detach(), k.detach(), encoding, causal, eps)
        assert max(shares) <= eps


def test_the_bound_is_close_enough_to_skip_most_keys_of_steep_heads():
    q, k, _ = data(2000, 2000, dtype=torch.float32, head_dim=64)
    _, before = weight_of_skipped_keys(q.detach(), k.detach(), rw.ALiBi(8), True, 2**-24)
    assert before[0] <= 80
    assert before[3] <= 640
    assert 1999 <= before[7]


def test_one_adversarial_key_far_away_is_read():
    """A key at the far end made for one query: its score outweighs its distance."""
    q, k, v = data(600, 600, size=0.1)
    with torch.no_grad():
        q[0, 0, 599] = 12.0
        k[0, 0, 3] = 12.0
    expected, got = both(q, k, v, rw.ALiBi(8))
    seen = rw.attend(q, k, v, rw.ALiBi(8), backend="reference")[0, 0, 599]
    assert float((seen - v[0, 0, 3]).abs().max().detach()) < 1e-6  # it is what the query attends
    assert_close(expected, got)


def test_huge_norms_read_everything():
    q, k, _ = data(300, 300, size=200.0)
    sight = look(q, k, rw.ALiBi(8), None, None, True, None, None, None)
    assert [[300] * 8, [0] * 8] == [w.tolist() for w in windows(q, k, sight, 0.25, 1e-9)]


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_bound_that_is_no_number_reads_everything(wrong):
    q, k, _ = data(300, 300)
    with torch.no_grad():
        q[0, 0, 7, 0] = wrong
    sight = look(q, k, rw.ALiBi(8), None, None, True, None, None, None)
    assert 300 == windows(q, k, sight, 0.25, 1e-9)[0][0]
    sight = look(q, k, Root(8), None, None, True, None, None, None)
    assert 299 <= windows(q, k, sight, 0.25, 1e-9)[0][0]


@pytest.mark.parametrize("backend", ["banded", "sdpa", "auto"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [*FALLING, "root"])
def test_values_and_gradients_equal_the_reference(name, causal, backend):
    encoding = Root(8) if name == "root" else FALLING[name]()
    expected, got = both(*data(570, 570), encoding, backend, causal=causal)
    assert_close(expected, got)


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 700), (3, 700), (300, 700), (570, 570), (257, 257)])
@pytest.mark.parametrize("kv_heads", [8, 4, 2, 1])
def test_groups_and_lengths_equal_the_reference(q_len, k_len, kv_heads):
    for encoding in (rw.ALiBi(8), rw.ALiBi(8, learned=True), None):
        expected, got = both(*data(q_len, k_len, num_kv_heads=kv_heads, batch=2), encoding)
        assert_close(expected, got)


def test_more_queries_than_keys_equal_the_reference():
    for causal in (True, False):
        assert_close(*both(*data(400, 300), rw.ALiBi(8), causal=causal))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_documents_equal_the_reference(learned, causal):
    lengths = torch.tensor([[250, 13, 1, 306], [100, 200, 169, 101]])
    documents = torch.stack([torch.repeat_interleave(torch.tensor([3, 1, 9, 4]), row) for row in lengths])
    q, k, v = data(570, 570, num_kv_heads=4, batch=2)
    for encoding in (rw.ALiBi(8, learned=learned), None):
        for rows in (documents, documents[:1]):
            assert_close(*both(q, k, v, encoding, causal=causal, documents=rows))
    assert_close(*both(q[:, :, 300:], k, v, rw.ALiBi(8), causal=causal, documents=documents))


def test_documents_are_read_alone():
    """What is formed grows with the documents' lengths, not with their number."""
    q, k, _ = data(4096, 4096, num_heads=1, num_kv_heads=1, dtype=torch.float32)
    documents = torch.arange(4096)[None] // 256
    sight = look(q, k, None, None, None, True, None, documents, None)
    bands = Bands(4096, 4096, 1, [8192], [0], sight.q_documents, sight.k_documents)
    assert {256} == {tile.columns.stop - tile.columns.start for tile in bands.tiles(bands.block)}


def test_learned_slopes_of_any_size_get_the_gradient_of_the_reference():
    slopes = [1e-8, 1e-4, 0.01, 0.1, 0.5, 2.0, 40.0, 300.0]
    encoding = rw.ALiBi(8, slopes=slopes, learned=True)
    assert_close(*both(*data(570, 570), encoding), tolerance=1e-6)  # the slopes themselves are float32


def test_gradcheck():
    q, k, v = data(9, 12, num_heads=2, num_kv_heads=1, head_dim=4)
    sight = look(q, k, rw.ALiBi(2), None, None, True, None, None, None)
    bias = sight.bias_by_distance(torch.float64).masked_fill(torch.zeros(1, dtype=torch.bool), 0)
    finite = torch.where(bias.isinf(), -30.0, bias).requires_grad_()
    bands = Bands(9, 12, 1, [4, 30], [0, 0])
    assert torch.autograd.gradcheck(lambda *x: banded(*x, bands, 0.5)[0], (q, k, v, finite))


@pytest.mark.parametrize("learned", [False, True])
def test_second_derivatives_equal_the_reference(learned):
    q, k, v = data(270, 270, num_kv_heads=4)
    encoding, results = rw.ALiBi(8, learned=learned), []
    for backend in ("reference", "banded"):
        out = rw.attend(q, k, v, encoding, backend=backend)
        wanted = [q, k, v, *encoding.parameters()]
        first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), wanted))
    assert_close(*results, tolerance=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_is_at_most_twice_that_of_plain_attention(dtype):
    q, k, v = (x.detach() for x in data(1024, 1024, head_dim=32, dtype=dtype))
    exact, plain = (
        reference(q.double(), k.double(), v.double(), look(q, k, e, None, None, True, None, None, None), 32**-0.5)[0]
        for e in (rw.ALiBi(8), None)
    )
    floor = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def error(got, wanted):
        return float((got.double() - wanted).norm() / wanted.norm())

    got = rw.attend(q, k, v, rw.ALiBi(8), backend="banded")
    assert error(got, exact) <= 2 * error(floor, plain)


def test_logarithm_equals_the_reference():
    q, k, v = (x.detach() for x in data(300, 570))
    for encoding, documents in ((rw.ALiBi(8), None), (None, torch.arange(570) // 200)):
        _, expected = rw.attend(q, k, v, encoding, documents=documents, return_lse=True, backend="reference")
        _, got = rw.attend(q, k, v, encoding, documents=documents, return_lse=True, backend="banded")
        assert float((expected - got).abs().max()) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("q_len", [1, 4])
def test_a_decode_step_equals_the_reference(q_len, kv_heads, dtype):
    q, k, v = (x.detach() for x in data(q_len, 1500, num_kv_heads=kv_heads, batch=2, dtype=dtype))
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
    norm = k.double().norm(dim=-1).amax((0, 2)).to(k.dtype if dtype == torch.float64 else torch.float32)
    for encoding in (rw.ALiBi(8), rw.Rotary(16), None, Root(8)):
        expected = rw.attend(q, k, v, encoding, backend="reference")
        for backend in ("auto", "banded"):
            for known in (norm, None):
                got = rw.attend(q, k, v, encoding, backend=backend, max_key_norm=known)
                assert float((expected.double() - got.double()).abs().max()) <= tolerance


def test_a_decode_step_reads_only_the_keys_in_its_windows():
    """Keys outside cannot change the result by a bit: they may hold anything that the norm allows."""
    q, k, v = (x.detach() for x in data(1, 3000, dtype=torch.float32))
    norm = k.norm(dim=-1).amax((0, 2))
    before = rw.attend(q, k, v, rw.ALiBi(8), max_key_norm=norm)
    v[:, :, :2000] = torch.nan
    after = rw.attend(q, k, v, rw.ALiBi(8), max_key_norm=norm)
    assert torch.equal(before[:, :4], after[:, :4])  # the steep heads
    assert bool(after[:, 7].isnan().all())  # the flat one sees them


def test_a_window_is_the_smallest_that_keeps_the_promise():
    """One key less, and the bound on what is skipped would exceed eps."""
    slope = 0.25
    q = torch.zeros(1, 1, 200, 4)
    sight = look(q, q, rw.ALiBi(1, slopes=[slope]), None, None, True, None, None, None)
    eps = 1e-4
    before = int(windows(q, q, sight, 0.5, eps)[0])
    tail = [sum(math.exp(-slope * d) for d in range(first + 1, 2000)) for first in (before, before - 1)]
    assert tail[0] <= eps < tail[1] * math.exp(2e-3)


def test_default_eps_is_the_rounding_of_the_dtype():
    assert 2**-24 == default_eps(torch.float32)
    assert 2**-8 == default_eps(torch.bfloat16)


@pytest.mark.parametrize("length", [2000, 600])
def test_rounding_of_huge_equal_scores_hides_no_key(length):
    """Own scores and bounds of 10^9 are equal but for rounding, which must not look like a window."""
    k = torch.full((1, 1, length, 64), 3e4)
    v = torch.randn(1, 1, length, 64, generator=torch.Generator().manual_seed(0))
    expected = rw.attend(k, k, v, rw.ALiBi(1, slopes=[1e-3]), backend="sdpa")
    for backend in ("auto", "banded"):
        got = rw.attend(k, k, v, rw.ALiBi(1, slopes=[1e-3]), backend=backend)
        assert float((expected - got).abs().max()) <= 1e-5


@pytest.mark.parametrize("learned", [False, True])
def test_many_gradients_at_once_equal_one_after_the_other(learned):
    encoding = rw.ALiBi(2, learned=learned)
    q = torch.randn(1, 2, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def attended(x):
        return rw.attend(x, x, x, encoding, documents=torch.tensor([0, 0, 1, 1, 1]))

    together, single = (
        torch.autograd.functional.jacobian(attended, q, vectorize=vectorize) for vectorize in (True, False)
    )
    assert float((together - single).abs().max()) <= 1e-12


@pytest.mark.parametrize("backend", ["auto", "sdpa", "banded"])
@pytest.mark.parametrize("make", [lambda: None, lambda: rw.ALiBi(2), lambda: rw.Rotary(4)])
def test_forward_derivatives_equal_the_reference(make, backend):
    q, tangent = (torch.randn(1, 2, 5, 4, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    results = []
    for name in ("reference", backend):
        results.append(torch.func.jvp(lambda x, b=name: rw.attend(x, x, x, make(), backend=b), (q,), (tangent,)))
    for expected, got in zip(*results, strict=True):
        assert float((expected - got).abs().max()) <= 1e-5


def test_the_smallest_eps_is_a_number_like_any_other():
    q, k, v = (x.detach() for x in data(300, 300))
    for causal in (True, False):
        exact = rw.attend(q, k, v, rw.ALiBi(8), causal=causal, backend="reference")
        got = rw.attend(q, k, v, rw.ALiBi(8), causal=causal, backend="banded", eps=5e-324)
        assert float((exact - got).abs().max()) <= 1e-12


def test_second_derivatives_count_each_way_once():
    """Queries, keys and values of one tensor, and keys that follow from queries: no path is taken twice."""
    x = torch.randn(1, 2, 6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    results = []
    for backend in ("reference", "banded"):
        for k in (x, x * 2 + 1):
            out = rw.attend(x, k, x.sin(), rw.ALiBi(2), backend=backend)
            (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            results.append((first.detach(), torch.autograd.grad(first.square().sum(), x)[0]))
    for expected, got in zip(results[:2], results[2:], strict=True):
        assert_close(expected, got)

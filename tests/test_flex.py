"""FlexAttention keeps to the reference: fused where it is compiled, and in torch's dense form of the same functions."""

import math

import pytest
import torch
from torch import nn

import ropewalk as rw
from ropewalk.attention import flex as module
from ropewalk.attention.flex import BLOCK, NARROWEST, flex, fuses
from ropewalk.attention.reference import reference
from ropewalk.attention.sight import look
from samples import normal
from subjects import ENCODINGS, SIZES

SCALE = 0.3
WIDTHS = torch.tensor([0, 3, 20, 90, 128, 129, 250, 2**40])


class Sloping(rw.Encoding):
    """A bias that depends on both positions, not on their distance alone."""

    def __init__(self, learned=False):
        super().__init__()
        self.steep = nn.Parameter(torch.tensor([0.1, 0.3, 0.7, 1.0])) if learned else None

    def bias(self, head, q_pos, k_pos):
        q_pos, k_pos = (x if x.is_floating_point() else x.float() for x in (q_pos, k_pos))
        slope = (head + 1) / 8 if self.steep is None else self.steep.to(q_pos.dtype)[head % 4]
        return -slope * (q_pos / 4 - k_pos / 3).abs()


class LearnedByDistance(rw.Encoding):
    """A stranger's bias with something to learn, T5's kind: one number per head and clipped distance."""

    distance_only = True

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-2, 1, 8 * 16).view(8, 16))

    def bias(self, head, q_pos, k_pos):
        table = self.table.to(q_pos.dtype if q_pos.is_floating_point() else torch.float32)
        return table[head, (q_pos - k_pos).long().clamp(-5, 10) + 5]


def tokens(q_len, k_len, *, batch=2, heads=8, kv_heads=2, head_dim=16, value_dim=None, dtype=torch.float32, seed=0):
    q = normal(batch, heads, q_len, head_dim, seed=seed, dtype=torch.float64)
    k = normal(batch, kv_heads, k_len, head_dim, seed=seed + 1, dtype=torch.float64)
    v = normal(batch, kv_heads, k_len, value_dim or head_dim, seed=seed + 2, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def sight_of(q, k, encoding, *, q_positions=None, k_positions=None, causal=True, mask=None, documents=None, heads=None):
    return look(q, k, encoding, q_positions, k_positions, causal, mask, documents, heads)


def near(sight, windows):
    """Windows as a mask."""
    distance = sight.q_pos[:, None, :, None] - sight.k_pos[:, None, None, :]
    return distance.abs() <= windows[:, None, None]


@torch.no_grad()
def assert_equals_reference(q, k, v, encoding, tolerance=2e-6, windows=None, return_lse=False, **options):
    """The reference in float64 on the left; large scores may cost twice what they cost the reference in q's dtype."""
    sight = sight_of(q, k, encoding, **options)
    if windows is None:
        masked = sight
    else:
        mask = near(sight, windows)
        mask = mask if options.get("mask") is None else mask & options["mask"]
        masked = sight_of(q, k, encoding, **{**options, "mask": mask})
    exact = reference(q.double(), k.double(), v.double(), masked, SCALE)
    rounded = reference(q, k, v, masked, SCALE)
    got = flex(q, k, v, sight, SCALE, return_lse, windows)
    assert got[0].dtype == v.dtype
    assert (got[1] is not None) == return_lse
    for expected, own, result in zip(exact, rounded, got, strict=True):
        if result is not None:
            gap = torch.where(expected == own, 0.0, (expected - own.double()).abs())
            allowed = tolerance + 2 * float(gap.max() if gap.numel() else 0)
            torch.testing.assert_close(expected, result.double(), atol=allowed, rtol=tolerance)
    return got[0]


@pytest.fixture
def dense(monkeypatch):
    """A machine without a compiler."""
    monkeypatch.setattr(module, "_has_compiler", lambda: False)


@torch.no_grad()
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ENCODINGS)
def test_every_encoding_equals_the_reference(dense, name, causal):
    encoding, heads = ENCODINGS[name](), SIZES.get(name, {}).get("num_heads", 8)
    scattered = {"q_positions": torch.randint(0, 90, (2, 50), generator=torch.Generator().manual_seed(3)),
                 "k_positions": torch.arange(9) * 7}  # fmt: skip
    for q_len, k_len, options in ((40, 40, {}), (9, 50, {}), (50, 9, {}), (50, 9, scattered)):
        x = tokens(q_len, k_len, heads=heads, dtype=torch.float64)
        options = {**options, "causal": causal, "return_lse": True}
        expected = rw.attend(*x, encoding, **options, backend="reference")
        for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-13)):
            got = rw.attend(*(t.to(dtype) for t in x), encoding, **options, backend="flex")
            for one, other in zip(expected, got, strict=True):
                torch.testing.assert_close(one, other.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("learned", [False, True])
def test_a_bias_of_both_positions_equals_the_reference(dense, learned):
    q, k, v = tokens(40, 60)
    encoding = Sloping(learned)
    assert_equals_reference(q, k, v, encoding)
    assert_equals_reference(q.double(), k.double(), v.double(), encoding, 1e-13)
    rows = torch.stack((torch.arange(60), torch.arange(60) * 5 + 1000))
    assert_equals_reference(q, k, v, encoding, q_positions=rows[:, 20:], k_positions=rows)


def test_a_table_by_distance_equals_the_reference(dense):
    q, k, v = tokens(40, 60)
    for far in (0, 10**12):
        rows = far + torch.stack((torch.arange(60), torch.arange(60) + 9))
        assert_equals_reference(q, k, v, LearnedByDistance(), q_positions=rows[:, 20:], k_positions=rows)
    spread = torch.arange(60) * 10**9  # too far apart for one entry per distance
    assert_equals_reference(q, k, v, LearnedByDistance(), q_positions=spread[20:], k_positions=spread)
    frozen = LearnedByDistance().requires_grad_(False)
    assert_equals_reference(q, k, v, frozen, q_positions=spread[20:], k_positions=spread)


def test_far_positions_are_subtracted_before_they_are_rounded(dense):
    q, k, v = tokens(20, 20)
    near_zero = assert_equals_reference(q, k, v, rw.ALiBi(8))
    far = 10**15 + torch.arange(20)
    assert torch.equal(near_zero, assert_equals_reference(q, k, v, rw.ALiBi(8), q_positions=far, k_positions=far))


def test_left_padding_equals_the_unpadded_run(dense):
    q, k, v = tokens(60, 60)
    real = torch.arange(60) >= torch.tensor([0, 37])[:, None]
    places = rw.positions.from_mask(real)
    mask = rw.positions.packed_mask(real)
    out = assert_equals_reference(q, k, v, rw.ALiBi(8), q_positions=places, k_positions=places, mask=mask)
    alone = assert_equals_reference(*(x[1:, :, 37:] for x in (q, k, v)), rw.ALiBi(8))
    torch.testing.assert_close(alone, out[1:, :, 37:], atol=2e-6, rtol=0)


def test_documents_equal_separate_runs(dense):
    q, k, v = tokens(150, 150, dtype=torch.float64)
    documents = torch.where(torch.arange(150) < 60, 4, 1)
    out = assert_equals_reference(q, k, v, rw.ALiBi(8), 1e-13, documents=documents)
    for part in (slice(0, 60), slice(60, None)):
        alone = assert_equals_reference(q[:, :, part], k[:, :, part], v[:, :, part], rw.ALiBi(8), 1e-13)
        torch.testing.assert_close(alone, out[:, :, part], atol=1e-13, rtol=0)
    by_row = torch.stack((documents, torch.arange(150) // 40))
    assert_equals_reference(q[:, :, 100:], k, v, rw.ALiBi(8), 1e-13, documents=by_row)


def test_a_shard_of_heads_equals_these_heads_of_the_whole(dense):
    q, k, v = tokens(30, 50)
    whole = assert_equals_reference(q, k, v, rw.ALiBi(8))
    shard = assert_equals_reference(q[:, 4:], k[:, 1:], v[:, 1:], rw.ALiBi(8), heads=torch.arange(4, 8))
    torch.testing.assert_close(whole[:, 4:], shard, atol=1e-6, rtol=0)
    for encoding in (Sloping(), Sloping(learned=True), LearnedByDistance()):
        assert_equals_reference(q[:, 4:], k[:, 1:], v[:, 1:], encoding, heads=torch.tensor([7, 1, 6, 2]))


@pytest.mark.parametrize("shape", [(2, 8, 30, 50), (8, 1, 50), (1, 30, 1), (30, 50), (1, 50), (2, 1, 1, 1), (1, 1)])
def test_masks_of_every_shape_equal_the_reference(dense, shape):
    q, k, v = tokens(30, 50)
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) > 0.4
    assert_equals_reference(q, k, v, rw.ALiBi(8), mask=mask, return_lse=True)
    assert_equals_reference(q, k, v, None, mask=~mask, causal=False, return_lse=True)


@pytest.mark.parametrize("causal", [True, False])
def test_windows_equal_a_mask(dense, causal):
    q, k, v = tokens(260, 300)
    assert_equals_reference(q, k, v, rw.ALiBi(8), windows=WIDTHS, causal=causal)
    places = {"q_positions": torch.arange(260) * 3, "k_positions": torch.arange(300) * 2}
    mask = torch.rand(260, 300, generator=torch.Generator().manual_seed(4)) > 0.4
    assert_equals_reference(q, k, v, None, windows=WIDTHS, causal=causal, mask=mask, **places)
    assert_equals_reference(q[:, :, :0], k, v, None, windows=WIDTHS)


def test_a_query_with_no_key_gives_zero_and_no_logarithm(dense):
    q, k, v = tokens(6, 4)
    mask = torch.ones(6, 4, dtype=torch.bool)
    mask[4] = False
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        x = [t.to(dtype) for t in (q, k, v)]
        out, lse = flex(*x, sight_of(q, k, rw.ALiBi(8), mask=mask), SCALE, True)
        assert 0 == int(out[:, :, [0, 1, 4]].count_nonzero())  # two queries stand before every key
        assert {-math.inf} == set(lse[:, :, [0, 1, 4]].flatten().tolist())
        assert bool(out[:, :, [2, 3, 5]].all())


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_or_to_ask_gives_zero(q_len, k_len):
    q, k, v = tokens(q_len, k_len)
    out = assert_equals_reference(q, k, v, rw.ALiBi(8), return_lse=True)
    assert (2, 8, q_len, 16) == tuple(out.shape)
    assert 0 == int(out.count_nonzero())
    empty = assert_equals_reference(*tokens(3, 3, batch=0), rw.ALiBi(8), return_lse=True)
    assert (0, 8, 3, 16) == tuple(empty.shape)


def test_one_query_reads_far_keys_alone():
    """torch's own kernel for one query loses them where some tile holds nothing that is allowed."""
    q, k, v = tokens(1, 1024, batch=1)
    mask = (torch.arange(1024) < 300) | (torch.arange(8) >= 4)[:, None, None]
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 2e-2)):
        x = [t.to(dtype) for t in (q, k, v)]
        assert not fuses(x[0], False)
        assert_equals_reference(*x, rw.ALiBi(8, slopes=[0.5] * 8), tolerance, mask=mask, return_lse=True)


@pytest.mark.parametrize("value_dim", [5, 16, 40])
def test_values_may_have_another_width(dense, value_dim):
    assert_equals_reference(*tokens(30, 50, value_dim=value_dim), rw.ALiBi(8), return_lse=True)


@pytest.mark.parametrize("make", [lambda: rw.ALiBi(8, learned=True), LearnedByDistance, lambda: Sloping(True)])
@pytest.mark.parametrize("spread", [1, 10**6])
def test_what_a_bias_learns_gets_its_gradient_through_the_lookup(make, spread):
    """As a kernel for GPUs asks for it: the same function, of all indices at once."""
    places = {"q_positions": torch.arange(10, 30) * spread, "k_positions": torch.arange(30) * spread}
    weights = normal(2, 8, 20, 30, dtype=torch.float64)
    b, h, i, j = torch.meshgrid(*map(torch.arange, weights.shape), indexing="ij")
    gradients = []
    for run in ("dense", "lookup"):
        encoding = make()
        sight = sight_of(*tokens(20, 30)[:2], encoding, causal=False, **places)
        if run == "dense":
            bias = sight.bias(torch.float64)
        else:
            bias = module._score_mod(sight, torch.float64)(torch.zeros_like(weights), b, h, i, j)
        (weights * bias).sum().backward()
        gradients.append(next(encoding.parameters()).grad)
    expected, got = gradients
    assert bool(expected.count_nonzero())
    torch.testing.assert_close(expected, got, atol=0, rtol=1e-6)


@pytest.mark.parametrize("which", ["q", "k", "v", "slopes"])
def test_a_gradient_on_a_cpu_is_refused_with_the_backends_that_have_one(which):
    x = dict(zip("qkv", tokens(4, 4), strict=True))
    encoding = rw.ALiBi(8, learned=which == "slopes")
    if which != "slopes":
        x[which].requires_grad_()
    sight = sight_of(x["q"], x["k"], encoding)
    refusal = r"backend must be one that has a gradient on a CPU, got 'flex'\nhint: 'auto', 'sdpa' and 'reference'"
    with pytest.raises(ValueError, match=refusal):
        flex(*x.values(), sight, SCALE, True)
    with torch.no_grad():
        expected, _ = reference(*x.values(), sight, SCALE)
        torch.testing.assert_close(expected, flex(*x.values(), sight, SCALE, True)[0], atol=2e-6, rtol=0)


def test_inputs_are_left_alone_and_results_depend_on_arguments_alone(dense):
    q, k, v = tokens(30, 50)
    before = [t.clone() for t in (q, k, v)]
    first = assert_equals_reference(q, k, v, rw.ALiBi(8))
    assert_equals_reference(q.double(), k.double(), v.double(), rw.ALiBi(8), 1e-13)
    assert_equals_reference(q, k, v, rw.ALiBi(8, slopes=[0.0] * 8), causal=False)
    assert torch.equal(first, assert_equals_reference(q, k, v, rw.ALiBi(8)))
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k, v), strict=True))


def crowded(case):
    """Sights whose tiles differ in kind: (sight, windows)."""
    q, k, _ = tokens(300, 520)
    generator = torch.Generator().manual_seed(5)
    sorted_rows = torch.randint(0, 900, (2, 520), generator=generator).sort(-1).values
    places = {"q_positions": sorted_rows[:, 100:400], "k_positions": sorted_rows}
    jagged = torch.arange(300)[:, None] % 256 > torch.arange(520) - 130
    return {
        "aligned": lambda: (sight_of(q, k, None), None),
        "everything": lambda: (sight_of(q, k, None, causal=False), None),
        "positions": lambda: (sight_of(q, k, None, **places), None),
        "documents": lambda: (sight_of(q, k, None, documents=sorted_rows // 256), None),
        "documents around": lambda: (sight_of(q, k, None, causal=False, documents=torch.arange(520) // 100), None),
        "windows": lambda: (sight_of(q, k, None), WIDTHS),
        "windows around": lambda: (sight_of(q, k, None, causal=False, **places), WIDTHS),
        "mask": lambda: (sight_of(q, k, None, causal=False, mask=jagged), None),
        "mask of keys": lambda: (sight_of(q, k, None, mask=(sorted_rows > 300)[:, None, None]), WIDTHS),
        "mask of heads": lambda: (sight_of(q, k, None, mask=(torch.arange(8) > 3)[:, None, None]), None),
    }[case]()


@pytest.mark.parametrize("case", ["aligned", "everything", "positions", "documents", "documents around", "windows",
                                  "windows around", "mask", "mask of keys", "mask of heads"])  # fmt: skip
def test_no_tile_is_left_out_that_holds_an_allowed_pair(case):
    sight, windows = crowded(case)
    some, every = torch.broadcast_tensors(*module._tiles(sight, windows))
    allowed = torch.ones(2, 8, 300, 520, dtype=torch.bool)
    for part in (sight.allowed(), None if windows is None else near(sight, windows)):
        allowed = allowed if part is None else allowed & part
    padded = nn.functional.pad(allowed, (0, 5 * BLOCK - 520, 0, 3 * BLOCK - 300))
    by_tile = padded.unflatten(3, (5, BLOCK)).unflatten(2, (3, BLOCK)).transpose(3, 4)
    some, every = (x.expand(2, 8, 3, 5) for x in (some, every))
    assert not bool((by_tile.any(-1).any(-1) & ~some).any())
    assert not bool((every & ~by_tile.all(-1).all(-1)).any())
    if case not in ("positions", "windows around"):  # where bounds say all there is to know
        assert torch.equal(by_tile.all(-1).all(-1), every)
    if case in ("aligned", "everything", "documents around", "windows", "mask", "mask of heads"):
        assert torch.equal(by_tile.any(-1).any(-1), some)


def test_windows_empty_most_tiles_of_a_long_sequence():
    q = torch.empty(1, 8, 4096, 1)
    mask = module._block_mask(sight_of(q, q, rw.ALiBi(8)), torch.full((8,), 100))
    assert 32 + 31 == int(mask.kv_num_blocks[0, 0].sum() + mask.full_kv_num_blocks[0, 0].sum())


def test_narrow_heads_are_widened_without_a_change(dense):
    q, k, v = tokens(30, 50, head_dim=5)
    wide = [nn.functional.pad(t, (0, NARROWEST - 5)) for t in (q, k, v)]
    out = assert_equals_reference(*wide, rw.ALiBi(8))
    torch.testing.assert_close(assert_equals_reference(q, k, v, rw.ALiBi(8)), out[..., :5], atol=1e-6, rtol=0)
    assert 0 == int(out[..., 5:].count_nonzero())


def fused(test):
    """A test that compiles kernels."""
    needs = pytest.mark.skipif(not module._has_compiler(), reason="needs a C++ compiler and vector instructions")
    return pytest.mark.compiled(pytest.mark.slow(needs(test)))


@fused
def test_the_fused_kernel_equals_the_reference():
    """One kernel, several inputs: fixed, given and learned slopes, hybrids, shards of heads, any scores."""
    for seed, encoding in enumerate((rw.ALiBi(8), rw.ALiBi(8, slopes=[0.0, 1.0] * 4), rw.ALiBi(8, learned=True),
                                     rw.Hybrid(rw.Rotary(40), rw.ALiBi(8)), rw.Rotary(40) + rw.ALiBi(8))):  # fmt: skip
        q, k, v = tokens(200, 261, head_dim=40, value_dim=24, seed=seed)
        assert fuses(q, False)
        assert_equals_reference(q, k, v, encoding)
    assert_equals_reference(10 * q, 10 * k, v, encoding)
    shard = assert_equals_reference(q, k, v, rw.ALiBi(16), heads=torch.arange(8, 16))
    assert bool((shard - assert_equals_reference(q, k, v, rw.ALiBi(16), heads=torch.arange(8))).abs().max() > 0.01)
    with torch.inference_mode():
        assert_equals_reference(q, k, v, rw.ALiBi(8))


@fused
def test_the_fused_kernel_keeps_every_rule_at_once():
    q, k, v = tokens(200, 261)
    documents = torch.stack((torch.arange(261) // 100, torch.arange(261) // 61))
    mask = torch.rand(2, 1, 200, 261, generator=torch.Generator().manual_seed(6)) > 0.3
    mask[:, :, :130] &= torch.arange(261) < 0  # a row of tiles with nothing in it, and some rows of the next
    places = {"q_positions": torch.arange(200) * 2, "k_positions": torch.arange(261) + documents}
    out = assert_equals_reference(q, k, v, rw.ALiBi(8), windows=WIDTHS, documents=documents, mask=mask, **places)
    assert 0 == int(out[:, :, :130].count_nonzero())
    assert bool(out[:, 7, 131:].any(-1).all())


@fused
def test_the_fused_kernel_equals_the_reference_for_narrow_heads_and_short_sequences():
    """torch 2.13's own is wrong there: with 16 channels, and with fewer."""
    for head_dim in (8, 16):
        for q_len, k_len in ((8, 8), (8, 24), (40, 40), (63, 200)):
            q, k, v = tokens(q_len, k_len, head_dim=head_dim, kv_heads=8)
            assert fuses(q, False)
            assert_equals_reference(q, k, v, None, causal=False)
            assert_equals_reference(q, k, v, rw.ALiBi(8))


@fused
def test_the_fused_kernel_keeps_half_precision_tokens_first_and_a_strangers_bias():
    own = ENCODINGS["own"]()
    x = normal(1, 127, 12, 16, seed=1).transpose(1, 2).bfloat16()
    assert_equals_reference(x[:, :8], x[:, 8:10], x[:, 10:], own, 1e-2, causal=False)


@fused
def test_beyond_the_limit_of_kernels_the_dense_form_answers(monkeypatch):
    lengths, dense_form = [], module._unfused
    monkeypatch.setattr(module, "_unfused", lambda q, *rest: lengths.append(q.shape[2]) or dense_form(q, *rest))
    monkeypatch.setattr(module, "RECOMPILES", 1)
    try:
        module._compiled.cache_clear()
        torch._dynamo.reset()
        for length in (129, 128):
            assert_equals_reference(*tokens(length, length, kv_heads=8), None, causal=False)
        assert [128] == lengths
    finally:
        module._compiled.cache_clear()
        torch._dynamo.reset()


@pytest.mark.compiled
@pytest.mark.slow
def test_inside_a_compiled_function_the_formula_answers():
    encoding = rw.ALiBi(8)

    def layer(q, k, v, windows):
        return flex(q, k, v, sight_of(q, k, encoding), SCALE, False, windows)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.no_grad():
        for q_len in (20, 1):
            q, k, v = tokens(q_len, 30)
            torch.testing.assert_close(layer(q, k, v, WIDTHS), compiled(q, k, v, WIDTHS), atol=2e-6, rtol=0)


def test_meta_tensors_give_the_shape():
    q, k, v = (t.to("meta") for t in tokens(5, 7))
    assert (2, 8, 5, 16) == tuple(flex(q, k, v, sight_of(q, k, None), SCALE, False)[0].shape)

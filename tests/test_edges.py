"""What holds at the edges of the layer, the model and the cache: padding with documents, moved caches, frozen
weights, other integer widths, empty batches, function transforms."""

import pytest
import torch

import ropewalk as rw

ENCODINGS = {
    "rotary": lambda: rw.Rotary(8),
    "alibi": lambda: rw.ALiBi(4),
    "rotary+alibi": lambda: rw.Rotary(8) + rw.ALiBi(4),
    "sinusoidal": lambda: rw.Sinusoidal(32),
    "learned": lambda: rw.Learned(64, 32),
}
each_encoding = pytest.mark.parametrize("name", ENCODINGS)


def model(name, seed=0):
    torch.manual_seed(seed)
    return rw.Transformer(50, ENCODINGS[name](), model_dim=32, num_layers=2, num_heads=4).eval()


def tokens(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


@each_encoding
@torch.no_grad()
def test_padding_inside_packed_documents_is_not_counted(name):
    made, text = model(name), tokens(1, 7)
    first, second = made(text[:, :3]), made(text[:, 3:])
    pads = torch.zeros(1, 2, dtype=torch.long)
    packed = torch.cat((pads, text[:, :3], pads, text[:, 3:]), dim=1)
    real = torch.tensor([[0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 1]], dtype=torch.bool)
    documents = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1])
    got = made(packed, documents=documents, key_padding_mask=real)
    torch.testing.assert_close(first, got[:, 2:5], atol=1e-5, rtol=0)
    torch.testing.assert_close(second, got[:, 7:], atol=1e-5, rtol=0)
    cache = made.new_cache()
    parts = [made(packed[:, a:b], documents=documents[:b], key_padding_mask=real[:, :b], cache=cache)
             for a, b in ((0, 4), (4, 8), (8, 11))]  # fmt: skip
    torch.testing.assert_close(got[real], torch.cat(parts, dim=1)[real], atol=1e-5, rtol=0)


@torch.no_grad()
def test_positions_under_a_padding_mask_go_on_from_where_the_cache_stands():
    """A cache that begins at 100, and one whose keys have moved: the next token stands one after the last."""
    attention = rw.Attention(32, 4, rw.Rotary(8))
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(2))
    whole = attention(x)
    cache = rw.KVCache(attention.encoding)
    attention(x[:, :8], positions=torch.arange(100, 108), cache=cache)
    got = attention(x[:, 8:], key_padding_mask=torch.ones(1, 9, dtype=torch.bool), cache=cache)
    torch.testing.assert_close(whole[:, 8:], got, atol=1e-5, rtol=0)
    assert 108 == int(cache.positions[..., -1])
    cache.evict(2, 3)
    assert [100, 101, 102, 103, 104] == cache.positions.flatten().tolist()
    attention(x[:, :1], key_padding_mask=torch.ones(1, 6, dtype=torch.bool), cache=cache)
    assert 105 == int(cache.positions[..., -1])


def test_first_real_token_stands_at_0_after_a_chunk_of_padding():
    attention, cache = rw.Attention(32, 4, rw.Rotary(8)), rw.KVCache()
    x = torch.zeros(2, 2, 32)
    attention(x, key_padding_mask=torch.tensor([[0, 0], [0, 1]]), cache=cache)
    attention(x, key_padding_mask=torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]]), cache=cache)
    assert [[0, 0, 0, 1], [0, 0, 1, 1]] == cache.positions.tolist()


@torch.no_grad()
def test_rows_may_part_after_an_eviction():
    encoding = rw.Rotary(8)
    cache = rw.KVCache(encoding)
    k = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(3))
    cache.append(encoding.key(k, encoding.at(torch.arange(6))), k)
    cache.evict(1, 3)
    apart = torch.tensor([[4, 5], [9, 12]])
    cache.append(encoding.key(k[:, :, :2], encoding.at(apart)), k[:, :, :2], apart)
    assert [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 9, 12]] == cache.positions.tolist()
    expected = encoding.key(torch.cat((k[:, :, :1], k[:, :, 3:], k[:, :, :2]), 2), encoding.at(cache.positions))
    torch.testing.assert_close(expected, cache.k, atol=1e-6, rtol=0)


@pytest.mark.parametrize("frozen", ["q_proj", "k_proj", "v_proj", "none"])
def test_gradients_flow_through_cached_decoding(frozen):
    attention = rw.Attention(32, 4, rw.Rotary(8))
    for name, parameter in attention.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(4))
    grads = []
    for chunks in ((6,), (2, 1, 1, 2)):
        attention.zero_grad()
        cache, outputs = rw.KVCache(), []
        for part in x.split(chunks, dim=1):
            outputs.append(attention(part, cache=cache))
        torch.cat(outputs, dim=1).square().sum().backward()
        grads.append([p.grad for p in attention.parameters() if p.grad is not None])
    assert len(grads[0]) == (4 if frozen == "none" else 3)
    for whole, chunked in zip(*grads, strict=True):
        torch.testing.assert_close(whole, chunked, atol=1e-5, rtol=0)


@torch.no_grad()
def test_cropping_to_nothing_forgets_the_batch():
    cache = rw.KVCache()
    cache.append(torch.zeros(2, 1, 3, 4), torch.zeros(2, 1, 3, 4))
    cache.crop(0)
    cache.append(torch.zeros(5, 1, 1, 4), torch.zeros(5, 1, 1, 4))
    assert (5, 1, 1, 4) == cache.k.shape


def test_what_was_generated_can_be_trained_on():
    made = model("rotary")
    made(made.generate(tokens(1, 3), 4)).sum().backward()
    assert all(p.grad is not None for p in made.parameters())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_narrow_integers_name_heads_and_positions(dtype):
    q = torch.randn(1, 64, 3, 8, generator=torch.Generator().manual_seed(5))
    heads, where = torch.arange(64), torch.tensor([0, 100, 127])
    for backend in ("reference", "sdpa"):
        options = {"q_positions": where, "k_positions": where, "backend": backend, "causal": False}
        expected = rw.attend(q, q, q, rw.ALiBi(64), heads=heads, **options)
        narrow = {name: options[name].to(dtype) for name in ("q_positions", "k_positions")}
        got = rw.attend(q, q, q, rw.ALiBi(64), heads=heads.to(dtype), **{**options, **narrow})
        torch.testing.assert_close(expected, got, atol=0, rtol=0)


@pytest.mark.parametrize("start", [2**53, 2**60, -(2**60)])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_distance_is_taken_between_integers(backend, start):
    """In float64 as well: positions beyond 2^53 are rounded only after they have been subtracted."""
    q = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    there = torch.arange(5) + start
    expected = rw.attend(q, q, q, rw.ALiBi(4), backend=backend)
    got = rw.attend(q, q, q, rw.ALiBi(4), q_positions=there, k_positions=there, backend=backend)
    torch.testing.assert_close(expected, got, atol=1e-12, rtol=0)


@each_encoding
def test_an_empty_batch_gives_an_empty_answer(name):
    assert (0, 4, 50) == model(name)(tokens(0, 4)).shape
    assert (2, 0, 50) == model(name)(tokens(2, 0)).shape


@each_encoding
def test_a_model_on_the_meta_device_has_shapes(name):
    with torch.device("meta"):
        made = rw.Transformer(50, ENCODINGS[name](), model_dim=32, num_layers=1, num_heads=4)
        assert (2, 5, 50) == made(torch.zeros(2, 5, dtype=torch.long)).shape


@pytest.mark.parametrize("rotary_dim", [4, 8])
def test_turning_goes_through_function_transforms(rotary_dim):
    rope = rw.Rotary(8, rotary_dim=rotary_dim)
    at = rope.at(torch.arange(3), torch.float64)
    x = torch.randn(5, 2, 3, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    turned = rope.query(x, at)
    torch.testing.assert_close(turned, torch.func.vmap(lambda y: rw.rotate(y, at))(x))
    _, tangent = torch.func.jvp(lambda y: rw.rotate(y, at), (x,), (x,))
    torch.testing.assert_close(turned, tangent)  # linear: its own derivative


def test_tables_that_are_trained_get_their_gradient():
    rates = torch.tensor([1.0, 0.1], requires_grad=True)
    angles = torch.arange(3)[:, None] * rates
    cos, sin = (torch.cat((t, t), -1)[None] for t in (angles.cos(), angles.sin()))
    q = torch.randn(1, 2, 3, 4, generator=torch.Generator().manual_seed(8))
    rw.compat.apply_rotary_pos_emb(q, q, cos, sin)[0].sum().backward()
    assert rates.grad is not None
    assert bool((rates.grad != 0).all())


def test_one_row_of_positions_per_sequence_whatever_lies_between():
    rope, where = rw.Rotary(8), torch.tensor([[0, 1, 2], [5, 6, 9]])
    x = torch.randn(2, 4, 5, 3, 8, generator=torch.Generator().manual_seed(9))
    got = rw.rotate(x, rope.at(where))
    for row in range(2):
        torch.testing.assert_close(rw.rotate(x[row], rope.at(where[row])), got[row], atol=0, rtol=0)
        torch.testing.assert_close(rw.rotate(x[row, 0, 0], rope.at(where[row])), got[row, 0, 0], atol=0, rtol=0)


class InItsOwnPrecision(rw.Encoding):
    distance_only = True

    def __init__(self, dtype):
        super().__init__()
        self.dtype = dtype

    def bias(self, head, q_pos, k_pos):
        return -(q_pos - k_pos).abs().to(self.dtype) / 4


@pytest.mark.parametrize("bias", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("data", [torch.float64, torch.float32, torch.bfloat16])
def test_bias_may_come_in_any_precision(bias, data):
    q = torch.randn(1, 4, 5, 8, generator=torch.Generator().manual_seed(11)).to(data)
    for options in ({}, {"mask": torch.ones(5, 5, dtype=torch.bool)}):
        expected, got = (
            rw.attend(q, q, q, InItsOwnPrecision(bias), backend=name, **options) for name in ("reference", "sdpa")
        )
        assert data == got.dtype
        torch.testing.assert_close(expected, got, atol=2e-2 if data == torch.bfloat16 else 1e-5, rtol=0)


class HalfOf(rw.Encoding):
    def key(self, k, at):
        return k * at.positions[:, None]


@pytest.mark.parametrize("make", [HalfOf, lambda: rw.Sinusoidal(8), lambda: rw.Rotary(8) + rw.Learned(9, 8),
                                  lambda: rw.Rotary(8) + rw.Rotary(8, layout="interleaved")])  # fmt: skip
def test_keys_that_cannot_be_moved_are_refused_and_kept(make):
    cache = rw.KVCache(make())
    cache.append(torch.ones(1, 1, 5, 8), torch.ones(1, 1, 5, 8))
    with pytest.raises(ValueError, match="encoding must be one"):
        cache.evict(1, 2)
    assert 5 == len(cache)


def test_a_sum_of_encodings_is_their_composition():
    assert repr(rw.Rotary(8) + rw.ALiBi(4)) == repr(sum([rw.Rotary(8), rw.ALiBi(4)]))


def test_what_a_rotary_was_built_with_cannot_be_replaced_by_half():
    with pytest.raises(AttributeError):
        rw.Rotary(8).spectrum = rw.spectra.linear(8, stretch=2)


def test_an_old_table_of_other_frequencies_is_refused():
    rope = rw.Rotary(8)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        rope.load_state_dict({"inv_freq": torch.tensor(rope.inv_freq, dtype=dtype)})
    with pytest.raises(ValueError, match="inv_freq must be the frequencies of this encoding"):
        rope.load_state_dict({"inv_freq": torch.tensor(rw.Rotary(8, base=10_090.0).inv_freq)})


@pytest.mark.compiled
def test_one_compiled_layer_takes_rows_with_and_without_padding():
    attention = rw.Attention(32, 4, rw.Rotary(8) + rw.ALiBi(4)).eval()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 6, 32, generator=torch.Generator().manual_seed(10))
    real = torch.tensor([[0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]], dtype=torch.bool)
    torch.testing.assert_close(attention(x), compiled(x), atol=1e-6, rtol=0)
    expected = attention(x[:2], key_padding_mask=real)
    torch.testing.assert_close(expected, compiled(x[:2], key_padding_mask=real), atol=1e-6, rtol=0)

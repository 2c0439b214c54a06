"""Laws behind public bug reports on caches, padding and packed or sharded sequences (K04, K05, K06)."""

import pytest
import torch

import oracles
import ropewalk as rw
from samples import NAMES, VOCABULARY, attention, encoding, model, normal, tokens

CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_offset_is_part_of_the_question(layout):
    """B25: positions 5.. asked alone equal rows 5.. of one longer call, also after a call at offset 0."""
    made = rw.Rotary(16, layout=layout)
    x = normal(1, 2, 9, 16)
    whole = made.query(x, made.at(torch.arange(9)))
    made.query(x[:, :, 5:], made.at(torch.arange(4)))
    assert torch.equal(whole[:, :, 5:], made.query(x[:, :, 5:], made.at(torch.arange(5, 9))))


@pytest.mark.parametrize("seq_len", [6, 64, 300])
@pytest.mark.parametrize("name", NAMES)
def test_last_decode_step_equals_the_last_row_of_one_pass(name, seq_len):
    """B26: the last query against all keys is the last row of the full result."""
    made = encoding(name, num_positions=300)
    q, k, v = (normal(1, 4, seq_len, 8, seed=seed, dtype=torch.float64) for seed in range(3))
    whole = rw.attend(q, k, v, made)
    step = rw.attend(q[:, :, -1:], k, v, made)
    torch.testing.assert_close(step, whole[:, :, -1:], atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("name", NAMES)
def test_prefill_and_steps_equal_one_pass_at_every_split(name, num_kv_heads):
    """B27, B30, B98: k tokens at once, the others one by one: the same output for every k."""
    module = attention(name, num_kv_heads)
    x = normal(2, 5, 32)
    with torch.inference_mode():
        whole = module(x)
        for prefix in range(6):
            cache = rw.KVCache(module.encoding)
            parts = [module(x[:, :prefix], cache=cache)] if prefix else []
            parts += [module(x[:, i : i + 1], cache=cache) for i in range(prefix, 5)]
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, **CLOSE)
            assert len(cache) == 5


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_same_with_and_without_the_cache(name):
    """B30: greedy continuation through the cache equals re-reading the whole text at each step."""
    made = model(name)
    text = tokens(2, 5)
    with torch.inference_mode():
        got = made.generate(text, 5)
        for _ in range(5):
            logits = made(text)[:, -1]
            top_two = logits.topk(2).values
            assert (top_two[:, 0] - top_two[:, 1]).min() > 1e-3
            text = torch.cat([text, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(text, got)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_moving_keys_is_one_turn_to_the_new_place(layout):
    """B29: keys moved by -1000 equal keys turned at the new positions in the first place."""
    made = rw.Rotary(64, layout=layout)
    raw = normal(1, 2, 5, 64)
    old, new = torch.arange(5) + 1000, torch.arange(5)
    moved = rw.reposition(made.key(raw, made.at(old)), made, old, new)
    torch.testing.assert_close(moved, made.key(raw, made.at(new)), atol=3e-6, rtol=0.0)
    for row in range(5):
        assert oracles.rotated(raw[0, 1, row].tolist(), row, layout=layout) == pytest.approx(
            moved[0, 1, row].tolist(), abs=3e-6
        )


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_moving_keys_by_narrow_integers_does_not_wrap(dtype):
    """B29, B06: from positions 9, 5 to 2, 1 in any integer type."""
    made = rw.Rotary(8)
    raw = normal(1, 1, 2, 8)
    old, new = torch.tensor([9, 5], dtype=dtype), torch.tensor([2, 1], dtype=dtype)
    moved = rw.reposition(made.key(raw, made.at(old)), made, old, new)
    torch.testing.assert_close(moved, made.key(raw, made.at(new.long())), atol=2e-6, rtol=0.0)


@pytest.mark.parametrize("name", ["rotary", "rotary+alibi", "alibi", "nope"])
def test_moving_there_and_back_is_identity(name):
    """B29: shift(d) then shift(-d) gives the keys back; encodings that do not turn leave them alone."""
    made = encoding(name)
    keys = normal(1, 4, 6, 8)
    near, far = torch.arange(6), torch.arange(6) + 12_345
    moved = rw.reposition(keys, made, near, far)
    assert torch.equal(keys, moved) == ("rotary" not in name)
    torch.testing.assert_close(rw.reposition(moved, made, far, near), keys, atol=2e-6, rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_hundreds_of_evictions_do_not_wear_the_keys(dtype):
    """B29: keys moved by 1000 tokens in steps of 4: bfloat16 norms grew to 1.8 times elsewhere."""
    made = rw.Rotary(64)
    cache = rw.KVCache(made)
    raw = normal(1014, 64).to(dtype)
    sinks, window = 2, 8
    for step in range(1014):
        position = torch.tensor([len(cache)])
        key = made.key(raw[step][None, None, None], made.at(position))
        cache.append(key, raw[step][None, None, None], position)
        if len(cache) > sinks + window + 3:
            cache.evict(sinks, window)
    kept = torch.cat([raw[:sinks], raw[-window:]])
    assert torch.equal(kept, cache.v[0, 0])
    expected = made.key(kept[None, None].float(), made.at(cache.positions.flatten()))[0, 0]
    worst = (expected - cache.k[0, 0].float()).abs().max().item()
    assert worst <= (4e-6 if dtype == torch.float32 else 0.02 * expected.abs().max().item())
    ratio = cache.k[0, 0].float().norm(dim=-1) / kept.float().norm(dim=-1)
    assert ratio.sub(1.0).abs().max().item() <= 1e-3


def test_cropping_the_cache_forgets_the_last_tokens():
    """B27, K04: a cache cut back to 4 tokens continues like one that never saw more."""
    module = attention("rotary+alibi")
    x, other = normal(1, 8, 32), normal(1, 2, 32, seed=4)
    with torch.inference_mode():
        cropped, short = rw.KVCache(module.encoding), rw.KVCache(module.encoding)
        module(x, cache=cropped)
        cropped.crop(4)
        module(x[:, :4], cache=short)
        torch.testing.assert_close(module(other, cache=cropped), module(other, cache=short), **CLOSE)


def test_positions_of_a_left_padded_row_start_at_its_first_token():
    """B32: mask 0001111: ids x, x, x, 0, 1, 2, 3; a row without pads counts from 0."""
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    padded, whole = rw.positions.from_mask(mask)
    assert padded[3:].tolist() == [0, 1, 2, 3]
    assert padded[:3].tolist() == [0, 0, 0]
    assert whole.tolist() == list(range(7))


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("name", NAMES)
def test_real_rows_of_a_padded_batch_equal_the_unpadded_run(name, side):
    """B32, B34: whatever the padding holds; without the mask's ids learned positions were 0.40 off in logits."""
    made = model(name, dtype=torch.float64)
    text = tokens(1, 5)
    before, after = {"left": (3, 0), "right": (0, 3), "both": (2, 1)}[side]
    mask = torch.tensor([[False] * before + [True] * 5 + [False] * after])
    with torch.inference_mode():
        expected = made(text)
        for seed in (1, 2):
            row = tokens(1, 8, seed=seed)
            row[:, before : before + 5] = text
            positions = rw.positions.from_mask(mask)
            got = made(row, positions, key_padding_mask=mask)
            torch.testing.assert_close(got[:, before : before + 5], expected, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("name", NAMES)
def test_every_row_of_a_padded_batch_counts_its_own_tokens_while_decoding(name):
    """B33: rows of 2 and 5 tokens continue at 2 + t and 5 + t: as if each were generated alone."""
    made = model(name)
    short, long = tokens(1, 2, seed=1), tokens(1, 5, seed=2)
    batch = torch.cat([torch.cat([tokens(1, 3, seed=3), short], dim=1), long])
    mask = torch.tensor([[False] * 3 + [True] * 2, [True] * 5])
    with torch.inference_mode():
        together = made.generate(batch, 4, key_padding_mask=mask)
        assert torch.equal(made.generate(short, 4)[0, 2:], together[0, 5:])
        assert torch.equal(made.generate(long, 4)[0, 5:], together[1, 5:])


def test_new_tokens_continue_after_everything_in_the_cache():
    """B37: 20 cached tokens (a prefix), 2 new ones: positions 20 and 21, 22 keys."""
    module = attention("rotary")
    cache = rw.KVCache(module.encoding)
    x = normal(1, 22, 32)
    with torch.inference_mode():
        module(x[:, :20], cache=cache)
        got = module(x[:, 20:], cache=cache)
        torch.testing.assert_close(got, module(x)[:, 20:], **CLOSE)
    assert cache.positions.flatten().tolist() == list(range(22))
    assert tuple(cache.k.shape) == (1, 4, 22, 8)


def test_positions_restart_in_each_packed_document():
    """B39, B41: lengths 3, 2: ids 0, 1, 2, 0, 1."""
    positions, documents = rw.positions.from_lengths([3, 2])
    assert positions.tolist() == [0, 1, 2, 0, 1]
    assert documents.tolist() == [0, 0, 0, 1, 1]
    assert rw.positions.from_documents(torch.tensor([4, 4, 9, 9, 9])).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("name", NAMES)
def test_packed_documents_equal_separate_runs(name):
    """B39, B41: each document's rows are those of its own run; another one's tokens change nothing at all."""
    made = model(name, dtype=torch.float64)
    positions, documents = rw.positions.from_lengths([2, 3])
    first, second = tokens(1, 2, seed=1), tokens(1, 3, seed=2)
    with torch.inference_mode():
        packed = made(torch.cat([first, second], dim=1), positions, documents=documents)
        torch.testing.assert_close(packed[:, :2], made(first), atol=1e-12, rtol=0.0)
        torch.testing.assert_close(packed[:, 2:], made(second), atol=1e-12, rtol=0.0)
        other = (first + 1) % VOCABULARY
        changed = made(torch.cat([other, second], dim=1), positions, documents=documents)
        assert torch.equal(packed[:, 2:], changed[:, 2:])
        # The control: positions alone do not keep documents apart.
        leaky = made(torch.cat([first, second], dim=1), positions)
        assert (leaky[:, 2:] - packed[:, 2:]).abs().max() > 1e-3


def shards(order, world_size=2, seq_len=8):
    return [rw.positions.shard(seq_len, rank, world_size, order=order) for rank in range(world_size)]


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
def test_shards_hold_every_position_once(order):
    """B43: the positions of all ranks together are those of the sequence."""
    assert sorted(torch.cat(shards(order)).tolist()) == list(range(8))
    expected = {"contiguous": [[0, 1, 2, 3], [4, 5, 6, 7]], "zigzag": [[0, 1, 6, 7], [2, 3, 4, 5]]}
    assert expected[order] == [positions.tolist() for positions in shards(order)]


def test_bias_rows_of_a_shard_are_rows_of_the_whole():
    """B43: chunk [4, 8) of 8 tokens: its bias rows are rows 4..7 of the full bias."""
    made = rw.ALiBi(4)
    head, k_pos = torch.arange(4)[:, None, None], torch.arange(8)
    shard = made.bias(head, rw.positions.shard(8, 1, 2)[:, None], k_pos)
    for h, slope in enumerate(oracles.slopes(4)):
        for row, i in enumerate(range(4, 8)):
            assert [-slope * abs(i - j) for j in range(8)] == pytest.approx(shard[h, row].tolist(), rel=1e-7)


@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("name", NAMES)
def test_sequence_shards_put_together_equal_the_whole(name, order):
    """B43: every rank's queries against all keys, whose order is the ranks' order."""
    made = encoding(name)
    q, k, v = (normal(1, 4, 8, 8, seed=seed) for seed in range(3))
    whole = rw.attend(q, k, v, made)
    gathered = torch.cat(shards(order))
    for backend in ("reference", "sdpa"):
        for positions in shards(order):
            got = rw.attend(
                q[:, :, positions],
                k[:, :, gathered],
                v[:, :, gathered],
                made,
                q_positions=positions,
                k_positions=gathered,
                backend=backend,
            )
            torch.testing.assert_close(got, whole[:, :, positions], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_values_enter_the_cache_as_they_were_projected(name):
    """B27: queries and keys are encoded, values never."""
    module = attention(name, num_kv_heads=2)
    x = normal(1, 6, 32)
    cache = rw.KVCache(module.encoding)
    with torch.inference_mode():
        module(x, torch.arange(6) + 40, cache=cache)
        expected = torch.nn.functional.linear(x, module.v_proj.weight).view(1, 6, 2, 8).transpose(1, 2)
    assert torch.equal(expected, cache.v)

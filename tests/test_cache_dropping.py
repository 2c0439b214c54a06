"""Keys that no later query can see may be forgotten, head by head, and nothing changes."""

import pytest
import torch

import ropewalk as rw
from ropewalk.attention.dropping import HeadCaches

MAX_SCORE = 6.0


def layer(encoding, num_kv_heads=8, size=1.0):
    torch.manual_seed(3)
    module = rw.Attention(64, 8, encoding, num_kv_heads=num_kv_heads).eval()
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.weight.mul_(size)
    return module


@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("make", [lambda: rw.ALiBi(8), lambda: rw.Rotary(8) + rw.ALiBi(8)])
@torch.no_grad()
def test_decoding_goes_on_as_if_nothing_were_dropped(make, num_kv_heads):
    module = layer(make(), num_kv_heads)
    x = torch.randn(2, 600, 64, generator=torch.Generator().manual_seed(1))
    whole, cache = module(x), rw.KVCache(module.encoding)
    outputs, start = [], 0
    for size in (350, 1, 1, 60, 1, 187):
        outputs.append(module(x[:, start : start + size], cache=cache))
        start += size
        dropped = cache.drop(MAX_SCORE)
    assert float((whole - torch.cat(outputs, 1)).abs().max()) <= 1e-5
    assert 600 == len(cache)
    kept = [len(part) for part in cache.heads.caches]
    assert [600 - n for n in dropped] == kept
    assert dropped[0] > (500 if num_kv_heads == 8 else 50)
    assert 0 == dropped[-1]  # slope 1/256 reaches farther back


@torch.no_grad()
def test_a_query_longer_than_promised_is_refused_not_answered_wrong():
    module = layer(rw.ALiBi(8))
    cache, x = rw.KVCache(module.encoding), torch.randn(1, 200, 64, generator=torch.Generator().manual_seed(1))
    module(x, cache=cache)
    cache.drop(MAX_SCORE)
    with pytest.raises(ValueError, match=r"\|q\| \|k\| / sqrt\(head_dim\) must be at most the max_score \(6.0\)"):
        module(x[:, :1] * 100, cache=cache)


@torch.no_grad()
def test_a_long_key_that_was_dropped_still_counts():
    """The promise covers keys that are gone: their norms are remembered."""
    encoding = rw.ALiBi(1, slopes=[1.0])
    k = torch.full((1, 1, 100, 4), 0.1)
    k[:, :, 0] = 10.0
    heads = HeadCaches(encoding, k, k)
    assert [0] != heads.drop(3.0)
    with pytest.raises(ValueError, match="max_score"):
        heads.attend(torch.ones(1, 1, 1, 4))


@torch.no_grad()
def test_what_needs_the_whole_cache_says_so():
    cache = rw.KVCache(rw.ALiBi(4))
    k = torch.randn(1, 4, 200, 8, generator=torch.Generator().manual_seed(0))
    cache.append(k, k)
    cache.drop(2.0)
    for call in (lambda: cache.k, lambda: cache.v, lambda: cache.crop(5), lambda: cache.evict(1, 5)):
        with pytest.raises(ValueError, match="cache must be whole"):
            call()
    cache.clear()
    assert cache.heads is None
    assert 200 == cache.append(k, k)[0].shape[2]


@pytest.mark.parametrize(
    ("encoding", "positions", "match"),
    [
        (None, None, "cache must be given its encoding"),
        (rw.Rotary(8), None, "encoding must be of a known number of heads"),
        (rw.ALiBi(4), torch.arange(20) + 3, "cache must be given its encoding, and appended to without positions"),
        (rw.ALiBi(4) + rw.Learned(64, 32), None, None),
    ],
)
@torch.no_grad()
def test_a_cache_that_cannot_know_refuses_and_stays(encoding, positions, match):
    cache = rw.KVCache(encoding)
    k = torch.randn(1, 4, 20, 8, generator=torch.Generator().manual_seed(0))
    cache.append(k, k, positions)
    if match is None:
        assert 4 == len(cache.drop(1.0))
        return
    with pytest.raises(ValueError, match=match):
        cache.drop(1.0)
    assert torch.equal(k, cache.k)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_promise_is_a_positive_number(wrong):
    cache = rw.KVCache(rw.ALiBi(4))
    with torch.no_grad():
        cache.append(torch.ones(1, 4, 5, 8), torch.ones(1, 4, 5, 8))
    with pytest.raises(ValueError, match="max_score must be finite and positive"):
        cache.drop(wrong)


@torch.no_grad()
def test_the_largest_norm_looks_at_each_key_once_and_never_falls_short():
    cache = rw.KVCache(rw.ALiBi(4))
    generator = torch.Generator().manual_seed(0)
    for size in (5, 1, 1, 9):
        k = torch.randn(2, 4, size, 8, generator=generator)
        cache.append(k, k)
        assert torch.equal(cache.k.norm(dim=-1).amax((0, 2)), cache.max_key_norm)
    cache.crop(3)
    assert bool((cache.max_key_norm >= cache.k.norm(dim=-1).amax((0, 2))).all())
    cache.append(10 * k, k)
    assert torch.equal(cache.k.norm(dim=-1).amax((0, 2)), cache.max_key_norm)
    cache.evict(1, 2)
    assert torch.equal(cache.k.norm(dim=-1).amax((0, 2)), cache.max_key_norm)


@torch.no_grad()
def test_a_refused_step_leaves_the_cache_as_it_was():
    module = layer(rw.ALiBi(8))
    x = torch.randn(1, 301, 64, generator=torch.Generator().manual_seed(1))
    cache = rw.KVCache(module.encoding)
    module(x[:, :300], cache=cache)
    cache.drop(MAX_SCORE)
    with pytest.raises(ValueError, match="max_score"):
        module(x[:, 300:] * 50, cache=cache)
    assert 300 == len(cache)
    assert float((module(x)[:, 300:] - module(x[:, 300:], cache=cache)).abs().max()) <= 1e-5


def test_a_cache_keeps_what_it_was_given_whatever_becomes_of_it():
    cache, k = rw.KVCache(), torch.ones(1, 1, 6, 8)
    places = torch.arange(6)
    cache.append(k, k, places)
    k.zero_()
    places.zero_()
    assert [1.0, 5.0] == [float(cache.k.min()), float(cache.positions.max())]
    given = torch.ones(1, 1, 2, 8)
    fresh = rw.KVCache()
    fresh.append(given, given)
    fresh.crop(1)
    with torch.no_grad():
        fresh.append(torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 1, 8))
    assert bool((given == 1).all())

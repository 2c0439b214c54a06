"""A cache whose keys were turned at other frequencies is refused, frozen, or turned anew: never read as it is."""

import pytest
import torch

import ropewalk as rw

TRAINED, LENGTH = 16, 40


def dynamic(length, extra=0):
    spectrum = rw.spectra.dynamic_ntk(16, stretch=4, train_len=TRAINED, length=length)
    return rw.Rotary(16, spectrum=spectrum) + (rw.ALiBi(4) if extra else rw.NoPE())


def yarn(length, extra=0):
    return rw.Rotary(16, spectrum=rw.spectra.yarn(16, stretch=max(length / TRAINED, 1), train_len=TRAINED))


def layer(encoding):
    torch.manual_seed(4)
    return rw.Attention(64, 4, encoding, num_kv_heads=2)


def tokens():
    return torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(9))


def grown(cache, make, extra=0):
    """The outputs of a sequence that outgrows its spectrum at token 16."""
    short = layer(make(TRAINED, extra))
    outputs = [short(tokens()[:, :TRAINED], cache=cache)]
    short.encoding = make(LENGTH, extra)
    outputs += [short(tokens()[:, i : i + 1], cache=cache) for i in range(TRAINED, LENGTH)]
    return torch.cat(outputs, 1)


@torch.no_grad()
@pytest.mark.parametrize("make", [dynamic, yarn])
def test_keys_of_another_spectrum_are_refused_and_kept(make):
    cache = rw.KVCache()
    with pytest.raises(ValueError, match="encoding must be of the frequencies that the cache's keys have"):
        grown(cache, make)
    assert TRAINED == len(cache)


@torch.no_grad()
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("make", [dynamic, yarn])
def test_turned_keys_equal_one_pass_with_the_new_spectrum(make, extra):
    cache = rw.KVCache(on_change="turn")
    got = grown(cache, make, extra)
    whole = layer(make(LENGTH, extra))(tokens())
    assert float((whole[:, TRAINED:] - got[:, TRAINED:]).abs().max()) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("make", [dynamic, yarn])
def test_a_frozen_cache_goes_on_as_it_began(make):
    got = grown(rw.KVCache(on_change="freeze"), make)
    whole = layer(make(TRAINED))(tokens())
    assert float((whole - got).abs().max()) <= 1e-5


@torch.no_grad()
def test_evicted_keys_are_turned_where_they_stand():
    """Moved keys and those they were moved from change together."""
    cache, again = rw.KVCache(dynamic(TRAINED), on_change="turn"), rw.KVCache(dynamic(LENGTH))
    k = torch.randn(1, 4, 30, 16, generator=torch.Generator().manual_seed(1))
    for one in (cache, again):
        encoding = one.encoding
        one.append(encoding.key(k, encoding.at(torch.arange(30))), k)
        one.evict(2, 10)
    cache.agree(again.encoding)
    assert float((again.k - cache.k).abs().max()) <= 1e-5
    for one in (cache, again):
        one.evict(1, 5)
    assert float((again.k - cache.k).abs().max()) <= 1e-5


@torch.no_grad()
def test_an_equal_spectrum_is_no_change_and_an_empty_cache_takes_any():
    cache = rw.KVCache(dynamic(TRAINED))
    layer(dynamic(LENGTH))(tokens(), cache=cache)
    layer(dynamic(LENGTH))(tokens(), cache=cache)
    assert 2 * LENGTH == len(cache)


def test_the_choice_has_a_name():
    with pytest.raises(ValueError, match="on_change must be one of 'refuse', 'freeze', 'turn', got 'ignore'"):
        rw.KVCache(on_change="ignore")

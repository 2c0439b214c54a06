"""The small transformer: generation through the cache, padding, packing, masks, sampling."""

import pytest
import torch

import ropewalk as rw
from samples import NAMES, VOCABULARY, model, tokens

CLOSE = {"atol": 1e-5, "rtol": 0.0}


def greedy(made, text, count, **options):
    """Continuation without a cache: the whole text is read again for every token."""
    for _ in range(count):
        text = torch.cat([text, made(text, **options)[:, -1].argmax(-1, keepdim=True)], dim=1)
    return text


@pytest.mark.parametrize("name", NAMES)
def test_logits_have_one_row_per_token_and_one_column_per_entry(name):
    logits = model(name)(tokens(3, 7))
    assert tuple(logits.shape) == (3, 7, VOCABULARY)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("name", NAMES)
def test_later_tokens_do_not_change_earlier_logits(name):
    made = model(name)
    text, other = tokens(1, 8), tokens(1, 8)
    other[:, 5:] = (other[:, 5:] + 1) % VOCABULARY
    with torch.inference_mode():
        one, two = made(text), made(other)
    assert torch.equal(one[:, :5], two[:, :5])
    assert not torch.equal(one[:, 5:], two[:, 5:])


@pytest.mark.parametrize("num_kv_heads", [None, 2, 1])
@pytest.mark.parametrize("name", NAMES)
def test_steps_through_the_cache_equal_one_pass(name, num_kv_heads):
    made = model(name, num_kv_heads)
    text = tokens(2, 9)
    with torch.inference_mode():
        whole = made(text)
        for cuts in ([9], [4, 1, 1, 1, 1, 1], [1] * 9, [3, 4, 2]):
            cache, parts, start = made.new_cache(), [], 0
            for count in cuts:
                parts.append(made(text[:, start : start + count], cache=cache))
                start += count
            torch.testing.assert_close(torch.cat(parts, dim=1), whole, **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_generation_equals_reading_everything_again(name):
    made = model(name, num_kv_heads=2)
    text = tokens(2, 3)
    with torch.inference_mode():
        expected = greedy(made, text, 7)
    assert torch.equal(expected, made.generate(text, 7))


def test_generating_nothing_returns_the_prompt():
    text = tokens(2, 3)
    assert torch.equal(text, model("rotary").generate(text, 0))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_padded_prompts_continue_like_single_ones(name, side):
    made = model(name)
    rows = [tokens(1, length, seed=length) for length in (1, 4, 6)]
    batch, mask = [], []
    for row in rows:
        pad = tokens(1, 6 - row.shape[1], seed=99)
        real, padding = torch.ones(row.shape[1], dtype=torch.bool), torch.zeros(pad.shape[1], dtype=torch.bool)
        batch.append(torch.cat([pad, row] if side == "left" else [row, pad], dim=1))
        mask.append(torch.cat([padding, real] if side == "left" else [real, padding]))
    got = made.generate(torch.cat(batch), 4, key_padding_mask=torch.stack(mask))
    for index, row in enumerate(rows):
        assert torch.equal(made.generate(row, 4)[0, row.shape[1] :], got[index, 6:])


@pytest.mark.parametrize("name", NAMES)
def test_a_padding_mask_alone_places_the_tokens(name):
    made = model(name, dtype=torch.float64)
    text = tokens(1, 4)
    padded = torch.cat([tokens(1, 3, seed=8), text], dim=1)
    mask = torch.tensor([[False] * 3 + [True] * 4])
    with torch.inference_mode():
        got = made(padded, key_padding_mask=mask)[:, 3:]
        torch.testing.assert_close(got, made(text), atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_documents_packed_into_one_row_equal_their_own_runs(name, given):
    made = model(name, dtype=torch.float64)
    rows = [tokens(1, length, seed=length) for length in (5, 1, 3)]
    positions, documents = rw.positions.from_lengths([5, 1, 3])
    with torch.inference_mode():
        packed = made(torch.cat(rows, dim=1), positions if given else None, documents=documents)
        start = 0
        for row in rows:
            got = packed[:, start : start + row.shape[1]]
            torch.testing.assert_close(got, made(row), atol=1e-12, rtol=0.0)
            start += row.shape[1]


@pytest.mark.parametrize("name", NAMES)
def test_documents_of_each_row_are_its_own(name):
    made = model(name, dtype=torch.float64)
    text = tokens(2, 6)
    documents = torch.tensor([[0, 0, 0, 0, 1, 1], [3, 8, 8, 8, 8, 8]])
    with torch.inference_mode():
        packed = made(text, documents=documents)
        torch.testing.assert_close(packed[:1, 4:], made(text[:1, 4:]), atol=1e-12, rtol=0.0)
        torch.testing.assert_close(packed[1:, 1:], made(text[1:, 1:]), atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("name", ["rotary", "alibi", "rotary+alibi", "hybrid"])
def test_a_common_shift_of_positions_changes_nothing_for_relative_encodings(name):
    made = model(name, dtype=torch.float64)
    text = tokens(1, 7)
    assert made.encoding.relative
    with torch.inference_mode():
        shifted = made(text, torch.arange(7) + 1_000_000)
        torch.testing.assert_close(shifted, made(text), atol=1e-8, rtol=0.0)


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_a_common_shift_of_positions_can_be_seen_with_absolute_encodings(name):
    made = model(name)
    text = tokens(1, 7)
    assert not made.encoding.relative
    with torch.inference_mode():
        assert (made(text, torch.arange(7) + 20) - made(text)).abs().max() > 1e-3


def test_every_encoding_gives_another_result():
    """The plain sum is written in two ways, `rotary+alibi` and `hybrid`; these two agree."""
    logits = {}
    for name in NAMES:
        made = model(name)
        made.load_state_dict(model("nope").state_dict(), strict=False)
        with torch.inference_mode():
            logits[name] = made(tokens(1, 9))
    for one in NAMES:
        for two in NAMES:
            if one != two and {one, two} != {"rotary+alibi", "hybrid"}:
                assert (logits[one] - logits[two]).abs().max() > 1e-4
    torch.testing.assert_close(logits["hybrid"], logits["rotary+alibi"], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_a_window_mask_limits_how_far_a_token_sees(name):
    """With one layer and a window of 3, the last logits depend on the last three tokens alone."""
    made = model(name, num_layers=1)
    text, other = tokens(1, 8), tokens(1, 8)
    other[:, :5] = (other[:, :5] + 1) % VOCABULARY
    index = torch.arange(8)
    near = (index[:, None] - index) < 3
    with torch.inference_mode():
        one, two = made(text, mask=near), made(other, mask=near)
        assert torch.equal(one[:, 7], two[:, 7])
        assert not torch.equal(one[:, 6], two[:, 6])
        assert not torch.equal(made(text)[:, 7], made(other)[:, 7])
        torch.testing.assert_close(made(text, mask=near[None, None]), one, **CLOSE)


def test_hidden_states_and_head_make_the_logits():
    made = model("rotary")
    text = tokens(2, 5)
    with torch.inference_mode():
        states = made.hidden(text)
        assert tuple(states.shape) == (2, 5, 32)
        assert torch.equal(made(text), made.head(states))
    assert not [key for key in made.state_dict() if "head" in key]


def test_sampling_follows_its_generator():
    made, text = model("rotary+alibi"), tokens(4, 3)
    draws = [
        made.generate(text, 10, temperature=1.5, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    ]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(text, draws[0][:, :3])
    assert draws[0].min() >= 0
    assert draws[0].max() < VOCABULARY


def test_low_temperature_approaches_the_likeliest_token():
    made, text = model("alibi"), tokens(2, 4)
    cold = made.generate(text, 6, temperature=1e-4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(made.generate(text, 6), cold)


def test_frequencies_of_sampled_tokens_follow_the_softmax():
    made, temperature = model("rotary", num_layers=1), 2.0
    text = tokens(1, 3).expand(4000, 3)
    with torch.inference_mode():
        expected = (made(text[:1])[0, -1].double() / temperature).softmax(-1)
    drawn = made.generate(text, 1, temperature=temperature, generator=torch.Generator().manual_seed(3))[:, 3]
    counts = torch.bincount(drawn, minlength=VOCABULARY).double()
    deviation = (counts - 4000 * expected).abs() / (4000 * expected * (1 - expected)).sqrt().clamp(min=1.0)
    assert deviation.max() < 5.0


def test_training_lowers_the_loss_of_a_repeated_text():
    torch.manual_seed(0)
    made = rw.Transformer(VOCABULARY, rw.Rotary(8), model_dim=32, num_layers=2, num_heads=4)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    text = tokens(4, 12)
    losses = []
    for _ in range(20):
        logits = made(text[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_shared_cache_position_is_not_reused_between_generations():
    """Two generations of one model, of different lengths, do not see each other."""
    made = model("rotary")
    first = made.generate(tokens(1, 9, seed=1), 4)
    made.generate(tokens(3, 2, seed=2), 9)
    assert torch.equal(first, made.generate(tokens(1, 9, seed=1), 4))

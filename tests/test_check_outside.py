"""Functions and modules of strangers under the laws: right ones pass, wrong ones are found and named."""

import importlib.util
import time

import pytest
import torch

import outside_mutants
import ropewalk as rw
from ropewalk.check.adapters import AttentionFunction, Bias, Rotation, fresh, modules_of
from ropewalk.check.libraries import adapt, flash_attn_rotary, transformers_rotary
from ropewalk.check.outside import LAWS_OF_ATTENTION, LAWS_OF_BIAS, LAWS_OF_ROTATION, check_callable, laws_of, run_on
from ropewalk.check.shrink import smallest

ALL_LAWS = (*LAWS_OF_ROTATION, *LAWS_OF_BIAS, *LAWS_OF_ATTENTION)


def broken(target) -> dict[str, set[str]]:
    """The laws that do not hold, with the kinds of what was found."""
    return {v.law: {finding.kind for finding in v.findings} for v in run_on(target) if v.status == "fail"}


def notes(target) -> str:
    return " ".join(note for verdict in run_on(target) for note in verdict.notes)


def needs(*packages: str):
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} not installed")


# What is right passes.


def flash_attn_reference(x, cos, sin, interleaved=False, seqlen_offsets=0):
    """flash-attn's interface in plain torch: x (batch, seq, heads, head_dim); cos, sin (rows, rotary_dim / 2); the
    first rotary_dim channels turn, the others stay."""
    rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
    cos, sin = cos[rows, None], sin[rows, None]
    width = 2 * cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    parts = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return torch.cat((out, rest), -1)


def by_tables_alone(x, cos, sin, interleaved):
    return flash_attn_reference(x, cos, sin, interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [None, 32])
@pytest.mark.parametrize("apply", [flash_attn_reference, by_tables_alone])
def test_flash_attns_interface_keeps_every_law(apply, interleaved, rotary_dim):
    assert {} == broken(flash_attn_rotary(apply, 64, interleaved=interleaved, rotary_dim=rotary_dim))


@pytest.mark.parametrize("options", [{}, {"rotary_dim": 8}, {"layout": "interleaved"}, {"base": 500_000.0}])
def test_our_rotation_keeps_every_law_at_any_position_in_float64_too(options):
    rope = rw.Rotary(16, **options)
    stated = {"base": 10_000.0, "layout": "half", "rotary_dim": 16, **options}
    target = Rotation(lambda x, at: rope.query(x, rope.at(at, x.dtype)), 16, exact=True, double=True, **stated)
    assert {} == broken(target)


@pytest.mark.parametrize("numbers", ["inv_freq", "exact"])
def test_a_rotation_with_frequencies_given_and_a_magnitude_keeps_every_law(numbers):
    rope = rw.Rotary(16, spectrum=rw.spectra.yarn(16, stretch=4.0, train_len=64))
    spectrum = rope.spectrum
    stated = {"inv_freq": getattr(spectrum, numbers), "magnitude": spectrum.magnitude, "exact": True}
    assert {} == broken(Rotation(lambda x, at: rope.query(x, rope.at(at, x.dtype)), 16, **stated))


@pytest.mark.parametrize("num_heads", [1, 6, 8])
def test_our_alibi_keeps_every_law(num_heads):
    def f(heads, q_positions, k_positions):
        head = torch.arange(heads)[:, None, None]
        return rw.ALiBi(heads).bias(head, q_positions[:, None], k_positions)

    assert {} == broken(Bias(f, num_heads, rule="alibi", symmetric=True))


@pytest.mark.parametrize("make", [lambda: rw.Rotary(16), lambda: rw.ALiBi(8), lambda: rw.Rotary(16) + rw.ALiBi(8)])
def test_our_attention_keeps_every_law(make):
    encoding = make()

    def f(q, k, v, positions):
        return rw.attend(q, k, v, encoding, q_positions=positions[-q.shape[2] :], k_positions=positions)

    assert {} == broken(AttentionFunction(f, 8, 2, 16, exact=True))


@pytest.mark.parametrize(
    "target",
    [
        Rotation(outside_mutants.right, 16, base=10_000.0, layout="half", rotary_dim=16),
        Bias(outside_mutants.right_bias, 8, rule="alibi", symmetric=True),
        Bias(outside_mutants.by_buckets, 2, rule="t5"),
        AttentionFunction(outside_mutants.right_attention, 8, 2, 16),
    ],
    ids=lambda target: target.name,
)
def test_what_the_wrong_ones_are_made_of_keeps_every_law(target):
    assert {} == broken(target)


# Other libraries: what they do break, they break for real (`test_faults_of_libraries_without_the_laws`).


@needs("rotary_embedding_torch")
def test_rotary_embedding_torch_rounds_positions_to_the_dtype_of_its_input():
    from rotary_embedding_torch import RotaryEmbedding

    expected = {"half precision": {"K01"}, "history": {"K02"}, "casts": {"K01"}}
    assert expected == broken(adapt(RotaryEmbedding(16)))


@needs("rotary_embedding_torch")
def test_faults_of_rotary_embedding_torch_without_the_laws():
    from rotary_embedding_torch import RotaryEmbedding

    x, first, spoiled = torch.ones(1, 1, 300, 16), RotaryEmbedding(16), RotaryEmbedding(16)
    expected = first.rotate_queries_or_keys(x)
    spoiled.rotate_queries_or_keys(x.bfloat16())  # positions 257, 259, ... become 256, 260, ...
    assert 1.0 < float((spoiled.rotate_queries_or_keys(x) - expected).abs().max())


@needs("x_transformers")
def test_rotation_of_x_transformers_keeps_every_law_until_its_frequencies_are_cast():
    from x_transformers.x_transformers import RotaryEmbedding

    assert {"casts": {"K01"}} == broken(adapt(RotaryEmbedding(16)))


@needs("x_transformers")
@pytest.mark.parametrize("num_heads", [6, 8])
def test_alibi_of_x_transformers_keeps_every_law(num_heads):
    from x_transformers.x_transformers import AlibiPositionalBias

    assert {} == broken(adapt(AlibiPositionalBias(num_heads)))


@needs("x_transformers")
@pytest.mark.parametrize("causal", [False, True])
def test_relative_bias_of_x_transformers_keeps_every_law(causal):
    from x_transformers.x_transformers import RelativePositionBias

    assert {} == broken(adapt(RelativePositionBias(1.0, causal=causal, heads=4)))


def llama():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=4))


def gpt_neox():
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

    return GPTNeoXRotaryEmbedding(GPTNeoXConfig(hidden_size=128, num_attention_heads=2))


def qwen2():
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

    return Qwen2RotaryEmbedding(Qwen2Config(hidden_size=64, num_attention_heads=4))


@needs("transformers")
@pytest.mark.parametrize("make", [llama, gpt_neox, qwen2])
def test_rotary_modules_of_transformers_keep_every_law_until_their_frequencies_are_cast(make):
    target = transformers_rotary(make(), layout="half")
    assert {"casts": {"K01"}} == broken(target)
    assert adapt(make()).base == target.base


@needs("transformers")
def test_frequencies_of_transformers_are_cast_without_the_laws():
    x, where = torch.zeros(1, 1, 1), torch.tensor([[1857]])
    before, after = llama()(x, where), llama().to(torch.bfloat16)(x, where)
    assert 0.1 < float((before[0] - after[0]).abs().max())


@needs("transformers")
def test_a_rotation_of_adjacent_channels_is_seen():
    from transformers import CohereConfig
    from transformers.models.cohere.modeling_cohere import CohereRotaryEmbedding

    target = adapt(CohereRotaryEmbedding(CohereConfig(hidden_size=64, num_attention_heads=4)))
    assert "the layout is interleaved" in notes(target)
    assert {"casts": {"K01"}} == broken(target)


# What is wrong is found and named.


@pytest.mark.parametrize("mutant", outside_mutants.MUTANTS, ids=lambda mutant: f"{mutant.kind}-{mutant.name}")
def test_each_fault_is_found_by_its_law_and_named_by_its_kind(mutant):
    target = mutant.make()
    law = next(law for law in laws_of(target) if law.name == mutant.law)
    assert mutant.kind in {finding.kind for finding in law(target)}
    assert {mutant.law} == {finding.law for finding in law(target)}


def test_faults_cover_every_kind_that_a_function_can_have():
    wanted = {f"K{n:02}" for n in (1, 2, 3, 4, 5, 7, 8, 9, 10, 14, 15, 16, 17, 20, 22, 23)}
    assert wanted == {mutant.kind for mutant in outside_mutants.MUTANTS}


@pytest.mark.parametrize("law", ALL_LAWS, ids=lambda law: f"{law.group}-{law.name}")
def test_each_law_says_what_it_promises_and_how_exactly(law):
    assert law.sentence.endswith(".")
    assert law.tolerance != ""


def test_each_law_has_a_fault_to_find():
    found = {(laws_of(mutant.make())[0].group, mutant.law) for mutant in outside_mutants.MUTANTS}
    assert {(law.group, law.name) for law in ALL_LAWS} == found


# What is left open is measured.


def test_what_is_not_stated_is_measured_and_noted():
    rope = rw.Rotary(16, rotary_dim=8, layout="interleaved")
    said = notes(Rotation(lambda x, at: rope.query(x, rope.at(at, x.dtype)), 16))
    turning = "8 of 16 channels turn, from channel 0 on"
    for words in ("the layout is interleaved", turning, "frequencies follow base 10000"):
        assert words in said


@pytest.mark.parametrize("direction", [None, "backward"])
def test_a_rotation_backward_is_right_where_that_is_stated_or_open(direction):
    def f(x, positions):
        return outside_mutants.right(x, -positions)

    target = Rotation(f, 16, base=10_000.0, direction=direction)
    assert {} == broken(target)
    assert ("it turns backward" in notes(target)) == (direction is None)


def test_channels_that_come_out_in_another_order_are_noted_not_judged():
    def f(x, positions):
        halves = torch.cat((x[..., ::2], x[..., 1::2]), -1)
        return outside_mutants.right(halves, positions)

    target = Rotation(f, 16, base=10_000.0, layout="interleaved", rotary_dim=16)
    assert {} == broken(target)
    assert "channels come out in another order" in notes(target)


def test_positions_that_are_refused_are_noted_and_break_nothing():
    def f(x, positions):
        if bool((positions >= 512).any()) or bool((positions < 0).any()):
            raise ValueError("positions must be below 512")
        return outside_mutants.right(x, positions)

    assert {} == broken(Rotation(f, 16, base=10_000.0, max_positions=512))
    assert {} == broken(Rotation(f, 16, base=10_000.0))
    assert "positions from 512 on are refused" in notes(Rotation(f, 16, base=10_000.0))


def test_distances_that_are_refused_are_noted_and_break_nothing():
    def f(num_heads, q_positions, k_positions):
        if int(q_positions.max()) >= 100:
            raise ValueError("positions must be below 100")
        return outside_mutants.right_bias(num_heads, q_positions, k_positions)

    assert {} == broken(Bias(f, 4, rule="alibi"))
    assert "are refused" in notes(Bias(f, 4, rule="alibi"))


def test_a_rotation_of_the_last_channels_is_right_where_that_is_stated():
    def f(x, positions):
        return torch.cat((x[..., :8], outside_mutants.registry.turn(x[..., 8:], positions[:, None] * inv_freq)), -1)

    inv_freq = outside_mutants.registry.frequencies(8)
    assert {} == broken(Rotation(f, 16, base=10_000.0, rotary_dim=8, first_channel=8, layout="half"))
    assert {"width": {"K08"}} == broken(Rotation(f, 16, base=10_000.0, rotary_dim=8, layout="half"))


def test_laws_that_say_nothing_of_a_target_give_the_reason():
    reasons = {v.law: v.reason for v in run_on(Bias(outside_mutants.right_bias, 2)) if v.status == "not applicable"}
    assert {"slopes", "shape", "buckets", "bounds"} == set(reasons)
    assert all(reasons.values())


# The smallest input.


@pytest.mark.parametrize("first", [1, 2, 3, 7, 300, 4095, 4096])
def test_the_smallest_failing_value_is_found(first):
    tried = []
    assert first == smallest(lambda n: tried.append(n) or n >= first, 1, 4096)
    assert len(tried) <= 2 * 13


def test_nothing_is_found_where_nothing_fails():
    assert smallest(lambda n: False, 1, 4096) is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("positions_in_float16", "position 2049"),
        ("table_that_wraps", "position 512"),
        ("keys_in_bfloat16", "shifted by 252"),
        ("rest_of_the_last_block_forgotten", "1 query on 65 keys"),
        ("one_rule_for_all_head_counts", "3 heads"),
    ],
)
def test_a_finding_names_the_smallest_input(wrong, words):
    mutant = next(mutant for mutant in outside_mutants.MUTANTS if mutant.name == wrong)
    law = next(law for law in laws_of(mutant.make()) if law.name == mutant.law)
    assert words in law(mutant.make())[0].input


# Adapters.


def test_modules_are_found_wherever_a_target_holds_them():
    rope = rw.Rotary(16)
    for f in (rope, rope.forward if hasattr(rope, "forward") else rope.query):
        assert [rope] == modules_of(Rotation(f, 16))
    assert [] == modules_of(Rotation(outside_mutants.right, 16))


def test_a_fresh_target_shares_no_module():
    target = Rotation(outside_mutants.of_rotation.FrequenciesInAFloatBuffer(), 16)
    fresh(target).f.to(torch.bfloat16)
    assert torch.float32 == target.f.inv_freq.dtype


def test_what_is_an_adapter_is_its_own_and_what_is_unknown_is_none():
    target = Rotation(outside_mutants.right, 16)
    assert adapt(target) is target
    assert adapt(torch.nn.Linear(2, 2)) is None
    assert adapt("llama") is None


@pytest.mark.errors
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotation(3, 16), "f must be callable, got int"),
        (lambda: Rotation(outside_mutants.right, 16, layout="neox"), "layout must be half or interleaved, got 'neox'"),
        (lambda: Rotation(outside_mutants.right, 16, rotary_dim=5), "rotary_dim must be even, from 2 to head_dim = 16"),
        (lambda: Rotation(outside_mutants.right, 16, rotary_dim=18), "rotary_dim must be even, from 2 to head_dim"),
        (lambda: Rotation(outside_mutants.right, 16, base=1.0, inv_freq=[1.0]), "base must be None where inv_freq"),
        (lambda: Rotation(outside_mutants.right, 16, rotary_dim=8, first_channel=9), "first_channel must be at most"),
        (lambda: Rotation(outside_mutants.right, 16, direction=1), "direction must be forward or backward, got 1"),
        (lambda: Rotation(outside_mutants.right, 16, base=-1.0), "base must be positive, got -1.0"),
        (lambda: Bias(outside_mutants.right_bias, 0), "num_heads must be at least 1"),
        (lambda: Bias(outside_mutants.right_bias, 2, rule="kerple"), "rule must be alibi, t5 or any"),
        (lambda: Bias(outside_mutants.right_bias, 2, max_distance=8), "max_distance must be above 8"),
        (lambda: AttentionFunction(outside_mutants.right_attention, 8, 3, 16), "num_kv_heads must be a divisor"),
    ],
)
def test_an_adapter_that_cannot_be_is_refused(make, words):
    with pytest.raises((TypeError, ValueError), match=words.replace("(", r"\(")):
        make()


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed")
def test_flash_attn_without_flash_attn_asks_for_the_function():
    with pytest.raises(ValueError, match=r"apply must be given where flash-attn is not installed, got None\nhint: "):
        flash_attn_rotary()


def test_each_target_takes_less_than_five_seconds():
    for target in (
        Rotation(outside_mutants.right, 128, name="wide"),
        AttentionFunction(outside_mutants.right_attention, 8, 2, 16),
        Bias(outside_mutants.right_bias, 8, rule="alibi"),
    ):
        started = time.process_time()
        run_on(target)
        assert time.process_time() - started < 5.0


def ignores_positions(x, positions):
    return x.clone()


def test_a_rotation_without_positions_is_named_once():
    assert {"frequencies": {"K11"}} == broken(Rotation(ignores_positions, 16, base=1e4, layout="half"))


def test_the_key_function_is_held_to_the_laws_of_the_query_function():
    rope = rw.Rotary(16, base=10_000.0)

    def turn(x, positions):
        return rope.query(x, rope.at(positions))

    found = broken(Rotation(turn, 16, key=lambda x, positions: turn(x, positions + 1), base=1e4))
    assert {"K04"} == found["start"]


@pytest.mark.parametrize("answer", [lambda x, p: None, lambda x, p: x[..., :2], lambda x: x])
def test_what_answers_no_plain_input_is_refused(answer):
    with pytest.raises(ValueError, match="target must be a function that"):
        check_callable(Rotation(answer, 16))


@pytest.mark.parametrize(("head_dim", "options"), [(15, {}), (16, {"max_positions": 0})])
def test_odd_heads_and_no_positions_are_refused(head_dim, options):
    with pytest.raises(ValueError, match="must be"):
        Rotation(ignores_positions, head_dim, **options)


def test_a_rotation_of_float64_alone_keeps_every_law():
    rope = rw.Rotary(16, base=10_000.0)

    def turn(x, positions):
        if x.dtype != torch.float64:
            raise TypeError("float64 only")
        return rope.query(x, rope.at(positions))

    assert {} == broken(Rotation(turn, 16, base=1e4, layout="half", double=True))


def test_another_base_is_said_once():
    rope = rw.Rotary(16, base=500_000.0)
    found = broken(Rotation(lambda x, p: rope.query(x, rope.at(p)), 16, base=1e4))
    assert {"frequencies": {"K09"}} == found

"""Laws behind public bug reports on compile, export, state dicts and the meta device (K18, K19)."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import oracles
import ropewalk as rw
from samples import NAMES, attention, encoding, leaves, model, normal, tokens

MANY = (*NAMES, "learned alibi")


def made_of(name):
    return rw.ALiBi(4, learned=True) if name == "learned alibi" else encoding(name)


class Dtypes(TorchDispatchMode):
    """Collects the dtype of every tensor that an operator returns."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in torch.utils._pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.seen.add(leaf.dtype)
        return out


class Through(torch.nn.Module):
    """Embed, then attend with q = k = v cut from the embedding: every hook of an encoding in one graph."""

    def __init__(self, made):
        super().__init__()
        self.encoding = made

    def forward(self, x):
        x = self.encoding.embed(x, self.encoding.at(torch.arange(x.shape[1])))
        heads = x.view(x.shape[0], x.shape[1], 4, 8).transpose(1, 2)
        return rw.attend(heads, heads, heads, self.encoding)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", MANY)
def test_no_complex_and_no_float64_tensor_on_the_way(name, backend):
    """B120, B121, B123: with float32 input every tensor is real and at most float32, so any device can run it."""
    q, k, v = (normal(1, 4, 6, 8, seed=seed) for seed in range(3))
    with Dtypes() as dtypes:
        made = made_of(name)
        x = made.embed(normal(1, 6, 32), made.at(torch.arange(6)))
        rw.attend(q, k, v, made, backend=backend)
    assert x.dtype == torch.float32
    assert torch.float32 in dtypes.seen
    assert not {dtype for dtype in dtypes.seen if dtype.is_complex or dtype == torch.float64}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MANY)
def test_no_buffer_can_be_spoilt_by_a_cast(name, dtype):
    """B121, B122: `.to(dtype)` and `.bfloat16()` / `.half()` agree; no complex or floating buffer exists."""
    made = made_of(name)
    for buffer in made.buffers():
        assert not (buffer.is_complex() or buffer.is_floating_point())
    one = copy.deepcopy(made).to(dtype)
    other = copy.deepcopy(made).bfloat16() if dtype == torch.bfloat16 else copy.deepcopy(made).half()
    q, k, v = (normal(1, 4, 6, 8, seed=seed).to(dtype) for seed in range(3))
    assert torch.equal(rw.attend(q, k, v, one), rw.attend(q, k, v, other))
    at = one.at(torch.tensor([0, 1, 15]))
    for before, after in zip(leaves(made.at(torch.tensor([0, 1, 15]))), leaves(at), strict=True):
        assert torch.equal(before, after)


def snapshot(module):
    """Everything a forward pass might assign: names, identities and contents."""
    rows = {}
    for prefix, part in module.named_modules():
        for key, value in vars(part).items():
            if key not in ("_parameters", "_buffers", "_modules"):
                rows[prefix, key] = (id(value), repr(value))
        rows[prefix, "buffers"] = {key: value.clone() for key, value in part._buffers.items() if value is not None}
    return rows


@pytest.mark.parametrize("name", NAMES)
def test_forward_assigns_nothing(name):
    """B126: `__dict__` and buffers of every module are the same before and after."""
    made = model(name)
    before = snapshot(made)
    for length in (3, 9):
        made(tokens(2, length))
    after = snapshot(made)
    assert before.keys() == after.keys()
    for key, value in before.items():
        if key[1] == "buffers":
            assert all(torch.equal(value[name], after[key][name]) for name in value)
        else:
            assert value == after[key]


@pytest.mark.compiled
@pytest.mark.parametrize("name", ["rotary+alibi", "sinusoidal", "learned", "learned alibi"])
def test_at_most_two_graphs_for_five_calls_of_two_lengths(name):
    """B127, B120: full-graph compilation passes and settles; results equal eager ones."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    module = Through(made_of(name))
    counter = CompileCounter()
    compiled = torch.compile(module, backend=counter, fullgraph=True)
    for length in (6, 6, 9, 9, 6):
        x = normal(1, length, 32, seed=length)
        torch.testing.assert_close(compiled(x), module(x), atol=1e-6, rtol=0.0)
    assert 1 <= counter.frame_count <= 2


@pytest.mark.compiled
@pytest.mark.parametrize("name", MANY)
def test_export_with_dynamic_length_is_right_at_other_lengths(name):
    """B120, B124: real operators only, and the exported program answers lengths it was not traced with."""
    module = Through(made_of(name)).eval()
    length = torch.export.Dim("length", min=2, max=64)
    program = torch.export.export(module, (normal(1, 12, 32),), dynamic_shapes={"x": {1: length}}, strict=False)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            assert not (value.dtype.is_complex or value.dtype == torch.float64)
    for length in (2, 5, 12, 33):
        x = normal(1, length, 32, seed=length)
        torch.testing.assert_close(program.module()(x), module(x), atol=1e-5, rtol=0.0)


@pytest.mark.compiled
def test_compiled_phase_is_exact_at_a_billion():
    """B127, B01: compilation keeps integer phases integers."""
    torch._dynamo.reset()
    made = rw.Rotary(32)
    compiled = torch.compile(lambda positions: made.at(positions).cos, backend="aot_eager", fullgraph=True)
    got = compiled(torch.tensor([0, 10**9 + 7]))[1].tolist()
    expected = [oracles.exact_cos_sin(10**9 + 7, pair, 32)[0] for pair in range(16)]
    assert expected == pytest.approx(got, abs=5e-7)


@pytest.mark.parametrize("name", MANY)
def test_state_dict_holds_learned_tensors_only(name):
    """B132, B133, K19: what is not learned is not stored."""
    state = made_of(name).state_dict()
    assert set(state) == {key for key, _ in made_of(name).named_parameters()}
    assert len(state) == (1 if name.startswith("learned") else 0)


def materialised(build):
    """Meta device, storage full of garbage, then the documented reset."""
    with torch.device("meta"):
        made = build()
    made = made.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*made.parameters(), *made.buffers()):
            tensor.fill_(-7)
    torch.manual_seed(5)
    for module in made.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return made


@pytest.mark.parametrize("name", MANY)
def test_meta_then_materialise_then_reset_equals_a_fresh_build(name):
    """B129, B130, B131: tables and results, not hook names, are compared; inv_freq[0] is 1."""
    build = lambda: made_of(name)  # noqa: E731
    made = materialised(build)
    q, k, v = (normal(1, 4, 6, 8, seed=seed) for seed in range(3))
    torch.manual_seed(5)
    fresh = rw.Learned(64, 32) if name == "learned" else build()
    assert torch.equal(rw.attend(q, k, v, fresh), rw.attend(q, k, v, made))
    positions = torch.tensor([0, 1, 63])
    x = normal(1, 3, 32)
    assert torch.equal(fresh.embed(x, fresh.at(positions)), made.embed(x, made.at(positions)))
    if name == "rotary":
        assert made.spectrum.inv_freq[0] == 1.0
        assert made.at(torch.tensor([1])).cos[0, 0].item() == pytest.approx(0.5403023058681398, abs=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_a_loaded_model_that_began_on_the_meta_device_equals_its_source(name):
    """B129: to_empty, then load: nothing but the checkpoint is needed."""
    source = model(name)
    with torch.device("meta"):
        target = model_on_meta(name)
    target = target.to_empty(device="cpu")
    target.load_state_dict(source.state_dict())
    text = tokens(1, 7)
    with torch.inference_mode():
        assert torch.equal(source(text), target(text))


def model_on_meta(name):
    made = rw.build(name, head_dim=8, num_heads=4, model_dim=32, num_positions=64)
    return rw.Transformer(61, made, model_dim=32, num_layers=2, num_heads=4).eval()


def rotary_paths(module):
    return [path for path, part in module.named_modules() if isinstance(part, rw.Rotary)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rotary", "rotary+alibi", "hybrid"])
def test_old_checkpoints_with_tables_load_strictly(name, dtype):
    """B132, B133: a legacy `inv_freq` is accepted and ignored, in bfloat16 too; its absence is no fault."""
    module = attention(name)
    fresh = attention(name)
    state = fresh.state_dict()
    fresh.load_state_dict(state, strict=True)
    for path in rotary_paths(module):
        frequencies = [float(oracles.exact_angle(1, pair, 8, 10_000.0)) for pair in range(4)]
        state[f"{path}.inv_freq"] = torch.tensor(frequencies, dtype=dtype)
    assert len(state) > len(module.state_dict())
    module.load_state_dict(state, strict=True)
    x = normal(1, 5, 32)
    assert torch.equal(fresh(x), module(x))


def test_legacy_rope_freqs_at_the_encoding_load_strictly():
    """B132: the other legacy spelling, on the encoding itself."""
    made = rw.Rotary(8)
    frequencies = torch.tensor([1.0, 0.1, 0.01, 0.001])
    made.load_state_dict({"rope.freqs": frequencies}, strict=True)
    assert list(made.spectrum.inv_freq) == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-12)


@pytest.mark.parametrize("key", ["inv_freq", "rope.freqs"])
def test_old_tables_of_another_spectrum_are_refused(key):
    """B132: accepted after a consistency check, not blindly."""
    with pytest.raises(ValueError, match=r"must be the frequencies of this encoding"):
        rw.Rotary(8).load_state_dict({key: torch.tensor([1.0, 0.5, 0.25, 0.125])}, strict=True)


def test_unknown_keys_are_still_refused():
    """B132: only the legacy names pass."""
    with pytest.raises(RuntimeError, match="Unexpected key"):
        rw.Rotary(8).load_state_dict({"frequencies": torch.ones(4)}, strict=True)

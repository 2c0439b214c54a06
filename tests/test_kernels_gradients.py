"""Rotations under autograd and whoever else watches: gradients, versions, transforms, tracers, operators."""

import contextlib
import itertools

import pytest
import torch

import ropewalk as rw
from ropewalk import kernels
from test_kernels import DTYPES, LAYOUTS, data, inputs, needs_native, tables
from turns import turned_as_complex

SHAPE, PAIRS = (2, 3, 5, 12), 4


def gradient(turn, x, cos, sin, layout, weight):
    leaf = x.detach().clone().requires_grad_()
    out = turn(leaf * 1, cos, sin, layout)
    return torch.autograd.grad(out, leaf, weight)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_gradient_is_the_opposite_turn(dtype, layout):
    x, cos, sin = inputs(SHAPE, PAIRS, (2, 1), dtype)
    weight = data(SHAPE, dtype, seed=5)
    expected = turned_as_complex(weight, cos, -sin, layout).to(dtype)
    for turn, way in itertools.product((kernels.turn, kernels.turn_), ("auto", "eager", "formula")):
        with kernels.using(way):
            got = gradient(turn, x, cos, sin, layout, weight)
        torch.testing.assert_close(got, expected, msg=lambda text, w=way: f"{w}: {text}")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_and_second_derivatives_equal_finite_differences(layout):
    x, cos, sin = inputs((1, 2, 3, 10), 4, (), torch.float64)
    x.requires_grad_()
    for turn in (kernels.turn, lambda y, *rest: kernels.turn_(y * 1, *rest)):
        assert torch.autograd.gradcheck(lambda y, t=turn: t(y, cos, sin, layout).square(), (x,))
        assert torch.autograd.gradgradcheck(lambda y, t=turn: t(y, cos, sin, layout).square(), (x,))


def test_learned_tables_get_their_gradient():
    x, cos, sin = inputs((1, 2, 3, 8), 4, (), torch.float64)
    cos.requires_grad_(), sin.requires_grad_()
    assert kernels.path(x, cos, sin, "half") == "formula"
    assert torch.autograd.gradcheck(lambda c, s: kernels.turn(x, c, s, "half"), (cos, sin))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_of_a_projection_is_turned_in_place_with_its_gradient(layout):
    weight, x = data((3 * 8, 6)), data((2, 5, 6), seed=2)
    cos, sin = tables((), 5, 4)
    found = []
    for turn in (kernels.turn, kernels.turn_):
        w = weight.clone().requires_grad_()
        projected = x @ w.T
        q = projected[..., 8:16].unflatten(-1, (1, 8)).transpose(1, 2)
        out = turn(q, cos, sin, layout)
        (out.square().sum() * 2 + projected[..., :8].sum()).backward()
        found.append(w.grad)
    torch.testing.assert_close(found[0], found[1])
    assert found[0].abs().sum() > 1


@pytest.mark.parametrize("way", ["auto", "eager", "formula"])
@pytest.mark.parametrize("recorded", [True, False])
def test_a_tensor_kept_for_backward_may_not_be_turned_in_place(recorded, way):
    cos, sin = tables((), 5, 4)
    x = data((2, 5, 8)).requires_grad_()
    y = x * 1
    out = y.square()  # keeps y
    with kernels.using(way), contextlib.nullcontext() if recorded else torch.no_grad():
        kernels.turn_(y, cos, sin, "half")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_leaf_that_requires_a_gradient_may_not_be_turned_in_place():
    cos, sin = tables((), 5, 4)
    leaf = data((2, 5, 8)).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        kernels.turn_(leaf, cos, sin, "half")
    before = leaf._version
    with torch.no_grad():
        kernels.turn_(leaf, cos, sin, "half")
    assert leaf._version > before


def test_inference_tensors_are_written_to_in_inference_mode_only():
    cos, sin = tables((), 5, 4)
    normal = data((2, 5, 8))
    with torch.inference_mode():
        frozen = data((2, 5, 8))
        assert torch.equal(kernels.turn(frozen, cos, sin, "half"), kernels.turn_(frozen, cos, sin, "half"))
        assert torch.equal(kernels.turn(normal, cos, sin, "half"), kernels.turn_(normal, cos, sin, "half"))
    with pytest.raises(RuntimeError, match="inference tensor"):
        kernels.turn_(frozen, cos, sin, "half")


class Own(torch.Tensor):
    """A subclass: whoever makes one wants to see every operation."""


def test_whoever_watches_sees_the_formula():
    x, (cos, sin) = data(SHAPE), tables((), 5, PAIRS)
    expected = kernels.turn(x, cos, sin, "half")
    assert isinstance(kernels.turn(x.as_subclass(Own), cos, sin, "half"), Own)
    turned = torch.func.vmap(lambda y: kernels.turn(y, cos, sin, "half"))(x)
    torch.testing.assert_close(turned, expected)
    in_place = torch.func.vmap(lambda y: kernels.turn_(y * 1, cos, sin, "half"))(x)
    torch.testing.assert_close(in_place, expected)
    for turn in (kernels.turn, lambda y, *rest: kernels.turn_(y * 1, *rest)):
        _, tangent = torch.func.jvp(lambda y, t=turn: t(y, cos, sin, "half"), (x,), (x,))
        torch.testing.assert_close(tangent, expected)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, x)
            tangent = torch.autograd.forward_ad.unpack_dual(turn(dual, cos, sin, "half")).tangent
        torch.testing.assert_close(tangent, expected)
    grad = torch.func.grad(lambda y: kernels.turn(y, cos, sin, "half").square().sum() / 2)(x)
    torch.testing.assert_close(grad, x)
    meta = kernels.turn(x.to("meta"), cos.to("meta"), sin.to("meta"), "half")
    assert meta.is_meta
    assert meta.shape == x.shape


@pytest.mark.errors  # sizes are tensors while torch.jit traces
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_jit_trace_holds_the_formula():
    x, (cos, sin) = data(SHAPE), tables((), 5, PAIRS)
    traced = torch.jit.trace(lambda y: kernels.turn(y, cos, sin, "half"), (x,), check_trace=False)
    torch.testing.assert_close(traced(2 * x), 2 * kernels.turn(x, cos, sin, "half"))


def test_tracers_and_counters_see_the_formula():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils.flop_counter import FlopCounterMode

    x, (cos, sin) = data(SHAPE), tables((), 5, PAIRS)
    expected = kernels.turn(x, cos, sin, "half")
    graph = make_fx(lambda y: kernels.turn(y, cos, sin, "half"))(x)
    torch.testing.assert_close(graph(2 * x), 2 * expected)
    with FakeTensorMode() as mode:
        fake = kernels.turn(*(mode.from_tensor(t) for t in (x, cos, sin)), "half")
        where = rw.Rotary(8).at(torch.arange(5000))
    assert fake.shape == x.shape
    assert type(where.cos) is type(fake)
    with FlopCounterMode(display=False):
        assert kernels.path(x, cos, sin, "half") == "formula"


def test_batched_gradients_go_through_backward():
    x, (cos, sin) = data((2, 5, 8)).requires_grad_(), tables((), 5, 4)
    out = kernels.turn(x, cos, sin, "half")
    weights = data((3, 2, 5, 8), seed=7)
    batched = torch.autograd.grad(out, x, weights, is_grads_batched=True, retain_graph=True)[0]
    for weight, got in zip(weights, batched, strict=True):
        torch.testing.assert_close(got, torch.autograd.grad(out, x, weight, retain_graph=True)[0])


@pytest.mark.compiled
def test_compilers_see_the_formula():
    x, (cos, sin) = data(SHAPE), tables((), 5, PAIRS)
    compiled = torch.compile(lambda y: kernels.turn(y, cos, sin, "half"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), kernels.turn(x, cos, sin, "half"))


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.compiled
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_pass_opcheck(dtype, layout):
    from ropewalk.kernels import ops

    contiguous, cos, sin = inputs(SHAPE, PAIRS, (), dtype)
    for x in (
        contiguous,
        contiguous.transpose(1, 2).contiguous().transpose(1, 2),
        data((2, 3, 5, 20), dtype)[..., 4:16],
    ):
        for back in (False, True):
            expected = turned_as_complex(x, cos, -sin if back else sin, layout).to(dtype)
            got = torch.ops.ropewalk.turn(x, cos, sin, layout, back)
            torch.testing.assert_close(got, expected)
            written = x.clone()
            torch.ops.ropewalk.turn_(written, cos, sin, layout, back)
            assert torch.equal(got, written)
        torch.library.opcheck(ops.turn, (x.detach().requires_grad_(), cos, sin, layout), test_utils=OPCHECKS)
        torch.library.opcheck(ops.turn_, (x.clone(), cos, sin, layout), test_utils=OPCHECKS)


@pytest.mark.compiled
def test_operators_stay_whole_in_a_graph_with_their_gradient():
    from ropewalk.kernels import ops

    x, cos, sin = inputs(SHAPE, PAIRS, (), torch.float32)
    weight = data(SHAPE, seed=9)
    compiled = torch.compile(lambda y: ops.turn(y, cos, sin, "half"), backend="aot_eager", fullgraph=True)
    leaf = x.requires_grad_()
    got = torch.autograd.grad(compiled(leaf), leaf, weight)[0]
    torch.testing.assert_close(got, kernels.turn(weight, cos, -sin, "half"))


@pytest.mark.errors
def test_operators_refuse_learned_tables():
    from ropewalk.kernels import ops

    x, cos, sin = inputs(SHAPE, PAIRS, (), torch.float32)
    with pytest.raises(ValueError, match="cos and sin must be tables without a gradient") as error:
        ops.turn(x, cos.requires_grad_(), sin, "half")
    assert "hint: kernels.turn" in str(error.value)


@needs_native
def test_compiled_code_is_what_runs_by_default():
    x, (cos, sin) = data(SHAPE), tables((), 5, PAIRS)
    assert kernels.path(x, cos, sin, "half") == "native"
    assert kernels.path(x, cos, sin, "half", in_place=True) == "native"


@pytest.mark.parametrize("make", [
    lambda x: x,
    lambda x: (x * 1).chunk(2, -1)[0],
    lambda x: (x * 1).unbind(0)[0],
    lambda x: _seen_without_gradients(x * 1),
])  # fmt: skip
def test_a_refused_turn_leaves_its_data_as_they_were(make):
    cos, sin = tables((), 5, 4)
    x = make(data((2, 5, 16)).requires_grad_())
    before = x.detach().clone()
    with pytest.raises(RuntimeError, match=r"x must be no .*\n.*hint: rotate gives a new tensor"):
        kernels.turn_(x, cos, sin, "half")
    assert torch.equal(before, x.detach())


def _seen_without_gradients(x):
    with torch.no_grad():
        return x[:1]

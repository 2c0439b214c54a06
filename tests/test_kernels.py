"""Compiled and plain rotations against complex numbers in float64, over dtypes, layouts, widths, strides and sizes."""

import contextlib
import itertools
import threading

import pytest
import torch

import ropewalk as rw
from ropewalk import kernels
from ropewalk.kernels import native
from turns import turned_as_complex

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("half", "interleaved")
SHAPES = (
    # shape, pairs, table's leading axes
    ((2, 3, 7, 16), 8, ()),
    ((2, 3, 7, 16), 5, (2, 1)),
    ((1, 4, 33, 64), 32, (1, 1)),
    ((2, 2, 5, 42), 19, (2, 2)),
    ((3, 1, 1, 9), 4, ()),
    ((5, 34), 17, ()),
    ((2, 2, 3, 2, 10), 5, (2, 1, 3)),
    ((1, 8, 70, 128), 64, ()),
    ((0, 3, 7, 16), 8, ()),
    ((2, 3, 0, 16), 8, ()),
)
needs_native = pytest.mark.skipif(bool(native.MISSING), reason="the compiled rotation is not built")


def tables(lead, rows, pairs, dtype=torch.float32, seed=0):
    angles = 9 * torch.randn(*lead, rows, pairs, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def data(shape, dtype=torch.float32, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(shape, pairs, lead, dtype):
    table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    return data(shape, dtype), *tables(lead, shape[-2], pairs, table_dtype)


def strided(x, order):
    """The same numbers in another order of memory."""
    if order == "token-major" and x.ndim > 2:
        return x.transpose(-3, -2).contiguous().transpose(-3, -2)
    if order == "slice of a projection":
        return torch.cat((x + 1, x, x - 1), dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]]
    return x.contiguous()


def rounding(dtype, expected):
    """Half a unit in the last place for the one rounding, and what float32 arithmetic loses before it."""
    arithmetic = 4e-15 if dtype == torch.float64 else 1e-6
    return expected.abs() * torch.finfo(dtype).eps / 2 * 1.001 + arithmetic


@contextlib.contextmanager
def plain_c():
    """The code that a processor without AVX2 runs."""
    native._turn.use_plain(True)
    try:
        yield
    finally:
        native._turn.use_plain(False)


WAYS = {
    "native": contextlib.nullcontext,
    "plain C": plain_c,
    "eager": lambda: kernels.using("eager"),
    "formula": lambda: kernels.using("formula"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_way_multiplies_complex_numbers(layout, dtype, way):
    if way in ("native", "plain C") and native.MISSING:
        pytest.skip("the compiled rotation is not built")
    for (shape, pairs, lead), order in itertools.product(
        SHAPES, ("contiguous", "token-major", "slice of a projection")
    ):
        x, cos, sin = inputs(shape, pairs, lead, dtype)
        x = strided(x, order)
        before = x.clone()
        expected = turned_as_complex(x, cos, sin, layout)
        with WAYS[way]():
            named = kernels.path(x, cos, sin, layout)
            got = kernels.turn(x, cos, sin, layout)
            there = strided(x.clone(), order)
            same = kernels.turn_(there, cos, sin, layout)
        assert named in ((way, "complex") if way == "eager" else (way.replace("plain C", "native"),))
        assert got.dtype == dtype
        assert same is there
        assert torch.equal(before, x)
        assert bool(((got.double() - expected).abs() <= rounding(dtype, expected)).all()), (shape, pairs, order)
        assert torch.equal(got, there), (shape, pairs, order)
        assert torch.equal(x[..., 2 * pairs :], got[..., 2 * pairs :])


@needs_native
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slice_of_a_projection_leaves_its_neighbours_alone(layout):
    projection = data((2, 5, 3 * 24))
    kept = projection.clone()
    q = projection[..., 24:48].unflatten(-1, (3, 8)).transpose(1, 2)
    cos, sin = tables((), 5, 4)
    expected = turned_as_complex(q, cos, sin, layout)
    kernels.turn_(q, cos, sin, layout)
    assert torch.allclose(expected.float(), q, atol=1e-6)
    assert torch.equal(kept[..., :24], projection[..., :24])
    assert torch.equal(kept[..., 48:], projection[..., 48:])


@needs_native
@pytest.mark.parametrize("way", ["native", "plain C"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_as_torch_rounds_it(dtype, layout, way):
    """Every bit pattern times a table whose sines are 0: one product, one rounding, ties and overflow included."""
    patterns = torch.arange(2**16).to(torch.int32).to(torch.int16).view(dtype)  # numbers, denormals, infinities, NaN
    x = patterns[patterns.isfinite()]
    x = torch.cat((x, torch.zeros_like(x)[: -len(x) % 64 + 64]))
    x = x[: len(x) // 64 * 64].view(-1, 64)
    for factor in (1.0, 1.0 + 2.0**-9, 1.0 + 2.0**-12, 0.70710678, 2.0**-14, -1.5):
        cos, sin = torch.full((1, 32), factor), torch.zeros(1, 32)
        with WAYS[way]():
            got = kernels.turn(x, cos, sin, layout)
        assert torch.equal((x.float() * factor).to(dtype), got)


@needs_native
@pytest.mark.parametrize("way", ["native", "plain C"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_infinity_stay_where_they_are(dtype, layout, way):
    x, cos, sin = inputs((1, 2, 3, 40), 20, (), dtype)
    x[0, 0, 1, 3], x[0, 1, 0, 2] = float("nan"), float("inf")
    payload = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # a NaN that careless rounding loses
    cos[2, 18] = payload.to(cos.dtype)
    with WAYS[way]():
        got = kernels.turn(x, cos, sin, layout)
    expected = turned_as_complex(x, cos, sin, layout)
    assert torch.equal(expected.isnan(), got.isnan())
    assert torch.equal(expected.isinf(), got.isinf())


@needs_native
def test_denormals_are_numbers_before_and_after():
    tiny = torch.full((1, 64), 1e-40)
    got = kernels.turn(tiny, torch.ones(1, 32), torch.zeros(1, 32), "half")
    assert torch.equal(tiny, got)
    assert float(tiny[0, 0] * 0.5) > 0


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_number_of_threads_gives_the_same_bits(dtype):
    before = torch.get_num_threads()
    try:
        for shape in ((1, 9, 517, 64), (3, 40, 61, 24), (2, 1, 4099, 32), (70_001, 8)):
            x, cos, sin = inputs(shape, shape[-1] // 2, (), dtype)
            for order in ("contiguous", "token-major"):
                y = strided(x, order)
                made = []
                for threads in (1, 2, 3):
                    torch.set_num_threads(threads)
                    made.append(kernels.turn(y, cos, sin, "half"))
                expected = turned_as_complex(x, cos, sin, "half")
                assert bool(((made[0].double() - expected).abs() <= rounding(dtype, expected)).all())
                assert torch.equal(made[0], made[1])
                assert torch.equal(made[0], made[2])
    finally:
        torch.set_num_threads(before)


@needs_native
def test_python_threads_turn_at_the_same_time():
    cos, sin = tables((), 600, 32)
    xs = [data((1, 4, 600, 64), seed=seed) for seed in range(4)]
    expected = [kernels.turn(x, cos, sin, "half") for x in xs]
    wrong = []

    def work(x, right):
        for _ in range(20):
            y = x.clone()
            kernels.turn_(y, cos, sin, "half")
            if not torch.equal(right, y):
                wrong.append(1)

    workers = [threading.Thread(target=work, args=pair) for pair in zip(xs, expected, strict=True)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [] == wrong


def test_what_compiled_code_cannot_walk_takes_plain_pytorch():
    x, (cos, sin) = data((2, 3, 7, 16)), tables((), 7, 8)
    across = data((2, 3, 16, 7)).mT
    opposite = torch.complex(x, x).conj().imag
    double = cos.double(), sin.double()
    assert opposite.is_neg()
    half = x.bfloat16()
    cases = ((across, (cos, sin)), (opposite, (cos, sin)), (x, double), (half, (cos.bfloat16(), sin.bfloat16())))
    for y, table in cases:
        assert kernels.path(y, *table, "half") == "eager"
        expected = turned_as_complex(y, *table, "half").to(y.dtype)
        exact = {"rtol": 0.02, "atol": 0.02} if y is half else {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close(kernels.turn(y, *table, "half"), expected, **exact)
        torch.testing.assert_close(kernels.turn_(y.clone(), *table, "half"), expected, **exact)


def test_a_repeated_tensor_is_read_but_not_written_to():
    one, (cos, sin) = data((1, 1, 7, 16)), tables((), 7, 8)
    x = one.expand(2, 3, 7, 16)
    assert torch.equal(kernels.turn(one, cos, sin, "half").expand(2, 3, 7, 16), kernels.turn(x, cos, sin, "half"))
    with pytest.raises(RuntimeError, match="single memory location"):
        kernels.turn_(x, cos, sin, "half")


@pytest.mark.errors
@pytest.mark.parametrize("turn", [kernels.turn, kernels.turn_])
def test_a_table_that_does_not_fit_is_refused(turn):
    x, (cos, sin) = data((2, 3, 7, 16)), tables((), 6, 8)
    with pytest.raises(RuntimeError, match="size"):
        turn(x, cos, sin, "half")


def test_one_token_equals_its_row_in_a_sequence():
    for dtype, layout in itertools.product(DTYPES, LAYOUTS):
        x, cos, sin = inputs((8, 4, 9, 40), 20, (), dtype)
        whole = kernels.turn(x, cos, sin, layout)
        alone = kernels.turn(x[:, :, 4:5], cos[4:5], sin[4:5], layout)
        assert torch.equal(whole[:, :, 4:5], alone)


def test_rotate_takes_positions_of_each_row():
    rope, x = rw.Rotary(16, rotary_dim=12), data((3, 2, 5, 16))
    where = torch.tensor([[0, 1, 2, 3, 4], [9, 8, 7, 6, 5], [10**12, 5, -3, 0, 1]])
    at = rope.at(where)
    expected = torch.stack([rw.rotate(x[row : row + 1], rope.at(where[row]))[0] for row in range(3)])
    assert torch.equal(expected, rw.rotate(x, at))
    assert torch.equal(expected, rw.rotate_(x.clone(), at))

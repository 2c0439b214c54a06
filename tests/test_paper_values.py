"""Numbers from the papers and the tutorials, checked by hand or with a pocket calculator."""

import cmath
import math

import pytest
import torch

import oracles
import ropewalk as rw

EXAMPLE = [0.2, 0.1, -0.3, 0.7]
SIXTY_DEGREES = math.pi / 3


def turn(x, position, encoding):
    """One vector through `encoding.query` at one position."""
    x = torch.tensor(x, dtype=torch.float64)
    at = encoding.at(torch.tensor([position]), dtype=torch.float64)
    return encoding.query(x[None, None, None], at)[0, 0, 0].tolist()


def plane(angle, magnitude=1.0):
    """The plane turned by `angle` radians a token."""
    return rw.Rotary(2, spectrum=rw.Spectrum((angle,), magnitude=magnitude))


@pytest.mark.parametrize(
    ("layout", "position", "expected"),
    [
        ("interleaved", 1, [0.02391336, 0.22232443, -0.30698488, 0.69696505]),
        ("interleaved", 2, [-0.17415911, 0.1402448, -0.31393907, 0.6938604]),
        ("half", 1, [0.36050176, 0.09299512, 0.00620351, 0.70096498]),
    ],
)
def test_rope_of_the_worked_example(layout, position, expected):
    encoding = rw.Rotary(4, base=10_000.0, layout=layout)
    assert expected == pytest.approx(turn(EXAMPLE, position, encoding), abs=1e-8)


def test_plane_rotation_by_60_degrees():
    turned = turn([1.0, 2.0], 1, plane(SIXTY_DEGREES))
    assert pytest.approx(turned, abs=1e-8) == [-1.23205081, 1.8660254]
    assert pytest.approx(2.23606798, abs=1e-8) == math.hypot(*turned)
    assert pytest.approx(0.5, abs=1e-12) == oracles.dot([1.0, 2.0], turned) / 5.0


def test_turning_and_stretching_squares_a_complex_number():
    """(1 + sqrt(3) i)^2 = -2 + 2 sqrt(3) i: a product with modulus 2 at 60 degrees."""
    turned = turn([1.0, math.sqrt(3.0)], 1, plane(SIXTY_DEGREES, magnitude=2.0))
    assert [-2.0, 2.0 * math.sqrt(3.0)] == pytest.approx(turned, abs=1e-12)
    modulus, angle = cmath.polar(complex(*turned))
    assert pytest.approx(4.0, abs=1e-12) == modulus
    assert pytest.approx(120.0, abs=1e-10) == math.degrees(angle)


@pytest.mark.parametrize("seed", range(5))
def test_score_of_a_pair_is_the_real_part_of_q_times_conjugate_k(seed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, generator=generator, dtype=torch.float64).tolist()
    product = complex(*q) * complex(*k).conjugate()
    frequency = 0.37
    encoding = plane(frequency)
    for q_pos, k_pos in ((0, 0), (5, 5), (9, 2), (3, 11)):
        expected = (product * cmath.exp(1j * frequency * (q_pos - k_pos))).real
        got = oracles.dot(turn(q, q_pos, encoding), turn(k, k_pos, encoding))
        assert expected == pytest.approx(got, abs=1e-12)
    assert product.real == pytest.approx(oracles.dot(turn(q, 4, encoding), turn(k, 4, encoding)), abs=1e-12)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_score_depends_on_distance_alone(layout):
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator, dtype=torch.float64).tolist()
    encoding = rw.Rotary(8, layout=layout)
    by_distance = {}
    for q_pos in range(12):
        for k_pos in range(12):
            score = oracles.dot(turn(q, q_pos, encoding), turn(k, k_pos, encoding))
            by_distance.setdefault(q_pos - k_pos, []).append(score)
    for scores in by_distance.values():
        assert scores[0] == pytest.approx(scores[-1], abs=1e-12)
    assert len({round(scores[0], 6) for scores in by_distance.values()}) == len(by_distance)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_position_zero_changes_nothing(layout):
    assert turn(EXAMPLE, 0, rw.Rotary(4, layout=layout)) == EXAMPLE


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("position", [1, 2, 500, 123_456_789])
def test_length_is_kept(layout, position):
    turned = turn(EXAMPLE, position, rw.Rotary(4, layout=layout))
    assert math.hypot(*EXAMPLE) == pytest.approx(math.hypot(*turned), abs=1e-12)


@pytest.mark.parametrize(
    ("num_heads", "expected"),
    [
        (1, [1 / 256]),
        (6, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]),
        (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
        (
            12,
            [*(2.0**-exponent for exponent in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
        ),
    ],
)
def test_slopes_of_the_published_rule(num_heads, expected):
    one_token_back = rw.ALiBi(num_heads).bias(torch.arange(num_heads), torch.tensor(1), torch.tensor(0))
    assert expected == pytest.approx((-one_token_back).tolist(), rel=1e-7)


def test_bias_is_minus_slope_times_distance():
    head, q_pos, k_pos = torch.arange(8)[:, None, None], torch.arange(6)[:, None], torch.arange(6)
    bias = rw.ALiBi(8).bias(head, q_pos, k_pos)
    for h in range(8):
        for i in range(6):
            for j in range(6):
                assert -(2.0 ** -(h + 1)) * abs(i - j) == bias[h, i, j].item()


def test_sinusoidal_rows_of_the_first_transformer():
    """Width 4: frequencies 1 and 0.01, sin on even and cos on odd channels."""
    encoding = rw.Sinusoidal(4)
    made = encoding.embed(torch.zeros(1, 3, 4), encoding.at(torch.arange(3)))[0]
    expected = [
        [0.0, 1.0, 0.0, 1.0],
        [0.8414709848, 0.5403023059, 0.0099998333, 0.9999500004],
        [0.9092974268, -0.4161468365, 0.0199986667, 0.9998000067],
    ]
    for row, numbers in enumerate(expected):
        assert numbers == pytest.approx(made[row].tolist(), abs=1e-7)


def test_llama_2_tables_have_4096_rows_of_64_frequencies():
    angles = rw.compat.precompute_freqs_cis(128, 4096, 10_000.0)
    assert tuple(angles.shape) == (4096, 64)
    assert len(rw.spectra.plain(128).inv_freq) == 64


def test_llama_2_tables_double_to_128_channels_in_the_half_layout():
    x = torch.zeros(1, 32, 4096, 128)
    cos, sin = rw.compat.LlamaRotaryEmbedding(128, max_position_embeddings=4096)(x, seq_len=4096)
    assert tuple(cos.shape)[-2:] == tuple(sin.shape)[-2:] == (4096, 128)
    assert torch.equal(cos[..., :64], cos[..., 64:])
    assert torch.equal(sin[..., :64], sin[..., 64:])


def test_llama_2_gives_ten_rows_for_ten_tokens():
    rotary = rw.compat.LlamaRotaryEmbedding(128, max_position_embeddings=4096)
    cos, sin = rotary(torch.zeros(1, 32, 10, 128), seq_len=10)
    assert tuple(cos.shape)[-2:] == tuple(sin.shape)[-2:] == (10, 128)
    long_cos, long_sin = rotary(torch.zeros(1, 32, 4096, 128), seq_len=4096)
    # a long run is made by the addition theorem: other roundings of the same numbers
    assert torch.allclose(long_cos[..., :10, :], cos, rtol=0, atol=5e-7)
    assert torch.allclose(long_sin[..., :10, :], sin, rtol=0, atol=5e-7)


def test_partial_width_uses_the_rotated_channels_in_the_exponent():
    """Head 128, rotated 64: the second frequency is 10000^(-2/64) = 0.7498942, the last 10000^(-62/64)."""
    inv_freq = rw.Rotary(128, rotary_dim=64).spectrum.inv_freq
    assert len(inv_freq) == 32
    assert pytest.approx(0.7498942093, abs=1e-10) == inv_freq[1]
    assert pytest.approx(1.3335214e-4, rel=1e-7) == inv_freq[31]


def test_linear_stretch_divides_every_frequency():
    expected = [frequency / 4.0 for frequency in (1.0, 0.1, 0.01, 0.001)]
    assert expected == pytest.approx(list(rw.spectra.linear(8, stretch=4.0).inv_freq), rel=1e-12)


def test_ntk_stretch_raises_the_base():
    """base' = base * stretch^(dim / (dim - 2)); the fastest pair stays, the slowest is stretched in full."""
    got = rw.spectra.ntk(128, base=10_000.0, stretch=4.0).inv_freq
    base = 10_000.0 * 4.0 ** (128 / 126)
    assert [base ** (-2 * pair / 128) for pair in range(64)] == pytest.approx(list(got), rel=1e-12)
    assert pytest.approx(got[63], rel=1e-12) == 10_000.0 ** (-126 / 128) / 4.0


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    """dim 64, trained on 4096 tokens, stretch 4: inv_freq[0] = 1 exactly, inv_freq[31] = 3.3338e-5."""
    spectrum = rw.spectra.yarn(64, base=10_000.0, stretch=4.0, train_len=4096)
    assert spectrum.inv_freq[0] == 1.0
    assert pytest.approx(3.3338e-5, rel=1e-4) == spectrum.inv_freq[31]
    assert pytest.approx(0.1 * math.log(4.0) + 1.0, abs=1e-12) == spectrum.magnitude


@pytest.mark.parametrize(
    ("base", "train_len", "stretch", "truncate", "pair", "expected"),
    [
        (150_000.0, 4096, 32.0, False, 17, 1.293187012e-4),
        (150_000.0, 4096, 32.0, True, 17, 2.279477958e-4),
        (10_000.0, 131_072, 4.0, True, 31, 6.411160732e-5),
    ],
)
def test_yarn_ramps_between_the_turns_that_its_betas_name(base, train_len, stretch, truncate, pair, expected):
    """B58, B59: inside the ramp, with its ends rounded to whole pairs or not, and the upper end above dim / 2."""
    spectrum = rw.spectra.yarn(64, base=base, stretch=stretch, train_len=train_len, truncate=truncate)
    assert expected == pytest.approx(spectrum.inv_freq[pair], rel=1e-8)


@pytest.mark.parametrize(("beta_fast", "beta_slow"), [(32.0, 1.0), (16.0, 2.0)])
def test_yarn_follows_its_formula_at_every_pair(beta_fast, beta_slow):
    """inv_freq = plain / stretch * ramp + plain * (1 - ramp), the ramp linear between two numbers of turns."""
    options = {"train_len": 4096, "beta_fast": beta_fast, "beta_slow": beta_slow}
    spectrum = rw.spectra.yarn(128, base=10_000.0, stretch=8.0, **options)
    low, high = (64 * math.log(4096 / (2 * math.pi * turns)) / math.log(10_000.0) for turns in (beta_fast, beta_slow))
    for pair, got in enumerate(spectrum.inv_freq):
        plain = 10_000.0 ** (-2 * pair / 128)
        ramp = (pair - math.floor(low)) / (math.ceil(high) - math.floor(low))
        ramp = min(max(ramp, 0.0), 1.0)
        assert plain / 8.0 * ramp + plain * (1.0 - ramp) == pytest.approx(got, rel=1e-12)


def test_hybrid_mixes_the_scaled_score_and_the_bias():
    """alpha * score + (1 - alpha) * bias on one query and two keys, softmax by hand."""
    alpha, slope = 0.25, 0.5
    q, keys, values = [1.0, 0.0], [[0.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 1.0]]
    hybrid = rw.Hybrid(rw.Rotary(2), rw.ALiBi(1, slopes=(slope,)), alpha=alpha)
    scores = []
    for k_pos, key in enumerate(keys):
        angle = 1 - k_pos
        turned = math.cos(angle) * key[0] + math.sin(angle) * key[1]
        scores.append(alpha * turned / math.sqrt(2.0) - (1.0 - alpha) * slope * (1 - k_pos))
    first = math.exp(scores[0]) / (math.exp(scores[0]) + math.exp(scores[1]))
    tensors = [torch.tensor(rows, dtype=torch.float64)[None, None] for rows in ([q], keys, values)]
    out = rw.attend(*tensors, hybrid)[0, 0, 0]
    assert [first, 1.0 - first] == pytest.approx(out.tolist(), abs=1e-7)


def test_longrope_magnitude_of_4_times_16_tokens():
    """sqrt(1 + ln 4 / ln 16) = sqrt(1.5)."""
    factors = {"short_factors": [1.0], "long_factors": [2.0], "train_len": 16, "stretch": 4}
    assert pytest.approx(1.2247448714, abs=1e-10) == rw.spectra.longrope(2, **factors, length=16).magnitude
    assert [(1.0,), (0.5,)] == [rw.spectra.longrope(2, **factors, length=n).inv_freq for n in (16, 17)]


def test_dynamic_ntk_at_twice_the_trained_length():
    """dim 128, factor 2: the base is 10000 * 3^(128 / 126) = 30527.737."""
    inv_freq = rw.spectra.dynamic_ntk(128, stretch=2, train_len=2048, length=4096).inv_freq
    assert 30527.7367488067 ** (-2 / 128) == pytest.approx(inv_freq[1], rel=1e-12)


def test_llama_3_mixes_between_one_and_four_turns():
    """dim 64, base 5e5, 8192 tokens stretched 32 times: pair 15 turns 2.78 times and keeps (2.78 - 1) / 3 of itself."""
    turns = 8192 * 5e5 ** (-30 / 64) / (2 * math.pi)
    kept = (turns - 1) / 3
    got = rw.spectra.llama3(64, stretch=32, train_len=8192).inv_freq[15]
    assert 5e5 ** (-30 / 64) * (kept + (1 - kept) / 32) == pytest.approx(got, rel=1e-12)
    assert pytest.approx(2.78, abs=0.01) == turns


def test_a_cell_of_a_grid_turns_by_its_row_and_its_column():
    """Row 2, column 3, width 4: the pair of rows turns by 2 radians, that of columns by 3."""
    encoding = rw.Axial(4, layout="interleaved")
    x = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    at = encoding.at(torch.tensor([2, 3]).view(2, 1, 1), torch.float64)
    expected = [math.cos(2), math.sin(2), math.cos(3), math.sin(3)]
    assert expected == pytest.approx(encoding.query(x, at).flatten().tolist(), abs=1e-12)


def test_mrope_gives_a_frame_a_row_and_a_column_their_pairs():
    """Sections 1, 1, 1 of width 6: three pairs, turned by time, height and width."""
    encoding = rw.MRoPE(6, [1, 1, 1], spectrum=rw.Spectrum([1.0, 0.5, 0.25]))
    x = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float64).view(1, 1, 1, 6)
    at = encoding.at(torch.tensor([4, 6, 8]).view(3, 1, 1), torch.float64)
    angles = (4 * 1.0, 6 * 0.5, 8 * 0.25)
    expected = [*map(math.cos, angles), *map(math.sin, angles)]
    assert expected == pytest.approx(encoding.query(x, at).flatten().tolist(), abs=1e-12)


def test_the_last_channels_turn_under_latent_attention():
    encoding = rw.Trailing(4, 2)
    x = torch.tensor([5.0, 7.0, 1.0, 0.0], dtype=torch.float64).view(1, 1, 1, 4)
    got = encoding.query(x, encoding.at(torch.tensor([2]), torch.float64)).flatten().tolist()
    assert [5.0, 7.0, math.cos(2), math.sin(2)] == pytest.approx(got, abs=1e-12)


def test_log_n_doubles_a_query_at_the_square_of_the_trained_length():
    encoding = rw.Temperature(train_len=100)
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    got = encoding.query(q, encoding.at(torch.tensor([5, 99, 9999]), torch.float64)).flatten().tolist()
    assert [1.0, 1.0, 2.0] == pytest.approx(got, abs=1e-12)

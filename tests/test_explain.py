"""`ropewalk explain`: every number by another route, every refusal by name."""

import cmath
import json
import math
import struct
import subprocess
import sys

import mpmath
import pytest

import oracles
from ropewalk import cli, explain, spectra
from ropewalk.explain import models
from ropewalk.explain.text import vector

VECTOR = [0.2, 0.1, -0.3, 0.7]
LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
         "num_hidden_layers": 4, "max_position_embeddings": 131072, "rope_theta": 500000.0,
         "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                          "low_freq_factor": 1.0, "high_freq_factor": 4.0}}  # fmt: skip


def run(*arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ropewalk", "explain", *arguments])
    try:
        cli.main()
        code = 0
    except SystemExit as ended:
        code = ended.code
    return code, *capsys.readouterr()


def test_worked_example_of_the_tutorial():
    n = explain.rotary(VECTOR, 1).numbers
    assert [[0, 1], [2, 3]] == n["pairs"]
    assert [1.0, 0.01] == n["inv_freq"]
    assert pytest.approx(n["cos"], abs=1e-12) == [math.cos(1.0), math.cos(0.01)]
    assert pytest.approx(n["sin"], abs=1e-12) == [math.sin(1.0), math.sin(0.01)]
    assert pytest.approx(n["result"]["interleaved"], abs=1e-8) == [0.02391336, 0.22232443, -0.30698488, 0.69696505]
    assert pytest.approx(n["result"]["half"], abs=1e-8) == [0.36050176, 0.09299512, 0.00620351, 0.70096498]
    two = explain.rotary(VECTOR, 2).numbers["result"]["interleaved"]
    assert pytest.approx(two, abs=1e-8) == [-0.17415911, 0.1402448, -0.31393907, 0.6938604]


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("position", [0, 1, 77, 123_456_789])
def test_terms_and_complex_form_give_the_result(layout, position):
    n = explain.rotary([0.3, -1.2, 0.5, 2.0, -0.7, 0.1], position, layout=layout).numbers
    assert oracles.rotated(n["vector"], position, layout=layout) == pytest.approx(n["result"][layout], abs=1e-7)
    for pair, (a_cos, b_sin, a_sin, b_cos), z in zip(n["pairs"], n["products"], n["complex"], strict=True):
        got = [n["result"][layout][channel] for channel in pair]
        assert [a_cos - b_sin, a_sin + b_cos] == pytest.approx(got, abs=1e-12)
        assert z == pytest.approx(got, abs=1e-12)


def test_scores_follow_the_distance_alone():
    q, k = [1.0, 2.0, -0.5, 0.25], [0.5, -1.0, 2.0, 1.0]
    rows = explain.rotary(q, 5, key=k).numbers["scores"]
    assert 5 == len(rows)
    for row in rows:
        parts = (complex(*q[2 * i : 2 * i + 2]) * complex(*k[2 * i : 2 * i + 2]).conjugate()
                 * cmath.exp(1j * row["distance"] * w) for i, w in enumerate((1.0, 0.01)))  # fmt: skip
        assert math.fsum(z.real for z in parts) / 2.0 == pytest.approx(row["score"], abs=1e-8)
        assert row["q_pos"] - row["k_pos"] == row["distance"]
    assert 3 == len({round(row["score"], 7) for row in rows})


def test_shown_numbers_are_the_computed_ones():
    text = str(explain.rotary(VECTOR, 1))
    for number in ("0.02391336, 0.22232443, -0.30698488, 0.69696505", "0.36050176, 0.09299512", "0.84147098", "628.32"):
        assert number in text


def test_slopes_of_twelve_heads_and_where_they_come_from():
    heads = explain.alibi(12).numbers["heads"]
    expected = [*(2.0**-i for i in range(1, 9)), 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert expected == pytest.approx([h["slope"] for h in heads], rel=1e-12)
    for h, slope in zip(heads, expected, strict=True):
        exponent = h["rule"].removeprefix("2^(-8 x ").removesuffix(")").split("/")
        assert slope == pytest.approx(2 ** (-8 * int(exponent[0]) / int(exponent[1])), rel=1e-12)
    text = str(explain.alibi(12))
    assert "heads 0-7: all 8 slopes" in text and "heads 8-11: every second slope" in text
    assert "is a power of two" in str(explain.alibi(8))


@pytest.mark.parametrize("share", [0.5, 0.01, 1e-6])
def test_sight_is_the_first_distance_below_the_share(share):
    for h in explain.alibi(6, share=share).numbers["heads"]:
        weights = (math.exp(-h["slope"] * d) for d in range(1 << 20))
        assert next(d for d, w in enumerate(weights) if w < share) == h["sees"]


@pytest.mark.parametrize(("name", "eps"), [("float32", 2.0**-24), ("bfloat16", 2.0**-8)])
def test_bound_of_the_window_is_that_of_the_series(name, eps):
    for h in explain.alibi(8).numbers["heads"]:
        tail = lambda w, m=h["slope"]: mpmath.exp(-m * (w + 1)) / (1 - mpmath.exp(-m))  # noqa: E731
        assert tail(h[name]) <= eps
        assert tail(h[name] - 2) > eps * 0.99


def test_a_head_without_slope_sees_everything():
    head = explain.alibi(1, slopes=[0.0]).numbers["heads"][0]
    assert [None] * 3 == [head[name] for name in ("sees", "float32", "bfloat16")]


def test_sinusoids_are_sines_and_cosines():
    n = explain.sinusoidal(6, 4).numbers
    expected = [f(4 * 10_000 ** (-2 * i / 6)) for i in range(3) for f in (math.sin, math.cos)]
    assert expected == pytest.approx(n["added"], abs=1e-9)
    (_, _, near), (_, _, same), (_, _, other) = n["products"]
    assert near == pytest.approx(same, abs=1e-9)
    assert abs(near - other) > 1e-3


@pytest.mark.parametrize("alpha", [None, 0.25])
def test_hybrid_is_score_and_bias(alpha):
    n = explain.hybrid(VECTOR, 8, distance=2, alpha=alpha).numbers
    score = (0.05 * math.cos(2.0) + 0.58 * math.cos(0.02)) / 2.0
    assert score == pytest.approx(n["score"], abs=1e-9)
    weight, rest = (1.0, 1.0) if alpha is None else (alpha, 1 - alpha)
    for i, h in enumerate(n["heads"]):
        assert weight * score - rest * 2 * 2.0 ** -(i + 1) == pytest.approx(h["sum"], abs=1e-9)


def test_config_in_numbers():
    made = explain.config(LLAMA)
    (group,) = made.numbers["groups"]
    assert [0, 1, 2, 3] == group["layers"]
    turns = [8192 * 500_000.0 ** (-i / 64) / (2 * math.pi) for i in range(64)]
    kept = [min(max((t - 1) / 3, 0.0), 1.0) for t in turns]
    stretched = [t * (k + (1 - k) / 8) for t, k in zip(turns, kept, strict=True)]
    assert [i for i, t in enumerate(turns) if t < 1] == group["incomplete_pairs"]
    more = [i for i in group["incomplete_pairs"] if stretched[i] * 131072 / 8192 > turns[i] * (1 + 1e-9)]
    assert more == group["unseen_pairs"]
    assert (8.0, 500000.0, 1.0) == (group["stretch"], group["base"], group["magnitude"])
    assert pytest.approx(group["wavelengths"][-1], rel=1e-9) == 2 * math.pi * 8 * 500_000 ** (63 / 64)
    assert f"{len(group['incomplete_pairs'])} of 64 pairs" in str(made)


def test_a_linear_stretch_to_its_own_length_shows_no_new_angle():
    block = {"rope_type": "linear", "factor": 4.0}
    config = {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 16384, "rope_scaling": block,
              "original_max_position_embeddings": 4096}  # fmt: skip
    yarn = {**config, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}}
    for case in (config, yarn):
        (group,) = explain.config(case).numbers["groups"]
        assert [i for i in range(64) if 4096 * 10_000.0 ** (-i / 64) < 2 * math.pi] == group["incomplete_pairs"]
        assert [] == group["unseen_pairs"]
    made = str(explain.config(yarn))
    assert "has not shown" not in made and "for 32768 tokens, twice the allowed length" in made
    far = {**yarn, "max_position_embeddings": 32768}
    assert explain.config(far).numbers["groups"][0]["unseen_pairs"]


def test_layers_behind_a_window_say_what_they_see():
    config = {"model_type": "gemma3_text", "hidden_size": 640, "num_attention_heads": 4, "head_dim": 256,
              "num_hidden_layers": 6, "sliding_window": 512, "max_position_embeddings": 32768}  # fmt: skip
    made = explain.config(config)
    assert [512, None] == [group["window"] for group in made.numbers["groups"]]
    near, far = made.sections[1:3]
    assert "Sees 512 tokens" in near.lines[0] and not any("has not shown" in line for line in near.lines)
    assert any("has not shown" in line for line in far.lines)


@pytest.mark.parametrize("position", [10**12, -(2**63), 2**63 - 1])
def test_every_printed_digit_is_right_at_far_positions(position):
    n = explain.rotary(VECTOR, position).numbers
    with mpmath.workdps(60):
        expected = [float(mpmath.cos(position * mpmath.mpf(100) ** -i)) for i in range(2)]
    assert expected == pytest.approx(n["cos"], abs=1e-14)
    assert f"{position}.00000000" in str(explain.rotary(VECTOR, position))


def test_layouts_agree_once_the_input_is_reordered():
    n = explain.rotary(VECTOR, 5).numbers
    other = explain.rotary([VECTOR[i] for i in (0, 2, 1, 3)], 5).numbers["result"]["half"]
    assert [n["result"]["interleaved"][i] for i in (0, 2, 1, 3)] == pytest.approx(other)
    assert vector(other) in str(explain.rotary(VECTOR, 5))


def test_one_head_and_slopes_that_count_the_heads():
    assert str(explain.alibi(1)).startswith("ALiBi for 1 head:")
    assert [0.5, 0.25] == [h["slope"] for h in explain.explained("alibi", slopes=[0.5, 0.25]).numbers["heads"]]


def test_layers_that_differ_are_told_apart():
    config = {"model_type": "smollm3", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 8}
    groups = explain.config(config).numbers["groups"]
    assert [([0, 1, 2, 4, 5, 6], ["Rotary"]), ([3, 7], ["NoPE"])] == [(g["layers"], g["encoding"]) for g in groups]


def test_float32_limit_is_the_first_failure():
    """By single rounding with `struct`, position by position, in another precision than torch's."""

    def single(x):
        return struct.unpack("f", struct.pack("f", x))[0]

    frequencies = [10_000.0 ** (-i / 4) for i in range(4)]
    wrong = (p for p in range(1, 1 << 20) for w in frequencies if abs(single(p * single(w)) - p * w) > 1e-3)
    assert next(wrong) - 1 == models.float32_right_up_to(spectra.plain(8))


def test_other_encodings_in_a_config():
    bloom = {"model_type": "bloom", "hidden_size": 1024, "n_head": 16, "n_layer": 2}
    assert "from 1179 in the flattest" in str(explain.config(bloom))
    bert = {"model_type": "bert", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
            "max_position_embeddings": 512}  # fmt: skip
    made = explain.config(bert)
    assert "Position 512 and beyond are refused" in str(made)
    assert all("learned table" in why for why in made.numbers["stretches"].values())


def test_latent_attention_with_its_softmax_factor():
    block = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "mscale": 1.0,
             "mscale_all_dim": 1.0}  # fmt: skip
    config = {"model_type": "deepseek_v3", "hidden_size": 256, "num_attention_heads": 2, "num_hidden_layers": 1,
              "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "max_position_embeddings": 163840,
              "rope_theta": 10000, "rope_scaling": block}  # fmt: skip
    made = explain.config(config)
    assert ["Trailing", "Temperature"] == made.numbers["groups"][0]["encoding"]
    assert f"factor={(0.1 * math.log(40) + 1) ** 2:.6g}" in str(made)
    assert "the config allows 40 times the trained length" in str(made)
    assert all(why.startswith("mscale_all_dim") for why in made.numbers["stretches"].values())


def test_yarn_magnitude_in_a_config():
    block = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 2048}
    config = {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 32768, "rope_scaling": block}
    made = explain.config(config)
    magnitude = 0.1 * math.log(16) + 1
    assert pytest.approx(made.numbers["groups"][0]["magnitude"], rel=1e-12) == magnitude
    assert f"its square, {magnitude**2:.6g}" in str(made)


def test_config_that_cannot_be_read_is_refused_by_name():
    with pytest.raises(ValueError, match="model_type must be one that Ropewalk knows, got 'nonsense'"):
        explain.config({**LLAMA, "model_type": "nonsense"})


@pytest.mark.parametrize(
    ("name", "given", "match"),
    [
        ("learned", {}, "encoding must be one with an explanation .*, got 'learned'\nhint: Learned: x"),
        ("nonsense", {}, "got 'nonsense'"),
        ("rotary", {}, "vector must be given for rotary"),
        ("rotary", {"vector": [1.0, 2.0, 3.0]}, "vector must be an even number of channels, at least 2, got 3"),
        ("rotary", {"vector": [1e300, 1e300]}, "vector must be at most 1e.150 in each channel"),
        ("rotary", {"vector": VECTOR, "position": 10**20}, r"position must be below 2\^63"),
        ("rotary", {"vector": [1.0, math.inf]}, "vector must be finite"),
        ("rotary", {"vector": VECTOR, "key": [1.0, 2.0]}, r"key must be as long as vector \(4\), got 2"),
        ("rotary", {"vector": VECTOR, "num_heads": 2}, "num_heads must be absent for rotary, got 2"),
        ("alibi", {"num_heads": 8, "share": 1.0}, "share must be between 0 and 1, got 1.0"),
        ("sinusoidal", {"model_dim": 5}, "model_dim must be even, got 5"),
        ("hybrid", {"vector": VECTOR, "num_heads": 2, "distance": -1}, "distance must be an integer of at least 0"),
    ],
)
def test_refusals(name, given, match):
    with pytest.raises(ValueError, match=match):
        explain.explained(name, **given)


def test_command(monkeypatch, capsys, tmp_path):
    code, out, _ = run("rotary", "--vector", "0.2,0.1,-0.3,0.7", monkeypatch=monkeypatch, capsys=capsys)
    assert 0 == code and str(explain.rotary(VECTOR)) == out.strip("\n")
    code, out, _ = run("alibi", "--heads", "12", "--json", monkeypatch=monkeypatch, capsys=capsys)
    assert 0 == code and explain.alibi(12).numbers == json.loads(out)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    code, out, _ = run("--config", str(path), "--json", monkeypatch=monkeypatch, capsys=capsys)
    assert 0 == code and explain.config(LLAMA).numbers == json.loads(out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "ENCODING must be given, or --config instead of it, got neither"),
        (["rotary", "--config", "x"], "got both"),
        (["--config", "x", "--heads", "3"], "--heads must be absent with --config, got 3"),
        (["sinusoidal"], "--dim must be given for sinusoidal"),
        (["rotary", "--vector", "1,a"], "--vector must be numbers separated by commas, got '1,a'"),
    ],
)
def test_command_refuses(arguments, said, monkeypatch, capsys):
    code, out, err = run(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert (2, "") == (code, out) and said in err


def test_help_has_an_example_and_imports_no_torch():
    code = ("import sys; sys.argv = ['ropewalk', 'explain', '--help']\nfrom ropewalk import cli\n"
            "try:\n    cli.main()\nexcept SystemExit:\n    pass\nprint('torch' in sys.modules)")  # fmt: skip
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "Example: ropewalk explain rotary --vector" in out and out.endswith("False\n")

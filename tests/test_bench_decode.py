"""The decoding benchmark times whole steps, right ones only, on a cache that stays as long as it is."""

import json
import math

import pytest
import torch

from ropewalk.bench import decode, page, timing
from ropewalk.bench.decode import Cached, DecodePlan

SIZES = {"cached": 40, "num_heads": 4, "num_kv_heads": (4, 2), "head_dim": 8}


@pytest.fixture(scope="module", autouse=True)
def _few_rounds():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "ROUNDS", (3, 4))
        patch.setattr(timing, "FRESH_BYTES", 1 << 16)
        yield


@pytest.fixture(scope="module")
def result(_few_rounds):
    return decode.run(DecodePlan(**SIZES, budget_seconds=0.1))


def test_every_number_of_key_heads_has_its_steps_and_the_call_its_overhead(result):
    titles = [section["title"] for section in result["sections"]]
    assert "4 heads of 8 on 4 key heads, 40 cached keys" == titles[0]
    assert "4 heads of 8 on 2 key heads, 40 cached keys" == titles[1]
    assert "one query over 64 keys, 4 heads of 8" == titles[2]
    for section in result["sections"]:
        rows = {row["name"].removeprefix("attend, "): row for row in section["rows"]}
        assert [decode.UNIT, "nope", "rotary", "alibi"] == list(rows)
        assert 1.0 == rows[decode.UNIT]["time"]["ratio"]
        assert {} == section["refused"]
        assert all(row["error"] < 1e-6 for row in rows.values())
    assert 0.0 == result["sections"][2]["rows"][0]["beyond"]["median"]
    assert all("beyond" in row for row in result["sections"][2]["rows"])


def by_loops(cached, head, slope):
    """One head's output, token by token; `slope` of ALiBi, 0 for none."""
    q = cached.q[0, head, 0].double()
    kv = head // (cached.q.shape[1] // cached.k.shape[1])
    keys = torch.cat((cached.cache.k[0, kv], cached.k[0, kv])).double()
    values = torch.cat((cached.cache.v[0, kv], cached.v[0, kv])).double()
    weights = [
        math.exp(float(q @ key) / math.sqrt(len(q)) - slope * (len(keys) - 1 - place)) for place, key in enumerate(keys)
    ]
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
def test_the_oracle_is_the_formula(num_kv_heads):
    plan = DecodePlan(**SIZES)
    cached = Cached(plan, num_kv_heads, 40)
    for name in ("nope", "alibi"):
        got = cached.exact(plan.build(name))
        for head in range(4):
            slope = 2.0 ** (-2 * (head + 1)) if name == "alibi" else 0.0
            torch.testing.assert_close(by_loops(cached, head, slope), got[0, head, 0], atol=1e-12, rtol=1e-12)


def test_a_step_leaves_the_cache_as_long_as_it_was():
    plan = DecodePlan(**SIZES)
    cached = Cached(plan, 2, 40)
    storage = cached.cache.k.data_ptr()
    with torch.no_grad():
        first, second = (cached.step(plan.build("rotary")) for _ in range(2))
    assert 40 == len(cached.cache)
    assert storage == cached.cache.k.data_ptr()
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["nope", "rotary", "alibi", "rotary+alibi"])
def test_a_step_is_that_of_float64(dtype, name):
    plan = DecodePlan(**{**SIZES, "cached": 300}, dtype=dtype)
    cached = Cached(plan, 2, 300)
    with torch.no_grad():
        assert cached.error(plan.build(name)) < (1e-6 if dtype == "float32" else 1e-2)


def test_a_step_that_is_wrong_gets_no_figure(monkeypatch):
    right = decode.attend

    def attend(q, k, v, encoding=None, **options):
        wrong = getattr(encoding, "has_bias", False) and options.get("backend") != "reference"
        return right(q, k, v, encoding, **options) * (1.001 if wrong else 1)

    monkeypatch.setattr(decode, "attend", attend)
    result = decode.run(DecodePlan(**SIZES, budget_seconds=0.1))
    for section in result["sections"]:
        assert {"alibi"} == set(section["refused"])
        assert section["refused"]["alibi"].startswith("is off by 1.0e-03")
        assert not any("alibi" in row["name"] for row in section["rows"])
    assert "alibi: no figures, it is off by" in page.text(result)


def test_result_is_plain_json_and_text_has_every_row(result):
    assert {**result, "settings": None} == {**json.loads(json.dumps(result)), "settings": None}
    text = page.text(result)
    for section in result["sections"]:
        for row in section["rows"]:
            assert f"{row['time']['ratio']:.2f} [{row['time']['low']:.2f}, {row['time']['high']:.2f}]" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cached": 0}, "cached must be at least 1, got 0"),
        ({"num_kv_heads": ()}, "num_kv_heads must be at least one number, got none"),
        ({"num_kv_heads": (3,)}, r"num_kv_heads must be divisors of num_heads \(4\), got 3"),
        ({"budget_seconds": 0.0}, "budget_seconds must be positive, got 0.0"),
    ],
)
def test_errors_say_must_and_got(options, message):
    with pytest.raises(ValueError, match=message):
        DecodePlan(**{**SIZES, **options})


def test_an_encoding_that_changes_no_step_is_refused():
    with pytest.raises(ValueError, match=r"encodings must be ones that take part in attention, got sinusoidal\nhint: "):
        decode.run(DecodePlan(**SIZES, encodings=("sinusoidal",)))

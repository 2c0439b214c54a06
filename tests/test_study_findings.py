"""Every sentence of the findings turns with the numbers that it is made from."""

import json
import math

import pytest

from constructed_study import CONTROLS, HEADLINE, write_study
from ropewalk.study import evidence
from ropewalk.study.findings import findings
from ropewalk.study.statistics import Interval
from ropewalk.study.verdicts import gate, verdict


def found(folder, topic=None, **tables):
    study = evidence.load(write_study(folder / "study", **tables))
    return [finding for finding in findings(study) if topic in (None, finding.topic)]


HEADLINE_ALONE = {"controls": {}, "context": {}, "copies": {}}


def one(findings_, **wanted):
    """The single finding whose numbers hold these values."""
    kept = [f for f in findings_ if all(f.numbers.get(key) == value for key, value in wanted.items())]
    assert len(kept) == 1, [f.text for f in findings_]
    return kept[0]


FLAT = (3.2,) * 5


def test_realistic_numbers_give_every_topic_once_at_least(tmp_path):
    topics = {finding.topic for finding in found(tmp_path)}
    assert topics == {"gate", "within", "beyond", "window", "context", "copy", "sliding", "stretch"}


def test_gate_closes_just_below_the_ratio_and_silences_every_contrast(tmp_path):
    rows = found(tmp_path, headline={**HEADLINE, "rotary": (3.3, 3.5, 4.0, 3.3 * 1.49, 6.0)})
    assert [finding.topic for finding in rows] == ["gate"]
    assert "Undertrained: contrasts are not meaningful" in rows[0].text
    assert "1.49 times" in rows[0].text
    assert rows[0].numbers["state"] == "undertrained"


def test_gate_opens_just_above_the_ratio(tmp_path):
    rows = found(tmp_path, headline={**HEADLINE, "rotary": (3.3, 3.5, 4.0, 3.3 * 1.51, 6.0)})
    assert rows[0].numbers["state"] == "passed"
    assert len(rows) > 10


def test_gate_does_not_apply_without_rope_and_contrasts_are_made(tmp_path):
    rows = found(tmp_path, headline={name: HEADLINE[name] for name in ("alibi", "rotary+alibi")})
    assert rows[0].numbers["state"] == "not applicable"
    assert "No plain RoPE" in rows[0].text
    assert len(rows) > 3


def test_gate_does_not_apply_when_nothing_beyond_twice_was_evaluated(tmp_path):
    study = evidence.load(write_study(tmp_path, headline={"rotary": (3.3, 3.5, None, None, None)}, **HEADLINE_ALONE))
    assert gate(study).state == "not applicable"
    assert "both 256 and at least 1024" in gate(study).text


@pytest.mark.parametrize(
    ("rope", "state"),
    [
        ((3.3, 3.5, 3.3 * 1.30, None, None), "undertrained"),
        ((3.3, 3.5, 3.3 * 1.33, None, None), "passed"),
        ((3.3, 3.5, 9.0, None, 3.3 * 1.49), "undertrained"),
        ((3.3, 3.5, 3.4, None, 3.3 * 1.51), "passed"),
    ],
)
def test_gate_takes_the_nearest_length_where_eight_times_is_missing(tmp_path, rope, state):
    assert gate(evidence.load(write_study(tmp_path, headline={"rotary": rope}, **HEADLINE_ALONE))).state == state


@pytest.mark.parametrize(
    ("rope", "alibi", "best", "said"),
    [
        (3.30, 3.10, "alibi", "beats RoPE"),
        (3.10, 3.30, "rotary", "beats ALiBi"),
        (3.30, 3.285, "alibi", "beats RoPE, by less than 1 %"),
        (3.30, 3.302, "rotary", "is as good as ALiBi within 1 %"),
    ],
)
def test_leader_within_the_training_length_follows_the_numbers(tmp_path, rope, alibi, best, said):
    headline = {"rotary": (rope, 4, 6, 10, 15), "alibi": (alibi, 3.1, 3.1, 3.1, 3.1)}
    finding = found(tmp_path, "within", headline=headline, **HEADLINE_ALONE)[0]
    assert finding.numbers["best"] == best
    assert said in finding.text
    assert "One seed" in finding.text


def test_seeds_that_disagree_in_sign_leave_the_leader_undecided(tmp_path):
    headline = {"rotary": (3.3, 4, 6, 10, 15), "alibi": FLAT}
    folder = write_study(tmp_path, headline=headline, seeds=(0, 1), **HEADLINE_ALONE)
    path = folder / "cells" / "alibi-seed1" / "evaluation.jsonl"
    moved = write_study(tmp_path / "other", headline={"alibi": (3.34,) * 5}, seeds=(1,), **HEADLINE_ALONE)
    path.write_text((moved / "cells" / "alibi-seed1" / "evaluation.jsonl").read_text())
    finding = next(f for f in findings(evidence.load(folder)) if f.topic == "within")
    assert "cannot be told apart" in finding.text
    assert "One seed" not in finding.text


@pytest.mark.parametrize(("end", "moved"), [(4.1, "grows"), (2.9, "falls"), (3.201, "stays within 1 %,")])
def test_growth_is_named_by_its_direction(tmp_path, end, moved):
    headline = {"rotary": HEADLINE["rotary"], "alibi": (*FLAT[:4], end)}
    finding = one(found(tmp_path, "beyond", headline=headline, **HEADLINE_ALONE), encoding="alibi")
    assert f"ALiBi's perplexity {moved}" in finding.text
    assert finding.numbers["ratio"] == pytest.approx(end / 3.2, rel=0.01)


def test_a_learned_table_that_ends_says_so_with_its_reason(tmp_path):
    headline = {**HEADLINE, "learned": (6.2, None, None, None, None)}
    finding = one(found(tmp_path, "beyond", headline=headline, **HEADLINE_ALONE), encoding="learned")
    assert "gives no answer at 4096 tokens: the learned table has 256 positions" in finding.text


@pytest.mark.parametrize(
    ("limited", "said", "verdict_"),
    [
        (3.05, "is as good as ALiBi with all of its context, within 1 %", "same"),
        (2.90, "is even better than ALiBi", "better"),
        (3.60, "is worse than ALiBi", "worse"),
    ],
)
def test_window_against_alibi(tmp_path, limited, said, verdict_):
    controls = {**CONTROLS, ("rotary", "limited"): (3.3, 3.2, 3.1, 3.1, limited)}
    finding = one(found(tmp_path, "window", controls=controls), limited="rotary", against="alibi")
    assert said in finding.text
    assert finding.numbers["verdict"] == verdict_
    gap = 15.75 / 3.05
    assert finding.numbers["closed"] == pytest.approx(1 - math.log(limited / 3.05) / math.log(gap), abs=0.01)


@pytest.mark.parametrize(("limited", "said"), [(3.05, "no measurable use"), (3.40, "is of use"), (2.80, "does harm")])
def test_window_against_the_same_model_without_it(tmp_path, limited, said):
    controls = {("alibi", "limited"): (3.25, 3.15, 3.1, 3.07, limited)}
    finding = one(found(tmp_path, "window", controls=controls), limited="alibi", against="alibi")
    assert said in finding.text


@pytest.mark.parametrize(
    ("near", "whole", "said"),
    [
        (3.0, 2.8, "this model uses it"),
        (3.0, 3.001, "surviving a long input is not using it"),
        (3.0, 3.4, "would be better without it"),
    ],
)
def test_use_of_far_context(tmp_path, near, whole, said):
    finding = found(tmp_path, "context", context={"alibi": ((near, whole),) * 4}, controls={}, copies={})[0]
    assert said in finding.text
    assert finding.numbers["nats_per_token"] == pytest.approx(math.log(whole / near), abs=0.01)


@pytest.mark.parametrize(("far", "form"), [(0.1, "falls"), (0.62, "does not change measurably"), (0.95, "rises")])
def test_copy_accuracy_over_distance(tmp_path, far, form):
    finding = found(tmp_path, "copy", copies={"rotary": {128: 0.7, 256: 0.66, 2048: far}}, controls={}, context={})[0]
    assert finding.numbers["form"] == form
    assert f"{100 * far:.0f} % at 2048 (41 % where the span has not been seen)." in finding.text


def test_sliding_is_compared_where_windows_slide(tmp_path):
    """At the longest length a document is one window: what differs there is not due to sliding."""
    finding = one(
        found(tmp_path, "sliding", controls={("alibi", "sliding"): (3.1, 3.1, 3.1, 3.1, 9.0)}), encoding="alibi"
    )
    assert "From 256 to 2048 tokens" in finding.text
    assert "loses" not in finding.text


@pytest.mark.parametrize(
    ("slid", "said"),
    [
        ((3.05,) * 5, "gains only in separate windows"),
        ((3.25, 3.2, 3.1, 3.0, 2.9), "gains under both protocols"),
    ],
)
def test_gain_with_length_is_credited_only_if_it_survives_sliding(tmp_path, slid, said):
    finding = one(found(tmp_path, "sliding", controls={("alibi", "sliding"): slid}), encoding="alibi")
    assert said in finding.text


@pytest.mark.parametrize(
    ("slid", "said"),
    [
        ((3.16, 4.3, 8.0, 14, 25.0), "loses more when windows slide"),
        ((3.16, 3.3, 3.5, 4, 5.0), "loses under both"),
        (FLAT, "loses in separate windows only"),
    ],
)
def test_loss_with_length_under_both_protocols(tmp_path, slid, said):
    finding = one(found(tmp_path, "sliding", controls={("rotary", "sliding"): slid}), encoding="rotary")
    assert said in finding.text


def test_flat_under_both_protocols(tmp_path):
    headline = {"rotary": HEADLINE["rotary"], "alibi": FLAT}
    rows = found(tmp_path, "sliding", headline=headline, controls={("alibi", "sliding"): (3.1,) * 5})
    assert "is flat under both" in one(rows, encoding="alibi").text


def test_stretches_name_the_best_at_each_length_and_the_one_that_always_hurts(tmp_path):
    finding = one(found(tmp_path, "stretch"), encoding="rotary")
    assert finding.numbers["best"] == {
        512: ("ntk", "better"),
        1024: ("ntk", "better"),
        2048: ("yarn", "better"),
        4096: ("yarn", "better"),
    }
    assert finding.numbers["harmful"] == ["linear"]
    assert "each of these lengths: linear interpolation" in finding.text


def test_stretches_that_all_hurt_are_not_called_help(tmp_path):
    order = enumerate(("ntk", "yarn", "linear"))
    worse = {("rotary", name): (3.3, 5.0 + k, 8.0 + k, 13.0 + k, 20.0 + k) for k, name in order}
    finding = found(tmp_path, "stretch", controls=worse)[0]
    assert "each one hurts, NTK least" in finding.text
    assert "helps" not in finding.text


def test_statements_about_few_documents_carry_a_warning(tmp_path):
    folder = write_study(tmp_path)
    for cell in (folder / "cells").iterdir():
        text = (cell / "evaluation.jsonl").read_text()
        (cell / "evaluation.jsonl").write_text(_first_documents(text, 3))
    texts = [finding.text for finding in findings(evidence.load(folder)) if finding.topic in ("within", "window")]
    assert texts
    assert all("Only 3 documents" in text for text in texts)


def _first_documents(text, count):
    lines = [json.loads(line) for line in text.splitlines()]
    kept = [{**line, "documents": line["documents"] and line["documents"][:count]} for line in lines]
    return "".join(json.dumps(line) + "\n" for line in kept)


@pytest.mark.parametrize(
    ("interval", "said"),
    [
        (Interval(-0.02, -0.03, -0.005), "better"),
        (Interval(0.02, 0.005, 0.03), "worse"),
        (Interval(-0.006, -0.0099, -0.001), "same"),
        (Interval(0.0, -0.02, 0.02), "undecided"),
        (Interval(-0.5, None, None), "undecided"),
    ],
)
def test_verdict_needs_the_whole_interval(interval, said):
    assert verdict(interval) == said


def test_half_a_line_is_never_read_as_a_result(tmp_path):
    folder = write_study(tmp_path)
    path = folder / "cells" / "alibi-seed0" / "evaluation.jsonl"
    before = evidence.load(folder)
    path.write_text(path.read_text() + '{"encoding": "alibi", "seed": 0, "protocol": "windows", "eval_l')
    assert evidence.load(folder) == before


def test_control_pairs_by_document_not_by_place(tmp_path):
    study = evidence.load(write_study(tmp_path))
    assert len(study.documents("rotary", "limited", 4096)) == 6
    assert len(study.documents("alibi", "windows", 4096)) == 12
    gap = study.gap(("rotary", "limited"), ("alibi", "windows"), 4096)
    assert gap.estimate == pytest.approx(math.log(3.10 / 3.05), abs=0.006)


@pytest.mark.parametrize("empty", [True, False])
def test_a_folder_without_a_study_or_without_results_is_refused_by_name(tmp_path, empty):
    if not empty:
        (write_study(tmp_path, headline={}) / "cells" / "rotary-seed0").mkdir(parents=True)
    said = "folder must be a study's" if empty else "cells must be evaluated at least once, got 1 without"
    with pytest.raises(ValueError, match=said):
        evidence.load(tmp_path)

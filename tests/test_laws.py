"""Every law, for every encoding and every backend."""

import pytest

import ropewalk as rw
from ropewalk.check import LAWS, Subject, law_named
from ropewalk.check.biases import published_bucket
from ropewalk.check.kinds import KINDS
from ropewalk.naming import names
from subjects import BACKENDS, ENCODINGS, subject

OF_ATTENTION = ("attending", "backends", "packing")
# Laws of numbers do not depend on the backend; running them on two of four shows it.
RUNS = [
    pytest.param(law, backend, id=f"{law.name}-{backend}")
    for law in LAWS
    for backend in BACKENDS
    if not law.compiled and (backend in ("reference", "sdpa") or law.find.__module__.split(".")[-1] in OF_ATTENTION)
]


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize(("law", "backend"), RUNS)
def test_law_holds(law, backend, encoding):
    assert [] == law(subject(encoding, backend))


@pytest.mark.compiled
@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("law", [law for law in LAWS if law.compiled], ids=lambda law: law.name)
def test_law_holds_compiled(law, encoding):
    assert [] == law(subject(encoding, "sdpa"))


def test_every_encoding_is_in_the_list_of_subjects():
    built = {type(make()) for make in ENCODINGS.values()}
    values = (getattr(rw, name) for name in rw.__all__)
    exported = {value for value in values if isinstance(value, type) and issubclass(value, rw.Encoding)}
    assert exported - built == {rw.Encoding}


def test_every_name_is_an_encoding_file():
    simple = ("alibi", "axial", "hybrid", "learned", "mrope", "nope", "rotary", "sinusoidal", "temperature", "trailing")
    assert simple == names()


def test_each_law_says_what_it_promises():
    assert all(law.sentence.endswith(".") and len(law.sentence) > 30 for law in LAWS)
    assert len(LAWS) == len({law.name for law in LAWS})


def test_each_law_says_what_counts_as_equal_and_which_kind_of_fault_it_finds():
    assert [] == [law.name for law in LAWS if len(law.tolerance) < 20 or "\n" in law.tolerance]
    assert [] == [law.name for law in LAWS if law.kind not in KINDS]


NOT_APPLICABLE = [
    ("precision", "alibi", "it has no rotation"),
    ("precision", "temperature", "it has no rotation of known frequencies"),
    ("absolute positions", "rotary", "it adds no table to the embeddings"),
    ("precision of tables", "rotary", "it adds nothing to the embeddings"),
    ("precision of tables", "learned", "its table is learned"),
    ("casts", "alibi-learned", "it learns its numbers, which a cast rounds"),
    ("double", "sinusoidal", "its scores depend on where a pair stands"),
    ("distance", "learned", "its scores depend on where a pair stands"),
    ("norms", "nope", "it has no rotation"),
    ("layouts", "alibi", "it has no rotation"),
    ("formula", "alibi", "it has no rotation"),
    ("formula", "rotary-yarn", "its frequencies are given as numbers, not by a base"),
    ("temperature", "rotary", "it has no temperature"),
    ("axes", "rotary", "its positions have one axis"),
    ("sections", "rotary", "its positions have one axis"),
    ("slopes", "rotary", "it has no ALiBi bias"),
    ("slopes", "alibi-given", "its slopes are given or learned"),
    ("bias", "t5-like", "it has no ALiBi bias"),
    ("relative bias", "rotary", "it has no bias"),
    ("reference", "rotary", "the reference backend is what others are compared with"),
    ("blocks", "alibi", "the reference backend is what others are compared with"),
    ("moved keys", "sinusoidal", "its keys hold their position in a way that cannot be turned back"),
    ("half precision", "learned", "its scores depend on where a pair stands"),
    ("distinct", "nope", "it is no encoding"),
    ("distinct", "learned", "its table is learned, and may start anywhere"),
]


@pytest.mark.parametrize(("law", "encoding", "reason"), NOT_APPLICABLE)
def test_a_law_that_does_not_apply_says_why(law, encoding, reason):
    verdict = law_named(law).verdict(subject(encoding))
    assert ("not applicable", reason) == (verdict.status, verdict.reason)


def test_grouped_heads_do_not_apply_to_heads_with_keys_of_their_own():
    verdict = law_named("grouped heads").verdict(Subject(lambda: rw.Rotary(16), num_heads=4, num_kv_heads=4))
    assert "each query head has a key head of its own" == verdict.reason


@pytest.mark.parametrize("law", [law for law in LAWS if not law.compiled], ids=lambda law: law.name)
def test_each_law_applies_to_something(law):
    names = ("alibi", "rotary", "mrope", "temperature", "sinusoidal")
    assert "pass" in {law.verdict(subject(name, "sdpa")).status for name in names}


def test_what_a_law_cannot_judge_is_noted():
    (note,) = law_named("axes").verdict(subject("mrope-channels")).notes
    assert "two channels of one pair follow different axes" in note


def test_buckets_are_the_published_ones():
    """K20, B137: 32 buckets up to 128 tokens."""
    past = [0, 1, 7, 8, 11, 12, 15, 16, 22, 23, 31, 32, 45, 46, 63, 64, 90, 91, 128, 1000]
    expected = [0, 1, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15, 15]
    assert expected == [published_bucket(d, 32, 128, True) for d in past]
    assert [16 + bucket for bucket in expected[1:]] == [published_bucket(-d, 32, 128, True) for d in past[1:]]
    assert [15, 16, 16, 17, 17, 18] == [published_bucket(d, 32, 128, False) for d in (15, 16, 18, 19, 20, 21)]
    assert 0 == published_bucket(-5, 32, 128, False)

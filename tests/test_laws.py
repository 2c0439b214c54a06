"""Every law, for every encoding and every backend."""

import pytest

import ropewalk as rw
from ropewalk.check import LAWS
from ropewalk.naming import names
from subjects import BACKENDS, ENCODINGS, subject

# Laws of numbers do not depend on the backend; running them on two of four shows it.
RUNS = [
    pytest.param(law, backend, id=f"{law.name}-{backend}")
    for law in LAWS
    for backend in BACKENDS
    if not law.compiled and (backend in ("reference", "sdpa") or law.find.__module__.endswith("attending"))
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

"""The laws bite: every wrong version breaks the law that it names, and the right version keeps it."""

import re

import pytest

import ropewalk as rw
from mutants import MUTANTS
from ropewalk.check import Subject, law_named

KINDS = {"K01", "K02", "K03", "K04", "K05", "K06", "K07", "K08", "K09", "K10", "K11", "K14", "K15", "K16", "K18",
         "K19", "K21", "K22", "K23"}  # fmt: skip
COMPILED = [m for m in MUTANTS if law_named(m.law).compiled]


def check_caught(mutant):
    findings = law_named(mutant.law)(mutant.subject)
    assert {mutant.law} == {f.law for f in findings}, f"{mutant.name} survives"
    assert all(f.input and f.expected and f.cause for f in findings)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m not in COMPILED], ids=lambda m: m.name)
def test_mutant_is_caught(mutant):
    check_caught(mutant)


@pytest.mark.compiled
@pytest.mark.parametrize("mutant", COMPILED, ids=lambda m: m.name)
def test_mutant_is_caught_by_compiling(mutant):
    check_caught(mutant)


def test_there_is_a_mutant_of_every_kind():
    assert KINDS == {m.kind for m in MUTANTS}
    assert 25 <= len(MUTANTS) == len({m.name for m in MUTANTS})
    assert all(re.fullmatch(r"K\d\d", m.kind) for m in MUTANTS)


@pytest.mark.parametrize("law", sorted({m.law for m in MUTANTS if m not in COMPILED}))
def test_right_version_keeps_the_law(law):
    for make in (lambda: rw.Rotary(16), lambda: rw.ALiBi(8), lambda: rw.Sinusoidal(128)):
        assert [] == law_named(law)(Subject(make))

"""The laws bite: every wrong version breaks the law that it names, and the right version keeps it."""

from collections import Counter

import pytest

import ropewalk as rw
from mutants import MUTANTS
from ropewalk.check import Subject, law_named
from ropewalk.check.kinds import KINDS

CRASHED = "the law's own inputs"  # a mutant must give wrong answers, not none
COMPILED = [m for m in MUTANTS if law_named(m.law).compiled]


def check_caught(mutant):
    findings = law_named(mutant.law)(mutant.subject)
    assert {mutant.law} == {f.law for f in findings}, f"{mutant.name} survives"
    seen = [f for f in findings if f.input != CRASHED]
    assert mutant.kind in {f.kind for f in seen}, f"{mutant.name} is taken for another kind: {findings}"
    assert all(f.input and f.expected and f.cause for f in findings)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m not in COMPILED], ids=lambda m: m.name)
def test_mutant_is_caught(mutant):
    check_caught(mutant)


@pytest.mark.compiled
@pytest.mark.parametrize("mutant", COMPILED, ids=lambda m: m.name)
def test_mutant_is_caught_by_compiling(mutant):
    check_caught(mutant)


def test_there_is_a_mutant_of_every_kind():
    seen = Counter(m.kind for m in MUTANTS)
    assert set(KINDS) == set(seen)
    assert [] == [kind for kind, count in seen.items() if count < 2]
    assert 60 <= len(MUTANTS) == len({m.name for m in MUTANTS})


SMALLEST = {
    "AnglesInFloat32": "position 129 ",
    "PositionsInBfloat16": "position 257 ",
    "PositionsOf32Bits": "position 2147483648 ",
    "KeysTurnedTheOtherWay": "1 token shifted by 1 ",
    "UniformSlopes": "3 heads",
    "DistanceInBfloat16": "distance 257,",
    "EdgesCutOff": "distance 7 ",
    "TableEndsTooEarly": "position 512",
    "WrapsBeyondTheTable": "position 64 ",
    "OffsetIgnored": "chunks of (1, 1)",
    "counts_the_padding": "1 token, 3 of padding (left)",
    "restarts_but_reads_other_documents": "documents of (1, 1)",
    "top_left_causality": "the last 1 of 2 queries",
    "forgets_the_tail_of_the_keys": "129 queries on 129 keys",
    "reads_slots_that_hold_nothing": "1 query on 1 of 2 slots",
    "BaseGrowsWithTheLongestInput": "a call with 16 tokens",
    "cells_counted_by_the_height": "1 x 2",
    "columns_first": "2 x 2",
}


@pytest.mark.parametrize("name", SMALLEST)
def test_a_finding_names_the_smallest_input_that_fails(name):
    (mutant,) = (m for m in MUTANTS if m.name == name)
    assert SMALLEST[name] in law_named(mutant.law)(mutant.subject)[0].input


@pytest.mark.parametrize("law", sorted({m.law for m in MUTANTS if m not in COMPILED}))
def test_right_version_keeps_the_law(law):
    for make in (lambda: rw.Rotary(16), lambda: rw.ALiBi(8), lambda: rw.Sinusoidal(128)):
        assert [] == law_named(law)(Subject(make))

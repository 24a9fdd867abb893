"""The list of mutations cannot rot in silence: each still applies, and names tests that exist."""

from __future__ import annotations

from collections import Counter

import pytest
from mutants import MUTANTS, PACKAGE, TESTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_applies_exactly_once_and_its_tests_exist(mutant: Mutant) -> None:
    assert (PACKAGE / mutant.module).read_text(encoding="utf-8").count(mutant.old) == 1
    assert mutant.old != mutant.new
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert name.partition("[")[0] in (TESTS / file).read_text(encoding="utf-8")


def test_names_are_unique() -> None:
    assert [name for name, count in Counter(mutant.name for mutant in MUTANTS).items() if count > 1] == []

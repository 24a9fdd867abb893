"""The list of native mutations cannot rot in silence: each still applies, exactly once."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "native/mutants.py"
spec = importlib.util.spec_from_file_location("native_mutants", SCRIPT)
assert spec is not None
assert spec.loader is not None
script = sys.modules["native_mutants"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.mark.parametrize("mutant", script.MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutation_applies_exactly_once(mutant) -> None:
    assert len(mutant.places(script.NATIVE)) == 1
    assert mutant.old != mutant.new


def test_names_are_unique() -> None:
    assert max(Counter(mutant.name for mutant in script.MUTANTS).values()) == 1


def test_there_are_mutations_of_orders_moves_and_deaths() -> None:
    assert sum("memory_order_relaxed" in mutant.new for mutant in script.MUTANTS) >= 3
    assert {mutant.run for mutant in script.MUTANTS} == {script.RACES, script.DEATHS}

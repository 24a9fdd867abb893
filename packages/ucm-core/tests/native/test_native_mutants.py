"""The list of native mutations cannot rot in silence: each still applies, exactly once."""

from __future__ import annotations

import importlib.util
import signal
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


def test_a_run_that_hangs_is_killed_with_its_children_and_noticed() -> None:
    hanging = ["bash", "-c", "sleep 600 & sleep 600"]  # the child keeps the pipe open unless it is killed too
    status, message = script.ended_within(0.2, hanging)
    assert status == -signal.SIGKILL
    assert message.startswith("nothing moved")


def test_a_run_that_ends_keeps_its_status_and_its_words() -> None:
    assert script.ended_within(60.0, ["bash", "-c", "echo wrong >&2; exit 3"]) == (3, "wrong\n")

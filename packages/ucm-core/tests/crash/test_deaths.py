"""Processes that are killed at every step: no wrong byte, nothing durable lost, nothing leaks, peers go on.

Prints how often a process died at each step. ``--long`` strikes whenever a step is passed, three times over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import last_long
import pytest
import shim
from scenarios import SCENARIOS
from strikes import LOOKS, Job

from ucm_core import _native

pytestmark = pytest.mark.timeout(7200)

URING = "files.uring."
"""Steps that are passed where the kernel has io_uring for us."""


@pytest.fixture(scope="module")
def long(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--long"))


@pytest.fixture(scope="module")
def reports(do: Callable[..., dict], long: bool, request: pytest.FixtureRequest) -> dict:
    most, rounds = (None, 3) if long else (8, 1)
    done = do([Job("", name, most=most, rounds=rounds) for name in SCENARIOS])
    request.config.stash[last_long.DEATHS] = done
    return done


@pytest.fixture(scope="module")
def deaths(reports: dict) -> Counter[str]:
    total: Counter[str] = Counter()
    for report in reports.values():
        total.update(report["struck"])
    return total


@pytest.mark.parametrize("name", SCENARIOS)
def test_wherever_a_process_dies_its_peers_go_on_and_nothing_is_lost(reports: dict, name: str) -> None:
    assert not reports[name]["failures"], "\n".join(reports[name]["failures"])


def test_a_process_died_at_every_step_that_the_sources_name(deaths: Counter[str]) -> None:
    """When this fails, give a scenario something to do that passes the new step."""
    named = {step for step in shim.named_steps() if _native.probe_uring() or not step.startswith(URING)}
    assert sorted(named - set(deaths)) == []


def test_a_process_died_before_every_kind_of_library_call(reports: dict, deaths: Counter[str]) -> None:
    passed = {step for report in reports.values() for step in report["passed"]}
    assert sorted(passed - set(deaths) - set(LOOKS)) == []


def test_enough_processes_died(deaths: Counter[str], long: bool, say: Callable[[str], None]) -> None:
    say(f"{deaths.total()} processes died:")
    for step, count in sorted(deaths.items()):
        say(f"{count:6} {step}")
    assert deaths.total() >= (10_000 if long else 2_000)

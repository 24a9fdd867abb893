"""The books of requests (C-68): they balance, they only grow, and each request is in them once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from ucm_core.coordinator.accounts import TokenAccount
from ucm_core.errors import SpecError

COUNTERS = ("requests", "prompt_tokens", "local_tokens", "queried_tokens", "hit_tokens", "failed_tokens")
COUNTERS += ("computed_tokens",)
CASE = {
    "requests": 1,
    "prompt_tokens": 1000,
    "local_tokens": 600,
    "queried_tokens": 400,
    "hit_tokens": 200,
    "failed_tokens": 100,
    "computed_tokens": 300,
}


def counted(registry: CollectorRegistry = REGISTRY) -> dict[str, float]:
    return {name: registry.get_sample_value(f"ucm_{name}_total") or 0.0 for name in COUNTERS}


def grown(before: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before[name] for name, value in counted().items()}


def test_the_reported_request() -> None:
    before = counted()
    TokenAccount(1000, 600).promised(200).delivered(100).count()
    assert grown(before) == CASE
    assert 600 + 200 - 100 + 300 == 1000


def test_nothing_moves_before_the_account_is_counted() -> None:
    before = counted()
    TokenAccount(1000, 600).promised(200).delivered(100)
    assert set(grown(before).values()) == {0}


@given(
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.lists(st.tuples(st.floats(0, 1), st.one_of(st.none(), st.floats(0, 1))), max_size=6),
)
def test_an_account_balances_after_any_loads(
    prompt: int, local: float, loads: list[tuple[float, float | None]]
) -> None:
    """Each load promises a share of what is left; a share of that comes, or (None) all of it."""
    account, held = TokenAccount(prompt, int(local * prompt)), 0
    for promised, delivered in loads:
        hit = int(promised * (account.queried_tokens - held))
        account, held = account.promised(hit), held + hit
        if delivered is not None:
            held = int(delivered * held)
            account = account.delivered(held)
        assert account.hit_tokens - account.failed_tokens == held
        assert account.local_tokens + held + account.computed_tokens == account.prompt_tokens


def test_more_delivered_than_promised_is_all_of_it() -> None:
    assert TokenAccount(1000, 600).promised(200).delivered(500) == TokenAccount(1000, 600, 200)


def test_a_second_load_after_a_failed_one_is_counted_with_it() -> None:
    account = TokenAccount(1000, 600).promised(200).delivered(0).promised(150)
    assert (account.hit_tokens, account.failed_tokens, account.computed_tokens) == (350, 200, 250)


@pytest.mark.parametrize("numbers", [(10, 11), (10, -1), (-1, 0), (10, 4, 7), (10, 4, 2, 3), (10, 4, 2, -1)])
def test_an_account_that_does_not_balance_is_refused(numbers: tuple[int, ...]) -> None:
    with pytest.raises(SpecError, match=f"{numbers[0]}.*does not balance"):
        TokenAccount(*numbers)


PROCESS = """
from ucm_core.coordinator.accounts import TokenAccount
for _ in range(3):
    TokenAccount(1000, 600).promised(200).delivered(100).count()
import os
os.kill(os.getpid(), 9)
"""


def test_processes_that_share_a_registry_are_summed_also_when_killed(tmp_path: Path) -> None:
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    children = [subprocess.Popen([sys.executable, "-c", PROCESS], env=environment) for _ in range(2)]
    assert [child.wait(60) for child in children] == [-9, -9]
    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(tmp_path))
    assert counted(registry) == {name: 6 * value for name, value in CASE.items()}

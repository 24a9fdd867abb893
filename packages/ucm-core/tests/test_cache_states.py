"""The facade and states: which are kept by the settings, and how a fresh process learns of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import DENSE, GRAIN, HYBRID, identity_of
from test_cache import TOKENS, fill, open_cache, resume

from ucm_core.coordinator.retention import RetentionPolicy
from ucm_core.errors import ConfigError
from ucm_core.opening import retention_policies
from ucm_core.ops.config import CacheConfig


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class TestRetentionSettings:
    """What the settings say about a row, checked against the table before anything is opened."""

    def test_a_named_row_a_star_and_the_default(self, root: Path) -> None:
        star = CacheConfig(root=root, retention={"*": {"interval_tokens": 64}})
        named = CacheConfig(root=root, retention={"*": {"second_sight": False}, "state": {"half_life_s": 60}})
        assert retention_policies(star, HYBRID) == {"state": RetentionPolicy(interval_tokens=64)}
        assert retention_policies(named, HYBRID) == {"state": RetentionPolicy(half_life_s=60.0)}
        assert retention_policies(CacheConfig(root=root), HYBRID) == {"state": RetentionPolicy()}
        assert retention_policies(star, DENSE) == {}

    @pytest.mark.parametrize("row", ["full", "stat"])
    def test_a_row_without_states_is_refused(self, root: Path, row: str) -> None:
        with pytest.raises(ConfigError, match=f"row '{row}' holds no states; rows that do: state"):
            open_cache(root, HYBRID, retention={row: {}})
        assert not root.exists()

    def test_a_budget_below_one_state_is_refused(self, root: Path) -> None:
        with pytest.raises(ConfigError, match=r"budget_bytes = 57 of row 'state' holds none .* of 58 bytes"):
            open_cache(root, HYBRID, retention={"*": {"budget_bytes": 57}})


def test_a_fresh_process_may_know_its_states_without_asking(root: Path) -> None:
    with open_cache(root, HYBRID) as writer:
        fill(writer)
    with open_cache(root, HYBRID) as cache:
        assert cache.rebuild() == 8
        directory = lambda: cache.statistics().coordinator.checkpoints["state"]  # noqa: E731
        assert (directory().states, directory().asked) == (8, 0)
        assert resume(cache) == 7 * GRAIN
        assert directory().asked == 1  # the one that was promised


def test_what_vanished_after_the_enumeration_is_not_promised(root: Path) -> None:
    with open_cache(root, HYBRID) as writer:
        fill(writer)
    with open_cache(root, HYBRID) as cache:
        cache.rebuild()
        cache.stores["state"].drop(cache.keys("state", cache.chain(TOKENS).digests[5:7]))
        assert resume(cache) == 5 * GRAIN


def test_without_a_usable_root_there_is_nothing_to_enumerate(root: Path) -> None:
    with open_cache(root, HYBRID, identity_of(HYBRID, weights=None)) as cache:
        assert cache.rebuild() == 0

"""What a user sets reaches the part that it is about."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from models import DENSE, FULL, GRAIN, identity_of, payloads_of

from ucm_core import _native
from ucm_core.cache import Cache
from ucm_core.flow.ticket import Level
from ucm_core.ops.config import CacheConfig, RingPolicy
from ucm_core.store import stack
from ucm_core.store.ring import Ring, RingOptions

WAIT_S = 60.0


def open_cache(root: Path, **settings: Any) -> Cache:
    config = CacheConfig(root=root, **{"ring_bytes": 1 << 22, "disk_bytes": 1 << 30, **settings})
    return Cache.open(config, DENSE, identity=identity_of(DENSE))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[RingOptions]:
    """With what options rings are opened; they are opened all the same."""
    real, seen = Ring.open, []

    def note(name: str | None, **given: Any) -> Ring:
        seen.append(given["options"])
        return real(name, **given)

    monkeypatch.setattr(stack.Ring, "open", note)
    return seen


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, RingOptions("clock", None)),
        ({"ring_policy": "lru"}, RingOptions("lru", None)),
        ({"ttl_s": 90.0}, RingOptions("clock", 90.0)),
        ({"ring_prefault": True}, RingOptions(prefault=True)),
        ({"ring_huge_pages": True}, RingOptions(huge_pages=True)),
    ],
)
def test_rings_are_as_they_were_asked_for(
    tmp_path: Path, opened: list[RingOptions], settings: dict[str, Any], options: RingOptions
) -> None:
    with open_cache(tmp_path, **settings):
        assert opened == [replace(options, shards=len(FULL.units))]


@pytest.mark.parametrize("policy", get_args(RingPolicy))
def test_the_policy_that_was_asked_for_is_the_one_that_is_reported(
    tmp_path: Path, policy: RingPolicy
) -> None:
    with open_cache(tmp_path, ring_policy=policy) as cache:
        ring = cache.statistics().rows[FULL.name].ring
        assert ring is not None
        assert ring.policy == policy


@pytest.mark.parametrize(("sync", "level"), [(False, Level.ON_MEDIUM), (True, Level.SYNCED)])
def test_a_save_is_as_durable_as_it_was_asked_for(tmp_path: Path, sync: bool, level: Level) -> None:
    with open_cache(tmp_path, sync=sync) as cache:
        tickets = cache.save(cache.chain(range(2 * GRAIN)), payloads_of(DENSE, 2))
        assert tickets.wait_durable(WAIT_S)
        assert tickets.level is level


@pytest.mark.parametrize("engine", ["threads", "uring"])
def test_threads_are_as_many_and_work_as_they_were_asked_to(tmp_path: Path, engine: str) -> None:
    with open_cache(tmp_path, io_threads=3, write_threads=1, io_engine=engine) as cache:
        pool, root = cache._spaces._pool, cache._spaces.root
        assert (pool.threads, pool.write_threads) == (3, 1)
        assert root.uring == (engine == "uring" and _native.probe_uring())


def test_waits_are_as_long_as_they_were_asked_to_be(tmp_path: Path) -> None:
    with open_cache(tmp_path, save_wait_s=0.25, load_wait_s=7.0, ttl_s=90.0) as cache:
        limits = cache.stores[FULL.name]._tiers.limits  # type: ignore[attr-defined]
        assert (limits.save_wait_s, limits.load_wait_s, limits.ttl_s) == (0.25, 7.0, 90.0)
        assert cache._spaces.root.ttl_s == 90.0

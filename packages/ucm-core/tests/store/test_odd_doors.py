"""Doors that refuse what cannot be meant, in words; passes of the collector beside others and odd clocks."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rings import DIGEST
from stores import open_store
from test_census import put

from ucm_core.errors import ConfigError, LayoutError, NoSpace, StoreError
from ucm_core.store.gc import Collector
from ucm_core.store.geometry import Geometry
from ucm_core.store.locks import KeptLock
from ucm_core.store.pool import IoPool
from ucm_core.store.ring import Ring, RingOptions
from ucm_core.store.root import CacheRoot
from ucm_core.testing.block_store import keys_of

HOUR_S = 3600.0


def test_a_load_without_a_target_says_what_to_call_instead(tmp_path: Path) -> None:
    store = open_store(tmp_path, Geometry(1, 4096))
    with pytest.raises(LayoutError, match="use prefetch"):
        store.load(keys_of(1), None)  # type: ignore[arg-type]
    assert store.statistics().working == 0


def test_a_save_without_a_source_says_what_to_call_instead(tmp_path: Path) -> None:
    store = open_store(tmp_path, Geometry(1, 4096))
    with pytest.raises(LayoutError, match="use reserve"):
        store.save(keys_of(1), None)  # type: ignore[arg-type]
    assert store.statistics().working == 0


@pytest.mark.parametrize("policy", ["", "random", None, 3])
def test_a_policy_that_no_ring_has_is_refused_with_those_it_has(policy: object) -> None:
    with pytest.raises(ConfigError, match="choose one of clock, fifo, lru, sieve"):
        RingOptions(policy=policy)  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan"), float("inf"), 2.0**32])
def test_a_time_to_live_that_is_none_is_refused(ttl_s: float) -> None:
    with pytest.raises(ConfigError, match="ttl_s = "):
        RingOptions(ttl_s=ttl_s)


@pytest.mark.parametrize("digest", [None, b"", DIGEST[1:], "0" * 32])
@pytest.mark.parametrize("name", [None, "digest"])
def test_a_ring_needs_the_digest_of_its_geometry(name: str | None, digest: object) -> None:
    with pytest.raises(StoreError, match="32 bytes"):
        Ring.open(name, slots=2, payload_bytes=4096, geometry_digest=digest)  # type: ignore[arg-type]


def test_a_private_ring_that_no_memory_is_large_enough_for_is_refused() -> None:
    with pytest.raises(NoSpace, match="a private ring needs 1125"):
        Ring.open(None, slots=1 << 20, payload_bytes=1 << 30, geometry_digest=DIGEST)


def test_a_file_of_a_time_to_come_grows_old_from_now_on(tmp_path: Path) -> None:
    path = put(tmp_path, 1 << 116, used_s=time.time() + 24 * HOUR_S)
    with CacheRoot(tmp_path, capacity_bytes=1 << 20) as root:
        pool = IoPool(1)
        Collector(root, pool, ttl_s=HOUR_S).collect()
        assert abs(path.stat().st_mtime - time.time()) < HOUR_S / 2
        pool.close(20.0)


@pytest.fixture
def full(tmp_path: Path) -> CacheRoot:
    for number in range(10):
        put(tmp_path, number << 116, size=1000)
    root = CacheRoot(tmp_path, capacity_bytes=10_000).open()
    assert root.usage.used_bytes == 10_000
    return root


def test_who_is_refused_waits_for_the_pass_of_another(
    full: CacheRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process would: it holds the lock of the collector, and removes a file a little later."""
    monkeypatch.setattr("ucm_core.store.gc.OTHERS_WAIT_S", 60.0)
    others = KeptLock.take(full.path / ".collector")
    assert others is not None

    def remove() -> None:
        begin = full.usage.begin_removal()
        next(full.path.glob("*/*/*/*")).unlink()
        full.usage.end_removal(begin, removed_bytes=1000)

    threading.Timer(0.2, remove).start()
    pool = IoPool(1)
    assert Collector(full, pool).make_room()
    assert full.usage.used_bytes == 9000
    others.release()
    pool.close(20.0)


def test_who_is_refused_waits_no_longer_than_told(full: CacheRoot, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ucm_core.store.gc.OTHERS_WAIT_S", 0.05)
    others = KeptLock.take(full.path / ".collector")
    assert others is not None
    pool = IoPool(1)
    assert not Collector(full, pool).make_room()
    assert full.usage.used_bytes == 10_000
    others.release()
    assert Collector(full, pool).make_room()
    assert full.usage.used_bytes <= 8500
    pool.close(20.0)
    assert np.all([path.stat().st_size == 1000 for path in full.path.glob("*/*/*/*")])

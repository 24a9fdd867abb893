"""C-34 with a disk that goes on failing: promised once, not again, and healed by the next save."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kernel_errors import failing
from models import DENSE, FULL, GRAIN, RING_BYTES, blocks_of, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.ops.config import CacheConfig

WAIT_S = 60.0
TOKENS = list(range(8 * GRAIN))


def open_cache(root: Path) -> Cache:
    config = CacheConfig(root=root, ring_bytes=RING_BYTES, disk_bytes=1 << 30, io_threads=1)
    return Cache.open(config, DENSE, identity=identity_of(DENSE))


def save(cache: Cache) -> None:
    tickets = cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8))
    assert tickets.wait_durable(WAIT_S)


def resume(cache: Cache) -> int:
    return cache.resolve(cache.chain([*TOKENS, 7])).hit.resume_tokens


def load(cache: Cache) -> int:
    chain = cache.chain([*TOKENS, 7])
    loaded = cache.load(chain, cache.resolve(chain))
    end = loaded.resume_tokens // GRAIN
    assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 8)[:end])
    return loaded.resume_tokens


def files(root: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in root.glob("*/full/???/*")}


@pytest.fixture
def unreadable(tmp_path: Path) -> Iterator[Cache]:
    """A cache of stored blocks of whose I/O thread every read fails with EIO, for as long as it lives.

    A thread inherits the filter of the one that starts it: the first load does.
    """
    with open_cache(tmp_path) as cache:
        save(cache)
    with open_cache(tmp_path) as cache:
        cache._spaces._pool.close()
        cache._spaces._pool.__init__(1)  # no thread from before the filter
        assert failing("preadv", errno.EIO, lambda: load(cache)) == 0
        yield cache


def test_what_stays_unreadable_is_promised_once(unreadable: Cache, tmp_path: Path) -> None:
    assert len(files(tmp_path)) == 8
    assert resume(unreadable) == 0
    assert load(unreadable) == 0


def test_the_next_save_writes_it_anew_and_then_it_is_served(unreadable: Cache, tmp_path: Path) -> None:
    before = files(tmp_path)
    save(unreadable)
    after = files(tmp_path)
    assert before.keys() == after.keys()
    assert all(before[name] != after[name] for name in before)
    assert resume(unreadable) == load(unreadable) == 8 * GRAIN


def test_what_a_save_found_there_is_not_trusted_again(tmp_path: Path) -> None:
    """Somebody else's load failed: that the file's name is there proves nothing."""
    with open_cache(tmp_path) as cache:
        save(cache)
        chain = cache.chain(TOKENS)
        keys = cache.coordinator.keys(chain, "full", begin_block=0, end_block=8)
        cache.coordinator.failed("full", keys[3:4])
        tickets = cache.save(chain, payloads_of(DENSE, 8))
        assert tickets.ok
        assert not tickets.rows["full"].stored.any()
        assert resume(cache) == 3 * GRAIN


def test_a_block_that_was_dropped_and_stored_again_is_trusted(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        save(cache)
        chain = cache.chain(TOKENS)
        keys = cache.coordinator.keys(chain, "full", begin_block=0, end_block=8)
        cache.coordinator.failed("full", keys[3:4])
        cache.stores["full"].drop(keys[3:4])
        tickets = cache.save(chain, payloads_of(DENSE, 8))
        assert np.flatnonzero(tickets.rows["full"].stored).tolist() == [3]
        assert resume(cache) == 8 * GRAIN

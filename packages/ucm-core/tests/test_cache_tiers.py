"""A cache without a ring, and one without files: the same answers, and honest levels."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from models import DENSE, FULL, GRAIN, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.flow.ticket import Level
from ucm_core.ops.config import CacheConfig

WAIT_S = 60.0
TOKENS = list(range(4 * GRAIN + 1))


def open_cache(root: Path, **settings: object) -> Cache:
    return Cache.open(CacheConfig(root=root, **settings), DENSE, identity=identity_of(DENSE))


def load(cache: Cache) -> int:
    chain = cache.chain(TOKENS)
    loaded = cache.load(chain, cache.resolve(chain))
    blocks = loaded.verdict.blocks[FULL.name]
    right = payloads_of(DENSE, 4)[FULL.name][blocks.start : blocks.stop]
    assert (loaded.payloads[FULL.name] == right).all()
    return loaded.resume_tokens


def test_without_a_ring_everything_goes_to_files_and_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO), open_cache(tmp_path, ring_bytes=0, disk_bytes=1 << 30) as cache:
        tickets = cache.save(cache.chain(TOKENS), payloads_of(DENSE, 4))
        assert tickets.wait_durable(WAIT_S)
        assert load(cache) == 4 * GRAIN
        assert cache.statistics().rows[FULL.name].ring is None
    assert caplog.text.count(f"row {FULL.name} has no ring") == 1
    with open_cache(tmp_path, ring_bytes=0, disk_bytes=1 << 30) as later:
        assert load(later) == 4 * GRAIN


def test_without_files_everything_is_in_the_ring_until_the_cache_is_closed(tmp_path: Path) -> None:
    with open_cache(tmp_path, ring_bytes=1 << 22, disk_bytes=0) as cache:
        tickets = cache.save(cache.chain(TOKENS), payloads_of(DENSE, 4))
        assert tickets.ok
        assert not tickets.wait_durable(WAIT_S)
        assert tickets.level is Level.IN_RING
        assert load(cache) == 4 * GRAIN
    with open_cache(tmp_path, ring_bytes=1 << 22, disk_bytes=0) as later:
        assert load(later) == 0
    assert not list(tmp_path.rglob("*.c0-1"))

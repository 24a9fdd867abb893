"""The facade's books (C-68): a request counts once, when it is loaded, however often it was looked up."""

from __future__ import annotations

from pathlib import Path

import pytest
from models import FULL, blocks_of, identity_of
from prometheus_client import REGISTRY

from ucm_core.cache import Cache
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.rows import RowKind, SpecRow
from ucm_core.spec.table import SpecTable

BLOCK = 100
ROW = SpecRow("full", RowKind.CHAIN, BLOCK, FULL.units, FULL.parts)
TABLE = SpecTable((ROW,), BLOCK)
TOKENS = list(range(1000))
NAMES = ("requests", "prompt_tokens", "local_tokens", "queried_tokens", "hit_tokens", "failed_tokens")


def open_cache(root: Path) -> Cache:
    config = CacheConfig(root=root, ring_bytes="16MiB", disk_bytes=1 << 30)
    return Cache.open(config, TABLE, identity=identity_of(TABLE))


def counted() -> list[float]:
    return [REGISTRY.get_sample_value(f"ucm_{name}_total") or 0.0 for name in (*NAMES, "computed_tokens")]


@pytest.fixture
def cache(tmp_path: Path):
    """A cache that holds the first 800 of 1000 tokens in files only."""
    with open_cache(tmp_path) as writer:
        saved = writer.save(writer.chain(TOKENS), {"full": blocks_of(ROW, 8)})
        assert saved.wait_durable(60.0)
    with open_cache(tmp_path) as cache:
        yield cache


def test_the_reported_request_counts_once_and_balances(cache: Cache, tmp_path: Path) -> None:
    chain = cache.chain(TOKENS)
    before = counted()
    verdict = [cache.resolve(chain, local_tokens=600) for _ in range(5)][-1]
    assert counted() == before
    lost = verdict.keys["full"][1].tobytes()[:16].hex()
    next(tmp_path.glob(f"*/*/*/{lost}.*")).unlink()
    assert cache.load(chain, verdict).resume_tokens == 700
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert grown == [1, 1000, 600, 400, 200, 100, 300]


def test_a_request_that_finds_nothing_counts_when_its_empty_verdict_is_loaded(cache: Cache) -> None:
    chain = cache.chain(TOKENS[::-1])
    before = counted()
    assert cache.load(chain, cache.resolve(chain)).resume_tokens == 0
    grown = [now - then for now, then in zip(counted(), before, strict=True)]
    assert grown == [1, 1000, 0, 1000, 0, 0, 1000]

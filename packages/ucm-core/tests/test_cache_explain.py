"""Why a cache finds no more of a prompt, asked through the facade over real files and rings."""

from __future__ import annotations

from pathlib import Path

from models import DENSE, GRAIN, RING_BYTES, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.ops.config import CacheConfig

TOKENS = list(range(8 * GRAIN))


def test_a_cache_says_why_it_finds_no_more(tmp_path: Path) -> None:
    config = CacheConfig(root=tmp_path / "cache", ring_bytes=RING_BYTES, disk_bytes=1 << 30)
    with Cache.open(config, DENSE, identity=identity_of(DENSE)) as cache:
        assert cache.save(cache.chain(TOKENS), payloads_of(DENSE, 8)).wait_durable(60.0)
        said = cache.explain(cache.chain([*TOKENS, *range(2 * GRAIN)]))
        (row,) = said.rows
        assert (said.resume_tokens, row.missing_block, said.limiting) == (8 * GRAIN, 8, (row.row,))
        assert f"resumes at {8 * GRAIN} of at most {9 * GRAIN} tokens" in str(said)
        assert cache.statistics().coordinator.verdicts == 0

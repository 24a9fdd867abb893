"""The collector behind a cache: what a verdict touched or a lease keeps stays, and lost states go first."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from models import GRAIN, HYBRID, identity_of
from test_cache import TOKENS, fill, object_files, open_cache, payloads_of, resume

from ucm_core.cache import Cache
from ucm_core.coordinator.attempts import Attempt
from ucm_core.store.census import Census
from ucm_core.store.gc import Collector
from ucm_core.store.ledger import NO_RESIDENTS
from ucm_core.store.pool import IoPool
from ucm_core.store.reach import unreachable
from ucm_core.store.root import CacheRoot

OTHERS = [token + 1_000_000 for token in TOKENS]
WAIT_S = 60.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(1)
    yield pool
    pool.close(WAIT_S)


def age(root: Path, seconds: float = 7200.0) -> None:
    """As if nobody had used anything since."""
    then = time.time() - seconds
    for path in object_files(root):
        os.utime(path, (then, then))


def fill_two(cache: Cache) -> None:
    fill(cache)
    assert cache.save(cache.chain(OTHERS), payloads_of(HYBRID, 8, seed=1)).wait_durable(WAIT_S)


def halve(root: CacheRoot, collector: Collector) -> None:
    """Make a pass that removes a half of what is there, whatever its age."""
    root.usage.capacity_bytes = int(0.5 * root.usage.recount() / 0.85)
    assert collector.collect().objects


def files_of(cache: Cache, tokens: list[int], blocks: int = 8) -> list[Path]:
    """The files of a prompt's first blocks, from the documented scheme."""
    names = []
    for row in HYBRID.rows:
        keys = cache.keys(row.name, cache.chain(tokens).digests[:blocks])
        names += [key[:16].tobytes().hex() for key in keys]
    return [path for path in object_files(cache.config.root) if path.name[:32] in names]


@pytest.mark.parametrize("hit_in", ["ring", "files"])
def test_what_a_verdict_touched_survives_a_pass_and_what_none_did_goes(
    root: Path, pool: IoPool, hit_in: str
) -> None:
    with open_cache(root, HYBRID) as cache:
        fill_two(cache)
        age(root)
        if hit_in == "ring":
            assert resume(cache, OTHERS) == 7 * GRAIN
    with open_cache(root, HYBRID) as cache:
        if hit_in == "files":
            assert resume(cache, OTHERS) == 7 * GRAIN
    promised = 7 + 3 + 1  # blocks of the full row, of the window of 40 tokens, and one state
    with CacheRoot(root) as opened:
        survivors = [path for path in object_files(root) if path.stat().st_mtime > time.time() - 3600]
        assert len(survivors) == promised
        opened.usage.capacity_bytes = int(opened.usage.recount() * 0.3)
        Collector(opened, pool).collect()
        assert set(survivors) <= set(object_files(root))
    with open_cache(root, HYBRID) as cache:
        assert resume(cache, OTHERS) == 7 * GRAIN
        assert resume(cache, TOKENS) == 0


def test_what_a_lease_keeps_stays_although_it_is_the_oldest(root: Path) -> None:
    """Of another cache of this node, whose ring is the same."""
    with open_cache(root, HYBRID) as other, open_cache(root, HYBRID) as cache:
        fill_two(cache)
        verdict = other.lease(other.resolve(other.chain(TOKENS)), Attempt("r1"))
        kept = set(files_of(cache, TOKENS, blocks=7)) - set(files_of(cache, TOKENS, blocks=4))
        cache.close()
        age(root)
        leased = {key[:16].tobytes().hex() for keys in verdict.keys.values() for key in keys}
        halve(other._spaces.root, other._spaces._parts.room)
        left = {path.name[:32] for path in object_files(root)}
        assert leased <= left
        assert len(left) < 2 * 24
        assert kept
        other.release(Attempt("r1"))


def test_a_state_without_its_block_is_told_from_names_alone(root: Path) -> None:
    """Each state of the prompt but the one whose block of the full row is deleted by hand."""
    with open_cache(root, HYBRID) as cache:
        fill_two(cache)
        covers = cache._spaces.covers()
    age(root)
    with open_cache(root, HYBRID) as cache:
        digests = cache.chain(TOKENS).digests
        lost_block = cache.keys("full", digests[4:5])[0, :16].tobytes().hex()
        lost_state = cache.keys("state", digests[4:5])[0, :16]
        assert {cover.blocks[1] for cover in covers} == {"full", "window-40"}
        assert unreachable(listed(root), covers, residents=NO_RESIDENTS).sum() == 0
        next(path for path in object_files(root) if path.name.startswith(lost_block)).unlink()
        census = listed(root)
        lost = census.families().names[unreachable(census, covers, residents=NO_RESIDENTS)]
        assert np.array_equal(lost, lost_state[None])


def listed(root: Path) -> Census:
    census = Census(root)
    assert not census.advance(WAIT_S)
    return census


def test_a_pass_takes_lost_states_before_older_blocks(root: Path, pool: IoPool) -> None:
    with open_cache(root, HYBRID) as cache:
        fill_two(cache)
        age(root)
        for path in files_of(cache, OTHERS):
            if path.parents[1].name == "full":
                path.unlink()
        cache.stores["full"].drop(cache.keys("full", cache.chain(OTHERS).digests))
        opened = cache._spaces.root
        used = opened.usage.recount()
        states = [path for path in files_of(cache, OTHERS) if path.parents[1].name == "state"]
        sizes = sum(path.stat().st_size for path in states)
        opened.usage.capacity_bytes = int((used - sizes) / 0.85) + 1
        Collector(opened, pool, view=cache._spaces).make_room()
        assert not any(path.exists() for path in states)
        assert resume(cache, TOKENS) == 7 * GRAIN


def test_a_cache_of_an_unknown_model_covers_nothing(root: Path) -> None:
    with open_cache(root, HYBRID, identity_of(HYBRID, weights=None)) as cache:
        assert not len(cache._spaces.residents().names)


@pytest.mark.parametrize(("ttl_s", "there"), [(3600, 0), (10_800, 24), (None, 24)])
def test_what_is_older_than_the_ttl_goes_with_the_next_start(
    root: Path, ttl_s: int | None, there: int
) -> None:
    with open_cache(root, HYBRID) as cache:
        fill(cache)
    age(root)
    (root / ".collector").unlink(missing_ok=True)  # as if nobody had looked lately
    with open_cache(root, HYBRID, ttl_s=ttl_s) as cache:
        cache._spaces._parts.room.collect()  # takes part in the pass of the start, or begins one
    assert len(object_files(root)) == there


def test_a_root_that_takes_no_files_is_no_matter_for_the_collector(caplog: pytest.LogCaptureFixture) -> None:
    unusable, pool = CacheRoot(Path("/proc/nothing-may-be-made-here")).open(), IoPool(1)
    assert not unusable.available
    caplog.clear()
    Collector(unusable, pool).take_stock()
    pool.close(60.0)  # ends when all that was queued has run
    assert caplog.records == []

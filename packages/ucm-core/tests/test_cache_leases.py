"""Leases of a real cache: what a verdict promised is there when the load comes, and the room comes back."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from models import DENSE, FULL, GRAIN, HYBRID, blocks_of, identity_of, payloads_of

from ucm_core import Attempt, BufferBlocks, Cache, CacheConfig, LayoutError, PrefixChain, Verdict
from ucm_core.spec.table import SpecTable

WAIT_S = 60.0
RING_BYTES = {8: 75_000, 12: 108_000, 30: 270_000}
"""Sizes by the number of slots that the one row of `DENSE` has then."""
R1, R2 = Attempt("r1"), Attempt("r2")


def open_cache(root: Path, table: SpecTable = DENSE, *, slots: int = 30) -> Cache:
    config = CacheConfig(root=root, ring_bytes=RING_BYTES[slots], disk_bytes=1 << 30, save_wait_s=0.05)
    cache = Cache.open(config, table, identity=identity_of(table))
    assert table is not DENSE or cache.stores["full"].slots == slots
    return cache


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    """A cache whose books balance whatever a test did."""
    with open_cache(tmp_path, slots=12) as cache:
        yield cache
        cache.check_integrity()
        cache.release(R1)
        cache.release(R2)
        assert pinned(cache) == (0, 0)


def pinned(cache: Cache) -> tuple[int, int]:
    """Leases held, and objects that the stores count as pinned."""
    return (cache.statistics().leases.held, sum(row.pins for row in cache.statistics().rows.values()))


def prompt(cache: Cache, number: int, blocks: int) -> PrefixChain:
    """A prompt of ``blocks`` blocks and one token more."""
    return cache.chain([number, *range(blocks * GRAIN)])


def fill(cache: Cache, number: int, blocks: int) -> PrefixChain:
    """Save a prompt and wait for its files."""
    chain = prompt(cache, number, blocks)
    assert cache.save(chain, payloads_of(cache.table, blocks, seed=number)).wait(WAIT_S)
    cache.save(chain, payloads_of(cache.table, blocks, seed=number)).wait_durable(WAIT_S)
    return chain


def press(cache: Cache, blocks: int) -> None:
    """Foreign blocks go through the ring, a few at a time."""
    for number in range(100, 100 + blocks // 2):
        fill(cache, number, 2)


def lose_files(root: Path) -> None:
    for path in root.glob("*/*/???/*.c0-1"):
        path.unlink()


def load_blocks(cache: Cache, chain: PrefixChain, verdict: Verdict, *, seed: int) -> int:
    """How many blocks of a promise come; those that do have their own bytes."""
    loaded = cache.load(chain, verdict)
    blocks = loaded.verdict.blocks["full"]
    assert np.array_equal(loaded.payloads["full"], blocks_of(FULL, 64, seed=seed)[: len(blocks)])
    return len(blocks)


def loads_all(cache: Cache, chain: PrefixChain, verdict: Verdict, *, seed: int) -> bool:
    return load_blocks(cache, chain, verdict, seed=seed) * GRAIN == verdict.hit.resume_tokens


def leased_blocks(verdict: Verdict) -> int:
    """How many blocks a lease keeps of the head of its promise."""
    assert verdict.lease is not None
    kept = {key.tobytes() for pins in verdict.lease.pins.values() for key in pins.keys}
    return sum(all(key.tobytes() in kept for key in verdict.keys["full"][: end + 1]) for end in range(6))


def test_what_is_leased_outlives_forty_foreign_blocks_and_its_files(cache: Cache, tmp_path: Path) -> None:
    """C-33: nine blocks are promised, forty foreign ones press on twelve slots, all nine load."""
    chain = fill(cache, 0, 9)
    verdict = cache.lease(cache.resolve(chain), R1)
    assert (verdict.hit.resume_tokens, verdict.lease and verdict.lease.objects) == (9 * GRAIN, 9)
    press(cache, 40)
    lose_files(tmp_path)
    assert loads_all(cache, chain, verdict, seed=0)
    assert pinned(cache) == (0, 0)


def test_without_a_lease_the_load_is_shorter_and_so_is_the_next_verdict(cache: Cache, tmp_path: Path) -> None:
    chain = fill(cache, 0, 9)
    verdict = cache.resolve(chain)
    press(cache, 40)
    lose_files(tmp_path)
    assert not loads_all(cache, chain, verdict, seed=0)
    assert cache.resolve(chain).hit.resume_tokens < 9 * GRAIN


def test_what_another_process_removed_is_named_and_the_load_ends_before_it(tmp_path: Path) -> None:
    """C-33: blocks 6 and 8 of nine go between verdict and load; only this request notices."""
    with open_cache(tmp_path) as writer:
        fill(writer, 0, 9)
    with open_cache(tmp_path) as cache:
        chain = prompt(cache, 0, 9)
        verdict, out = cache.resolve(chain), np.full_like(blocks_of(FULL, 9), 0x5C)
        for block in (6, 8):
            name = verdict.keys["full"][block].tobytes()[:16].hex()
            subprocess.run(["rm", *tmp_path.glob(f"*/full/???/{name}.*")], check=True)
        tickets = cache.load_into(verdict, {"full": BufferBlocks(out)})
        assert tickets.wait(WAIT_S)
        assert verdict.hit.resume_tokens == 9 * GRAIN
        assert np.flatnonzero(tickets.rows["full"].object_results).tolist() == [6, 8]
        right = blocks_of(FULL, 9, seed=0)
        right[[6, 8]] = 0x5C
        assert np.array_equal(out, right)
        assert cache.load(chain, verdict).resume_tokens == 6 * GRAIN


def test_leases_leave_a_quarter_of_the_ring(cache: Cache) -> None:
    first, second = fill(cache, 0, 6), fill(cache, 1, 6)
    cache.lease(cache.resolve(first), R1)
    cache.lease(cache.resolve(second), R2)
    assert cache.statistics().leases.objects <= 9
    assert cache.save(prompt(cache, 2, 2), payloads_of(DENSE, 2, seed=2)).wait(WAIT_S)
    assert cache.stores["full"].statistics().ring.pinned <= 9 + 2  # type: ignore[union-attr]


def test_a_new_verdict_replaces_the_lease(cache: Cache) -> None:
    chain, longer = fill(cache, 0, 4), fill(cache, 0, 6)
    cache.lease(cache.resolve(chain), R1)
    cache.lease(cache.resolve(longer), R1)
    assert pinned(cache) == (1, 6)


def test_a_release_ends_the_lease_and_a_second_one_is_a_no_op(cache: Cache) -> None:
    verdict = cache.lease(cache.resolve(fill(cache, 0, 4)), R1)
    cache.release(R1)
    cache.release(R1)
    cache.release(Attempt("r3"))
    assert pinned(cache) == (0, 0)
    assert cache.load(prompt(cache, 0, 4), verdict).resume_tokens == 4 * GRAIN


def test_a_load_into_memory_ends_the_lease_when_all_has_come(cache: Cache) -> None:
    verdict = cache.lease(cache.resolve(fill(cache, 0, 4)), R1)
    out = blocks_of(FULL, 4, seed=9)
    with pytest.raises(LayoutError, match="rows without a target: full"):
        cache.load_into(verdict, {})
    assert pinned(cache) == (1, 4)
    called = threading.Event()
    cache.load_into(verdict, {"full": BufferBlocks(out)}).add_done_callback(called.set)
    assert called.wait(WAIT_S)
    assert pinned(cache) == (0, 0)
    assert np.array_equal(out, blocks_of(FULL, 4, seed=0))


def test_changed_weights_end_all_leases(cache: Cache) -> None:
    chain = fill(cache, 0, 4)
    verdict = cache.lease(cache.resolve(chain), R1)
    stores = cache.stores
    cache.weights_changed()
    assert stores["full"].statistics().pins == 0
    assert pinned(cache) == (0, 0)
    assert cache.load(chain, verdict).resume_tokens == 0
    assert cache.lease(verdict, R2).lease.objects == 0  # type: ignore[union-attr]


def test_closing_ends_all_leases(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache:
        verdict = cache.lease(cache.resolve(fill(cache, 0, 4)), R1)
    assert pinned(cache) == (0, 0)
    assert verdict.lease is not None
    verdict.lease.release()
    cache.release(R1)
    cache.check_integrity()


def test_all_rows_are_leased_together(tmp_path: Path) -> None:
    with open_cache(tmp_path, HYBRID) as cache:
        chain = fill(cache, 0, 6)
        verdict = cache.lease(cache.resolve(chain), R1)
        assert verdict.lease is not None
        kept = {row: len(pins.keys) for row, pins in verdict.lease.pins.items()}
        assert kept == {"full": 6, "window-40": 3, "state": 1}
        assert cache.load(chain, verdict).resume_tokens == 6 * GRAIN
        assert pinned(cache) == (0, 0)


def test_a_root_that_keeps_nothing_leases_nothing(tmp_path: Path) -> None:
    identity = identity_of(DENSE, weights=None)
    with Cache.open(CacheConfig(root=tmp_path), DENSE, identity=identity) as cache:
        verdict = cache.lease(cache.resolve(prompt(cache, 0, 4)), R1)
        assert (verdict.lease is not None, pinned(cache)) == (True, (0, 0))


@pytest.mark.parametrize("files", ["files", "no files"])
def test_fifty_requests_that_need_six_of_eight_slots_all_end(tmp_path: Path, files: str) -> None:  # case C-46
    with open_cache(tmp_path, slots=8) as cache:
        chains = [fill(cache, number, 6) for number in range(50)]
        asked = [cache.lease(cache.resolve(chain), Attempt(f"r{n}")) for n, chain in enumerate(chains)]
        if files == "no files":
            lose_files(tmp_path)
        sure = [leased_blocks(verdict) if files == "no files" else 6 for verdict in asked]
        assert any(sure)
        served: list[bool] = []

        def work(number: int) -> None:
            served.append(load_blocks(cache, chains[number], asked[number], seed=number) >= sure[number])

        threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(50)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert len(served) == 50
        assert all(served)
        assert pinned(cache) == (0, 0)
        cache.check_integrity()


def test_nothing_waits_for_what_is_leased(tmp_path: Path) -> None:
    """While leases hold all that they may, saves, loads and verdicts of others end."""
    with open_cache(tmp_path, slots=8) as cache:
        others = [fill(cache, number, 6) for number in range(1, 4)]
        held = cache.lease(cache.resolve(fill(cache, 0, 6)), R1)
        assert held.lease is not None
        assert held.lease.objects == 6
        for number, chain in enumerate(others, 1):
            assert loads_all(cache, chain, cache.resolve(chain), seed=number)
        assert cache.save(prompt(cache, 7, 6), payloads_of(DENSE, 6, seed=7)).wait(WAIT_S)
        assert held.lease.pins["full"].keys.tolist() == held.keys["full"].tolist()
        assert cache.stores["full"].lookup(held.keys["full"]).all()


def test_what_somebody_is_storing_is_not_there_yet(cache: Cache) -> None:
    chain = fill(cache, 0, 4)
    cache.stores["full"].drop(cache.resolve(chain).keys["full"][3:])
    verdict = cache.resolve(chain)
    assert (verdict.hit.resume_tokens, cache.soon_tokens(chain, verdict)) == (3 * GRAIN, 3 * GRAIN)
    (key,) = cache.coordinator.keys(chain, "full", begin_block=3, end_block=4)
    donation = cache.stores["full"].reserve(key)
    assert donation is not None
    assert (cache.resolve(chain).hit.resume_tokens, cache.soon_tokens(chain, verdict)) == (
        3 * GRAIN,
        4 * GRAIN,
    )
    donation.abort()
    assert cache.soon_tokens(chain, verdict) == 3 * GRAIN


@pytest.mark.parametrize("leased", [True, False], ids=["leased", "not leased"])
@pytest.mark.parametrize(
    ("row", "block", "resume_blocks"),
    [("full", 4, 4), ("full", 0, 0), ("window-40", 7, 7), ("window-40", 5, 5), ("state", 7, 7)],
)
def test_all_rows_rewind_together_with_a_lease_and_without(
    tmp_path: Path, row: str, block: int, resume_blocks: int, leased: bool
) -> None:
    """One object vanishes between verdict and load (C-36). A lease does not keep what only files hold."""
    with open_cache(tmp_path, HYBRID) as writer:
        fill(writer, 0, 8)
    with open_cache(tmp_path, HYBRID) as cache:
        chain = prompt(cache, 0, 8)
        verdict = cache.resolve(chain)
        verdict = cache.lease(verdict, R1) if leased else verdict
        (key,) = cache.coordinator.keys(chain, row, begin_block=block, end_block=block + 1)
        next(tmp_path.glob(f"*/{row}/???/{key.tobytes()[:16].hex()}.*")).unlink()
        loaded = cache.load(chain, verdict)
        assert (verdict.hit.resume_tokens, loaded.resume_tokens) == (8 * GRAIN, resume_blocks * GRAIN)
        for spec in HYBRID.rows:
            blocks = loaded.verdict.blocks[spec.name]
            stored = blocks_of(spec, 8, seed=0)[blocks.start : blocks.stop]
            assert np.array_equal(loaded.payloads[spec.name], stored)
        assert cache.resolve(chain).hit.resume_tokens == resume_blocks * GRAIN
        assert pinned(cache) == (0, 0)


def test_what_is_leased_of_all_rows_loads_without_its_files(tmp_path: Path) -> None:
    with open_cache(tmp_path, HYBRID) as cache:
        chain = fill(cache, 0, 6)
        verdict = cache.lease(cache.resolve(chain), R1)
        lose_files(tmp_path)
        press(cache, 40)
        assert cache.load(chain, verdict).resume_tokens == 6 * GRAIN
        assert pinned(cache) == (0, 0)

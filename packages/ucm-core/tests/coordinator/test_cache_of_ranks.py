"""Caches of the ranks of one engine and the scheduler's, over real rings and files: C-11, C-13, C-50."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import RING_BYTES
from oracle import World, brute_force
from rank_engine import BLOCKS, CUT, GRAIN, RANKS, TABLE, RankEngine

from ucm_core.coordinator.presence import Presence
from ucm_core.errors import SpecError, StoreError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.spec.segments import Parallelism, Rank, Share, slices_of
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow, SpecTable
from ucm_core.store.stack import plan_rows

Masks = dict[tuple[Rank, str], npt.NDArray[np.bool_]]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankEngine]:
    engine = RankEngine(tmp_path_factory.mktemp("ranks"))
    yield engine
    engine.close()


def everything() -> Masks:
    pairs = ((rank, row) for rank in RANKS for row in slices_of(TABLE, CUT, rank=rank))
    return {pair: np.ones(BLOCKS, dtype=np.bool_) for pair in pairs}


@st.composite
def stored(draw: st.DrawFn) -> Masks:
    """What each rank stored: all but a few blocks."""
    masks = everything()
    for pair in draw(st.lists(st.sampled_from(sorted(masks, key=str)), max_size=4)):
        masks[pair][draw(st.integers(0, BLOCKS - 1))] = False
    return masks


def presence(row: SpecRow, mask: npt.NDArray[np.bool_]) -> Presence:
    if row.kind is RowKind.SNAPSHOT:
        return Presence(positions=frozenset(((np.flatnonzero(mask) + 1) * GRAIN).tolist()))
    return Presence(mask)


def world(masks: Masks) -> World:
    """The same for the oracle, which knows stages and ranks but no segments."""
    stages = [
        [
            {row: presence(TABLE.row(row), mask) for (other, row), mask in masks.items() if other == rank}
            for rank in RANKS
            if rank.stage == stage
        ]
        for stage in range(CUT.stages)
    ]
    return World(TABLE.rows, stages)


numbers = itertools.count(1)


@settings(max_examples=40)
@given(masks=stored(), tail=st.integers(1, 20))
def test_a_verdict_of_all_segments_is_that_of_trying_every_token(
    engine: RankEngine, masks: Masks, tail: int
) -> None:
    chain = engine.chain(next(numbers))
    for (rank, row), mask in masks.items():
        assert engine.save(rank, row, chain, mask)
    hit = engine.scheduler.resolve(chain, tail_tokens=tail).hit
    answer = brute_force(world(masks), request_tokens=chain.token_count, tail_tokens=tail, align_tokens=GRAIN)
    assert (hit.hit_tokens, hit.resume_tokens) == (answer.hit_tokens, answer.resume_tokens)


def test_every_rank_of_a_new_engine_loads_its_own_bytes(tmp_path: Path) -> None:
    before = RankEngine(tmp_path)
    for (rank, row), mask in everything().items():
        assert before.save(rank, row, before.chain(1), mask)
    before.close()
    after = RankEngine(tmp_path)
    verdict = after.scheduler.resolve(after.chain(1))
    assert verdict.hit.resume_tokens == BLOCKS * GRAIN
    for rank, cache in after.ranks.items():
        blank = {row: np.zeros_like(after.payload(rank, row)) for row in cache.stores}
        parts = {row: blank[row][list(verdict.blocks[row])] for row in blank}
        assert cache.load_into(verdict, {row: BufferBlocks(part) for row, part in parts.items()}).wait(60)
        for row, part in parts.items():
            assert (part == after.payload(rank, row)[list(verdict.blocks[row])]).all()
    after.close()


def test_a_rank_has_no_store_for_a_row_without_a_layer_on_its_stage(engine: RankEngine) -> None:
    assert list(engine.ranks[Rank(0, 0)].stores) == ["full", "latent", "window"]
    assert list(engine.ranks[Rank(1, 1)].stores) == ["full", "latent", "state"]
    with pytest.raises(SpecError, match="no cached row 'state'"):
        engine.ranks[Rank()].save(engine.chain(0), {"state": np.zeros((1, 1, 20), np.uint8)})


def test_the_scheduler_moves_no_bytes(engine: RankEngine) -> None:
    store = engine.scheduler.stores["full"]
    keys, blocks = np.zeros((1, 32), np.uint8), BufferBlocks(np.zeros((1, 2, 64), np.uint8))
    for move in (store.load, store.save, store.begin_load, store.begin_save):
        with pytest.raises(StoreError, match="asks for all 4 segments of a row"):
            move(keys, blocks)
    with pytest.raises(StoreError, match="all 4 segments"):
        store.reserve(keys[0])


def test_a_lease_keeps_what_every_ring_holds_and_a_prefetch_reads_every_segment(engine: RankEngine) -> None:
    chain = engine.chain(next(numbers))
    for (rank, row), mask in everything().items():
        assert engine.save(rank, row, chain, mask)
    store = engine.scheduler.stores["full"]
    keys = engine.scheduler.coordinator.keys(chain, "full", begin_block=0, end_block=BLOCKS)
    with store.pin(keys) as pins:
        assert len(pins.keys) == BLOCKS
        assert [cache.statistics().rows["full"].pins for cache in engine.ranks.values()] == [0] * 4
        assert store.statistics().pins == BLOCKS * 4
    assert store.statistics().pins == 0
    reads = store.prefetch(keys)
    assert reads.wait(60)
    assert reads.ok
    assert reads.results.shape == (BLOCKS, 4)


def test_what_one_rank_lacks_is_nowhere_and_a_drop_takes_the_whole_family(engine: RankEngine) -> None:
    chain = engine.chain(next(numbers))
    masks = everything()
    masks[Rank(1, 1), "full"][3] = False
    for (rank, row), mask in masks.items():
        assert engine.save(rank, row, chain, mask)
    store = engine.scheduler.stores["full"]
    keys = engine.scheduler.coordinator.keys(chain, "full", begin_block=0, end_block=BLOCKS)
    assert store.lookup(keys).tolist() == [True] * 3 + [False] + [True] * 2
    assert store.lookup_prefix(keys) == 3
    store.drop(keys)
    assert not any(cache.stores["full"].lookup(keys).any() for cache in engine.ranks.values())


@pytest.mark.parametrize(("rule", "hit_tokens"), [(RankRule.INTERSECTION, 192), (RankRule.ALL_UNION, 288)])
def test_c50_one_answer_for_all_ranks_by_rank_rule(tmp_path: Path, rule: RankRule, hit_tokens: int) -> None:
    row = SpecRow("r", RowKind.CHAIN, 48, (0,), (Part("k", (3, 4), "int8"),), rank_rule=rule)
    engine = RankEngine(tmp_path, SpecTable((row,), 48), Parallelism(3))
    chain = engine.chain(1, 8)
    for rank, missing in zip(engine.ranks, ([6], [4, 6], [6, 7]), strict=True):
        mask = np.ones(8, dtype=np.bool_)
        mask[missing] = False
        assert engine.save(rank, "r", chain, mask)
    assert engine.scheduler.resolve(chain).hit.hit_tokens == hit_tokens
    engine.close()


def test_c50_eviction_takes_whole_families(tmp_path: Path) -> None:
    row = SpecRow("r", RowKind.CHAIN, 48, (0,), (Part("k", (3, 4), "int8"),))
    engine = RankEngine(tmp_path, SpecTable((row,), 48), Parallelism(3), disk_bytes=24 * 8192)
    chain = engine.chain(1, 20)
    kept = [
        [engine.save(rank, "r", chain, np.arange(20) == block) for rank in engine.ranks]
        for block in range(20)
    ]
    keys = engine.scheduler.coordinator.keys(chain, "r", begin_block=0, end_block=20)
    # a write that the bound refuses is no eviction: such a family was never whole
    names = {key[:16].tobytes() for key, each in zip(keys, kept, strict=True) if all(each)}
    deadline = time.monotonic() + 60  # a pass of the collector may be under way
    while len(set(there := families_left(engine, names))) > 1 and time.monotonic() < deadline:
        pass  # what a pass has begun it ends
    assert there[0] == there[1] == there[2]
    assert 0 < len(there[0]) <= 8 < len(names)
    engine.close()


def families_left(engine: RankEngine, names: set[bytes]) -> list[frozenset[bytes]]:
    """Which of ``names`` each rank's files hold now."""
    stores = (cache.stores["r"] for cache in engine.ranks.values())
    return [frozenset(name.tobytes() for part in store.names() for name in part) & names for store in stores]


def test_an_object_is_in_flight_when_what_its_segments_lack_is(engine: RankEngine) -> None:
    chain = engine.chain(next(numbers))
    keys = engine.scheduler.coordinator.keys(chain, "full", begin_block=0, end_block=2)
    last = RANKS[-1]
    for rank in RANKS:
        assert engine.save(rank, "full", chain, np.array([rank != last, rank not in {last, Rank()}]))
    donation = [engine.ranks[last].stores["full"].reserve(key) for key in keys]
    store = engine.scheduler.stores["full"]
    assert store.in_flight(keys).tolist() == [True, False], "of the second another segment is missing"
    for each in donation:
        assert each is not None
        each.abort()
    assert store.in_flight(keys).tolist() == [False, False]


def test_every_process_comes_to_the_same_ring_sizes() -> None:
    together = plan_rows(TABLE, RING_BYTES, share=Share(CUT))
    slots = {(row, plan.segment): plan.slots for row, plans in together.items() for plan in plans}
    for rank in RANKS:
        for row, plans in plan_rows(TABLE, RING_BYTES, share=Share(CUT, rank)).items():
            assert all(plan.slots == slots[row, plan.segment] for plan in plans)
    sizes = [
        plan.slots * (plan.geometry.payload_bytes + 640) for plans in together.values() for plan in plans
    ]
    assert 0.9 * RING_BYTES < sum(sizes) <= RING_BYTES, "what all ranks have together"

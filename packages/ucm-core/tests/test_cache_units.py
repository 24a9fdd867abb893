"""Loads and saves by units through the facade: same keys, same bytes, same leases as the whole ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models import GRAIN, HYBRID, payloads_of
from test_cache import WAIT_S, open_cache

from ucm_core import Attempt, BufferBlocks, Cache, LayoutError, PrefixChain, SpecError
from ucm_core.coordinator.coordinator import Verdict
from ucm_core.flow.handles import UnitLoad, UnitSave

ALL = slice(None)
BLOCKS = 4
SEED = 3


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return open_cache(tmp_path / "cache", HYBRID)


def prompt(cache: Cache) -> PrefixChain:
    return cache.chain(range(BLOCKS * GRAIN))


def sources(cache: Cache) -> dict[str, BufferBlocks]:
    return {row: BufferBlocks(blocks) for row, blocks in payloads_of(cache.table, BLOCKS, seed=SEED).items()}


def save_by_units(cache: Cache, chain: PrefixChain) -> dict[str, UnitSave]:
    saves = cache.begin_save(chain, sources(cache))
    for save in saves.values():
        save.submit(ALL)
        save.seal()
    for save in saves.values():
        assert save.ticket.wait_durable(WAIT_S)
    return saves


def blank(cache: Cache, verdict: Verdict) -> dict[str, np.ndarray]:
    geometries = {row: cache.stores[row].geometry for row in verdict.keys}
    shape = {
        row: (len(keys), geometries[row].shards, geometries[row].shard_bytes)
        for row, keys in verdict.keys.items()
    }
    return {row: np.zeros(size, dtype=np.uint8) for row, size in shape.items()}


def begin(cache: Cache, verdict: Verdict) -> tuple[dict[str, UnitLoad], dict[str, np.ndarray]]:
    out = blank(cache, verdict)
    return cache.begin_load(verdict, {row: BufferBlocks(blocks) for row, blocks in out.items()}), out


def verdict_of(cache: Cache) -> Verdict:
    return cache.resolve(prompt(cache), request_tokens=BLOCKS * GRAIN + 1)


def test_what_is_saved_by_units_is_loaded_whole(cache: Cache) -> None:
    saves = save_by_units(cache, prompt(cache))
    assert set(saves) == set(cache.stores)
    loaded = cache.load(prompt(cache), verdict_of(cache))
    assert loaded.resume_tokens == BLOCKS * GRAIN
    right = payloads_of(cache.table, BLOCKS, seed=SEED)
    for row, blocks in loaded.payloads.items():
        assert np.array_equal(blocks, right[row][list(loaded.verdict.blocks[row])])


def test_what_is_saved_whole_is_loaded_by_units(cache: Cache) -> None:
    right = payloads_of(cache.table, BLOCKS, seed=SEED)
    assert cache.save(prompt(cache), right).wait_durable(WAIT_S)
    verdict = verdict_of(cache)
    loads, out = begin(cache, verdict)
    for row, load in loads.items():
        load.submit(ALL)
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.ok
        assert np.array_equal(out[row], right[row][list(verdict.blocks[row])])


def test_the_lease_ends_with_the_last_unit(cache: Cache) -> None:
    save_by_units(cache, prompt(cache))
    loads, _ = begin(cache, cache.lease(verdict_of(cache), Attempt("r1")))
    first, *others = loads.values()
    first.submit(ALL)
    assert first.ticket.wait(WAIT_S)
    assert cache.statistics().leases.held == bool(others)
    for load in others:
        load.cancel()
        assert load.ticket.wait(WAIT_S)
    assert cache.statistics().leases.held == 0


def test_a_row_without_a_target_is_refused(cache: Cache) -> None:
    save_by_units(cache, prompt(cache))
    with pytest.raises(LayoutError, match="rows without a target"):
        cache.begin_load(verdict_of(cache), {})


def test_a_row_that_is_none_is_refused(cache: Cache) -> None:
    with pytest.raises(SpecError, match="nonsense"):
        cache.begin_save(prompt(cache), {"nonsense": BufferBlocks(np.zeros((1, 1, 1), np.uint8))})


def test_blocks_begin_where_it_is_said(cache: Cache) -> None:
    begins = dict.fromkeys(sources(cache), 1)
    saves = cache.begin_save(prompt(cache), sources(cache), first_block=begins)
    for row, save in saves.items():
        tokens = cache.table.row(row).block_tokens
        assert save.ticket.results.shape[0] == BLOCKS * GRAIN // tokens - 1
        save.abandon()

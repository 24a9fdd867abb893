"""The ring keeps the head of a prefix, because the facade and the stores say who follows whom (case C-63)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import DENSE, FULL, GRAIN, HYBRID, STATE, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.errors import LayoutError
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.keys import PrefixChain, following
from ucm_core.store.tiers import KeyBatch

WAIT_S = 60.0


def chain_of(blocks: int, first: int = 0) -> PrefixChain:
    chain = PrefixChain(None, grain_tokens=GRAIN)
    chain.extend(range(first, first + blocks * GRAIN))
    return chain


def head_in_ring(cache: Cache, chain: PrefixChain, blocks: int) -> int:
    """How many blocks from the first on the ring holds without a gap."""
    store: Any = cache.stores[FULL.name]
    keys = cache.coordinator.keys(chain, FULL.name, begin_block=0, end_block=blocks)
    return int(np.cumprod(store._tiers.ring.lookup(keys)).sum())


@pytest.mark.parametrize("policy", ["clock", "fifo", "lru", "sieve"])
def test_a_prompt_that_outgrows_the_ring_keeps_its_head_there(tmp_path: Path, policy: str) -> None:
    config = CacheConfig(root=tmp_path, ring_bytes="1MiB", disk_bytes=1 << 30, ring_policy=policy)
    with Cache.open(config, DENSE, identity=identity_of(DENSE)) as cache:
        slots = cache.stores[FULL.name].slots
        blocks, step = 2 * slots, slots // 2
        chain, payloads = chain_of(blocks), payloads_of(DENSE, blocks)
        for begin in range(0, blocks, step):
            part = {row: all_blocks[begin : begin + step] for row, all_blocks in payloads.items()}
            assert cache.save(chain, part, first_block=begin).wait_durable(WAIT_S)
        assert head_in_ring(cache, chain, blocks) >= slots - slots // 16 - 1
        cache.check_integrity()


def test_without_files_the_part_of_a_save_that_is_given_up_takes_no_head_s_place(tmp_path: Path) -> None:
    """A save that found no room for its first piece does not try the others."""
    config = CacheConfig(root=tmp_path, ring_bytes="1MiB", disk_bytes=0)
    with Cache.open(config, DENSE, identity=identity_of(DENSE)) as cache:
        slots = cache.stores[FULL.name].slots
        blocks, step = 3 * slots, slots // 2 + 1
        chain, payloads = chain_of(blocks), payloads_of(DENSE, blocks)
        for begin in range(0, blocks, step):
            part = {row: all_blocks[begin : begin + step] for row, all_blocks in payloads.items()}
            cache.save(chain, part, first_block=begin)
        assert head_in_ring(cache, chain, blocks) >= slots - slots // 16 - 1


def test_a_block_follows_the_one_before_it_in_the_chain(tmp_path: Path) -> None:
    config = CacheConfig(root=tmp_path, ring_bytes="4MiB", disk_bytes=1 << 30)
    with Cache.open(config, HYBRID, identity=identity_of(HYBRID)) as cache:
        chain = chain_of(4)
        of = cache.coordinator
        keys = of.keys(chain, FULL.name, begin_block=0, end_block=4)
        parents = of.parents(chain, FULL.name, begin_block=0, end_block=4)
        assert parents is not None
        assert not parents[0].any()
        assert (parents[1:] == keys[:3]).all()
        later = of.parents(chain, FULL.name, begin_block=2, end_block=4)
        assert later is not None
        assert (later == keys[1:3]).all()


def test_states_follow_nothing(tmp_path: Path) -> None:
    config = CacheConfig(root=tmp_path, ring_bytes="4MiB", disk_bytes=1 << 30)
    with Cache.open(config, HYBRID, identity=identity_of(HYBRID)) as cache:
        assert cache.coordinator.parents(chain_of(4), STATE.name, begin_block=0, end_block=2) is None


def test_parents_stay_with_their_keys_when_keys_repeat() -> None:
    keys = np.repeat(np.array([[3], [4], [3], [5]], dtype=np.uint8), 32, axis=1)
    batch = KeyBatch(keys, following(keys[[0, 1, 1, 3]]))
    found = batch.parents(np.arange(3))
    assert found is not None
    assert found[:, 0].tolist() == [0, 3, 4]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        (np.zeros((1, 32), np.uint8), "2 keys and 1 parents"),
        (np.zeros((2, 32), np.int64), r"parents are int64\[2, 32\]"),
        ([[0] * 32] * 2, "parents are a list"),
    ],
)
def test_a_parent_for_each_key_is_needed(parents: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        KeyBatch(np.zeros((2, 32), dtype=np.uint8), parents)

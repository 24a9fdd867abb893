"""The rules behind the public cases of a verdict, C-18 to C-32, C-36 and C-50: sweeps, not instances.

The instances are in `test_cases.py`. C-18, C-26, C-36 and C-50 are tried at random in `test_brute_force.py`,
C-23 in `test_kept_resolves.py`, C-24 and C-25 in `test_coverage.py`, C-31 in `test_table.py`. C-27 and C-28
are about bytes and belong to the stores.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import permutations, product

import numpy as np
import pytest
from doubles import Node, chain_of
from oracle import World, brute_force
from seeded_cases import case_of, presence_of, random_table
from spec_rows import chain, snapshot, states, table, whole

from ucm_core.coordinator.boundaries import served
from ucm_core.coordinator.coverage import coverage
from ucm_core.coordinator.presence import Presence, combine_ranks, combine_slices, unite
from ucm_core.coordinator.resolve import resolve_hit
from ucm_core.spec.table import RankRule


def test_c19_what_engine_and_store_hold_together_is_what_either_holds() -> None:
    for seed in range(500):
        dice = random.Random(seed)
        spec = random_table(dice)
        engine, store = ({row.name: presence_of(row, dice, 0.1) for row in spec.rows} for _ in range(2))
        hit = resolve_hit(spec, unite(store, engine), request_tokens=120)
        either = [replace(row, rank_rule=RankRule.ALL_UNION) for row in spec.rows]
        tried = brute_force(
            World(either, [[engine, store]]), request_tokens=120, tail_tokens=1, align_tokens=1
        )
        assert (hit.hit_tokens, hit.resume_tokens) == (tried.hit_tokens, tried.resume_tokens), f"seed {seed}"


@pytest.mark.parametrize("tail", range(10))
def test_c20_a_state_that_has_seen_the_tail_is_not_used(tail: int) -> None:
    kept = (144, 288, 432)
    known = {"full": whole(20), "s": states(*kept)}
    for request in range(500):
        hit = resolve_hit(
            table(chain("full", 48), snapshot("s", 48)), known, request_tokens=request, tail_tokens=tail
        )
        assert hit.resume_tokens == max((at for at in kept if at <= request - tail), default=0)


@pytest.mark.parametrize("local", [0, 100, 120, 240, 601, 5000])
def test_c21_a_full_hit_leaves_the_tail_and_gains_nothing_negative(local: int) -> None:
    spec = table(chain("a", 24), chain("b", 40))
    for request, tail in product(range(0, 700, 7), [0, 1, 7, 121]):
        hit = resolve_hit(
            spec,
            {"a": whole(40), "b": whole(40)},
            request_tokens=request,
            tail_tokens=tail,
            local_tokens=local,
        )
        assert hit.resume_tokens == max(0, request - tail) // 120 * 120
        assert hit.new_tokens == max(0, hit.resume_tokens - local)


@pytest.mark.parametrize(("grid", "block", "page"), [*product([16, 64, 96], [48, 64, 512], [1, 32, 512])])
def test_c22_a_joint_point_is_a_multiple_of_every_grid_and_of_the_page(
    grid: int, block: int, page: int
) -> None:
    spec = table(chain("full", block), snapshot("s", grid))
    every = {"full": whole(4096 // block), "s": states(*range(grid, 4097, grid))}
    for request in range(1, 4097, 61):
        hit = resolve_hit(spec, every, request_tokens=request, align_tokens=page)
        assert hit.resume_tokens == (request - 1) // math.lcm(grid, block, page) * math.lcm(grid, block, page)
    # A state at any other depth is no point at all.
    apart = {**every, "s": states(*(p for p in range(1, 4097) if p % math.lcm(grid, block, page)))}
    assert resolve_hit(spec, apart, request_tokens=4096, align_tokens=page).resume_tokens == 0


@pytest.mark.parametrize(("block", "window", "extra"), [*product([3, 8, 24], [None, 1, 5, 33], [0, 2])])
def test_c24_yes_exactly_when_every_block_that_a_load_would_touch_is_there(
    block: int, window: int | None, extra: int
) -> None:
    row = chain("r", block, window, extra=extra if window else 0)
    dice = np.random.default_rng(block)
    for density in (0.05, 0.3):
        mask = dice.random(200 // block) >= density
        there = served(row, Presence(mask), candidates=np.arange(1, 220))
        for boundary, yes in enumerate(there.tolist(), 1):
            assert yes == all(b < len(mask) and mask[b] for b in coverage(row, boundary))


def test_c29_what_is_loaded_begins_where_the_engines_own_blocks_end() -> None:
    spec = table(chain("full", 64), chain("w", 32, 50), grain=16)
    node, request = Node(spec), chain_of(spec, 1000)
    node.store(request, {"full": whole(15), "w": whole(31)})
    for local in range(0, 1001, 16):
        verdict = node.coordinator.verdict(request, request_tokens=1000, local_tokens=local)
        assert verdict.hit.new_tokens == max(0, 960 - local)
        loaded = verdict.blocks["full"]
        assert [*loaded] == [b for b in range(15) if (b + 1) * 64 > local]
        assert all((block + 1) * 32 > local for block in verdict.blocks["w"])


@pytest.mark.parametrize("blocks", [(16,), (16, 64), (24, 40), (7,)])
def test_c30_only_tokens_of_whole_blocks_count(blocks: tuple[int, ...]) -> None:
    spec = table(*(chain(f"r{size}", size) for size in blocks))
    for stored in range(0, 300, 3):
        node, written = Node(spec), chain_of(spec, stored)
        node.store(written, {f"r{size}": whole(stored // size) for size in blocks})
        hit = node.coordinator.verdict(chain_of(spec, 300), request_tokens=300).hit
        assert hit.resume_tokens == min(stored, 299) // math.lcm(*blocks) * math.lcm(*blocks)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_c32_under_context_parallelism_a_block_is_there_when_every_coordinate_wrote_it(size: int) -> None:
    replicated = table(chain("mla", 16 * size, rank_rule=RankRule.ALL_UNION))
    spec = replicated.under_context(size)
    for missing in range(6):
        pieces = [{"mla": whole(6)} for _ in range(size - 1)]
        pieces.append({"mla": Presence(np.arange(6) != missing)})
        for known in (combine_ranks(spec, pieces), combine_slices(pieces)):
            assert resolve_hit(spec, known, request_tokens=1000).resume_tokens == missing * 16 * size


def test_c50_every_rank_gives_the_same_answer() -> None:
    for seed in range(200):
        case = case_of(seed)
        answers = {
            resolve_hit(case.spec, combine_ranks(case.spec, order), **case.ask)
            for order in permutations(case.slices[0])
        }
        assert len(answers) == 1, f"seed {seed}"

"""Boundary sets against a brute-force oracle, and the laws every verdict obeys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coordinator_strategies import asks, worlds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import World, brute_force
from spec_rows import blocks, chain, follower, snapshot, states, table, whole

from ucm_core.coordinator.boundaries import boundaries
from ucm_core.coordinator.coverage import coverage, voter
from ucm_core.coordinator.presence import Presence, combine_ranks, combine_slices
from ucm_core.coordinator.resolve import clamp_followers, resolve_hit, rewind
from ucm_core.spec.table import RankRule, RowKind, SpecRow, SpecTable

relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
Worlds = tuple[SpecTable, list[dict[str, Presence]]]


@settings(relaxed, max_examples=400)
@given(world=worlds(), ask=asks())
def test_the_resolver_agrees_with_trying_every_token(world: Worlds, ask: dict[str, Any]) -> None:
    spec, ranks = world
    hit = resolve_hit(spec, combine_ranks(spec, ranks), **ask)
    local = min(ask.pop("local_tokens"), ask["request_tokens"])
    tried = brute_force(World(spec.rows, [ranks], local), **ask)
    assert (hit.hit_tokens, hit.resume_tokens) == (tried.hit_tokens, tried.resume_tokens)


@settings(relaxed, max_examples=150)
@given(world=worlds(ranks=1), ask=asks())
def test_what_a_verdict_promises_is_there(world: Worlds, ask: dict[str, Any]) -> None:
    spec, (known,) = world
    hit = resolve_hit(spec, known, **ask)
    assert 0 <= hit.resume_tokens <= hit.hit_tokens <= max(0, ask["request_tokens"] - ask["tail_tokens"])
    assert hit.new_tokens == max(0, hit.resume_tokens - ask["local_tokens"])
    for row in spec.chain_rows:
        local = min(ask["local_tokens"], ask["request_tokens"]) // row.block_tokens
        assert all(block < local or known[row.name].blocks[block] for block in hit.coverage[row.name])


@settings(relaxed, max_examples=150)
@given(world=worlds(ranks=1), ask=asks(), data=st.data())
def test_more_presence_never_shortens(world: Worlds, ask: dict[str, Any], data: st.DataObject) -> None:
    spec, (known,) = world
    row = data.draw(st.sampled_from((*spec.chain_rows, *spec.snapshot_rows)))
    more = {**known, row.name: Presence(np.ones(96, np.bool_), frozenset(range(1, 97)))}
    assert resolve_hit(spec, more, **ask).resume_tokens >= resolve_hit(spec, known, **ask).resume_tokens


@settings(relaxed, max_examples=150)
@given(world=worlds(ranks=1), ask=asks(), data=st.data())
def test_a_rewind_is_legal_and_avoids_the_failure(
    world: Worlds, ask: dict[str, Any], data: st.DataObject
) -> None:
    spec, (known,) = world
    hit = resolve_hit(spec, known, **ask)
    row = data.draw(st.sampled_from((*spec.chain_rows, *spec.follower_rows)))
    if not hit.coverage[row.name]:
        return
    unit = data.draw(st.sampled_from(hit.coverage[row.name]))
    after = rewind(spec, known, hit=hit, failed={row.name: [unit]})
    assert after.resume_tokens < hit.resume_tokens
    assert unit not in coverage(voter(spec, row), after.resume_tokens)
    before = World(spec.rows, [[known]], min(ask["local_tokens"], ask["request_tokens"]))
    voters = (*spec.chain_rows, *spec.snapshot_rows)
    assert after.resume_tokens == 0 or all(before.serves(voting, after.resume_tokens) for voting in voters)


@settings(relaxed, max_examples=150)
@given(world=worlds(ranks=1), ask=asks())
def test_the_set_holds_the_verdict_and_nothing_deeper(world: Worlds, ask: dict[str, Any]) -> None:
    spec, (known,) = world
    ask["local_tokens"] = 0
    limit = max(0, ask["request_tokens"] - ask["tail_tokens"])
    joint = boundaries(spec, known, limit_tokens=limit, align_tokens=ask["align_tokens"])
    assert max(joint, default=0) == resolve_hit(spec, known, **ask).resume_tokens


FULL = chain("full", 16)


def test_the_set_lists_every_joint_position() -> None:
    window = chain("w", 16, 32)
    known = {"full": whole(6), "w": blocks((0, 1), (3, 6))}
    assert boundaries(table(FULL, window), known, limit_tokens=96) == {16, 80, 96}


@pytest.mark.parametrize("limit", [0, 1, 15])
def test_no_boundary_below_the_first_step(limit: int) -> None:
    assert boundaries(table(FULL), {"full": whole(9)}, limit_tokens=limit) == frozenset()


def test_the_adapters_alignment_thins_the_set() -> None:
    known = {"full": whole(9)}
    assert boundaries(table(FULL), known, limit_tokens=144, align_tokens=24) == {48, 96, 144}


def test_an_unmentioned_row_holds_nothing() -> None:
    spec = table(FULL, chain("other", 16))
    assert resolve_hit(spec, {"full": whole(9)}, request_tokens=100).resume_tokens == 0


def test_a_table_that_nobody_votes_in_promises_nothing() -> None:
    nothing = SpecTable((SpecRow("cross", RowKind.NONE, 0, (0,), ()),), 16)
    hit = resolve_hit(nothing, {}, request_tokens=1000)
    assert (hit.hit_tokens, hit.resume_tokens, dict(hit.coverage)) == (0, 0, {})
    assert boundaries(nothing, {}, limit_tokens=1000) == frozenset()


def test_without_chain_rows_states_alone_decide() -> None:
    spec = table(snapshot("a", 16), snapshot("b", 16))
    hit = resolve_hit(spec, {"a": states(16, 48, 64), "b": states(16, 48)}, request_tokens=100)
    assert (hit.hit_tokens, hit.resume_tokens) == (48, 48)


def test_a_state_off_its_grid_is_no_point() -> None:
    known = {"full": whole(9), "s": states(48, 64)}
    hit = resolve_hit(table(FULL, snapshot("s", 48)), known, request_tokens=100)
    assert (hit.hit_tokens, hit.resume_tokens) == (96, 48)


def test_a_window_row_is_not_monotone() -> None:
    spec = table(chain("w", 16, 17))
    assert resolve_hit(spec, {"w": blocks((4, 5))}, request_tokens=100).resume_tokens == 80
    assert resolve_hit(spec, {"w": blocks((4, 5))}, request_tokens=80).resume_tokens == 0


def test_a_million_tokens_in_sixteen_thousand_blocks() -> None:
    spec = table(chain("full", 64), chain("w", 64, 4096), snapshot("s", 64))
    known = {"full": whole(16384), "w": whole(16384), "s": states(*range(64 * 100, 64 * 16384, 6400))}
    hit = resolve_hit(spec, known, request_tokens=2**20)
    assert (hit.hit_tokens, hit.resume_tokens) == (2**20 - 64, 1043200)


def test_slices_of_the_model_are_always_anded() -> None:
    stages = [{"full": blocks((0, 5)), "s": states(16, 32)}, {"full": blocks((0, 2), (3, 4))}]
    both = combine_slices(stages)
    assert both["full"].blocks.tolist() == [True, True, False, True, False]
    assert both["s"].positions == {16, 32}


def test_no_rank_holds_nothing() -> None:
    for rule in RankRule:
        held = combine_ranks(table(chain("full", 16, rank_rule=rule)), [])
        assert held["full"].mask.tolist() == []


def test_a_stage_whose_ranks_say_nothing_holds_nothing() -> None:
    stages = [combine_ranks(table(FULL), ranks) for ranks in ([{"full": whole(3)}], [{}, {}], [])]
    assert resolve_hit(table(FULL), combine_slices(stages), request_tokens=100).resume_tokens == 0


def test_a_follower_combines_as_its_source_does() -> None:
    mla = chain("mla", 16, rank_rule=RankRule.ALL_UNION)
    spec = table(mla, follower("indexer", mla))
    ranks = [{"mla": whole(1), "indexer": whole(3)}, {"mla": whole(2), "indexer": whole(1)}]
    held = combine_ranks(spec, ranks)
    assert (held["mla"].mask.tolist(), held["indexer"].mask.tolist()) == ([True] * 2, [True] * 3)


def test_a_follower_that_is_not_mentioned_at_load_clamps_to_nothing() -> None:
    spec = table(FULL, follower("f", FULL))
    known = {"full": whole(9)}
    hit = resolve_hit(spec, known, request_tokens=100)
    assert (hit.resume_tokens, clamp_followers(spec, known, hit=hit, at_load={}).resume_tokens) == (96, 0)


def test_a_follower_of_a_row_that_needs_nothing_needs_nothing() -> None:
    own = chain("own", 16, 1)
    spec = table(FULL, own, follower("f", own))
    hit = resolve_hit(spec, {"full": whole(9)}, request_tokens=100)
    assert clamp_followers(spec, {"full": whole(9)}, hit=hit, at_load={}).resume_tokens == 96


def test_a_rewind_avoids_what_a_follower_lacks() -> None:
    """No failed unit is at 64, but the follower of the window has no block there."""
    window = chain("w", 16, 17)
    spec = table(FULL, window, follower("f", window))
    known = {"full": whole(9), "w": whole(9), "f": blocks((0, 2), (4, 9))}
    hit = resolve_hit(spec, known, request_tokens=100)
    assert rewind(spec, known, hit=hit, failed={"full": [4]}).resume_tokens == 32


def test_a_failed_follower_rewinds_all_rows() -> None:
    spec = table(FULL, follower("f", FULL))
    known = {"full": whole(9)}
    hit = resolve_hit(spec, known, request_tokens=100)
    assert rewind(spec, known, hit=hit, failed={"f": [4]}).resume_tokens == 64


def test_a_rewind_never_goes_deeper_than_the_hit() -> None:
    spec = table(FULL, snapshot("s", 16))
    hit = resolve_hit(spec, {"full": whole(9), "s": states(16, 48)}, request_tokens=100)
    later = {"full": whole(9), "s": states(16, 48, 80)}
    assert rewind(spec, later, hit=hit, failed={"s": [48]}).resume_tokens == 16

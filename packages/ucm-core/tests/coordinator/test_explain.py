"""Why no hit: each row says how far it alone would go, what it lacks, and whether it held others back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from coordinator_strategies import REQUEST_TOKENS, asks, worlds
from doubles import Node, chain_of
from hypothesis import HealthCheck, given, settings
from spec_rows import blocks, chain, follower, snapshot, states, table, whole

from ucm_core.coordinator.explain import Explanation, explain
from ucm_core.coordinator.presence import Presence
from ucm_core.coordinator.resolve import Ask, clamp_followers, resolve_hit
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

World = tuple[SpecTable, list[dict[str, Presence]]]
relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
MLA, CSA, SWA, MAMBA = (
    chain("mla", 128),
    chain("csa_c16", 128),
    chain("swa", 128, 128),
    snapshot("mamba2", 64),
)
INDEXER = follower("indexer", MLA)
HYBRID = table(MLA, CSA, SWA, MAMBA)
KNOWN = {"mla": whole(20), "csa_c16": whole(19), "swa": whole(23), "mamba2": states(1280, 2304)}


def lacks(said: Explanation) -> dict[str, tuple[int, int | None, int | None]]:
    return {row.row: (row.boundary_tokens, row.refused_tokens, row.missing_block) for row in said.rows}


def test_every_row_has_its_say() -> None:
    """Example 1: the state lags, so 2432 is the first boundary that is refused, by the state alone."""
    said = explain(HYBRID, KNOWN, ask=Ask(3000))
    assert lacks(said) == {
        "mla": (2560, 2688, 20),
        "csa_c16": (2432, 2560, 19),
        "swa": (2944, None, None),
        "mamba2": (2304, 2432, None),
    }
    assert (said.resume_tokens, said.limit_tokens, said.limiting) == (2304, 2944, ("mamba2",))


def test_the_text_has_a_line_per_row() -> None:
    assert str(explain(HYBRID, KNOWN, ask=Ask(3000))).splitlines() == [
        "resumes at 2304 of at most 2944 tokens, held back by mamba2",
        "  mla (chain) serves up to 2560, lacks block 20 for 2688",
        "  csa_c16 (chain) serves up to 2432, lacks block 19 for 2560",
        "  swa (chain) serves up to 2944",
        "  mamba2 (snapshot) serves up to 2304, lacks the state for 2432",
    ]


def test_a_short_follower_is_explained_too() -> None:
    """Example 2: promised 4096, but a follower with 3968 tokens sends the load back to 3072."""
    known = {"mla": whole(39), "indexer": whole(31), "mamba2": states(1024, 2048, 3072, 4096)}
    said = explain(table(MLA, INDEXER, MAMBA), known, ask=Ask(5000))
    assert (said.hit.resume_tokens, said.resume_tokens) == (4096, 3072)
    assert lacks(said)["indexer"] == (3968, 4096, 31)
    assert "resumes at 3072 of at most 4992 tokens, 4096 were promised" in str(said)
    # More of the indexer would give 4096, more states 3200.
    assert said.limiting == ("mamba2", "indexer")


def test_a_hole_in_a_window_row_is_named() -> None:
    (said,) = explain(table(chain("w", 16, 40)), {"w": blocks((0, 3), (4, 5))}, ask=Ask(100)).rows
    assert (said.boundary_tokens, said.refused_tokens, said.missing_block) == (48, 64, 3)


def test_a_hole_counts_even_where_the_row_serves_the_limit() -> None:
    known = {"full": whole(4), "w": blocks((0, 2), (3, 8))}
    said = explain(table(chain("full", 16), chain("w", 16, 17)), known, ask=Ask(129))
    assert lacks(said) == {"full": (64, 80, 4), "w": (128, None, None)}
    known["full"] = whole(3)
    held = explain(table(chain("full", 16), chain("w", 16, 17)), known, ask=Ask(129))
    assert (held.resume_tokens, lacks(held)["w"]) == (32, (128, 48, 2))


def test_local_blocks_count() -> None:
    (said,) = explain(table(chain("f", 16)), {}, ask=Ask(100, local_tokens=40)).rows
    assert (said.kind, said.boundary_tokens, said.missing_block) == (RowKind.CHAIN, 32, 2)


@pytest.mark.parametrize(("grid", "wanted"), [(16, 16), (24, 48), (80, 80), (96, None)])
def test_a_state_that_would_help_lies_on_its_grid(grid: int, wanted: int | None) -> None:
    said = explain(table(chain("f", 16), snapshot("s", grid), grain=1), {"f": whole(5)}, ask=Ask(90))
    assert (said.rows[1].refused_tokens, said.rows[1].limits) == (wanted, wanted is not None)


def test_a_row_that_needs_nothing_serves_up_to_the_limit() -> None:
    said = explain(table(chain("f", 16), chain("own", 16, 1)), {"f": whole(2)}, ask=Ask(1000))
    assert lacks(said) == {"f": (32, 48, 2), "own": (992, None, None)}


def test_what_a_limiting_row_lacks_is_what_would_help() -> None:
    """64 is lacked by both rows, 256 by the window alone: its block 3 is the one to have, not block 0.

    320 is lacked by the states alone.
    """
    spec = table(chain("win", 64, 65), snapshot("ssm", 64))
    known = {"win": blocks((4, 6)), "ssm": states(256)}
    said = explain(spec, known, ask=Ask(400))
    assert (said.limiting, lacks(said)["win"]) == (("win", "ssm"), (384, 256, 3))
    assert lacks(said)["ssm"] == (256, 320, None)
    assert explain(spec, known | {"win": blocks((3, 6))}, ask=Ask(400)).resume_tokens == 256


def test_nobody_is_to_blame_at_the_limit() -> None:
    said = explain(table(MLA), {"mla": whole(9)}, ask=Ask(9 * 128 + 1))
    assert (said.limiting, lacks(said)) == ((), {"mla": (1152, None, None)})


def test_two_rows_that_lack_the_same_are_both_named() -> None:
    said = explain(table(MLA, CSA), {"mla": whole(3), "csa_c16": whole(3)}, ask=Ask(1000))
    assert said.limiting == ("mla", "csa_c16")


def test_a_table_without_votes_has_nothing_to_say() -> None:
    nothing = SpecTable((SpecRow("cross", RowKind.NONE, 0, (0,), ()),), 16)
    assert explain(nothing, {}, ask=Ask(1000)).rows == ()


@relaxed
@given(world=worlds(ranks=1), ask=asks())
def test_what_a_row_lacks_is_lacking_and_would_help(world: World, ask: dict[str, Any]) -> None:
    spec, (known,) = world
    said = explain(spec, known, ask=Ask(**ask))
    hit = resolve_hit(spec, known, **ask)
    assert (said.hit, said.resume_tokens) == (
        hit,
        clamp_followers(spec, known, hit=hit, at_load=known).resume_tokens,
    )
    deeper = best_with(spec, known, ask, said.limiting)
    assert bool(said.limiting) == (said.resume_tokens < said.limit_tokens)
    assert not said.limiting or deeper > said.resume_tokens
    for row in said.rows:
        assert row.refused_tokens is None or row.refused_tokens > said.resume_tokens
        assert row.missing_block is None or not holds(known[row.row], row.missing_block)
    if len(said.limiting) == 1:  # what it is said to lack is the very boundary that it alone keeps from all
        (near,) = (row.refused_tokens for row in said.rows if row.limits)
        short = {**ask, "request_tokens": near + ask["tail_tokens"]}
        assert best_with(spec, known, short, said.limiting) == near


def holds(presence: Presence, block: int) -> bool:
    return block < len(presence.mask) and bool(presence.mask[block])


def best_with(spec: SpecTable, known: dict[str, Presence], ask: dict[str, Any], rows: Any) -> int:
    """Where the request would resume if ``rows`` held everything."""
    everything = Presence(np.ones(REQUEST_TOKENS, np.bool_), frozenset(range(REQUEST_TOKENS + 1)))
    return explain(spec, {**known, **dict.fromkeys(rows, everything)}, ask=Ask(**ask)).resume_tokens


class TestByTheCoordinator:
    """The stores are asked for all of it, and nothing is counted as a verdict."""

    @relaxed
    @given(world=worlds(ranks=1), ask=asks())
    def test_it_knows_what_the_stores_hold(self, world: World, ask: dict[str, Any]) -> None:
        spec, (known,) = world
        node, request = Node(spec), chain_of(spec, REQUEST_TOKENS)
        node.store(request, known)
        assert node.coordinator.explain(request, **ask) == explain(spec, known, ask=Ask(**ask))
        assert node.coordinator.statistics().verdicts == 0

    def test_what_failed_to_load_is_missing(self) -> None:
        node, request = Node(table(MLA)), chain_of(table(MLA), 1000)
        node.store(request, {"mla": whole(7)})
        node.coordinator.failed("mla", node.keys(request, "mla", [3 * 128]))
        said = node.coordinator.explain(request, request_tokens=1000)
        assert lacks(said) == {"mla": (256, 384, 2)}

    def test_a_chain_without_digests_for_all_is_absent_beyond(self) -> None:
        node, request = Node(table(MLA)), chain_of(table(MLA), 500)
        node.store(request, {"mla": whole(3)})
        said = node.coordinator.explain(request, request_tokens=2**31 - 1)
        assert lacks(said) == {"mla": (384, 512, 3)}

"""EXAMPLES 1 to 5, number for number, with rows like those of X-Hybrid-96."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from doubles import Node, chain_of
from spec_rows import blocks, chain, follower, snapshot, states, table, whole

from ucm_core.coordinator.coverage import coverage
from ucm_core.coordinator.presence import Presence, combine_ranks
from ucm_core.coordinator.resolve import clamp_followers, resolve_hit
from ucm_core.spec.table import RankRule, RowKind, SpecRow, SpecTable

MLA = chain("mla", 128, rank_rule=RankRule.ALL_UNION)
CSA = chain("csa_c16", 128)
INDEXER = follower("indexer", MLA)
MAMBA = snapshot("mamba2", 64)
KDA = snapshot("kda_perslot", 256)
CROSS = SpecRow("cross", RowKind.NONE, 0, (3,), ())


def swa(window: int) -> SpecRow:
    return chain("swa", 128, window)


def hybrid(window: int = 5000, *states_of: SpecRow) -> SpecTable:
    return table(MLA, CSA, swa(window), INDEXER, CROSS, *(states_of or (MAMBA,)), grain=64)


class TestAStateThatLags:
    """Example 1."""

    known: ClassVar = {"mla": whole(20), "csa_c16": whole(19), "swa": whole(23), "mamba2": states(1280, 2304)}

    def test_verdict(self) -> None:
        hit = resolve_hit(hybrid(), self.known, request_tokens=3000)
        assert (hit.hit_tokens, hit.resume_tokens, hit.new_tokens) == (2432, 2304, 2304)
        assert (hit.coverage["mla"], hit.coverage["mamba2"]) == (range(18), range(35, 36))

    def test_a_state_of_another_prefix_stays_invisible(self) -> None:
        """Same position, different digest: the store has a state at 2432, of other tokens."""
        node, request = Node(hybrid()), chain_of(hybrid(), 3000)
        node.store(request, self.known)
        node.store(chain_of(hybrid(), 3000, seed=1), {"mamba2": states(2432)})
        hit = node.coordinator.verdict(request, request_tokens=3000).hit
        assert (hit.hit_tokens, hit.resume_tokens) == (2432, 2304)

    def test_what_is_computed_again_is_not_stored_again(self) -> None:
        """[2304, 2432) is there already; everything after it is new to the shortest chain row."""
        node, request = Node(hybrid()), chain_of(hybrid(), 3000)
        node.store(request, self.known)
        lacking = node.coordinator.missing(request, "csa_c16", begin_block=18, end_block=23)
        assert lacking.tolist() == [False, True, True, True, True]


class TestSnapshotsDoNotVoteOnL:
    """Example 2."""

    known: ClassVar = {
        "mla": whole(39),
        "csa_c16": whole(38),
        "swa": whole(39),
        "indexer": whole(39),
        "mamba2": states(1024, 2048, 3072, 4096),
    }

    def test_verdict(self) -> None:
        hit = resolve_hit(hybrid(), self.known, request_tokens=5000)
        assert (hit.hit_tokens, hit.resume_tokens) == (4864, 4096)

    def test_the_follower_is_not_asked_but_clamps(self) -> None:
        silent = {name: held for name, held in self.known.items() if name != "indexer"}
        hit = resolve_hit(hybrid(), silent, request_tokens=5000)
        clamped = clamp_followers(hybrid(), silent, hit=hit, at_load={"indexer": whole(3968 // 128)})
        assert (hit.resume_tokens, clamped.hit_tokens, clamped.resume_tokens) == (4096, 3968, 3072)
        assert clamped.coverage["indexer"] == range(24)

    def test_a_follower_that_is_whole_changes_nothing(self) -> None:
        hit = resolve_hit(hybrid(), self.known, request_tokens=5000)
        assert clamp_followers(hybrid(), self.known, hit=hit, at_load={"indexer": whole(39)}) == hit

    @pytest.mark.parametrize(("boundary", "needed"), [(4096, range(28, 32)), (4864, range(34, 38))])
    def test_a_smaller_window(self, boundary: int, needed: range) -> None:
        assert coverage(swa(512), boundary) == needed

    def test_the_window_is_checked_again_at_the_resume_point(self) -> None:
        known = {**self.known, "swa": blocks((0, 24), (34, 39))}
        hit = resolve_hit(hybrid(512), known, request_tokens=5000)
        assert (hit.hit_tokens, hit.resume_tokens) == (4864, 3072)
        assert hit.coverage["swa"] == range(20, 24)


def test_several_snapshot_rows_meet_at_a_joint_point() -> None:
    """Example 3."""
    known = {"mla": whole(39), "csa_c16": whole(38), "swa": whole(39)}
    known |= {"mamba2": states(1024, 2048, 4096), "kda_perslot": states(256, 2048, 3840)}
    hit = resolve_hit(hybrid(5000, MAMBA, KDA), known, request_tokens=5000)
    assert (hit.hit_tokens, hit.resume_tokens) == (4864, 2048)


def test_the_last_token_is_computed() -> None:
    """Example 4."""
    known = {name: whole(32) for name in ("mla", "csa_c16", "swa")} | {"mamba2": states(3072, 4096)}
    hit = resolve_hit(hybrid(), known, request_tokens=4096)
    assert (hit.ask.limit_tokens(hybrid()), hit.hit_tokens, hit.resume_tokens) == (3968, 3968, 3072)


@pytest.mark.parametrize(("rule", "chance"), [(RankRule.INTERSECTION, 0.6561), (RankRule.ALL_UNION, 0.9999)])
def test_rank_rules_by_monte_carlo(rule: RankRule, chance: float) -> None:
    """Example 5: four ranks, each save fails with probability 0.1; 100,000 blocks."""
    count = 100_000
    saved = np.random.default_rng(20240).random((4, count)) >= 0.1
    ranks = [{"r": Presence(rank)} for rank in saved]
    combined = combine_ranks(table(chain("r", 128, rank_rule=rule)), ranks)["r"].blocks
    assert abs(combined.mean() - chance) <= 3 * (chance * (1 - chance) / count) ** 0.5


def test_the_rank_rule_is_not_in_the_digest() -> None:
    """Example 5."""
    both = [table(chain("r", 128, rank_rule=rule)).digest for rule in RankRule]
    assert both[0] == both[1]

"""20,000 seeded cases against an oracle that tries every position; a failure names the seed that repeats it.

``case_of(seed)`` gives the case again.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
from oracle import Answer, World, brute_force, is_seen
from seeded_cases import Case, case_of

from ucm_core.coordinator.boundaries import boundaries
from ucm_core.coordinator.presence import Presence, combine_ranks, combine_slices
from ucm_core.coordinator.resolve import Hit, clamp_followers, resolve_hit, rewind

CASES = 20_000
BATCH = 1_000


def known_of(case: Case) -> dict[str, Presence]:
    return combine_slices([stage_of(case, ranks) for ranks in case.slices])


def stage_of(case: Case, ranks: list[dict[str, Presence]]) -> dict[str, Presence]:
    """What a stage holds of the rows that have layers on it."""
    return {name: held for name, held in combine_ranks(case.spec, ranks).items() if name in ranks[0]}


def tried(case: Case, *, followers: bool = False, **changes: object) -> Answer:
    ask = {name: number for name, number in case.ask.items() if name != "local_tokens"}
    return brute_force(case.world(**changes), **ask, followers=followers)


def same(hit: Hit, answer: Answer) -> bool:
    return (hit.hit_tokens, hit.resume_tokens) == (answer.hit_tokens, answer.resume_tokens)


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_verdicts_are_those_of_trying_every_token(first: int) -> None:
    """C-18, C-50: sets over rows and ranks are intersected before the deepest is taken."""
    for seed in range(first, first + BATCH):
        case = case_of(seed)
        known, answer = known_of(case), tried(case)
        hit = resolve_hit(case.spec, known, **case.ask)
        assert same(hit, answer), f"seed {seed}: verdict {hit}, tried {answer}"
        assert hit.new_tokens == max(0, answer.resume_tokens - case.ask["local_tokens"]), f"seed {seed}"
        if not case.ask["local_tokens"]:
            assert set_of(case, known) == answer.joint, f"seed {seed}"


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_clamps_and_rewinds_are_those_of_trying_every_token(first: int) -> None:
    """C-26, C-36; every fourth case. With less to find the search ends earlier by itself and needs no cap."""
    for seed in range(first, first + BATCH, 4):
        case = case_of(seed)
        known = known_of(case)
        hit = resolve_hit(case.spec, known, **case.ask)
        check_clamp(seed, case, known, hit)
        check_rewind(seed, case, known, hit)


def set_of(case: Case, known: dict[str, Presence]) -> frozenset[int]:
    limit = max(0, case.ask["request_tokens"] - case.ask["tail_tokens"])
    return boundaries(case.spec, known, limit_tokens=limit, align_tokens=case.ask["align_tokens"])


def check_clamp(seed: int, case: Case, known: dict[str, Presence], hit: Hit) -> None:
    clamped = clamp_followers(case.spec, known, hit=hit, at_load=case.at_load)
    riders = {row.name for row in case.spec.follower_rows}
    stored = {name: held for name, held in known.items() if name not in riders}
    answer = tried(case, followers=True, slices=[[combined(case, {**stored, **case.at_load})]])
    assert same(clamped, answer), f"seed {seed}: clamped {clamped}, tried {answer}"


def check_rewind(seed: int, case: Case, known: dict[str, Presence], hit: Hit) -> None:
    after = rewind(case.spec, known, hit=hit, failed=case.failed)
    lost = frozenset((name, unit) for name, units in case.failed.items() for unit in units)
    answer = tried(case, followers=True, lost=lost)
    assert same(after, answer), f"seed {seed}: rewound {after}, tried {answer}"


def combined(case: Case, held: dict[str, Presence]) -> dict[str, Presence]:
    """One rank that holds what all hold together, so that the rules make no difference."""
    return {row.name: held.get(row.name, Presence()) for row in case.spec.rows}


def test_what_a_verdict_covers_is_what_its_tokens_need() -> None:
    for seed in range(1_000):
        case = case_of(seed)
        hit = resolve_hit(case.spec, known_of(case), **case.ask)
        for row in case.spec.chain_rows:
            seen = {
                t // row.block_tokens for t in range(hit.resume_tokens) if is_seen(row, t, hit.resume_tokens)
            }
            assert set(hit.coverage[row.name]) == seen, f"seed {seed}, row {row.name}"


def test_the_cases_are_worth_trying() -> None:
    """Enough of every kind of case, so that agreement means something."""
    seen = Counter(what for seed in range(500) for what in features(case_of(seed)))
    rare = {what: count for what, count in seen.items() if count < 10}
    assert (rare, len(seen)) == ({}, 15)


def features(case: Case) -> Iterator[str]:
    """Name what makes a case worth trying."""
    hit = resolve_hit(case.spec, known_of(case), **case.ask)
    clamped = clamp_followers(case.spec, known_of(case), hit=hit, at_load=case.at_load)
    after = rewind(case.spec, known_of(case), hit=hit, failed=case.failed)
    found = {
        f"{min(len(case.slices[0]), 2)} ranks or more": True,
        f"{len(case.slices)} slices": True,
        f"resumes: {hit.resume_tokens > 0}": True,
        "states or windows lag": hit.resume_tokens < hit.hit_tokens,
        "a follower clamps": 0 < clamped.resume_tokens < hit.resume_tokens,
        "a failure rewinds": 0 < after.resume_tokens < hit.resume_tokens,
        "five rows or six": len(case.spec.rows) >= 5,
        "new beyond local": bool(hit.new_tokens and case.ask["local_tokens"]),
        "a window jumps over a hole": holes(case),
        "states alone": not case.spec.chain_rows,
        "extra tokens": any(row.extra for row in case.spec.chain_rows),
        "several grids": len(case.spec.snapshot_rows) > 1,
    }
    yield from (what for what, is_so in found.items() if is_so)


def holes(case: Case) -> bool:
    """Return whether the windows are whole at a boundary that follows one where they are not."""
    known = known_of(case)
    world = World(case.spec.rows, [[combined(case, known)]])
    windows = [row for row in case.spec.chain_rows if row.window]
    ends = range(case.spec.alignment_tokens, case.ask["request_tokens"], case.spec.alignment_tokens)
    serve = [all(world.serves(row, end) for row in windows) for end in ends if windows]
    return any(not before and after for before, after in itertools.pairwise(serve))

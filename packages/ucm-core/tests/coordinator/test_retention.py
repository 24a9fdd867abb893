"""EXAMPLES 6, the three triggers one by one, and what becomes of an engine's offers."""

from __future__ import annotations

import math
from typing import Any

import pytest
from coordinator_strategies import tables
from doubles import Node
from hypothesis import given
from hypothesis import strategies as st
from spec_rows import chain, snapshot, states, table, whole

from ucm_core.coordinator.coverage import joint_step
from ucm_core.coordinator.resolve import resolve_hit
from ucm_core.coordinator.retention import Progress, RetentionPolicy, keep, positions
from ucm_core.coordinator.sightings import Sightings
from ucm_core.errors import SpecError
from ucm_core.spec.keys import PrefixChain, RequestIdentity
from ucm_core.spec.table import SpecRow, SpecTable

MAMBA = snapshot("mamba2", 64, interval=1024)
LAZY = snapshot("mamba2", 64)
EVERYTHING = [set(range(64, 2049, 64))]


def chain_of(tokens: list[int], salt: str | None = None) -> PrefixChain:
    made = PrefixChain(RequestIdentity(cache_salt=salt), grain_tokens=64)
    made.extend(tokens)
    return made


class Scheduler:
    """EXAMPLES 6 as one scheduler lives it: verdicts of a real coordinator over stores of keys only."""

    A = 128

    def __init__(self, row: SpecRow, policy: RetentionPolicy | None = None) -> None:
        self.row = row
        self.policy = policy or RetentionPolicy()
        self.node = Node(table(chain("full", self.A), row, grain=64))
        self.sightings = Sightings(step_tokens=joint_step(self.node.spec))
        self.resumed = 0

    def serve(self, request: PrefixChain, *, output_tokens: int = 0) -> list[int]:
        """Serve a prompt; returns the positions at which states were stored."""
        tokens = request.token_count
        verdict = self.node.coordinator.verdict(request, request_tokens=tokens - output_tokens)
        self.resumed = verdict.hit.resume_tokens
        common = self.sightings.see(request, served_tokens=self.resumed)
        progress = Progress(tokens - output_tokens, tokens, self.resumed, common_tokens=common)
        kept = positions(self.row, progress, alignment_tokens=self.A, policy=self.policy)
        blocks = range(self.A, tokens + 1, self.A)
        for name, ends in (("full", blocks), (self.row.name, kept)):
            keys = self.node.keys(request, name, ends)
            self.node.stores[name].put(keys)
            self.node.coordinator.saved(name, keys)
        return list(kept)

    def checkpoints(self) -> int:
        return self.node.coordinator.statistics().checkpoints[self.row.name].states


INTERVALS = list(range(1024, 9217, 1024))
FIRST = list(range(10_000))
SECOND = list(range(5000)) + [7] * 5000


class TestHowTheDirectoryGrows:
    """Example 6, A = 128."""

    def test_ten_checkpoints(self) -> None:
        scheduler = Scheduler(MAMBA)
        assert scheduler.serve(chain_of(FIRST)) == [*INTERVALS, 9984]
        assert scheduler.checkpoints() == 10

    def test_the_end_is_a_joint_point(self) -> None:
        assert Scheduler(MAMBA).serve(chain_of(list(range(10_060))))[-1] == 9984

    def test_repeating_it_fully_served_adds_none(self) -> None:
        scheduler = Scheduler(MAMBA)
        scheduler.serve(chain_of(FIRST))
        assert scheduler.serve(chain_of(FIRST)) == []
        assert (scheduler.resumed, scheduler.checkpoints()) == (9984, 10)

    @pytest.mark.parametrize("repeats", [0, 1, 2])
    def test_second_sight_of_five_thousand_tokens(self, repeats: int) -> None:
        """Also after repeats that were served deeper: nobody was served at 4992 yet."""
        scheduler = Scheduler(MAMBA)
        for _ in range(1 + repeats):
            scheduler.serve(chain_of(FIRST))
        assert scheduler.serve(chain_of(SECOND)) == [4992, *INTERVALS[4:], 9984]
        assert scheduler.resumed == 4096
        third = [*range(5000), *[8] * 3000]
        scheduler.serve(chain_of(third))
        assert scheduler.resumed == 4992

    def test_a_prefix_that_is_served_is_no_sight(self) -> None:
        """The second prompt is served at 4992 already, so there is nothing to store for a third there."""
        scheduler = Scheduler(MAMBA)
        scheduler.serve(chain_of(list(range(5000))))
        assert scheduler.serve(chain_of(SECOND)) == [*INTERVALS[4:], 9984]
        assert scheduler.resumed == 4992

    def test_each_trigger_alone(self) -> None:
        def stored(**knobs: Any) -> list[list[int]]:
            off = {"request_end": False, "second_sight": False, "interval_tokens": 0}
            scheduler = Scheduler(MAMBA, RetentionPolicy(**off | knobs))
            return [scheduler.serve(chain_of(tokens)) for tokens in (FIRST, SECOND)]

        assert stored() == [[], []]
        assert stored(request_end=True) == [[9984], [9984]]
        assert stored(second_sight=True) == [[], [4992]]
        assert stored(interval_tokens=None) == [INTERVALS, INTERVALS[4:]]
        assert stored(interval_tokens=4096) == [[4096, 8192], [8192]]


def test_request_end_keeps_the_same_prompt_and_the_next_turn() -> None:
    assert positions(LAZY, Progress(1024, 1400), alignment_tokens=128) == (896, 1280)


def test_a_longer_tail_moves_the_first_end() -> None:
    assert positions(LAZY, Progress(1024, 1024, tail_tokens=200), alignment_tokens=128) == (768, 1024)


def test_an_interrupted_prompt_ends_where_it_was_computed() -> None:
    assert positions(LAZY, Progress(4096, 1000), alignment_tokens=128) == (896,)


def test_a_tail_longer_than_the_prompt_keeps_nothing() -> None:
    assert positions(LAZY, Progress(3, 3, tail_tokens=9), alignment_tokens=128) == ()


def test_an_interval_off_the_alignment_is_floored_to_it() -> None:
    row = snapshot("s", 64, interval=192)
    assert positions(row, Progress(700, 700), alignment_tokens=128) == (128, 384, 512, 640)


def test_the_interval_covers_output_too() -> None:
    assert positions(MAMBA, Progress(1000, 3100), alignment_tokens=128) == (896, 1024, 2048, 3072)


def test_without_an_interval_every_offered_joint_position_is_kept() -> None:
    offered = [{64, 128, 192, 256, 1000}]
    assert keep(LAZY, offered, progress=Progress(1000, 1000), alignment_tokens=128) == (128, 256)


def test_with_an_interval_only_what_a_trigger_asks_for() -> None:
    progress = Progress(9000, 2100, common_tokens=640)
    assert keep(MAMBA, EVERYTHING, progress=progress, alignment_tokens=128) == (640, 1024, 2048)


def test_a_row_without_an_interval_can_be_thinned_too() -> None:
    progress = Progress(9000, 2048)
    policy = RetentionPolicy(interval_tokens=768)
    kept = keep(LAZY, EVERYTHING, progress=progress, alignment_tokens=128, policy=policy)
    assert kept == (768, 1536)


def test_past_the_prompt_every_offer_may_be_the_last_one() -> None:
    """Prompt 1000: 896 for the same prompt again; the answer may end after 1024, 1152 or 1280."""
    for computed, kept in ((1000, (896,)), (1100, (896, 1024)), (1300, (896, 1024, 1152, 1280))):
        progress = Progress(1000, computed)
        policy = RetentionPolicy(interval_tokens=0)
        found = keep(MAMBA, EVERYTHING, progress=progress, alignment_tokens=128, policy=policy)
        assert found == kept


def test_what_is_not_computed_yet_is_not_kept() -> None:
    assert keep(LAZY, [{128, 256, 384}], progress=Progress(500, 300), alignment_tokens=128) == (128, 256)


def test_a_position_counts_only_when_all_groups_offer_it() -> None:
    assert keep(LAZY, [{128, 256}, {256, 384}], progress=Progress(500, 500), alignment_tokens=128) == (256,)


@pytest.mark.parametrize("offers", [[], [set()], [{0}], [{-128}], [{100}]])
def test_nothing_worth_keeping(offers: list[set[int]]) -> None:
    assert keep(LAZY, offers, progress=Progress(500, 500), alignment_tokens=128) == ()


@pytest.mark.parametrize(
    ("prompt", "tail", "resume"),
    [(432, 1, 288), (433, 1, 432), (431, 1, 288), (290, 1, 288), (288, 1, 144), (145, 1, 144), (144, 1, 0),
     (434, 3, 288), (435, 3, 432)],
)  # fmt: skip
def test_the_last_token_is_never_in_a_state_that_is_resumed(prompt: int, tail: int, resume: int) -> None:
    """C-20, from the states that the prompt's own end left."""
    row = snapshot("state", 144)
    kept = positions(row, Progress(prompt, prompt, tail_tokens=tail), alignment_tokens=48)
    known = {"full": whole(10), "state": states(*kept)}
    hit = resolve_hit(table(chain("full", 48), row), known, request_tokens=prompt, tail_tokens=tail)
    assert hit.resume_tokens == resume


def test_a_state_for_another_depth_is_not_kept() -> None:
    """C-22: blocks of 512, states on a grid of 64: what is offered at 640 is no state at 512."""
    row = snapshot("state", 64)
    assert keep(row, [{640}], progress=Progress(700, 700), alignment_tokens=512) == ()
    assert keep(row, [{512, 640}], progress=Progress(1100, 1100), alignment_tokens=512) == (512,)


@pytest.mark.parametrize(("tokens", "stored", "resume"), [(700, {640}, 0), (1100, {512, 640}, 512)])
def test_a_state_that_somebody_kept_at_another_depth_stays_there(
    tokens: int, stored: set[int], resume: int
) -> None:
    """C-22: it is found under its true depth only, which no joint point is."""
    node = Node(table(chain("full", 512), snapshot("state", 64), grain=64))
    request = chain_of(list(range(tokens)))
    node.store(request, {"full": whole(tokens // 512), "state": states(*stored)})
    assert node.coordinator.verdict(request, request_tokens=tokens).hit.resume_tokens == resume


@pytest.mark.parametrize("number", [-1, 2**31, 2**40, 1.5, None])
@pytest.mark.parametrize("name", ["resume_tokens", "tail_tokens", "common_tokens"])
def test_senseless_progress_is_refused(name: str, number: Any) -> None:
    with pytest.raises(SpecError, match="tokens are ints, at least 0 and at most 2147483647"):
        Progress(10, 10, **{name: number})


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("interval_tokens", -1),
        ("interval_tokens", 2**31),
        ("interval_tokens", True),
        ("interval_tokens", 64.0),
        ("budget_bytes", 0),
        ("half_life_s", 0.0),
        ("half_life_s", math.inf),
        ("half_life_s", math.nan),
    ],
)
def test_a_senseless_policy_is_refused(knob: str, value: Any) -> None:
    with pytest.raises(SpecError, match=knob):
        RetentionPolicy(**{knob: value})


@given(
    prompt=st.integers(1, 3000),
    output=st.integers(0, 500),
    resume=st.integers(0, 40).map(lambda k: 128 * k),
    interval=st.sampled_from([None, 64, 192, 1024]),
)
def test_what_is_kept_is_a_joint_point_and_serves_the_same_prompt(
    prompt: int, output: int, resume: int, interval: int | None
) -> None:
    row = snapshot("s", 64, interval=interval)
    kept = positions(row, Progress(prompt, prompt + output, resume), alignment_tokens=128)
    assert all(p % math.lcm(64, 128) == 0 and resume < p <= prompt + output for p in kept)
    known = {"f": whole(100), "s": states(*kept)}
    again = resolve_hit(table(chain("f", 128), row), known, request_tokens=prompt)
    end = (prompt - 1) // 128 * 128
    assert again.resume_tokens == (end if end > resume else 0)


def obvious(row: SpecRow, progress: Progress, step: int, policy: RetentionPolicy) -> set[int]:
    """The positions that the triggers ask for, one by one and token by token."""
    every = row.interval if policy.interval_tokens is None else policy.interval_tokens
    asked = set()
    if policy.request_end:
        asked |= {max(progress.prompt_tokens - progress.tail_tokens, 0), progress.computed_tokens}
    if policy.second_sight:
        asked.add(progress.common_tokens)
    asked |= {t for t in range(1, progress.computed_tokens + step) if every and t % every == 0}
    floors = {token - token % step for token in asked}
    return {p for p in floors if progress.resume_tokens < p <= progress.computed_tokens}


POLICIES = st.builds(
    RetentionPolicy,
    request_end=st.booleans(),
    second_sight=st.booleans(),
    interval_tokens=st.none() | st.integers(0, 400),
)


@given(
    prompt=st.integers(0, 900),
    output=st.integers(0, 300),
    resume=st.integers(0, 900),
    common=st.integers(0, 900),
    interval=st.sampled_from([None, 16, 48, 160]),
    policy=POLICIES,
)
def test_the_triggers_against_the_obvious(
    prompt: int, output: int, resume: int, common: int, interval: int | None, policy: RetentionPolicy
) -> None:
    row, step = snapshot("s", 16, interval=interval), 48
    progress = Progress(prompt, prompt + output, resume, common_tokens=common)
    kept = positions(row, progress, alignment_tokens=24, policy=policy)
    assert set(kept) == obvious(row, progress, step, policy)
    # of a running request at least the same is kept of whatever is offered
    offers = [set(range(0, prompt + output + 1, 8))]
    while_running = keep(row, offers, progress=progress, alignment_tokens=24, policy=policy)
    if policy.interval(row) is not None:
        assert set(kept) <= set(while_running)


@given(
    spec=tables(),
    prompt=st.integers(1, 96),
    output=st.integers(0, 30),
    align=st.sampled_from([1, 2, 5]),
    running=st.booleans(),
)
def test_states_that_are_kept_serve_the_prompt_and_the_next_turn(
    spec: SpecTable, prompt: int, output: int, align: int, running: bool
) -> None:
    """C-23: the same prompt and the next turn find a state whenever there is a joint point to find."""
    step = joint_step(spec, align)
    progress = Progress(prompt, prompt + output)
    kept = {}
    for row in spec.snapshot_rows:
        more = {"progress": progress, "alignment_tokens": step}
        offers = [range(prompt + output + 1)]
        policy = RetentionPolicy(interval_tokens=0)
        found = keep(row, offers, policy=policy, **more) if running else positions(row, **more)  # type: ignore[arg-type]
        kept[row.name] = states(*found)
    known = {row.name: whole((prompt + output) // row.block_tokens) for row in spec.rows} | kept
    again = resolve_hit(spec, known, request_tokens=prompt, align_tokens=align)
    longer = resolve_hit(spec, known, request_tokens=prompt + output + 1, align_tokens=align)
    if spec.snapshot_rows:
        assert again.resume_tokens == (prompt - 1) // step * step
        assert longer.resume_tokens == (prompt + output) // step * step

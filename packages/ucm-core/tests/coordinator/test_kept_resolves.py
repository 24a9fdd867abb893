"""C-23: what the writer's policy keeps of a finished request serves the same prompt, and the next turn.

The writer keeps the coverage of every joint boundary that a later request can reach, and the states at the
positions that retention asks for. Nothing else is there: neither older windows nor other states.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from seeded_cases import random_table
from spec_rows import chain, snapshot, states, table, whole

from ucm_core.coordinator.coverage import cached_rows, coverage, joint_step, voter
from ucm_core.coordinator.presence import Presence
from ucm_core.coordinator.resolve import clamp_followers, resolve_hit
from ucm_core.coordinator.retention import Progress, keep, positions
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

CASES = 4_000
BATCH = 1_000


@dataclass(frozen=True)
class Finished:
    """A request that has ended: prompt and output are computed, except the last token that was sampled."""

    spec: SpecTable
    prompt_tokens: int
    output_tokens: int
    tail_tokens: int
    align_tokens: int

    @property
    def step(self) -> int:
        return joint_step(self.spec, self.align_tokens)

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens

    def kept(self) -> dict[str, Presence]:
        return {row.name: self.kept_of(row) for row in cached_rows(self.spec)}

    def kept_of(self, row: SpecRow) -> Presence:
        if row.kind is RowKind.SNAPSHOT:
            return Presence(positions=frozenset(self.kept_states(row)))
        blocks = np.zeros(self.computed_tokens // row.block_tokens, dtype=np.bool_)
        for boundary in range(self.again(self.prompt_tokens), self.computed_tokens + 1, self.step):
            blocks[list(coverage(voter(self.spec, row), boundary))] = True
        return Presence(blocks)

    def kept_states(self, row: SpecRow) -> tuple[int, ...]:
        """What the engine offers is every position on the row's grid."""
        progress = Progress(self.prompt_tokens, self.computed_tokens, tail_tokens=self.tail_tokens)
        offered = range(row.block_tokens, self.computed_tokens + 1, row.block_tokens)
        kept = keep(row, [offered], progress=progress, alignment_tokens=self.step)
        assert set(positions(row, progress, alignment_tokens=self.step)) <= set(kept)
        return kept

    def again(self, request_tokens: int) -> int:
        """Where a later request should resume: the last joint boundary before its tail."""
        return max(0, request_tokens - self.tail_tokens) // self.step * self.step

    def resumes(self, request_tokens: int, kept: dict[str, Presence]) -> int:
        ask = {"tail_tokens": self.tail_tokens, "align_tokens": self.align_tokens}
        hit = resolve_hit(self.spec, kept, request_tokens=request_tokens, **ask)
        return clamp_followers(self.spec, kept, hit=hit, at_load=kept).resume_tokens


def finished(seed: int) -> Finished:
    dice = random.Random(seed)
    return Finished(
        random_table(dice),
        prompt_tokens=dice.randint(1, 400),
        output_tokens=dice.choice([0, 0, 1, dice.randint(2, 200)]),
        tail_tokens=dice.choice([1, 1, 1, 2, 9]),
        align_tokens=dice.choice([1, 1, 2, 5, 8]),
    )


@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_the_same_prompt_and_the_next_turn_resume_as_deep_as_they_can(first: int) -> None:
    served = 0
    for seed in range(first, first + BATCH):
        request = finished(seed)
        kept = request.kept()
        longer = request.computed_tokens + request.tail_tokens
        for tokens in (request.prompt_tokens, longer):
            resumed = request.resumes(tokens, kept)
            assert resumed == request.again(tokens), f"seed {seed}: {tokens} tokens resume at {resumed}"
            served += resumed > 0
    assert served > BATCH / 2


def test_a_writer_that_keeps_only_the_newest_window_is_wrong() -> None:
    spec = table(chain("full", 128), chain("w", 48, 100), grain=16)
    newest = {"full": whole(11), "w": Presence(np.arange(31) >= 29)}
    assert resolve_hit(spec, newest, request_tokens=1500).resume_tokens == 0
    request = Finished(spec, 1536, 0, tail_tokens=1, align_tokens=1)
    assert np.flatnonzero(request.kept()["w"].mask).tolist() == [21, 22, 23, 29, 30, 31]


def test_two_grids_keep_states_where_both_can_be_resumed() -> None:
    """Each row's own lcm with A is not enough: at 96 and at 160 nobody could resume."""
    fast, slow = snapshot("fast", 96), snapshot("slow", 160)
    spec = table(chain("full", 32), fast, slow)
    ends = Progress(1301, 1301)
    alone = {row.name: states(*positions(row, ends, alignment_tokens=32)) for row in (fast, slow)}
    assert resolve_hit(spec, {"full": whole(40), **alone}, request_tokens=1301).resume_tokens == 0
    assert joint_step(spec) == 480
    assert Finished(spec, 1301, 0, tail_tokens=1, align_tokens=1).kept()["slow"].positions == {480, 960}

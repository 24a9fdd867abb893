"""EXAMPLES 6, the three triggers one by one, and what becomes of an engine's offers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_rows import chain, snapshot, states, table, whole

from ucm_core.coordinator.resolve import resolve_hit
from ucm_core.coordinator.retention import Progress, Sightings, keep, positions, retention_step
from ucm_core.errors import SpecError
from ucm_core.spec.keys import PrefixChain, RequestIdentity

MAMBA = snapshot("mamba2", 64, interval=1024)
LAZY = snapshot("mamba2", 64)


def chain_of(tokens: list[int], salt: str | None = None) -> PrefixChain:
    made = PrefixChain(RequestIdentity(cache_salt=salt), grain_tokens=64)
    made.extend(tokens)
    return made


class TestHowTheDirectoryGrows:
    """Example 6, A = 128."""

    def test_ten_checkpoints(self) -> None:
        kept = positions(MAMBA, Progress(10_000, 10_000), alignment_tokens=128)
        assert kept == (*range(1024, 9217, 1024), 9984)

    def test_the_end_is_a_joint_point(self) -> None:
        assert positions(MAMBA, Progress(10_060, 10_060), alignment_tokens=128)[-1] == 9984

    def test_repeating_it_fully_served_adds_none(self) -> None:
        again = Progress(10_000, 10_000, resume_tokens=9984, common_tokens=9984)
        assert positions(MAMBA, again, alignment_tokens=128) == ()

    def test_second_sight_of_five_thousand_tokens(self) -> None:
        sightings = Sightings(step_tokens=retention_step(MAMBA, 128))
        shared = list(range(5000))
        assert sightings.see(chain_of(shared + [7] * 5000)) == 0
        common = sightings.see(chain_of(shared + [8] * 5000))
        progress = Progress(10_000, 10_000, common_tokens=common)
        assert common == 4992
        assert set(positions(MAMBA, progress, alignment_tokens=128)) == {*range(1024, 9217, 1024), 4992, 9984}

    def test_served_at_the_common_boundary_adds_nothing_there(self) -> None:
        progress = Progress(10_000, 10_000, resume_tokens=4992, common_tokens=4992)
        assert min(positions(MAMBA, progress, alignment_tokens=128)) == 5120


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
    offered = [set(range(64, 2049, 64))]
    assert keep(MAMBA, offered, progress=Progress(2100, 2100), alignment_tokens=128) == (1024, 2048)


def test_a_position_counts_only_when_all_groups_offer_it() -> None:
    assert keep(LAZY, [{128, 256}, {256, 384}], progress=Progress(500, 500), alignment_tokens=128) == (256,)


@pytest.mark.parametrize("offers", [[], [set()], [{0}], [{-128}], [{100}]])
def test_nothing_worth_keeping(offers: list[set[int]]) -> None:
    assert keep(LAZY, offers, progress=Progress(500, 500), alignment_tokens=128) == ()


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 0"):
        Progress(10, 10, resume_tokens=-1)


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


class TestSightings:
    """The memory of the second-sight trigger."""

    def test_other_salts_have_nothing_in_common(self) -> None:
        sightings = Sightings(step_tokens=128)
        sightings.see(chain_of([1] * 1000, "a"))
        assert [sightings.see(chain_of([1] * 1000, salt)) for salt in ("b", None, "a")] == [0, 0, 896]

    def test_the_deepest_common_boundary_of_all_earlier_requests(self) -> None:
        sightings = Sightings(step_tokens=128)
        base = list(range(2000))
        sightings.see(chain_of(base[:300] + [9] * 700))
        sightings.see(chain_of(base[:1000] + [9] * 1000))
        assert sightings.see(chain_of(base)) == 896

    def test_it_is_bounded_and_forgets_tails_first(self) -> None:
        sightings = Sightings(step_tokens=128, capacity=4)
        sightings.see(chain_of(list(range(1280))))
        sightings.check_integrity()
        assert sightings.statistics().entries == 4
        assert sightings.see(chain_of(list(range(1280)))) == 512

    def test_senseless_sizes_are_refused(self) -> None:
        with pytest.raises(SpecError, match="at least 1"):
            Sightings(step_tokens=0)

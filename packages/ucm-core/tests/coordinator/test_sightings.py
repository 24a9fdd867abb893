"""The registry of prefixes that were seen and not served: what counts as a sight, and its bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.coordinator.sightings import Sightings
from ucm_core.errors import SpecError
from ucm_core.spec.keys import PrefixChain, RequestIdentity

STEP = 128


def chain_of(tokens: list[int], salt: str | None = None) -> PrefixChain:
    made = PrefixChain(RequestIdentity(cache_salt=salt), grain_tokens=64)
    made.extend(tokens)
    return made


@pytest.fixture
def sightings() -> Sightings:
    return Sightings(step_tokens=STEP)


def test_the_first_sight_has_nothing_in_common(sightings: Sightings) -> None:
    assert sightings.see(chain_of([1] * 1000)) == 0
    assert sightings.see(chain_of([2] * 1000)) == 0
    assert sightings.see(chain_of([1] * 1000)) == 896


def test_other_salts_have_nothing_in_common(sightings: Sightings) -> None:
    sightings.see(chain_of([1] * 1000, "a"))
    assert [sightings.see(chain_of([1] * 1000, salt)) for salt in ("b", None, "a")] == [0, 0, 896]


def test_the_deepest_common_boundary_of_all_earlier_requests(sightings: Sightings) -> None:
    base = list(range(2000))
    sightings.see(chain_of(base[:300] + [9] * 700))
    sightings.see(chain_of(base[:1000] + [9] * 1000))
    assert sightings.see(chain_of(base)) == 896


def test_what_was_served_is_no_sight(sightings: Sightings) -> None:
    assert sightings.see(chain_of([1] * 1000), served_tokens=896) == 0
    assert sightings.see(chain_of([1] * 1000), served_tokens=0) == 0
    assert sightings.see(chain_of([1] * 1000), served_tokens=0) == 896


def test_only_boundaries_past_the_service_count(sightings: Sightings) -> None:
    sightings.see(chain_of([1] * 1000))
    assert sightings.see(chain_of([1] * 600), served_tokens=512) == 0
    assert sightings.see(chain_of([1] * 600), served_tokens=384) == 512


def test_a_prompt_shorter_than_a_step_leaves_nothing(sightings: Sightings) -> None:
    assert sightings.see(chain_of([1] * 127), served_tokens=500) == 0
    assert sightings.statistics().boundaries == 0


def test_it_is_bounded_and_forgets_tails_first() -> None:
    sightings = Sightings(step_tokens=STEP, capacity=4)
    sightings.see(chain_of(list(range(1280))))
    sightings.check_integrity()
    assert sightings.statistics().boundaries == 4
    assert sightings.see(chain_of(list(range(1280)))) == 512


def test_statistics_count_boundaries_prompts_and_second_sights(sightings: Sightings) -> None:
    for _ in range(3):
        sightings.see(chain_of([1] * 300))
    counts = sightings.statistics()
    assert (counts.boundaries, counts.prompts, counts.second_sights) == (2, 3, 2)


@pytest.mark.parametrize("sizes", [{"step_tokens": 0}, {"step_tokens": 64, "capacity": 0}])
def test_senseless_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        Sightings(**sizes)


def test_a_negative_service_is_refused(sightings: Sightings) -> None:
    with pytest.raises(SpecError, match="served_tokens is -1"):
        sightings.see(chain_of([1] * 300), served_tokens=-1)
    assert sightings.statistics().prompts == 0


PROMPTS = st.lists(st.integers(0, 1), min_size=0, max_size=6)


@given(history=st.lists(st.tuples(PROMPTS, st.integers(0, 7)), max_size=12))
def test_against_a_list_of_everything_seen(history: list[tuple[list[int], int]]) -> None:
    """The oracle remembers each prefix that lacked a state, as tokens; a prompt is a list of steps."""
    sightings, lacking = Sightings(step_tokens=64), set[tuple[int, ...]]()
    for steps, served in history:
        tokens = [step for step in steps for _ in range(64)]
        boundaries = [tuple(steps[: index + 1]) for index in range(len(steps))]
        unserved = [prefix for prefix in boundaries if len(prefix) > served]
        common = max((len(prefix) for prefix in unserved if prefix in lacking), default=0)
        assert sightings.see(chain_of(tokens), served_tokens=64 * served) == 64 * common
        lacking |= set(unserved)
        assert sightings.statistics().boundaries == len(lacking)
        sightings.check_integrity()

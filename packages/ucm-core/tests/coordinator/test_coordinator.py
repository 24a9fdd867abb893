"""The coordinator over store doubles: same answer as complete knowledge, few questions, no exception."""

from __future__ import annotations

import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest
from coordinator_strategies import REQUEST_TOKENS, asks, worlds
from doubles import Node, chain_of, errors_counted
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_rows import blocks, chain, follower, snapshot, states, table, whole

from ucm_core.coordinator.coordinator import Coordinator, CoordinatorLimits
from ucm_core.coordinator.lookups import names_of
from ucm_core.coordinator.presence import Presence
from ucm_core.coordinator.resolve import clamp_followers, resolve_hit, rewind
from ucm_core.errors import SpecError, StoreError
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.table import SpecTable

relaxed = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
World = tuple[SpecTable, list[dict[str, Presence]]]


@relaxed
@given(world=worlds(ranks=1), ask=asks())
def test_asking_little_answers_as_knowing_everything(world: World, ask: dict[str, Any]) -> None:
    spec, (known,) = world
    request = chain_of(spec, REQUEST_TOKENS)
    node = Node(spec)
    node.store(request, known)
    for _ in range(2):  # the second time from the directory's memory
        assert node.coordinator.verdict(request, **ask).hit == resolve_hit(spec, known, **ask)
    node.coordinator.check_integrity()


@relaxed
@given(world=worlds(ranks=1), ask=asks(), data=st.data())
def test_rewinds_and_clamps_answer_as_the_pure_ones(
    world: World, ask: dict[str, Any], data: st.DataObject
) -> None:
    spec, (known,) = world
    request = chain_of(spec, REQUEST_TOKENS)
    node = Node(spec)
    node.store(request, known)
    verdict = node.coordinator.verdict(request, **ask)
    clamped = node.coordinator.clamp(request, verdict)
    assert clamped.hit == clamp_followers(spec, known, hit=verdict.hit, at_load=known)
    loaded = [name for name, keys in verdict.keys.items() if len(keys) and name not in ("f", "s0", "s1")]
    if loaded:
        name = data.draw(st.sampled_from(loaded))
        failed = {name: [data.draw(st.sampled_from(verdict.blocks[name]))]}
        assert node.coordinator.rewind(request, verdict, failed=failed).hit == rewind(
            spec, known, hit=verdict.hit, failed=failed
        )


FULL = chain("full", 64)
WINDOW = chain("window", 64, 200)
STATE = snapshot("state", 64)
HYBRID = table(FULL, WINDOW, STATE)


def hybrid_node(tokens: int = 1000) -> tuple[Node, PrefixChain]:
    """Everything stored of one prefix; states at 256 and 768."""
    node, request = Node(HYBRID), chain_of(HYBRID, tokens)
    node.store(request, {"full": whole(15), "window": whole(15), "state": states(256, 768)})
    return node, request


class TestWhatToLoad:
    """The keys of a verdict are the coverage at the resume point, past what the engine holds."""

    def test_keys_and_ranges(self) -> None:
        node, request = hybrid_node()
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        assert verdict.blocks == {"full": range(12), "window": range(8, 12), "state": range(11, 12)}
        for name, keys in verdict.keys.items():
            assert (
                keys.tolist()
                == node.keys(request, name, [64 * (i + 1) for i in verdict.blocks[name]]).tolist()
            )

    def test_what_the_engine_holds_wholly_is_not_loaded(self) -> None:
        node, request = hybrid_node()
        verdict = node.coordinator.verdict(request, request_tokens=1000, local_tokens=600)
        assert (verdict.hit.new_tokens, verdict.blocks["full"], verdict.blocks["window"]) == (
            168,
            range(9, 12),
            range(9, 12),
        )

    def test_nothing_is_loaded_when_the_engine_holds_more(self) -> None:
        node, request = hybrid_node()
        verdict = node.coordinator.verdict(request, request_tokens=1000, local_tokens=800)
        assert verdict.hit.new_tokens == 0
        assert {len(keys) for keys in verdict.keys.values()} == {0}

    def test_followers_are_loaded_but_not_asked(self) -> None:
        spec = table(FULL, follower("f", FULL))
        node, request = Node(spec), chain_of(spec, 1000)
        node.store(request, {"full": whole(15)})
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        assert (verdict.blocks["f"], node.stores["f"].asked) == (range(15), [])

    def test_a_follower_clamps_at_load(self) -> None:
        spec = table(FULL, STATE, follower("f", FULL))
        node, request = Node(spec), chain_of(spec, 1000)
        node.store(request, {"full": whole(15), "state": states(256, 768), "f": whole(7)})
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        clamped = node.coordinator.clamp(request, verdict)
        assert (verdict.hit.resume_tokens, clamped.hit.resume_tokens, clamped.blocks["f"]) == (
            768,
            256,
            range(4),
        )


class TestOtherPrefixes:
    """Same positions, other digests: invisible."""

    def test_a_state_of_another_prefix_is_not_used(self) -> None:
        node, request = hybrid_node()
        node.store(chain_of(HYBRID, 1000, seed=1), {"state": states(896)})
        assert node.coordinator.verdict(request, request_tokens=1000).hit.resume_tokens == 768

    @pytest.mark.parametrize("other", [{"seed": 1}, {"salt": "tenant"}])
    def test_another_request_hits_nothing(self, other: dict[str, Any]) -> None:
        node, _ = hybrid_node()
        assert (
            node.coordinator.verdict(chain_of(HYBRID, 1000, **other), request_tokens=1000).hit.hit_tokens == 0
        )

    def test_a_longer_request_with_the_same_prefix_resumes(self) -> None:
        node, request = hybrid_node()
        request.extend([7] * 5000)
        assert node.coordinator.verdict(request, request_tokens=6000).hit.resume_tokens == 768


class TestFewQuestions:
    """Batched, and no further than it can matter."""

    def test_a_cold_prompt_costs_one_small_batch(self) -> None:
        node, request = Node(HYBRID), chain_of(HYBRID, 64 * 1000)
        node.coordinator.verdict(request, request_tokens=64_000)
        assert {name: sum(store.asked) for name, store in node.stores.items()} == {
            "full": 128,
            "window": 0,
            "state": 0,
        }

    def test_a_warm_window_is_asked_near_the_end_only(self) -> None:
        node, request = Node(HYBRID), chain_of(HYBRID, 64 * 1000)
        node.store(request, {"full": whole(1000), "window": whole(1000), "state": states(63_936)})
        assert node.coordinator.verdict(request, request_tokens=64_000).hit.resume_tokens == 63_936
        assert sum(node.stores["window"].asked) == 19
        assert len(node.stores["full"].asked) == 2

    def test_what_is_local_is_not_asked(self) -> None:
        node, request = hybrid_node()
        node.coordinator.verdict(request, request_tokens=1000, local_tokens=640)
        assert sum(node.stores["full"].asked) == 5

    def test_a_hole_in_one_full_row_bounds_the_next(self) -> None:
        spec = table(chain("a", 128), chain("b", 64))
        node, request = Node(spec), chain_of(spec, 6400)
        node.store(request, {"a": whole(2), "b": whole(100)})
        node.coordinator.verdict(request, request_tokens=6400)
        assert sum(node.stores["b"].asked) == 4


class TestNoBoundaryIsSkipped:
    """Batches from deep to shallow meet without a gap, and go on until a joint boundary."""

    def test_a_lone_state_is_found_wherever_it_is(self) -> None:
        request = chain_of(HYBRID, 64 * 200)
        for block in range(1, 200, 7):
            node = Node(HYBRID)
            node.store(request, {"full": whole(200), "window": whole(200), "state": states(64 * block)})
            assert node.coordinator.verdict(request, request_tokens=12_800).hit.resume_tokens == 64 * block

    @pytest.mark.parametrize("block", range(4, 200, 13))
    def test_a_lone_window_is_found_wherever_it_is(self, block: int) -> None:
        spec = table(FULL, WINDOW)
        node, request = Node(spec), chain_of(spec, 64 * 200)
        node.store(request, {"full": whole(200), "window": blocks((block - 4, block))})
        assert node.coordinator.verdict(request, request_tokens=12_800).hit.resume_tokens == 64 * block


class TestFailures:
    """A failed load changes the next verdict; a failed lookup is a miss."""

    def test_fail_recompute_heal(self) -> None:
        """C-34: 240, fails at block 4, 160; 240 at the end."""
        spec = table(chain("full", 40))
        node, request = Node(spec), chain_of(spec, 241)
        node.store(request, {"full": whole(6)})
        ask = lambda: node.coordinator.verdict(request, request_tokens=241)  # noqa: E731
        first = ask()
        node.coordinator.failed("full", first.keys["full"][4:5])
        answers = [first.hit.resume_tokens, ask().hit.resume_tokens]
        node.coordinator.saved("full", first.keys["full"][4:5])
        assert [*answers, ask().hit.resume_tokens] == [240, 160, 240]

    def test_a_suspect_is_asked_again_after_a_while(self) -> None:
        node, request = hybrid_node()
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        node.coordinator.failed("full", verdict.keys["full"][2:3])
        assert node.coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 128
        node.clock.now = 59.9
        assert node.coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 128
        node.clock.now = 60.0
        assert node.coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 960
        assert node.coordinator.statistics().suspects["full"] == 0

    def test_a_failed_state_moves_the_resume_point(self) -> None:
        node, request = hybrid_node()
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        again = node.coordinator.rewind(request, verdict, failed={"state": [768]})
        assert (again.hit.hit_tokens, again.hit.resume_tokens) == (960, 256)

    def test_an_evicted_state_that_is_remembered_is_not_promised(self) -> None:
        node, request = hybrid_node()
        node.coordinator.verdict(request, request_tokens=1000)
        node.stores["state"].drop(node.keys(request, "state", [768]))
        assert node.coordinator.verdict(request, request_tokens=1000).hit.resume_tokens == 256

    def test_a_reported_state_is_found_without_asking_for_all(self) -> None:
        node, request = hybrid_node()
        keys = node.keys(request, "state", [896])
        node.stores["state"].put(keys)
        node.coordinator.saved("state", keys)
        assert node.coordinator.verdict(request, request_tokens=1000).hit.resume_tokens == 896

    @pytest.mark.parametrize("broken", [StoreError("closed"), OSError(5, "EIO"), ValueError("bad")])
    @pytest.mark.parametrize("row", ["full", "window", "state"])
    def test_a_lookup_that_fails_is_a_miss(self, row: str, broken: Exception) -> None:
        node, request = hybrid_node()
        node.stores[row].broken = broken
        before = errors_counted("lookup")
        assert node.coordinator.verdict(request, request_tokens=1000).hit.resume_tokens == 0
        failures = node.coordinator.statistics().lookups[row].failures
        assert failures > 0
        assert errors_counted("lookup") == before + failures
        node.stores[row].broken = None
        assert node.coordinator.verdict(request, request_tokens=1000).hit.resume_tokens == 768

    def test_an_answer_of_the_wrong_length_is_a_miss(self) -> None:
        spec = table(FULL)
        short = Coordinator(spec, {"full": lambda keys: np.ones(len(keys) - 1)}, {"full": bytes(32)})
        before = errors_counted("lookup")
        assert short.verdict(chain_of(spec, 1000), request_tokens=1000).hit.hit_tokens == 0
        assert short.statistics().lookups["full"].failures == 1
        assert errors_counted("lookup") == before + 1


class TestAnswersOnTheirWay:
    """C-34: a late answer, of either kind, does not override newer knowledge."""

    def test_present_from_before_the_failure(self) -> None:
        node, request = hybrid_node()
        keys = node.keys(request, "full", [192])
        honest = node.stores["full"].lookup
        node.coordinator.failed("full", keys[:0])  # nothing yet

        def slow(asked: Any) -> Any:
            answer = honest(asked)
            node.coordinator.failed("full", keys)
            return answer

        spec_lookup = {**{n: s.lookup for n, s in node.stores.items()}, "full": slow}
        node.coordinator = Coordinator(HYBRID, spec_lookup, node.seeds)
        assert node.coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 128

    def test_absent_from_before_the_save(self) -> None:
        node, request = hybrid_node()
        keys = node.keys(request, "full", [192])
        node.stores["full"].drop(keys)
        asked, may_answer = threading.Event(), threading.Event()
        honest = node.stores["full"].lookup

        def slow(wanted: Any) -> Any:
            answer = honest(wanted)
            if not may_answer.is_set():
                asked.set()
                assert may_answer.wait(60)
            return answer

        lookups = {**{n: s.lookup for n, s in node.stores.items()}, "full": slow}
        coordinator = Coordinator(HYBRID, lookups, node.seeds)
        early = threading.Thread(target=coordinator.verdict, args=(request,), kwargs={"request_tokens": 1000})
        early.start()
        assert asked.wait(60)
        node.stores["full"].put(keys)
        coordinator.saved("full", keys)
        may_answer.set()
        early.join(60)
        assert coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 960

    @pytest.mark.parametrize("row", ["full", "state"])
    def test_a_failure_from_before_the_save(self, row: str) -> None:
        """The load was promised, then the object was stored anew, then the load of the old one failed."""
        node, request = hybrid_node()
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        keys = verdict.keys[row][-1:]
        node.coordinator.saved(row, keys)
        node.coordinator.failed(row, keys, moment=verdict.moment)
        assert node.coordinator.verdict(request, request_tokens=1000).hit == verdict.hit
        units = {row: [768 if row == "state" else 11]}
        assert node.coordinator.rewind(request, verdict, failed=units).hit == verdict.hit

    @pytest.mark.parametrize("row", ["full", "state"])
    def test_a_failure_of_what_was_saved_last(self, row: str) -> None:
        node, request = hybrid_node()
        node.coordinator.saved(row, node.keys(request, row, [768]))
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        units = {row: [768 if row == "state" else 11]}
        assert node.coordinator.rewind(request, verdict, failed=units).hit.resume_tokens == 256
        assert node.coordinator.verdict(request, request_tokens=1000).hit.resume_tokens == 256

    def test_saves_are_remembered_in_bounded_number(self) -> None:
        """What was forgotten counts as old: its failure is believed."""
        node, request = Node(HYBRID, CoordinatorLimits(suspects=2)), chain_of(HYBRID, 1000)
        node.store(request, {"full": whole(15), "window": whole(15), "state": states(768)})
        verdict = node.coordinator.verdict(request, request_tokens=1000)
        node.coordinator.saved("full", verdict.keys["full"])
        node.coordinator.check_integrity()
        node.coordinator.failed("full", verdict.keys["full"][-1:], moment=verdict.moment)
        assert node.coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 960
        node.coordinator.failed("full", verdict.keys["full"][:1], moment=verdict.moment)
        assert node.coordinator.verdict(request, request_tokens=1000).hit.hit_tokens == 0


class TestTheSavePath:
    """`missing` says what still has to be stored."""

    def test_only_what_the_store_lacks(self) -> None:
        node, request = Node(HYBRID), chain_of(HYBRID, 1000)
        node.store(request, {"full": blocks((0, 2), (5, 9))})
        assert np.flatnonzero(
            node.coordinator.missing(request, "full", begin_block=1, end_block=8)
        ).tolist() == [1, 2, 3]

    def test_suspects_are_stored_again(self) -> None:
        node, request = hybrid_node()
        node.coordinator.failed("full", node.keys(request, "full", [192]))
        assert np.flatnonzero(
            node.coordinator.missing(request, "full", begin_block=0, end_block=15)
        ).tolist() == [2]

    def test_everything_when_the_lookup_fails(self) -> None:
        node, request = hybrid_node()
        node.stores["full"].broken = OSError(5, "EIO")
        assert node.coordinator.missing(request, "full", begin_block=0, end_block=15).all()

    def test_no_block_no_question(self) -> None:
        node, request = hybrid_node()
        assert len(node.coordinator.missing(request, "full", begin_block=3, end_block=3)) == 0
        assert node.stores["full"].asked == []

    def test_an_unfinished_block_has_no_key(self) -> None:
        node, request = hybrid_node()
        with pytest.raises(SpecError, match="digests up to 960"):
            node.coordinator.missing(request, "full", begin_block=14, end_block=16)


class TestRefusals:
    """What would turn every verdict into 0, or into nonsense, is said at once."""

    def test_a_row_without_a_lookup(self) -> None:
        with pytest.raises(SpecError, match="rows without a lookup"):
            Coordinator(table(FULL), {}, {"full": bytes(32)})

    def test_a_lookup_without_a_row(self) -> None:
        lookups = {"full": lambda keys: [], "fulll": lambda keys: []}
        with pytest.raises(SpecError, match="fulll"):
            Coordinator(table(FULL), lookups, {"full": bytes(32)})

    def test_a_row_without_a_seed(self) -> None:
        with pytest.raises(SpecError, match="'full' has no seed"):
            Coordinator(table(FULL), {"full": lambda keys: []}, {})

    def test_a_chain_of_another_grain(self) -> None:
        node, _ = hybrid_node()
        with pytest.raises(SpecError, match="16 tokens per grain, the table 64"):
            node.coordinator.verdict(PrefixChain(grain_tokens=16), request_tokens=10)

    def test_a_state_between_two_grains_has_no_key(self) -> None:
        node = Node(table(chain("full", 64), snapshot("state", 96), grain=64))
        with pytest.raises(SpecError, match="96 is no multiple of the grain of 64"):
            node.coordinator.keys(chain_of(node.spec, 500), "state", begin_block=0, end_block=1)

    @pytest.mark.parametrize("call", ["failed", "saved", "rebuild"])
    def test_an_unknown_row(self, call: str) -> None:
        node, _ = hybrid_node()
        with pytest.raises(SpecError, match="no cached row 'fulll'"):
            getattr(node.coordinator, call)("fulll", np.zeros((1, 32), np.uint8))

    def test_a_directory_of_a_chain_row(self) -> None:
        node, _ = hybrid_node()
        with pytest.raises(SpecError, match="only snapshot rows"):
            node.coordinator.rebuild("full", [])


@pytest.mark.parametrize("number", [-1, 2**40, 2**70, 1.5, float("nan"), "1", None])
@pytest.mark.parametrize("name", ["request_tokens", "local_tokens", "tail_tokens", "align_tokens"])
def test_a_question_with_senseless_numbers_is_refused(name: str, number: Any) -> None:
    node, request = hybrid_node()
    with pytest.raises(SpecError, match=f"{name} is .*; tokens are ints, at least"):
        node.coordinator.verdict(request, **{"request_tokens": 1000, name: number})


@pytest.mark.parametrize("block", [-1, 2**58 - 1, 2**63, 1.5])
def test_a_number_that_would_wrap_around_names_no_block(block: Any) -> None:
    node, request = hybrid_node()
    with pytest.raises(SpecError, match="block"):
        node.coordinator.keys(request, "full", begin_block=block, end_block=block + 1)


def test_a_chain_shorter_than_the_request_is_absent_beyond() -> None:
    node, request = hybrid_node()
    assert node.coordinator.verdict(request, request_tokens=5000, local_tokens=4000).hit.resume_tokens == 768


def test_an_unfinished_prefix_is_no_hit() -> None:
    node, _ = hybrid_node()
    assert node.coordinator.verdict(PrefixChain(grain_tokens=64), request_tokens=1000).hit.resume_tokens == 0


def test_a_follower_without_a_seed_uses_its_sources() -> None:
    spec = table(FULL, follower("f", FULL))
    seeded = Coordinator(spec, {"full": lambda keys: np.ones(len(keys))}, {"full": bytes(range(32))})
    verdict = seeded.verdict(chain_of(spec, 1000), request_tokens=1000)
    assert names_of(verdict.keys["f"]) == names_of(verdict.keys["full"])
    assert seeded.clamp(chain_of(spec, 1000), verdict).hit.resume_tokens == 0


def test_statistics_count_verdicts_and_gains() -> None:
    node, request = hybrid_node()
    node.coordinator.verdict(request, request_tokens=1000, local_tokens=640)
    node.coordinator.verdict(request, request_tokens=1000, local_tokens=800)
    counts = node.coordinator.statistics()
    assert (counts.verdicts, counts.hits, counts.hit_tokens) == (2, 1, 128)
    assert counts.checkpoints["state"].states == 2


def test_suspects_are_bounded() -> None:
    node = Node(HYBRID, CoordinatorLimits(suspects=10))
    request = chain_of(HYBRID, 64 * 30)
    node.coordinator.failed("full", node.coordinator.keys(request, "full", begin_block=0, end_block=30))
    node.coordinator.check_integrity()
    assert node.coordinator.statistics().suspects["full"] == 10


@pytest.mark.parametrize("limits", [{"suspect_s": 0}, {"suspects": 0}, {"checkpoints": 0}])
def test_senseless_limits_are_refused(limits: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="at least 1"):
        Node(HYBRID, CoordinatorLimits(**limits))


@pytest.mark.parametrize("window", [None, 40])
def test_a_request_beyond_all_reason_costs_what_its_chain_costs(window: int | None) -> None:
    spec = table(chain("full", 1, window=window), grain=1)
    request, node = chain_of(spec, 50), Node(spec)
    node.store(request, {"full": whole(50)})
    tracemalloc.start()
    try:
        verdict = node.coordinator.verdict(request, request_tokens=2**31 - 1)
        assert node.coordinator.soon_tokens(request, verdict, in_flight={}) == 50
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert verdict.hit.resume_tokens == 50

"""The directory: remembers presence only, asks in batches, follows the store, stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from doubles import StoreDouble
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.coordinator.checkpoints import Checkpoints
from ucm_core.errors import SpecError
from ucm_core.spec.keys import Keys

Ask = Callable[[Checkpoints, Keys], object]


def keys(*numbers: int) -> Keys:
    made = np.zeros((len(numbers), 32), dtype=np.uint8)
    made[:, 0] = numbers
    return made


@pytest.fixture
def store() -> StoreDouble:
    made = StoreDouble()
    made.put(keys(1, 2, 3))
    return made


@pytest.fixture
def directory(store: StoreDouble) -> Checkpoints:
    return Checkpoints(lambda wanted: store.lookup(wanted).astype(bool), capacity=100)


def test_the_unknown_is_asked_in_one_batch(store: StoreDouble, directory: Checkpoints) -> None:
    assert directory.held(keys(1, 7, 3)).tolist() == [True, False, True]
    assert store.asked == [3]


def test_presence_is_remembered_absence_is_not(store: StoreDouble, directory: Checkpoints) -> None:
    directory.held(keys(1, 7))
    store.put(keys(7))
    assert directory.held(keys(1, 7)).tolist() == [True, True]
    assert store.asked == [2, 1]


def test_a_report_is_known_without_asking(store: StoreDouble, directory: Checkpoints) -> None:
    directory.register(keys(9))
    assert directory.held(keys(9)).all()
    assert store.asked == []


def test_a_failed_get_removes_the_entry(store: StoreDouble, directory: Checkpoints) -> None:
    directory.held(keys(1))
    store.drop(keys(1))
    assert directory.held(keys(1)).all()  # a cache may be stale until told
    directory.remove(keys(1))
    assert not directory.held(keys(1)).any()


def test_confirming_corrects_the_memory(store: StoreDouble, directory: Checkpoints) -> None:
    directory.register(keys(8))
    assert directory.confirm(keys(8, 2)).tolist() == [False, True]
    assert directory.statistics().states == 1


def test_rebuild_replaces_the_memory(store: StoreDouble, directory: Checkpoints) -> None:
    directory.register(keys(8))
    assert directory.rebuild([keys(1, 2)[:, :16], keys(3)[:, :16]]) == 3
    assert directory.held(keys(1, 2, 3)).all()
    assert store.asked == []
    assert not directory.held(keys(8)).any()


def test_a_rebuild_holds_no_more_than_the_memory_and_lists_no_further(store: StoreDouble) -> None:
    listed: list[int] = []

    def slices() -> Iterator[Keys]:
        for number in range(0, 100, 4):
            listed.append(number)
            yield keys(*range(number, number + 4))

    directory = Checkpoints(store.lookup, capacity=10)
    assert directory.rebuild(slices()) == 10
    assert listed == [0, 4, 8, 12]


def test_a_rebuild_does_not_bring_back_what_was_removed_meanwhile(directory: Checkpoints) -> None:
    def slices() -> Iterator[Keys]:
        yield keys(1)
        directory.remove(keys(3))  # its load failed
        yield keys(2, 3)

    assert directory.rebuild(slices()) == 1


def test_a_rebuild_keeps_what_was_reported_meanwhile(store: StoreDouble, directory: Checkpoints) -> None:
    def slices() -> Iterator[Keys]:
        yield keys(1)
        directory.register(keys(9))
        yield keys(2)

    assert directory.rebuild(slices()) == 3
    assert directory.held(keys(1, 2, 9)).all()
    assert store.asked == []


class TestAnswersOnTheirWay:
    """C-34: a late old answer, of either kind, does not override what was told since."""

    def directory(self, store: StoreDouble, meanwhile: Callable[[Checkpoints], None]) -> Checkpoints:
        """Something happens after the store has answered and before the answer arrives."""

        def slow(wanted: Keys) -> np.ndarray:
            answer = store.lookup(wanted).astype(bool)
            meanwhile(directory)
            return answer

        directory = Checkpoints(slow, capacity=100)
        return directory

    @pytest.mark.parametrize("ask", [Checkpoints.held, Checkpoints.confirm])
    def test_present_from_before_a_failed_load(self, store: StoreDouble, ask: Ask) -> None:
        directory = self.directory(store, lambda it: it.remove(keys(1)))
        ask(directory, keys(1))
        assert directory.statistics().states == 0

    @pytest.mark.parametrize("ask", [Checkpoints.held, Checkpoints.confirm])
    def test_absent_from_before_a_save(self, store: StoreDouble, ask: Ask) -> None:
        directory = self.directory(store, lambda it: it.register(keys(7)))
        ask(directory, keys(7))
        assert directory.statistics().states == 1

    def test_present_from_before_another_question_found_it_gone(self, store: StoreDouble) -> None:
        def evicted(directory: Checkpoints) -> None:
            if store.lookup(keys(1)).any():
                store.drop(keys(1))
                assert not directory.confirm(keys(1)).any()

        directory = self.directory(store, evicted)
        directory.held(keys(1))
        assert directory.statistics().states == 0


def test_nothing_to_ask(store: StoreDouble, directory: Checkpoints) -> None:
    assert len(directory.held(keys())) == 0
    directory.remove(keys())
    assert store.asked == []


def test_statistics_count_what_memory_and_store_answered(directory: Checkpoints) -> None:
    directory.held(keys(1, 7))
    directory.held(keys(1, 7))
    counts = directory.statistics()
    assert (counts.states, counts.answered, counts.asked) == (1, 1, 3)


def test_the_least_recently_used_is_forgotten(store: StoreDouble) -> None:
    directory = Checkpoints(lambda wanted: store.lookup(wanted).astype(bool), capacity=2)
    directory.register(keys(1, 2))
    directory.held(keys(1))
    directory.register(keys(3))
    store.names.clear()
    assert directory.held(keys(1, 2, 3)).tolist() == [True, False, True]


def test_a_senseless_capacity_is_refused() -> None:
    with pytest.raises(SpecError, match="at least 1"):
        Checkpoints(lambda wanted: np.zeros(len(wanted), bool), capacity=0)


@given(
    st.lists(
        st.tuples(st.sampled_from(["save", "evict", "fail", "ask", "rebuild"]), st.integers(0, 9)),
        max_size=60,
    )
)
def test_it_never_denies_what_the_store_holds(events: list[tuple[str, int]]) -> None:
    """Over any history: a stored state is always found, and a confirmed one is really there."""
    store = StoreDouble()
    directory = Checkpoints(lambda wanted: store.lookup(wanted).astype(bool), capacity=4)
    for event, number in events:
        if event == "save":
            store.put(keys(number))
            directory.register(keys(number))
        elif event == "evict":
            store.drop(keys(number))
        elif event == "fail":
            store.drop(keys(number))
            directory.remove(keys(number))
        elif event == "rebuild":
            directory.rebuild(keys(*(name[0] for name in sorted(store.names))) for _ in range(1))
        held = directory.held(keys(number)).any()
        assert held or not store.lookup(keys(number)).any()
        assert directory.confirm(keys(number)).tolist() == store.lookup(keys(number)).astype(bool).tolist()
        directory.check_integrity()

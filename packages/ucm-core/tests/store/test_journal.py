"""The journal of changes: bounded, off while nobody listens, and its last word about an object is true."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from objects import Payloads, Shelf, make_keys, open_shelf

from ucm_core.store.gc import Collector
from ucm_core.store.journal import Change, Journal, Place
from ucm_core.store.pool import IoPool

PLACE = Place("00" * 16, "full", "hx")
Names = npt.NDArray[np.uint8]


def names(count: int, *, seed: int = 0) -> Names:
    return make_keys(count, seed=seed)[:, :16]


def always(answer: bool) -> Callable[[Names], npt.NDArray[np.bool_]]:
    return lambda asked: np.full(len(asked), answer)


def replay(changes: list[Change] | None, index: set[bytes]) -> set[bytes]:
    assert changes is not None
    for change in changes:
        found = {name.tobytes() for name in change.names}
        index = index | found if change.stored else index - found
    return index


def test_nobody_listening_is_told_nothing_and_nothing_is_looked_at() -> None:
    journal = Journal()
    journal.tell(PLACE, names(2), stored=True, exist=lambda asked: pytest.fail("looked"))
    journal.tell_absent(PLACE, names(2), exist=lambda asked: pytest.fail("looked"))
    assert not journal.listening


def test_a_listener_begins_with_an_enumeration_and_then_hears_everything() -> None:
    journal = Journal()
    listener = journal.listen()
    assert listener.take() is None
    journal.tell(PLACE, make_keys(2), stored=True, exist=always(True))
    (change,) = listener.take() or []
    assert (change.place, change.stored, change.names.shape) == (PLACE, True, (2, 16))
    assert listener.take() == []


def test_what_is_not_as_it_was_told_is_told_again() -> None:
    journal = Journal()
    listener = journal.listen()
    listener.take()
    answers = iter([np.array([True, False, True]), np.array([False])])
    journal.tell(PLACE, names(3), stored=True, exist=lambda asked: next(answers))
    changes = listener.take() or []
    assert [(change.stored, len(change.names)) for change in changes] == [(True, 3), (False, 1)]
    assert changes[1].names.tobytes() == names(3)[1].tobytes()


@pytest.mark.parametrize("counts", [[4], [2, 2], [3, 0, 1, 50]])
def test_too_much_is_lost_together_and_said_once(counts: list[int]) -> None:
    journal = Journal()
    listener = journal.listen(capacity=3)
    listener.take()
    for count in counts:
        journal.tell(PLACE, names(count), stored=True, exist=always(True))
    assert listener.take() is None
    assert listener.take() == []


def test_what_was_told_before_a_loss_is_said_counts_as_lost() -> None:
    journal = Journal()
    listener = journal.listen(capacity=3)
    journal.tell(PLACE, names(3), stored=True, exist=always(True))
    assert listener.take() is None
    journal.tell(PLACE, names(3), stored=True, exist=always(True))
    assert len(listener.take() or []) == 1
    journal.lose()
    assert listener.take() is None


def test_listeners_do_not_see_each_others_takes_and_a_closed_one_hears_nothing() -> None:
    journal = Journal()
    first, second = journal.listen(), journal.listen()
    assert first.take() is None
    assert second.take() is None
    first.close()
    first.close()
    journal.tell(PLACE, names(1), stored=True, exist=always(True))
    assert first.take() == []
    assert len(second.take() or []) == 1
    second.close()
    assert not journal.listening


def test_an_absence_is_told_only_of_what_a_listener_was_told() -> None:
    journal = Journal()
    listener = journal.listen()
    listener.take()
    journal.tell_absent(PLACE, names(100), exist=always(False))
    assert listener.take() == []
    journal.tell(PLACE, names(1), stored=True, exist=always(True))
    listener.enumerated(PLACE, names(100)[5:6])
    journal.tell_absent(PLACE, names(100), exist=always(False))
    stored, gone = listener.take() or []
    assert (stored.stored, gone.stored) == (True, False)
    assert gone.names.tobytes() == names(100)[[0, 5]].tobytes()
    journal.tell_absent(PLACE, names(100), exist=always(False))
    assert listener.take() == []


# -- over real files


@pytest.fixture
def shelf(tmp_path):
    shelf = open_shelf(tmp_path)
    yield shelf
    shelf.root.close()


def on_disk(shelf: Shelf) -> set[bytes]:
    return {bytes.fromhex(path.name[:32]) for path in shelf.tier.directory.glob("???/*.hx") if path.is_file()}


def test_a_tier_tells_where_its_objects_are(shelf: Shelf) -> None:
    listener = shelf.root.journal.listen()
    listener.take()
    shelf.write(make_keys(2))
    (change,) = listener.take() or []
    assert change.place == PLACE
    assert {name.tobytes() for name in change.names} == on_disk(shelf)


def test_what_was_there_already_and_what_failed_is_not_told(shelf: Shelf) -> None:
    shelf.write(make_keys(1))
    keys = make_keys(2)
    shelf.file(keys[1]).mkdir(parents=True)
    (shelf.file(keys[1]) / "full").touch()
    listener = shelf.root.journal.listen()
    listener.take()
    assert shelf.write(keys)[1] != 0
    assert listener.take() == []


@pytest.mark.parametrize("notice", ["lookup", "load"])
def test_a_file_that_somebody_else_removed_is_told_when_it_is_missed(shelf: Shelf, notice: str) -> None:
    listener = shelf.root.journal.listen()
    listener.take()
    shelf.write(make_keys(3))
    index = replay(listener.take(), set())
    shelf.file(make_keys(3)[1]).unlink()
    assert listener.take() == []
    shelf.tier.exist(make_keys(5)) if notice == "lookup" else shelf.read(make_keys(5))
    assert replay(listener.take(), index) == on_disk(shelf)
    assert len(on_disk(shelf)) == 2


def test_a_damaged_object_that_is_dropped_and_healed_is_told_both_times(shelf: Shelf) -> None:
    listener = shelf.root.journal.listen()
    listener.take()
    shelf.write(make_keys(2))
    listener.take()
    data = bytearray(shelf.file(make_keys(2)[0]).read_bytes())
    data[5000] ^= 1
    shelf.file(make_keys(2)[0]).write_bytes(data)
    shelf.read(make_keys(2))
    shelf.write(make_keys(2))
    assert [change.stored for change in listener.take() or []] == [False, True]


def test_what_the_collector_removes_is_told(shelf: Shelf) -> None:
    pool = IoPool(1)
    listener = shelf.root.journal.listen()
    listener.take()
    shelf.write(make_keys(20))
    shelf.root.usage.capacity_bytes = 10 * shelf.tier.geometry.object_bytes
    Collector(shelf.root, pool).collect()
    pool.close(60.0)
    assert 0 < len(on_disk(shelf)) < 10
    assert replay(listener.take(), set()) == on_disk(shelf)


def test_a_root_that_is_lost_needs_an_enumeration(shelf: Shelf) -> None:
    listener = shelf.root.journal.listen()
    listener.take()
    shelf.root.lose(OSError("gone"))
    assert listener.take() is None


def test_threads_that_write_and_drop_the_same_objects_leave_a_true_index(shelf: Shelf) -> None:
    listener = shelf.root.journal.listen()
    listener.take()
    keys = make_keys(4)

    def work(number: int) -> None:
        payloads = Payloads(4)
        for _ in range(40):
            if number % 2:
                shelf.tier.write(keys, payloads.addresses)
            else:
                shelf.tier.drop(keys)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replay(listener.take(), set()) == on_disk(shelf)

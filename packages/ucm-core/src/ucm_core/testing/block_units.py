"""What loads and saves by units of every block store must do; part of `BlockStoreTests`."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.handles import UnitLoad
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store.absent import ObjectStore
from ucm_core.store.geometry import Geometry
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, Bytes, FaultyBlocks, blank, keys_of, payloads_of

ALL = slice(None)


def unit(number: int) -> slice:
    """The shard ``number``."""
    return slice(number, number + 1)


class EngineEvent:
    """Stands for a point in an engine's stream; somebody sets it."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        """What came before has run."""
        self._reached.set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """As `ucm_core.flow.handles.ComputeEvent.wait`."""
        return self._reached.wait(timeout_s)


class UnitTests:
    """The part of `ucm_core.testing.block_store.BlockStoreTests` that speaks of units."""

    geometry: Geometry

    def save(self, store: ObjectStore, *numbers: int) -> Ticket:
        """Save the payloads of these numbers under their keys, durably."""
        raise NotImplementedError

    def expect(self, store: ObjectStore, *numbers: int) -> None:
        """All of these load with their own bytes."""
        raise NotImplementedError

    def check_kept(self, ticket: Ticket) -> None:
        """All of it is kept, as far as the store can keep anything."""
        raise NotImplementedError

    def begin_load(self, store: ObjectStore, *numbers: int) -> tuple[UnitLoad, Bytes]:
        """A load of these numbers, and where its bytes go."""
        out = blank(self.geometry, len(numbers))
        return store.begin_load(keys_of(*numbers), BufferBlocks(out)), out

    def test_units_come_in_any_order(self, store: ObjectStore) -> None:
        self.save(store, 1, 2)
        load, out = self.begin_load(store, 2, 1)
        for number in reversed(range(self.geometry.shards)):
            load.submit(unit(number))
            assert load.ticket.wait(WAIT_S, shard=number)
            assert (out[:, number] == payloads_of(self.geometry, 2, 1)[:, number]).all()
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.ok

    def test_a_unit_is_brought_once(self, store: ObjectStore) -> None:
        self.save(store, 1)
        target = FaultyBlocks(blank(self.geometry, 2))
        load = store.begin_load(keys_of(1, 1), target)
        load.submit(ALL)
        assert load.ticket.wait(WAIT_S)
        copied = len(target.copied)
        load.submit(ALL)
        load.submit(unit(1), urgency=-1)
        load.cancel()
        assert load.ticket.ok
        assert len(target.copied) == copied

    def test_absent_units_are_misses(self, store: ObjectStore) -> None:
        self.save(store, 1)
        load, out = self.begin_load(store, 1, 9)
        load.submit(ALL)
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.object_results.tolist() == [ResultCode.OK, ResultCode.MISS]
        assert (out[1] == UNTOUCHED).all()
        assert (out[0] == payloads_of(self.geometry, 1)).all()

    def test_a_cancelled_load_ends(self, store: ObjectStore) -> None:
        self.save(store, 1, 2)
        load, out = self.begin_load(store, 1, 2)
        load.cancel()
        assert load.ticket.wait(WAIT_S)
        assert set(load.ticket.object_results.tolist()) == {ResultCode.CANCELLED}
        load.submit(ALL)
        assert (out == UNTOUCHED).all()

    def test_a_target_that_raises_fails_its_units_only(self, store: ObjectStore) -> None:
        self.save(store, 1, 2, 3)
        load = store.begin_load(keys_of(1, 2, 3), FaultyBlocks(blank(self.geometry, 3), broken=[1]))
        load.submit(ALL)
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.object_results.tolist() == [ResultCode.OK, ResultCode.INVALID, ResultCode.OK]

    def test_units_of_nothing_are_done(self, store: ObjectStore) -> None:
        none, blocks = keys_of(1)[:0], BufferBlocks(blank(self.geometry, 0))
        load, save = store.begin_load(none, blocks), store.begin_save(none, blocks)
        load.submit(ALL)
        save.submit(ALL)
        save.seal()
        assert load.ticket.wait(WAIT_S)
        assert save.ticket.wait(WAIT_S)

    def test_nobody_sees_an_object_before_its_last_unit(self, store: ObjectStore) -> None:
        save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads_of(self.geometry, 1, 2)))
        for number in range(self.geometry.shards):
            save.submit(unit(number))
            assert not store.lookup(keys_of(1, 2)).any()
        save.seal()
        self.check_kept(save.ticket)
        self.expect(store, 1, 2)

    def test_a_unit_that_is_submitted_again_has_its_last_bytes(self, store: ObjectStore) -> None:  # case C-52
        payloads = payloads_of(self.geometry, 7, 8)
        save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads))
        save.submit(ALL)
        payloads[:, 1] = UNTOUCHED
        save.submit(unit(1))
        payloads[:] = payloads_of(self.geometry, 1, 2)
        save.submit(ALL)
        save.seal()
        self.check_kept(save.ticket)
        self.expect(store, 1, 2)

    def test_a_copy_begins_after_its_event(self, store: ObjectStore) -> None:  # case C-53
        payloads, ready = payloads_of(self.geometry, 8), EngineEvent()
        save = store.begin_save(keys_of(1), BufferBlocks(payloads))
        worker = threading.Thread(target=lambda: save.submit(ALL, ready=ready))  # some stores wait in it
        worker.start()
        payloads[:] = payloads_of(self.geometry, 1)
        ready.reach()
        worker.join()
        save.seal()
        self.check_kept(save.ticket)
        self.expect(store, 1)

    @pytest.mark.parametrize("submitted", [0, 1])
    def test_what_lacks_a_unit_is_given_up(self, store: ObjectStore, submitted: int) -> None:
        save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads_of(self.geometry, 1, 2)))
        for number in range(submitted):
            save.submit(unit(number))
        save.seal()
        assert save.ticket.wait(WAIT_S)
        assert set(save.ticket.object_results.tolist()) == {ResultCode.CANCELLED}
        assert not store.lookup(keys_of(1, 2)).any()
        self.save(store, 1, 2)
        self.expect(store, 1, 2)

    def test_an_abandoned_save_keeps_nothing(self, store: ObjectStore) -> None:
        save = store.begin_save(keys_of(1, 2), BufferBlocks(payloads_of(self.geometry, 1, 2)))
        save.submit(ALL)
        save.abandon()
        assert save.ticket.wait(WAIT_S)
        save.seal()
        assert set(save.ticket.object_results.tolist()) == {ResultCode.CANCELLED}
        assert not store.lookup(keys_of(1, 2)).any()
        assert not store.in_flight(keys_of(1, 2)).any()

    def test_present_objects_are_not_gathered_by_unit(self, store: ObjectStore) -> None:
        self.save(store, 1)
        source = FaultyBlocks(payloads_of(self.geometry, 1, 2, 1), broken=[0, 2])
        save = store.begin_save(keys_of(1, 2, 1), source)
        save.submit(ALL)
        save.seal()
        self.check_kept(save.ticket)
        assert set(source.copied) == {1}
        self.expect(store, 1, 2)

    def test_a_source_that_raises_fails_its_object_only(self, store: ObjectStore) -> None:
        source = FaultyBlocks(payloads_of(self.geometry, 1, 2, 3), broken=[1])
        save = store.begin_save(keys_of(1, 2, 3), source)
        save.submit(ALL)
        save.seal()
        assert save.ticket.wait(WAIT_S)
        assert save.ticket.object_results.tolist() == [ResultCode.OK, ResultCode.INVALID, ResultCode.OK]
        assert store.lookup(keys_of(1, 2, 3)).tolist() == [True, False, True]

    @pytest.mark.parametrize("shards", [slice(0, 99), slice(-1, None), slice(2, 1), slice(0, 2, 2)])
    def test_what_is_no_range_of_shards_is_refused(self, store: ObjectStore, shards: slice) -> None:
        self.save(store, 1)
        load, _ = self.begin_load(store, 1)
        save = store.begin_save(keys_of(2), BufferBlocks(payloads_of(self.geometry, 2)))
        for call in (load.submit, save.submit):
            with pytest.raises(LayoutError, match="no range of the"):
                call(shards)
        load.cancel()
        save.abandon()

    def test_a_closed_store_ends_units(self, store: ObjectStore) -> None:
        self.save(store, 1)
        load, out = self.begin_load(store, 1)
        save = store.begin_save(keys_of(2), BufferBlocks(payloads_of(self.geometry, 2)))
        save.submit(unit(0))
        store.close()
        load.submit(ALL)
        save.submit(ALL)
        save.seal()
        assert load.ticket.wait(WAIT_S)
        assert save.ticket.wait(WAIT_S)
        assert (out == UNTOUCHED).all()
        assert not np.count_nonzero(save.ticket.durable_results == ResultCode.OK)

    def test_after_a_computation_is_over_no_unit_of_it_is_brought(self, store: ObjectStore) -> None:
        self.save(store, 1)
        load, out = self.begin_load(store, 1)
        store.revoke()
        load.submit(ALL)
        assert load.ticket.wait(WAIT_S)
        assert load.ticket.object_results.tolist() == [ResultCode.CANCELLED]
        assert (out == UNTOUCHED).all()

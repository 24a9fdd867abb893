"""What every block store must do, whatever its tiers: subclass `BlockStoreTests` and give it a store."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import Level, ResultCode, Ticket
from ucm_core.store.absent import ObjectStore
from ucm_core.store.geometry import Geometry
from ucm_core.testing.block_units import UnitTests
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, Bytes, FaultyBlocks, blank, keys_of, payloads_of

OpenStore = Callable[..., ObjectStore]


class BlockStoreTests(UnitTests):
    """Subclass it, define `open_store` and say what the store can. What it cannot is tested as well.

    The geometry has padding between its shards on purpose.
    """

    geometry = Geometry(3, 5000)
    slots = 16
    durable = True
    """What is saved is on a medium, and outlives the store."""
    ring = True
    """What is prefetched, pinned or being filled is known in memory."""
    shared = True
    """Stores that are open over one directory at the same time find what the others saved."""

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        """A new store over ``directory``; the suite closes it."""
        raise NotImplementedError

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[OpenStore]:
        """Opens stores over one directory, and closes them."""
        with ExitStack() as stack:

            def open_one(slots: int = self.slots) -> ObjectStore:
                store = self.open_store(tmp_path, self.geometry, slots=slots)
                stack.callback(store.close)
                return store

            yield open_one

    @pytest.fixture
    def store(self, opened: OpenStore) -> Iterator[ObjectStore]:
        """A store whose books must balance in the end."""
        store = opened()
        yield store
        self.check_balance(store)

    def check_balance(self, store: ObjectStore) -> None:
        """Nothing is referenced or under way once everything has ended."""
        store.close()
        assert store.statistics().working == 0
        assert store.statistics().pending_writes == 0
        ring = store.statistics().ring
        assert ring is None or ring.own_references == 0

    def check_kept(self, ticket: Ticket) -> None:
        """All of it is kept, as far as the store can keep anything."""
        assert ticket.wait(WAIT_S)
        assert ticket.ok
        assert ticket.wait_durable(WAIT_S) == self.durable
        assert ticket.level >= Level.ON_MEDIUM if self.durable else ticket.level is Level.IN_RING
        assert ResultCode.PENDING not in ticket.durable_results

    def save(self, store: ObjectStore, *numbers: int) -> Ticket:
        """Save the payloads of these numbers under their keys, durably."""
        ticket = store.save(keys_of(*numbers), BufferBlocks(payloads_of(self.geometry, *numbers)))
        assert ticket.wait(WAIT_S)
        ticket.wait_durable(WAIT_S)
        return ticket

    def load(self, store: ObjectStore, *numbers: int) -> tuple[Bytes, list[int]]:
        """What a load of these numbers delivers: bytes, and codes by object."""
        out = blank(self.geometry, len(numbers))
        ticket = store.load(keys_of(*numbers), BufferBlocks(out))
        assert ticket.wait(WAIT_S)
        return out, ticket.object_results.tolist()

    def expect(self, store: ObjectStore, *numbers: int) -> None:
        """All of these load with their own bytes."""
        out, codes = self.load(store, *numbers)
        assert codes == [ResultCode.OK] * len(numbers)
        assert np.array_equal(out, payloads_of(self.geometry, *numbers))

    def test_absent_is_a_miss(self, store: ObjectStore) -> None:
        out, codes = self.load(store, 1, 2)
        assert codes == [ResultCode.MISS, ResultCode.MISS]
        assert (out == UNTOUCHED).all()
        assert not store.lookup(keys_of(1, 2)).any()

    def test_what_is_saved_is_loaded(self, store: ObjectStore) -> None:
        ticket = self.save(store, 1, 2, 3)
        self.check_kept(ticket)
        assert ticket.results.shape == (3, self.geometry.shards)
        assert store.lookup(keys_of(1, 2, 3, 4)).tolist() == [True, True, True, False]
        self.expect(store, 3, 1, 2)

    def test_what_is_called_absent_is_kept_all_the_same(self, store: ObjectStore) -> None:
        for numbers in ((1, 2), (2, 3, 2)):
            source = BufferBlocks(payloads_of(self.geometry, *numbers))
            self.check_kept(store.save(keys_of(*numbers), source, absent=True))
        self.expect(store, 1, 2, 3)

    def test_what_is_durable_outlives_its_store(self, store: ObjectStore, opened: OpenStore) -> None:
        self.check_kept(self.save(store, 1, 2))
        store.close()
        later = opened()
        assert later.lookup(keys_of(1, 2)).tolist() == [self.durable] * 2
        if self.durable:
            self.expect(later, 1, 2)

    def test_what_is_shared_is_found_by_others(self, store: ObjectStore, opened: OpenStore) -> None:
        other = opened()
        self.check_kept(self.save(store, 1, 2))
        assert other.lookup(keys_of(1, 2)).tolist() == [self.shared] * 2
        if self.shared:
            self.expect(other, 1, 2)

    def test_an_empty_batch_is_done(self, store: ObjectStore) -> None:
        none = keys_of(1)[:0]
        blocks = BufferBlocks(blank(self.geometry, 0))
        assert store.save(none, blocks).wait(0)
        assert store.load(none, blocks).wait(0)
        assert store.prefetch(none).wait(0)
        assert store.lookup(none).shape == (0,)
        assert store.lookup_prefix(none) == 0

    def test_a_batch_may_repeat_a_key(self, store: ObjectStore) -> None:
        source = FaultyBlocks(payloads_of(self.geometry, 1, 1, 2))
        self.check_kept(store.save(keys_of(1, 1, 2), source))
        assert sorted(source.copied) == [0, 2]
        self.expect(store, 2, 1, 2, 1, 1)

    def test_present_objects_are_not_gathered(self, store: ObjectStore) -> None:
        self.save(store, 1, 2)
        source = FaultyBlocks(payloads_of(self.geometry, 1, 3, 2), broken=[0, 2])
        self.check_kept(store.save(keys_of(1, 3, 2), source))
        assert source.copied == [1]
        self.expect(store, 1, 2, 3)

    def test_the_source_is_free_when_save_returns(self, store: ObjectStore) -> None:
        payloads = payloads_of(self.geometry, 1, 2)
        ticket = store.save(keys_of(1, 2), BufferBlocks(payloads))
        payloads[:] = UNTOUCHED
        self.check_kept(ticket)
        self.expect(store, 1, 2)

    def test_gathering_can_be_left_to_the_store(self, store: ObjectStore) -> None:
        source = BufferBlocks(payloads_of(self.geometry, 1, 2))
        self.check_kept(store.save(keys_of(1, 2), source, gather_inline=False))
        self.expect(store, 1, 2)

    def test_a_source_that_raises_fails_its_objects_only(self, store: ObjectStore) -> None:
        source = FaultyBlocks(payloads_of(self.geometry, 1, 2, 3), broken=[1])
        ticket = store.save(keys_of(1, 2, 3), source)
        assert ticket.wait(WAIT_S)
        assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.INVALID, ResultCode.OK]
        assert store.lookup(keys_of(1, 2, 3)).tolist() == [True, False, True]
        self.save(store, 2)
        self.expect(store, 1, 2, 3)

    def test_a_target_that_raises_fails_its_objects_only(self, store: ObjectStore) -> None:
        self.save(store, 1, 2, 3)
        out = blank(self.geometry, 3)
        ticket = store.load(keys_of(1, 2, 3), FaultyBlocks(out, broken=[1]))
        assert ticket.wait(WAIT_S)
        assert ticket.object_results.tolist() == [ResultCode.OK, ResultCode.INVALID, ResultCode.OK]
        assert np.array_equal(out[[0, 2]], payloads_of(self.geometry, 1, 3))

    def test_a_batch_may_be_larger_than_the_ring(self, store: ObjectStore) -> None:
        """What has a medium keeps all; without one the newest evict others, and what is found is right."""
        numbers = range(5 * max(8, self.slots))
        self.check_kept(self.save(store, *numbers))
        out, codes = self.load(store, *numbers)
        found = [number for number in numbers if codes[number] == ResultCode.OK]
        assert len(found) == len(numbers) if self.durable else found
        assert np.array_equal(out[found], payloads_of(self.geometry, *found))

    def test_the_prefix_ends_at_the_first_hole(self, store: ObjectStore) -> None:
        self.save(store, 0, 1, 3)
        assert store.lookup_prefix(keys_of(0, 1, 2, 3)) == 2
        assert store.lookup_prefix(keys_of(0, 1)) == 2
        assert store.lookup_prefix(keys_of(2, 0)) == 0

    def test_prefetch_says_what_is_there(self, store: ObjectStore, opened: OpenStore) -> None:
        self.save(store, 1)
        if self.durable:
            store.close()
            store = opened()
        ticket = store.prefetch(keys_of(1, 2))
        assert ticket.wait(WAIT_S)
        expected = [ResultCode.OK, ResultCode.MISS] if self.ring else [ResultCode.NO_SPACE] * 2
        assert ticket.object_results.tolist() == expected

    def test_what_is_prefetched_needs_no_medium(self, store: ObjectStore, opened: OpenStore) -> None:
        """Somebody removes the object from the medium afterwards: it is still loaded."""
        self.save(store, 1)
        if self.durable:
            store.close()
        store, other = (opened(), opened()) if self.durable else (store, None)
        assert store.prefetch(keys_of(1)).wait(WAIT_S)
        if other is not None:
            other.drop(keys_of(1))
        assert self.load(store, 1)[1] == [ResultCode.OK if self.ring else ResultCode.MISS]

    def test_drop_removes_and_save_heals(self, store: ObjectStore) -> None:
        self.save(store, 1, 2)
        store.drop(keys_of(1, 9))
        assert store.lookup(keys_of(1, 2)).tolist() == [False, True]
        assert self.load(store, 1)[1] == [ResultCode.MISS]
        self.save(store, 1)
        self.expect(store, 1, 2)

    def test_touching_changes_no_byte(self, store: ObjectStore) -> None:
        self.save(store, 1)
        store.touch(keys_of(1, 2))
        self.expect(store, 1)
        assert not store.lookup(keys_of(2))[0]

    def test_pins_are_released_once(self, store: ObjectStore) -> None:
        self.save(store, 1)
        with store.pin(keys_of(1, 2)) as pins:
            assert store.statistics().pins == len(pins.keys)
            pins.release()
        assert store.statistics().pins == 0

    def test_what_is_being_filled_is_in_flight(self, store: ObjectStore) -> None:
        self.save(store, 1)
        donation = store.reserve(keys_of(2)[0])
        assert donation is not None
        assert store.in_flight(keys_of(1, 2, 3)).tolist() == [False, self.ring, False]
        assert not store.lookup(keys_of(2))[0]
        donation.abort()
        assert not store.in_flight(keys_of(1, 2, 3)).any()

    def test_a_closed_store_misses_and_cancels(self, store: ObjectStore) -> None:
        self.save(store, 1)
        store.close()
        store.close()
        blocks = BufferBlocks(blank(self.geometry, 1))
        assert not store.lookup(keys_of(1))[0]
        for ticket in (
            store.load(keys_of(1), blocks),
            store.save(keys_of(1), blocks),
            store.prefetch(keys_of(1)),
        ):
            assert ticket.wait(0)
            assert ticket.object_results.tolist() == [ResultCode.CANCELLED]
        assert not store.in_flight(keys_of(1))[0]
        store.touch(keys_of(1))
        store.drop(keys_of(1))

    def test_a_cancelled_load_settles(self, store: ObjectStore) -> None:
        self.save(store, 1)
        ticket = store.load(keys_of(1), BufferBlocks(blank(self.geometry, 1)))
        ticket.cancel()
        assert ticket.wait(WAIT_S)
        assert ticket.object_results[0] in (ResultCode.OK, ResultCode.CANCELLED)

    @pytest.mark.parametrize(
        "keys", [np.zeros(4, np.uint8), np.zeros((4, 31), np.uint8), np.zeros((4, 32)), [bytes(32)]]
    )
    def test_what_are_no_keys_is_refused_and_changes_nothing(self, store: ObjectStore, keys: Bytes) -> None:
        self.save(store, 1)
        blocks = BufferBlocks(blank(self.geometry, 4))
        calls: list[Callable[[], object]] = [
            lambda: store.save(keys, blocks),
            lambda: store.load(keys, blocks),
            lambda: store.reserve(keys),
        ]
        asks: list[Callable[[Bytes], object]] = [store.lookup, store.lookup_prefix, store.prefetch, store.pin]
        asks += [store.in_flight, store.touch, store.drop]
        for call in calls + [partial(ask, keys) for ask in asks]:
            with pytest.raises(LayoutError, match=r"need uint8\[n, 32\]"):
                call()
        assert store.statistics().pins == 0
        self.expect(store, 1)

    def test_after_a_computation_is_over_nothing_of_it_is_loaded(self, store: ObjectStore) -> None:
        self.save(store, 1)
        store.revoke()
        out, codes = self.load(store, 1)
        assert codes == [ResultCode.CANCELLED]
        assert (out == UNTOUCHED).all()
        assert store.prefetch(keys_of(1)).wait(WAIT_S)
        self.check_kept(self.save(store, 2))

    def test_closing_says_what_it_kept(self, store: ObjectStore) -> None:
        self.save(store, 1)
        report = store.close()
        assert (report.lost, report.unfinished) == (0, 0)
        assert store.close() == report

    def test_many_threads_see_only_right_bytes(self, store: ObjectStore) -> None:
        wrong: list[object] = []

        def work(seed: int) -> None:
            for numbers in np.random.default_rng(seed).integers(0, 40, (12, 6)):
                store.save(
                    keys_of(*numbers.tolist()), BufferBlocks(payloads_of(self.geometry, *numbers.tolist()))
                )
                out, codes = self.load(store, *numbers.tolist())
                good = [code == ResultCode.OK for code in codes]
                if not np.array_equal(out[good], payloads_of(self.geometry, *numbers.tolist())[good]):
                    wrong.append(numbers)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

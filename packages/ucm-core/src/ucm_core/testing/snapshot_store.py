"""What every snapshot store must do: subclass `SnapshotStoreTests` and give it a block store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ucm_core.errors import LayoutError, NoSpace, StoreError
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.spec.table import Part, RowKind, SpecRow
from ucm_core.store.absent import ObjectStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.snapshot import SnapshotStore
from ucm_core.testing.objects import UNTOUCHED, WAIT_S, keys_of

State = dict[str, npt.NDArray[Any]]

ROW = SpecRow(
    name="state",
    kind=RowKind.SNAPSHOT,
    block_tokens=64,
    units=(2, 5),
    parts=(
        Part("ssm", (3, 700), "float32"),
        Part("conv", (11,), "bfloat16"),
        Part("aux1", (5,), "uint8"),
        Part("aux2", (4096,), "uint8"),
    ),
)


def state_of(seed: int) -> State:
    """A reproducible state: for every part of `ROW` an array ``uint8[units, part bytes]``."""
    random = np.random.default_rng(seed)
    return {
        part.name: random.integers(0, 256, (len(ROW.units), ROW.part_bytes(part)), dtype=np.uint8)
        for part in ROW.parts
    }


def blank_state(fill: int = UNTOUCHED) -> State:
    """A state full of one byte."""
    return {name: np.full_like(part, fill) for name, part in state_of(0).items()}


def _part(name: str) -> Part:
    return next(part for part in ROW.parts if part.name == name)


def key_of(number: int) -> npt.NDArray[np.uint8]:
    """One key, ``uint8[32]``."""
    return keys_of(number).reshape(32)


def same(one: State, other: State) -> bool:
    """Whether two states have equal bytes."""
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


class SnapshotStoreTests:
    """Subclass it, define `open_store` and say what the store can. What it cannot is tested as well."""

    slots = 8
    durable = True
    """What is put is on a medium, and named there."""
    donations: int | None = 8
    """The most states that can be donated at a time; None = any number."""

    def open_store(self, directory: Path, geometry: Geometry, *, slots: int) -> ObjectStore:
        """A new block store over ``directory``; the suite closes it."""
        raise NotImplementedError

    @pytest.fixture
    def store(self, tmp_path: Path) -> Iterator[SnapshotStore]:
        """A snapshot store of `ROW` whose books must balance in the end."""
        blocks = self.open_store(tmp_path, Geometry.of_row(ROW), slots=self.slots)
        yield SnapshotStore(ROW, blocks)
        blocks.close()
        ring = blocks.statistics().ring
        assert ring is None or ring.own_references == 0

    def check_kept(self, ticket: Ticket) -> None:
        """It is kept, on the medium where there is one."""
        assert ticket.wait(WAIT_S)
        assert ticket.ok
        assert ticket.wait_durable(WAIT_S) == self.durable

    def put(self, store: SnapshotStore, number: int) -> None:
        """Put the state of ``number`` under its key, durably."""
        self.check_kept(store.put(key_of(number), state_of(number)))

    def get(self, store: SnapshotStore, number: int) -> State:
        """The state under the key of ``number``."""
        out = blank_state()
        ticket = store.get(key_of(number), out)
        assert ticket.wait(WAIT_S)
        assert ticket.ok
        return out

    def test_what_is_put_is_got(self, store: SnapshotStore) -> None:
        self.put(store, 1)
        self.put(store, 2)
        assert same(self.get(store, 1), state_of(1))
        assert same(self.get(store, 2), state_of(2))
        assert store.exists(keys_of(1, 2, 3)).tolist() == [True, True, False]

    def test_what_is_on_the_medium_is_named(self, store: SnapshotStore) -> None:
        self.put(store, 1)
        self.put(store, 2)
        names = [bytes(name) for part in store.names() for name in part]
        assert sorted(names) == sorted(map(bytes, keys_of(1, 2)[:, :16])) * self.durable
        store.blocks.close()
        assert list(store.names()) == []

    def test_parts_may_have_any_dtype(self, store: SnapshotStore) -> None:
        state = {name: part.copy() for name, part in state_of(1).items()}
        typed = dict(
            state, ssm=state["ssm"].view(np.float32).reshape(2, 3, 700), conv=state["conv"].view("<i2")
        )
        self.check_kept(store.put(key_of(1), typed))
        assert same(self.get(store, 1), state)

    def test_absent_is_a_miss_and_writes_nothing(self, store: SnapshotStore) -> None:
        out = blank_state(0xAA)
        ticket = store.get(key_of(1), out)
        assert ticket.wait(WAIT_S)
        assert ticket.object_results.tolist() == [ResultCode.MISS]
        assert same(out, blank_state(0xAA))

    @pytest.mark.parametrize("fill", [0x00, 0xAA, 0xFF])
    def test_get_fills_every_byte_of_a_dirty_target(self, store: SnapshotStore, fill: int) -> None:
        """No byte of another state stays: each differs from what lay there; 0xFF is NaN in every float."""
        state = blank_state(fill ^ 0x5A)
        self.check_kept(store.put(key_of(1), state))
        out = blank_state(fill)
        assert store.get(key_of(1), out).wait(WAIT_S)
        assert same(out, state)

    @pytest.mark.parametrize("call", ["put", "get"])
    def test_a_missing_part_is_refused(self, store: SnapshotStore, call: str) -> None:
        state = state_of(1)
        del state["aux2"]
        with pytest.raises(LayoutError, match=r"'aux2': the state has nothing, the row needs 8192 bytes"):
            getattr(store, call)(key_of(1), state)
        assert not store.exists(keys_of(1))[0]

    @pytest.mark.parametrize("call", ["put", "get"])
    def test_an_extra_part_is_refused(self, store: SnapshotStore, call: str) -> None:
        with pytest.raises(LayoutError, match=r"'aux3': the state has 3 bytes, the row needs no such part"):
            getattr(store, call)(key_of(1), state_of(1) | {"aux3": np.zeros(3, dtype=np.uint8)})
        assert not store.exists(keys_of(1))[0]

    @pytest.mark.parametrize("call", ["put", "get"])
    def test_a_part_of_another_size_is_refused(self, store: SnapshotStore, call: str) -> None:
        with pytest.raises(LayoutError, match=r"'aux1': the state has 9 bytes, the row needs 10 bytes"):
            getattr(store, call)(key_of(1), state_of(1) | {"aux1": np.zeros(9, dtype=np.uint8)})
        assert not store.exists(keys_of(1))[0]

    @pytest.mark.parametrize("part", [[1, 2], None, np.zeros(10, dtype=object)])
    def test_a_part_that_is_no_array_of_bytes_is_refused(self, store: SnapshotStore, part: Any) -> None:
        with pytest.raises(
            LayoutError, match=r"'aux1': the state has a .* no array of bytes, the row needs 10"
        ):
            store.put(key_of(1), state_of(1) | {"aux1": part})
        assert not store.exists(keys_of(1))[0]

    def test_a_strided_part_is_refused(self, store: SnapshotStore) -> None:
        with pytest.raises(LayoutError, match="'aux1' has strides"):
            store.put(key_of(1), state_of(1) | {"aux1": np.zeros((2, 10), dtype=np.uint8)[:, ::2]})

    def test_a_read_only_part_cannot_be_filled(self, store: SnapshotStore) -> None:
        out = blank_state()
        out["conv"].flags.writeable = False
        with pytest.raises(LayoutError, match="'conv' is read-only"):
            store.get(key_of(1), out)

    def test_neither_source_nor_result_reaches_what_is_stored(self, store: SnapshotStore) -> None:
        state = state_of(1)
        ticket = store.put(key_of(1), state)
        for part in state.values():
            part[:] = 0
        self.check_kept(ticket)
        for part in self.get(store, 1).values():
            part[:] = 0
        assert same(self.get(store, 1), state_of(1))

    def test_a_dropped_state_is_gone(self, store: SnapshotStore) -> None:
        self.put(store, 1)
        store.drop(keys_of(1))
        assert not store.exists(keys_of(1))[0]

    def donate(self, store: SnapshotStore, number: int) -> list[memoryview]:
        """Donate the state of ``number``; returns the views that it was written through."""
        donation = store.reserve(key_of(number))
        assert donation is not None
        views = []
        for name, part in state_of(number).items():
            for unit, row in enumerate(part):
                view = donation.part(name, unit)
                view[:] = row.tobytes()
                views.append(view)
        self.check_kept(donation.commit())
        return views

    def test_a_donated_state_is_got(self, store: SnapshotStore) -> None:
        self.donate(store, 1)
        assert same(self.get(store, 1), state_of(1))

    def test_the_donor_loses_access(self, store: SnapshotStore) -> None:
        for view in self.donate(store, 1):
            with pytest.raises(ValueError, match="released"):
                view[0] = 0
        assert same(self.get(store, 1), state_of(1))

    def test_nothing_is_readable_before_commit(self, store: SnapshotStore) -> None:
        donation = store.reserve(key_of(1))
        assert donation is not None
        donation.part("ssm")[:4] = b"half"
        assert not store.exists(keys_of(1))[0]
        donation.abort()
        donation.abort()
        assert not store.exists(keys_of(1))[0]
        self.put(store, 1)
        assert same(self.get(store, 1), state_of(1))

    @pytest.mark.parametrize("end", ["commit", "abort"])
    def test_memory_still_in_use_is_not_taken_over(self, store: SnapshotStore, end: str) -> None:
        donation = store.reserve(key_of(1))
        assert donation is not None
        for name in ("ssm", "conv", "aux1", "aux2"):
            donation.part(name, 0)
            donation.part(name, 1)
        array = np.frombuffer(donation.part("ssm"), dtype=np.uint8)
        part = donation.part("conv")[2:4]
        with pytest.raises(StoreError, match="still uses the donated memory"):
            getattr(donation, end)()
        del array
        with pytest.raises(StoreError, match="still uses the donated memory"):
            getattr(donation, end)()
        del part
        getattr(donation, end)()

    def test_a_state_with_a_part_that_nobody_wrote_is_not_stored(self, store: SnapshotStore) -> None:
        """What a donor leaves out would be bytes of another state."""
        donation = store.reserve(key_of(1))
        assert donation is not None
        for unit, name in ((0, "ssm"), (0, "conv"), (0, "aux1"), (0, "aux2"), (1, "ssm"), (1, "aux2")):
            donation.part(name, unit)[:] = bytes(ROW.part_bytes(_part(name)))
        with pytest.raises(LayoutError, match="part 'aux1' of unit 1 was never written, and 1 more parts"):
            donation.commit()
        assert not store.exists(keys_of(1))[0]
        donation.abort()
        assert not store.exists(keys_of(1))[0]

    def test_a_donation_ends_once(self, store: SnapshotStore) -> None:
        donation = store.reserve(key_of(1))
        assert donation is not None
        for part in ROW.parts:
            for unit in range(len(ROW.units)):
                donation.part(part.name, unit)
        self.check_kept(donation.commit())
        with pytest.raises(StoreError, match="the donation is over"):
            donation.commit()
        with pytest.raises(StoreError, match="the donation is over"):
            donation.part("ssm")

    def test_a_forgotten_donation_gives_its_memory_back(self, store: SnapshotStore) -> None:
        for number in range(3 * (self.donations or self.slots)):
            donation = store.reserve(key_of(number))
            assert donation is not None
            view = donation.part("ssm")
            del donation
            with pytest.raises(ValueError, match="released"):
                view[0] = 0
        assert not store.exists(keys_of(0))[0]

    def test_a_part_that_the_row_lacks_cannot_be_donated(self, store: SnapshotStore) -> None:
        donation = store.reserve(key_of(1))
        assert donation is not None
        with pytest.raises(LayoutError, match="'aux3': no such part; the row has ssm, conv, aux1, aux2"):
            donation.part("aux3")
        with pytest.raises(StoreError, match="shard 2"):
            donation.part("ssm", 2)
        donation.abort()

    def test_what_is_stored_needs_no_donation(self, store: SnapshotStore) -> None:
        self.put(store, 1)
        assert store.reserve(key_of(1)) is None

    def test_without_room_there_is_no_space(self, store: SnapshotStore) -> None:
        at_once = self.donations or 2 * self.slots
        donations = [store.reserve(key_of(number)) for number in range(at_once)]
        if self.donations is not None:
            with pytest.raises(NoSpace, match=r"none of \d+ ring slots is free"):
                store.reserve(key_of(99))
        for donation in donations:
            assert donation is not None
            donation.abort()
        self.put(store, 99)
        assert same(self.get(store, 99), state_of(99))

    def test_states_live_on_while_their_makers_go_on(self, store: SnapshotStore) -> None:
        """One state at 192, donated; three continuations from it write their own; the first is recycled."""
        self.donate(store, 192)
        for number in (288, 289, 290):
            state = self.get(store, 192)
            own = {name: part + np.uint8(number % 251) for name, part in state.items()}
            self.check_kept(store.put(key_of(number), own))
        store.drop(keys_of(288))
        for number in range(1000, 1000 + 2 * self.slots) if self.durable else ():
            self.put(store, number)
        assert same(self.get(store, 192), state_of(192))
        for number in (289, 290):
            expected = {name: part + np.uint8(number % 251) for name, part in state_of(192).items()}
            assert same(self.get(store, number), expected)

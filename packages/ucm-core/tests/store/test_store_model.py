"""A block store against the simplest model there is, a dict, under any sequence of calls."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stores import NAMESPACE, open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.geometry import Geometry
from ucm_core.store.names import object_names
from ucm_core.testing.block_store import UNTOUCHED, WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(2, 5000)
NUMBERS = st.lists(st.integers(0, 11), max_size=8)


class BlockStoreMachine(RuleBasedStateMachine):
    """The model: which numbers are stored in the ring's reach, which of them on the medium."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.on_medium: set[int] = set()
        self.open()

    def open(self) -> None:
        self.store = open_store(Path(self.directory.name), GEOMETRY, slots=5, threads=2)

    def path(self, number: int) -> Path:
        name = object_names(keys_of(number), "hx.u0-1.c0-1")[0].decode()
        return Path(self.directory.name) / NAMESPACE / "row" / name

    @rule(numbers=NUMBERS, broken=st.sets(st.integers(0, 7)), inline=st.booleans())
    def save(self, numbers: list[int], broken: set[int], inline: bool) -> None:
        source = FaultyBlocks(payloads_of(GEOMETRY, *numbers) if numbers else blank(GEOMETRY, 0), broken)
        ticket = self.store.save(keys_of(*numbers), source, gather_inline=inline)
        assert ticket.wait(WAIT_S)
        ticket.wait_durable(WAIT_S)
        firsts = {number: numbers.index(number) for number in numbers}
        for place, number in enumerate(numbers):
            fails = firsts[number] in broken and number not in self.on_medium
            assert ticket.object_results[place] == (ResultCode.INVALID if fails else ResultCode.OK)
            assert ticket.durable_results[place] == ticket.object_results[place]
        self.on_medium |= {number for number, first in firsts.items() if first not in broken}

    @rule(numbers=NUMBERS, broken=st.sets(st.integers(0, 7)))
    def load(self, numbers: list[int], broken: set[int]) -> None:
        out = blank(GEOMETRY, len(numbers))
        ticket = self.store.load(keys_of(*numbers), FaultyBlocks(out, broken))
        assert ticket.wait(WAIT_S)
        for place, number in enumerate(numbers):
            there = number in self.on_medium
            expected = (
                ResultCode.MISS if not there else ResultCode.INVALID if place in broken else ResultCode.OK
            )
            assert ticket.object_results[place] == expected
            right = payloads_of(GEOMETRY, number)[0] if expected == ResultCode.OK else UNTOUCHED
            assert (out[place] == right).all()

    @rule(numbers=NUMBERS)
    def lookup(self, numbers: list[int]) -> None:
        expected = [number in self.on_medium for number in numbers]
        assert self.store.lookup(keys_of(*numbers)).tolist() == expected
        assert self.store.lookup_prefix(keys_of(*numbers)) == [*expected, False].index(False)

    @rule(numbers=NUMBERS)
    def prefetch(self, numbers: list[int]) -> None:
        ticket = self.store.prefetch(keys_of(*numbers))
        assert ticket.wait(WAIT_S)
        for number, code in zip(numbers, ticket.object_results.tolist(), strict=True):
            assert code in (
                {ResultCode.OK, ResultCode.NO_SPACE}
                if number in self.on_medium
                else {ResultCode.MISS, ResultCode.NO_SPACE}
            )

    @rule(numbers=NUMBERS)
    def drop(self, numbers: list[int]) -> None:
        self.store.drop(keys_of(*numbers))
        self.on_medium -= set(numbers)

    @rule(number=st.integers(0, 11))
    def pin_and_touch(self, number: int) -> None:
        self.store.touch(keys_of(number))
        with self.store.pin(keys_of(number)) as pins:
            assert len(pins.keys) <= (number in self.on_medium)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.open()

    @rule(number=st.integers(0, 11), at=st.integers(0, 1 << 20))
    def damage_after_restart(self, number: int, at: int) -> None:
        """A flipped byte behind a closed store: a miss, healed by the next save."""
        self.store.close()
        if self.path(number).exists():
            data = bytearray(self.path(number).read_bytes())
            data[at % len(data)] ^= 0x40
            self.path(number).write_bytes(data)
        self.open()
        if number in self.on_medium:
            out = blank(GEOMETRY, 1)
            ticket = self.store.load(keys_of(number), BufferBlocks(out))
            assert ticket.wait(WAIT_S)
            assert ticket.object_results.tolist() == [ResultCode.CORRUPT]
            assert (out == UNTOUCHED).all()
            self.on_medium.discard(number)

    @invariant()
    def files_are_what_the_model_says(self) -> None:
        assert {number for number in range(12) if self.path(number).exists()} == self.on_medium

    @invariant()
    def books_balance(self) -> None:
        self.store.check_integrity()
        assert self.store.statistics().pending_writes == 0

    def teardown(self) -> None:
        self.store.close()
        ring = self.store.statistics().ring
        assert ring is not None
        assert ring.own_references == 0
        self.directory.cleanup()


TestBlockStoreModel = BlockStoreMachine.TestCase
TestBlockStoreModel.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_the_model_of_equality_can_fail() -> None:
    assert not np.array_equal(payloads_of(GEOMETRY, 1), payloads_of(GEOMETRY, 2))

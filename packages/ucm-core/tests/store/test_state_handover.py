"""C-44, to the letter: what was put is what is got, whatever anybody does with source, donation or result."""

from __future__ import annotations

import numpy as np
import pytest
from stores import open_store

from ucm_core.spec.keys import PrefixChain, object_keys, row_seed
from ucm_core.spec.table import Part, RowKind, SpecRow
from ucm_core.store.geometry import Geometry
from ucm_core.store.ring import Outcome
from ucm_core.store.snapshot import SnapshotStore

WAIT_S = 60.0
GRID = 96
ROW = SpecRow(
    "state",
    RowKind.SNAPSHOT,
    GRID,
    units=(0, 1),
    parts=(Part("conv", (7,), "uint8"), Part("ssm", (3, 500), "float32"), Part("aux", (4096,), "uint8")),
)
SEED = row_seed(b"namespace", ROW.name)
PROMPT = list(range(192))
CONTINUATIONS = [[1000 * request + step for step in range(GRID)] for request in (1, 2, 3)]


class Recurrence:
    """A double of a recurrent layer's memory: each token changes every byte, and the order counts."""

    def __init__(self, fill=0):
        self.parts = {
            part.name: np.full((len(ROW.units), ROW.part_bytes(part)), fill, dtype=np.uint8)
            for part in ROW.parts
        }

    def run(self, tokens):
        for token in tokens:
            mixed = np.uint8(token * 2654435761 >> 13 & 0xFF)
            for salt, part in enumerate(self.parts.values(), 1):
                places = np.arange(part.size).reshape(part.shape).astype(np.uint8) * np.uint8(salt)
                part[:] = part * np.uint8(5) + (places ^ mixed)
        return self

    def bytes(self):
        return b"".join(part.tobytes() for part in self.parts.values())


def key(tokens):
    chain = PrefixChain(grain_tokens=GRID)
    chain.extend(tokens)
    return object_keys(SEED, chain.digests[-1:])[0]


@pytest.fixture
def store(tmp_path):
    blocks = open_store(tmp_path, Geometry.of_row(ROW), slots=8)
    yield SnapshotStore(ROW, blocks)
    blocks.close()


def got(store, tokens):
    memory = Recurrence(fill=0xFF)
    ticket = store.get(key(tokens), memory.parts)
    assert ticket.wait(WAIT_S)
    assert ticket.ok
    return memory


def donate(store, memory, tokens):
    donation = store.reserve(key(tokens))
    views = [donation.part(name, unit) for name in memory.parts for unit in range(len(ROW.units))]
    rows = [row for part in memory.parts.values() for row in part]
    for view, row in zip(views, rows, strict=True):
        view[:] = row.tobytes()
    assert donation.commit().wait_durable(WAIT_S)
    return views


def slot_of(store, tokens):
    ring = store.blocks._tiers.ring
    claims = ring.pin(key(tokens)[None])
    assert claims.outcome[0] == Outcome.READY
    ring.release(claims.slots)
    return int(claims.slots[0])


def resume(store, continuation):
    """A request that goes on in the very memory that it was given, and keeps its own state at 288."""
    memory = got(store, PROMPT).run(continuation)
    assert store.put(key(PROMPT + continuation), memory.parts).wait_durable(WAIT_S)
    memory.run(range(50))


def test_one_state_three_continuations_and_a_donor_that_goes_on(store):
    donor = Recurrence().run(PROMPT)
    views = donate(store, donor, PROMPT)
    for step, view in zip(range(5), views, strict=False):
        with pytest.raises(ValueError, match="released"):
            view[step] = 1
    donor.run(range(5))
    for continuation in CONTINUATIONS:
        resume(store, continuation)

    first, slot = PROMPT + CONTINUATIONS[0], slot_of(store, PROMPT + CONTINUATIONS[0])
    assert store.blocks._tiers.ring.drop(key(first)[None])[0]
    assert store.put(key(list(range(GRID))), Recurrence().run([7]).parts).wait_durable(WAIT_S)
    assert slot_of(store, list(range(GRID))) == slot, "the first one's slot holds another state now"

    assert got(store, PROMPT).bytes() == Recurrence().run(PROMPT).bytes()
    ends = [got(store, PROMPT + continuation).bytes() for continuation in CONTINUATIONS]
    assert ends == [Recurrence().run(PROMPT + continuation).bytes() for continuation in CONTINUATIONS]
    assert len(set(ends)) == 3


def test_the_recurrence_tells_orders_and_prefixes_apart():
    runs = [[], [1], [2], [1, 2], [2, 1], PROMPT, PROMPT[:-1]]
    assert len({Recurrence().run(tokens).bytes() for tokens in runs}) == len(runs)


def test_the_memory_of_a_forgotten_donation_goes_back_with_its_last_array(tmp_path):
    blocks = open_store(tmp_path, Geometry.of_row(ROW), slots=8)
    donation = SnapshotStore(ROW, blocks).reserve(key(PROMPT))
    array = np.frombuffer(donation.part("ssm"), dtype=np.uint8)
    del donation
    array[:] = 7  # it is still the donor's
    assert blocks.statistics().ring.loading == 1
    del array
    ring = blocks.statistics().ring
    assert (ring.loading, ring.pinned) == (0, 0)
    blocks.close()


@pytest.mark.parametrize("slots", [8, 0])
def test_an_array_of_donated_memory_outlives_donation_and_store(tmp_path, slots):
    blocks = open_store(tmp_path, Geometry.of_row(ROW), slots=slots)
    donation = SnapshotStore(ROW, blocks).reserve(key(PROMPT))
    array = np.frombuffer(donation.part("ssm"), dtype=np.uint8)
    blocks.close()
    del blocks, donation
    array[:] = 7
    assert (array == 7).all()

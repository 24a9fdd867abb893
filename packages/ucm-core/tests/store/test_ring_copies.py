"""Whole batches between engine memory and a ring, against the same work done in steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from rings import PAYLOAD_BYTES, keys, parent_keys, private_ring
from stores import open_store

from ucm_core.errors import LayoutError
from ucm_core.flow.copy import BlockSource, BlockTarget, BufferBlocks, EngineBlocks, Strides, strides_of
from ucm_core.flow.ticket import Level, ResultCode, Ticket
from ucm_core.ops import metrics
from ucm_core.store.geometry import Geometry
from ucm_core.store.ring import Outcome, Ring
from ucm_core.testing.block_store import UNTOUCHED, WAIT_S, FaultyBlocks, blank, keys_of, payloads_of

GEOMETRY = Geometry(2, 1500)
UNITS = (1, PAYLOAD_BYTES)


def some_payloads(count: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(count).integers(0, 256, (count, 1, PAYLOAD_BYTES), dtype=np.uint8)


def whole(blocks: BlockSource | BlockTarget) -> Strides:
    strides = strides_of(blocks, None, written=False)
    assert strides is not None
    return strides


def filled(ring: Ring, *names: object) -> npt.NDArray[np.uint8]:
    """The payloads that ``names`` have in the ring from now on; nothing is referenced."""
    payloads = some_payloads(len(names))
    claims = ring.gather(keys(*names), whole(BufferBlocks(payloads)), units=UNITS)
    assert (claims.outcome == Outcome.OWNER).all()
    ring.release(claims.slots)
    return payloads


def test_what_was_gathered_is_scattered_in_any_order_and_more_than_once() -> None:
    ring = private_ring()
    payloads = filled(ring, *"abc")
    out = np.zeros((4, 1, PAYLOAD_BYTES), dtype=np.uint8)
    assert ring.scatter(keys(*"cabc"), whole(BufferBlocks(out)))
    assert np.array_equal(out, payloads[[2, 0, 1, 2]])
    assert ring.statistics().pinned == 0


@pytest.mark.parametrize("names", ["abx", "xab", "x"])
def test_a_batch_of_which_one_is_missing_is_not_touched(names: str) -> None:
    ring = private_ring()
    filled(ring, *"ab")
    out = np.zeros((len(names), 1, PAYLOAD_BYTES), dtype=np.uint8)
    assert not ring.scatter(keys(*names), whole(BufferBlocks(out)))
    assert not out.any()
    assert ring.statistics().pinned == 0


def test_a_batch_of_which_one_is_being_filled_is_not_touched() -> None:
    ring = private_ring()
    filled(ring, "a")
    ring.claim(keys("b"))
    out = np.zeros((2, 1, PAYLOAD_BYTES), dtype=np.uint8)
    assert not ring.scatter(keys(*"ab"), whole(BufferBlocks(out)))
    assert not out.any()
    assert ring.statistics().own_references == 1


def test_pieces_of_no_key_or_past_a_payload_are_refused_before_a_byte_moves() -> None:
    ring = private_ring()
    filled(ring, "a")
    with pytest.raises(ValueError, match=r"payload_index 1 is not in \[0, 1\)"):
        ring.scatter(keys("a"), whole(BufferBlocks(some_payloads(2))))
    long = BufferBlocks(np.zeros((1, 2, PAYLOAD_BYTES), dtype=np.uint8))
    with pytest.raises(ValueError, match="part 1 ends at byte 8192 of a payload of 4096 bytes"):
        ring.gather(keys("b"), whole(long), units=UNITS)
    with pytest.raises(ValueError, match="1 units of 4097 bytes do not fit a payload of 4096"):
        ring.gather(keys("b"), whole(BufferBlocks(some_payloads(1))), units=(1, 4097))
    with pytest.raises(ValueError, match="1 keys and 2 parents"):
        ring.gather(keys("b"), whole(BufferBlocks(some_payloads(1))), parents=keys("c", "d"), units=UNITS)
    assert not ring.lookup(keys("b"))[0]
    assert ring.statistics().own_references == 0


def test_only_what_is_ours_to_fill_is_filled() -> None:
    ring = private_ring(slots=3)
    before = filled(ring, "a")
    loading = ring.claim(keys("b"))
    claims = ring.gather(keys(*"abcd"), whole(BufferBlocks(some_payloads(4))), units=UNITS)
    assert claims.outcome.tolist() == [Outcome.READY, Outcome.LOADING, Outcome.OWNER, Outcome.NO_SPACE]
    assert ring.lookup(keys(*"abcd")).tolist() == [1, 0, 1, 0]
    out = np.zeros((2, 1, PAYLOAD_BYTES), dtype=np.uint8)
    assert ring.scatter(keys(*"ac"), whole(BufferBlocks(out)))
    assert np.array_equal(out, np.stack([before[0], some_payloads(4)[2]]))
    ring.abort(loading.slots)


def test_padding_is_zero_whatever_the_slot_held_before() -> None:
    ring = private_ring(slots=1, payload_bytes=2 * PAYLOAD_BYTES)
    dirty = np.full((1, 2, PAYLOAD_BYTES), 255, dtype=np.uint8)
    ring.release(ring.gather(keys("a"), whole(BufferBlocks(dirty)), units=(2, PAYLOAD_BYTES)).slots)
    part = BufferBlocks(np.full((1, 2, 1500), 7, dtype=np.uint8))
    ring.release(ring.gather(keys("b"), whole(part), units=(2, 1500)).slots)
    out = np.zeros((1, 2, PAYLOAD_BYTES), dtype=np.uint8)
    assert ring.scatter(keys("b"), whole(BufferBlocks(out)))
    assert (out[:, :, :1500] == 7).all()
    assert not out[:, :, 1500:].any()


def test_a_prefix_keeps_its_head_also_when_it_is_gathered() -> None:
    ring = private_ring(slots=2)
    for names in ("ab", "c"):
        parents = parent_keys(names, {"b": "a", "c": "b"})
        source = BufferBlocks(some_payloads(len(names)))
        claims = ring.gather(keys(*names), whole(source), parents=parents, units=UNITS)
        ring.release(claims.slots[claims.slots >= 0])
    assert ring.lookup(keys(*"abc")).tolist() == [1, 1, 0]


class MoreThanACopy(BufferBlocks):
    """A double of engine memory whose class may do more than copy."""


def test_only_known_classes_are_copied_for() -> None:
    buffers = some_payloads(2)
    for blocks in (MoreThanACopy(buffers), FaultyBlocks(buffers)):
        assert strides_of(blocks, None, written=True) is None
    assert strides_of(None, None, written=True) is None
    assert strides_of(EngineBlocks([], []), None, written=True) == []


def test_a_target_that_cannot_be_written_is_refused() -> None:
    buffers = some_payloads(1)
    buffers.flags.writeable = False
    assert strides_of(BufferBlocks(buffers), None, written=False)
    with pytest.raises(LayoutError, match="read-only"):
        strides_of(BufferBlocks(buffers), None, written=True)


@pytest.mark.parametrize("count", [1, 4096, 4097])
def test_all_objects_are_the_objects_in_order(count: int) -> None:
    blocks = BufferBlocks(np.zeros((count, 1, 8), dtype=np.uint8))
    ((_, every),) = whole(blocks)
    ((_, named),) = strides_of(blocks, np.arange(count), written=True) or []
    assert np.array_equal(every, named)


def test_hits_are_settled_and_counted_before_load_returns(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    assert store.save(keys_of(1, 2), BufferBlocks(payloads_of(GEOMETRY, 1, 2))).wait_durable(WAIT_S)
    counter = metrics.OBJECTS_LOADED.labels(row="row", tier="ring")
    before = counter._value.get()
    ticket = store.load(keys_of(2, 1), BufferBlocks(out := blank(GEOMETRY, 2)))
    assert ticket.done
    assert ticket.ok
    assert ticket.level is Level.IN_RING
    assert np.array_equal(out, payloads_of(GEOMETRY, 2, 1))
    assert counter._value.get() == before + 2
    store.close()


def test_hits_of_a_computation_that_is_over_are_not_delivered(tmp_path: Path) -> None:
    store = open_store(tmp_path, GEOMETRY)
    assert store.save(keys_of(1), BufferBlocks(payloads_of(GEOMETRY, 1))).wait_durable(WAIT_S)
    store.revoke()
    ticket = store.load(keys_of(1), BufferBlocks(out := blank(GEOMETRY, 1)))
    assert ticket.object_results.tolist() == [ResultCode.CANCELLED]
    assert (out == UNTOUCHED).all()
    store.close()


@pytest.mark.parametrize(
    ("code", "level"), [(ResultCode.OK, Level.IN_RING), (ResultCode.CANCELLED, Level.SUBMITTED)]
)
def test_a_load_that_is_over_has_one_code_for_everything(code: ResultCode, level: Level) -> None:
    ticket = Ticket.of_load(2, 3, code=code)
    other = Ticket(2, 3, durable=False)
    other.settle([0, 1], code)
    assert ticket.done
    assert ticket.level is level is other.level
    assert np.array_equal(ticket.results, other.results)
    assert np.array_equal(ticket.durable_results, other.durable_results)

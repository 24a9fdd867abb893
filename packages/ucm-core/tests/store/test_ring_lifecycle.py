"""Regions that are lost, replaced or raced for, and slots that are used anew while somebody reads them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import numpy as np
import pytest
from rings import (
    DIGEST,
    PAYLOAD_BYTES,
    RingProcess,
    expected_payload,
    key,
    keys,
    payload,
    private_ring,
    processes,
    put,
    region_path,
    shared_ring,
    shows,
)

from ucm_core.errors import ClosedError, StoreError
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.store import stack
from ucm_core.store.ring import Outcome, Ring, RingOptions

TABLE = SpecTable((SpecRow("full", RowKind.CHAIN, 16, (0,), (Part("k", (1, 8), "uint8"),)),), 16)


# -- case C-61


def test_many_who_open_the_name_of_a_killed_process_meet_in_one_ring(name: str) -> None:
    with processes(name, 1) as (victim,):
        victim.call("put", "old")
    with processes(name, 4) as together:
        together[0].call("put", "new")
        assert [one.call("shows", "new") for one in together] == [True] * 4
        assert [one.call("shows", "old") for one in together] == [False] * 4
        assert together[0].call("statistics").participants == 4


def test_the_death_of_one_who_makes_a_region_leaves_the_name_to_the_next(name: str) -> None:
    victim = RingProcess(name, dies_at="fallocate")
    victim.process.join()
    assert victim.process.exitcode == -signal.SIGSYS
    assert region_path(name).exists()
    with shared_ring(name) as ring:
        put(ring, "a")
        assert shows(ring, "a")


def test_several_schedulers_on_one_ring_read_each_block_once(name: str) -> None:
    wanted = keys(*range(8))
    with processes(name, 4) as schedulers:
        for scheduler in schedulers:
            scheduler.start("claim", wanted)
        outcomes = np.array([scheduler.result().outcome for scheduler in schedulers])
        assert ((outcomes == Outcome.OWNER).sum(axis=0) == 1).all()
        assert ((outcomes == Outcome.LOADING).sum(axis=0) == 3).all()


def test_a_process_that_finds_64_others_in_a_ring_uses_one_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (plan,) = stack.plan_rows(TABLE, 1 << 20)["full"]
    name = stack.ring_name(tmp_path, "ns", row="full", segment=plan.segment)
    crowd = [stack._open_ring(name, plan, RingOptions()) for _ in range(64)]
    late = stack._open_ring(name, plan, RingOptions())
    put(crowd[0], "a")
    assert shows(crowd[63], "a")
    assert not late.lookup(keys("a")).any()
    put(late, "b")
    assert shows(late, "b")
    (said,) = caplog.messages
    assert "row full: no shared ring" in said
    assert "all 64 participants of the ring are alive" in said
    for ring in (late, *crowd):
        ring.close()
    assert not region_path(name).exists()


# -- case C-62


def test_a_replaced_region_is_read_to_the_end_and_left_alone(name: str) -> None:
    wanted = expected_payload(key("a"))
    with shared_ring(name) as server:
        put(server, "a")
        worker = shared_ring(name)
        held = worker.pin(keys("a"))
        half = payload(worker, held.slots[0])[: PAYLOAD_BYTES // 2].copy()
    region_path(name).unlink()  # as an operator would who starts anew
    with shared_ring(name, slots=4) as successor:
        put(successor, "b")
        rest = payload(worker, held.slots[0])[PAYLOAD_BYTES // 2 :]
        assert (np.concatenate((half, rest)) == wanted).all()
        assert not worker.lookup(keys("b")).any()
        worker.close()
        assert region_path(name).exists()
        with shared_ring(name) as again:
            assert shows(again, "b")
            assert not again.lookup(keys("a")).any()


def test_the_death_of_the_maker_does_not_end_the_ring_for_those_who_read(name: str) -> None:
    with processes(name, 1) as (server,):
        server.call("put", "a")
        with shared_ring(name) as worker:
            held = worker.pin(keys("a"))
            server.kill()
            with shared_ring(name) as restarted:
                put(restarted, "b")
                assert (payload(worker, held.slots[0]) == expected_payload(key("a"))).all()
                assert shows(worker, "b")


def test_a_copy_past_the_end_of_its_ring_neither_crashes_nor_reaches_others(name: str) -> None:
    with shared_ring(name) as stays:
        leaves = shared_ring(name)
        put(leaves, "a")
        slot = leaves.pin(keys("a")).slots[0]
        memory = payload(leaves, slot)
        leaves.close()
        memory[:] = 0xEE  # into private memory by now
        assert shows(stays, "a")
        with pytest.raises(ClosedError):
            leaves.pin(keys("a"))


# -- case C-65


def test_a_slot_is_not_used_anew_while_it_is_read() -> None:
    wanted = expected_payload(key("a"))
    with private_ring(1) as ring:
        put(ring, "a")
        reader = ring.pin(keys("a"))
        pieces = np.split(payload(ring, reader.slots[0]), 8)
        copied = [piece.copy() for piece in pieces[:2]]
        assert ring.claim(keys("b")).outcome.tolist() == [Outcome.NO_SPACE]
        copied += [piece.copy() for piece in pieces[2:]]
        assert (np.concatenate(copied) == wanted).all()


def test_a_stay_that_ended_is_told_from_a_later_one_of_the_same_key() -> None:
    with private_ring(1) as ring:
        put(ring, "a")
        reader = ring.pin(keys("a"))
        ring.release(reader.slots)  # the lease ends after piece 2
        put(ring, "b")
        put(ring, "a")  # after piece 4: the same slot, the same key, the same bytes
        again = ring.pin(keys("a"))
        assert again.slots.tolist() == reader.slots.tolist()
        assert int(again.version[0]) == int(reader.version[0]) + 2
        waited = ring.wait(reader.slots, reader.version, timeout_s=0)
        assert waited.tolist() == [Outcome.FAILED]


# -- leaving


def test_no_call_waits_for_one_who_leaves(name: str) -> None:
    ring = shared_ring(name)
    put(ring, "a")
    refused: list[type] = []

    def look() -> None:
        try:
            while True:
                ring.lookup(keys("a"))
        except ClosedError as error:
            refused.append(type(error))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    ring.close()
    for thread in threads:
        thread.join()
    assert refused == [ClosedError] * 4


def test_another_version_beside_a_living_ring_changes_nothing_there(name: str) -> None:
    with shared_ring(name) as living:
        put(living, "a")
        with region_path(name).open("r+b") as file:
            file.seek(8)
            file.write((1).to_bytes(4, "little"))
        with pytest.raises(StoreError, match="header version 1, not"):
            Ring.open(name, slots=8, payload_bytes=PAYLOAD_BYTES, geometry_digest=DIGEST)
        assert shows(living, "a")
        assert living.statistics().participants == 1

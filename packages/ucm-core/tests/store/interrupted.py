"""A store whose calls a signal's handler ends anywhere: ``python interrupted.py DIRECTORY TURNS``.

The timer's signal comes a little later each time, so that it meets every part of a call. Afterwards nothing
is counted, nothing is held, and every byte is right.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from stores import open_store

from ucm_core.errors import NoSpace
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_store import blank, keys_of, payloads_of

GEOMETRY = Geometry(2, 4096)
SLOTS = 8
STEP_S = 7e-6
LATEST = 150
WAIT_S = 20.0


class Interruption(BaseException):
    """What the handler raises."""


def interrupt(*_signal: object) -> None:
    raise Interruption


def save(store: BlockStore, turn: int) -> None:
    numbers = range(turn % 50, turn % 50 + 6)
    store.save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers))).wait_durable(WAIT_S)


def save_later(store: BlockStore, turn: int) -> None:
    numbers = range(turn % 50, turn % 50 + 6)
    source = BufferBlocks(payloads_of(GEOMETRY, *numbers))
    store.save(keys_of(*numbers), source, gather_inline=False).wait(WAIT_S)


def load(store: BlockStore, turn: int) -> None:
    numbers = range(turn % 50, turn % 50 + 4)
    out = blank(GEOMETRY, len(numbers))
    ticket = store.load(keys_of(*numbers), BufferBlocks(out))
    ticket.wait(WAIT_S)
    for number, code, got in zip(numbers, ticket.object_results, out, strict=True):
        assert code != ResultCode.OK or np.array_equal(got, payloads_of(GEOMETRY, number)[0])


def look(store: BlockStore, turn: int) -> None:
    keys = keys_of(*range(turn % 50, turn % 50 + 8))
    store.lookup(keys)
    store.touch(keys)
    with store.pin(keys[:2]):
        store.in_flight(keys)
    store.drop(keys[:1])


def donate(store: BlockStore, turn: int) -> None:
    with suppress(NoSpace):
        donation = store.reserve(keys_of(turn % 50)[0])
        if donation is not None:
            for shard, content in enumerate(payloads_of(GEOMETRY, turn % 50)[0]):
                donation.view(shard)[:] = content.tobytes()
            donation.commit().wait_durable(WAIT_S)


def load_units(store: BlockStore, turn: int) -> None:
    numbers = range(turn % 50, turn % 50 + 4)
    out = blank(GEOMETRY, len(numbers))
    handle = store.begin_load(keys_of(*numbers), BufferBlocks(out))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        handle.submit(slice(0, 1))
        handle.ticket.wait(WAIT_S, shard=0)
    finally:
        handle.cancel()
        assert handle.ticket.wait(WAIT_S)
    there = (handle.ticket.results == ResultCode.OK)[..., None]
    assert not ((out != payloads_of(GEOMETRY, *numbers)) & there).any()


def save_units(store: BlockStore, turn: int) -> None:
    numbers = range(turn % 50, turn % 50 + 6)
    handle = store.begin_save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers)))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0)
        handle.submit(slice(0, 1 + turn % 2))
        handle.seal()
        handle.ticket.wait(WAIT_S)
    finally:
        handle.abandon()


CALLS = (save, load, look, save_later, donate, load_units, save_units)


def is_ended(call: Callable[[BlockStore, int], None], store: BlockStore, turn: int) -> bool:
    """Whether the signal came before the call was over."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, STEP_S * (1 + turn // len(CALLS) % LATEST))
            call(store, turn)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Interruption:
        return True
    return False


def check(store: BlockStore, what: str) -> None:
    assert store._work.wait_idle(WAIT_S), f"{what}: {store._work.count} pieces of work are left"
    assert store._writer.wait_idle(WAIT_S), f"{what}: {store._writer.pending} writes are left"
    ring = store._tiers.ring.statistics()
    assert (ring.own_references, ring.pinned, ring.loading) == (0, 0, 0), f"{what}: {ring}"
    statistics = store.statistics()
    assert (statistics.working, statistics.pins) == (0, 0), f"{what}: {statistics}"


def main(directory: Path, turns: int) -> None:
    signal.signal(signal.SIGALRM, interrupt)
    limits = StoreLimits(save_wait_s=1.0, load_wait_s=5.0)
    store = open_store(directory, GEOMETRY, slots=SLOTS, limits=limits)
    ended = 0
    for turn in range(turns):
        call = CALLS[turn % len(CALLS)]
        ended += is_ended(call, store, turn)
        check(store, f"{call.__name__} in turn {turn}")
    numbers = range(60)
    keys, blocks = keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers))
    assert store.save(keys, blocks).wait_durable(WAIT_S), "the store is not usable any more"
    out = blank(GEOMETRY, len(numbers))
    ticket = store.load(keys, BufferBlocks(out))
    assert ticket.wait(WAIT_S), "a load hangs"
    assert ticket.ok, ticket.object_results
    assert np.array_equal(out, payloads_of(GEOMETRY, *numbers)), "wrong bytes"
    report = store.close(WAIT_S)
    assert not report.unfinished, report
    sys.stdout.write(f"{ended} calls were ended, {threading.active_count()} threads\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

"""What a process does while it is struck.

Every payload follows from its key, so a wrong byte shows wherever it comes from.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from shim import FOR_EVER, Action, Strike
from stores import NAMESPACE, open_store

from ucm_core.errors import NoSpace
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store import region
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.ring import Claims, Ring
from ucm_core.store.root import CacheRoot
from ucm_core.store.tiers import StoreLimits
from ucm_core.testing.block_store import UNTOUCHED, blank, keys_of, payloads_of

GEOMETRY = Geometry(3, 4096)
SLOTS = 12
OLD = tuple(range(5))
"""Numbers of objects that are on the medium before anything is struck."""
BASE = bytes(32)
"""The identity whose generation is counted."""
WAIT_S = 120.0
FRESH = 16
"""Objects of its own that a struck process may touch."""


@dataclass(frozen=True, slots=True)
class Place:
    """What the processes share."""

    root: Path
    ring: str

    @property
    def region(self) -> Path:
        """The ring's file."""
        return region.DIRECTORY / f"ucm-{os.geteuid()}-{self.ring}"


def fresh(turn: int, count: int = FRESH) -> tuple[int, ...]:
    """Numbers that only ``turn`` (from 1 on) uses, in a folder that hardly any other turn uses."""
    return tuple((turn % 4096 << 52) + (turn << 8) + i for i in range(count))


class Actor:
    """The process that is struck; ``say`` tells the parent what it was promised."""

    def __init__(self, place: Place, turn: int, say: Callable[..., None]) -> None:
        self.place, self.say = place, say
        self.mine = fresh(turn)
        self.store: BlockStore
        self.spare = fresh(turn, FRESH + 2)[-1]

    def open(self, *, capacity_objects: int | None = None, uring: bool = False, **limits: Any) -> None:
        """Open the store."""
        capacity = None if capacity_objects is None else capacity_objects * GEOMETRY.object_bytes
        self.store = open_store(
            self.place.root,
            GEOMETRY,
            slots=SLOTS,
            ring_name=self.place.ring,
            capacity_bytes=capacity,
            limits=StoreLimits(**{"save_wait_s": 5.0, "load_wait_s": 5.0, **limits}),
            uring=uring,
        )

    @property
    def root(self) -> CacheRoot:
        """The cache directory."""
        return self.store._tiers.files._root

    def close(self) -> None:
        """Close it, in bounded time."""
        self.store.close(WAIT_S)
        self.store._tiers.pool.close(WAIT_S)
        self.root.close()

    def save(self, *numbers: int) -> list[int]:
        """Save and wait; says what is promised."""
        ticket = self.store.save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers)))
        assert ticket.wait(WAIT_S), "a save hangs"
        self._promise("ring", numbers, ticket.object_results)
        self.await_durable(ticket, *numbers)
        return [int(code) for code in ticket.object_results]

    def await_durable(self, ticket: Ticket, *numbers: int) -> None:
        """Wait for the medium; says what is promised."""
        ticket.wait_durable(WAIT_S)
        results = ticket.durable_results.reshape(len(numbers), -1)
        assert not (results == ResultCode.PENDING).any(), "a write hangs"
        self._promise("durable", numbers, results.max(axis=1))

    def load(self, *numbers: int) -> list[int]:
        """Load and wait; what is OK has its own bytes, what failed was not written."""
        out = blank(GEOMETRY, len(numbers))
        ticket = self.store.load(keys_of(*numbers), BufferBlocks(out))
        assert ticket.wait(WAIT_S), "a load hangs"
        codes = [int(code) for code in ticket.object_results]
        for number, code, got in zip(numbers, codes, out, strict=True):
            right = payloads_of(GEOMETRY, number)[0]
            same = np.array_equal(got, right) if code == ResultCode.OK else bool((got == UNTOUCHED).all())
            assert same, f"object {number} came as {ResultCode(code).name} with wrong bytes"
        return codes

    def save_units(self, numbers: tuple[int, ...], shards: Iterable[int]) -> None:
        """Save unit by unit and wait; says what is promised."""
        save = self.store.begin_save(keys_of(*numbers), BufferBlocks(payloads_of(GEOMETRY, *numbers)))
        for shard in shards:
            save.submit(slice(shard, shard + 1))
        save.seal()
        assert save.ticket.wait(WAIT_S), "a save by units hangs"
        self._promise("ring", numbers, save.ticket.object_results)
        self.await_durable(save.ticket, *numbers)

    def load_units(self, numbers: tuple[int, ...], shards: Iterable[int]) -> None:
        """Load these units, give the others up; what is OK has its own bytes, what is not was not written."""
        out = blank(GEOMETRY, len(numbers))
        load = self.store.begin_load(keys_of(*numbers), BufferBlocks(out))
        for shard in shards:
            load.submit(slice(shard, shard + 1), urgency=shard)
            assert load.ticket.wait(WAIT_S, shard=shard), "a unit hangs"
        load.cancel()
        assert load.ticket.wait(WAIT_S), "a cancelled load hangs"
        there = (load.ticket.results == ResultCode.OK)[..., None]
        right = np.where(there, payloads_of(GEOMETRY, *numbers), np.uint8(UNTOUCHED))
        assert np.array_equal(out, right), "a unit came with wrong bytes"

    def check_use(self) -> None:
        """The store works."""
        if self.root.available:
            assert set(self.save(self.spare) + self.load(self.spare)) == {ResultCode.OK}, (
                "not usable any more"
            )
            self.say("drops", self.spare)
            self.store.drop(keys_of(self.spare))

    def _promise(self, what: str, numbers: tuple[int, ...], codes: Any) -> None:
        assert {int(code) for code in codes} <= set(ResultCode) - {ResultCode.PENDING}
        self.say(what, *(n for n, code in zip(numbers, codes, strict=True) if code == ResultCode.OK))


# -- what the struck process does


def save(actor: Actor) -> None:
    """New objects, then some of them again."""
    actor.open()
    actor.save(*actor.mine[:3])
    actor.save(*actor.mine[1:4])


def both(actor: Actor) -> None:
    """There and back, past the ring."""
    actor.open()
    actor.save(*actor.mine[:2])
    actor.store._tiers.ring.drop(keys_of(*actor.mine[:2]))
    actor.load(*actor.mine[:2], *OLD[:2])


def uring(actor: Actor) -> None:
    """There and back, many at once; old ones too."""
    actor.open(uring=True)
    actor.save(*actor.mine[:6])
    actor.store._tiers.ring.drop(keys_of(*actor.mine[:6]))
    actor.load(*actor.mine[:6], *OLD)


def save_synced(actor: Actor) -> None:
    """With the device flushed."""
    actor.open(sync=True)
    actor.save(*actor.mine[:2])


def load(actor: Actor) -> None:
    """From the medium, one that is not there, then from the ring."""
    actor.open()
    actor.say("loaded", *actor.load(*OLD, actor.mine[0]))
    actor.load(*OLD)


def prefetch(actor: Actor) -> None:
    """Into the ring, then out of it."""
    actor.open()
    assert actor.store.prefetch(keys_of(*OLD)).wait(WAIT_S)
    actor.load(*OLD[:2])


def donate(actor: Actor) -> None:
    """One slot is filled in place and committed, one given up."""
    actor.open()
    with suppress(NoSpace):
        number = actor.mine[0]
        donation = actor.store.reserve(keys_of(number)[0])
        if donation is not None:
            for shard, content in enumerate(payloads_of(GEOMETRY, number)[0]):
                donation.view(shard)[:] = content.tobytes()
            actor.await_durable(donation.commit(), number)
        other = actor.store.reserve(keys_of(actor.mine[1])[0])
        if other is not None:
            other.view(0)[:] = bytes(GEOMETRY.shard_bytes)
            other.abort()


def drop(actor: Actor) -> None:
    """What was just saved, and what was there."""
    actor.open()
    actor.save(*actor.mine[:2])
    gone = (actor.mine[0], OLD[0])
    actor.say("drops", *gone)
    actor.store.drop(keys_of(*gone))
    actor.load(*gone, OLD[1])


def evict(actor: Actor) -> None:
    """More than the ring holds, while something is in use."""
    actor.open()
    with actor.store.pin(keys_of(*OLD)):
        for begin in range(0, 16, 8):
            actor.save(*actor.mine[begin : begin + 8])
    actor.load(*OLD, actor.mine[0])


def wait(actor: Actor) -> None:
    """A load waits in vain for somebody who fills the slot."""
    actor.open(load_wait_s=0.02)
    with suppress(NoSpace):
        donation = actor.store.reserve(keys_of(actor.mine[0])[0])
        actor.load(actor.mine[0], OLD[0])
        if donation is not None:
            donation.abort()


def shards(actor: Actor) -> None:
    """Slots become full shard by shard, while somebody waits in vain."""
    actor.open()
    ring, numbers = actor.store._tiers.ring, actor.mine[:2]
    claims = ring.claim(keys_of(*numbers))
    ring.wait(claims.slots, claims.version, timeout_s=0.01, shard=0)
    _fill(ring, claims, numbers)
    for shard in range(ring.shards):
        ring.publish_shards(claims.slots, claims.version, begin=shard, end=shard + 1)
    ring.release(claims.slots)
    actor.load(*numbers)


def chain(actor: Actor) -> None:
    """A batch that cannot be admitted whole puts its victims back; then blocks that follow each other."""
    actor.open()
    actor.save(*actor.mine[:7])
    ring = actor.store._tiers.ring
    with actor.store.pin(keys_of(*OLD)):
        refused = ring.claim(keys_of(*actor.mine[7:]), whole=True)
        ring.release(refused.slots[refused.slots >= 0])
    numbers = actor.mine[8:11]
    keys = keys_of(*numbers)
    claims = ring.claim(keys, np.concatenate([np.zeros_like(keys[:1]), keys[:-1]]))
    _fill(ring, claims, numbers)
    ring.publish(claims.slots)
    ring.release(claims.slots)
    actor.load(*numbers)


def unit_load(actor: Actor) -> None:
    """Unit by unit: from the medium, one that is not there; from the ring, and given up in between."""
    actor.open()
    actor.load_units((*OLD, actor.mine[0]), range(GEOMETRY.shards))
    actor.load_units(OLD, (2, 0))
    actor.load(*OLD)


def unit_save(actor: Actor) -> None:
    """Unit by unit, one of them again; more than the ring holds; one that is given up."""
    actor.open()
    actor.save_units(actor.mine[:3], (0, 1, 2, 0))
    with actor.store.pin(keys_of(*OLD)):
        actor.save_units(actor.mine[3:15], range(GEOMETRY.shards))
    left = actor.store.begin_save(
        keys_of(actor.mine[15]), BufferBlocks(payloads_of(GEOMETRY, actor.mine[15]))
    )
    left.submit(slice(0, 1))
    left.abandon()
    assert left.ticket.wait(WAIT_S), "an abandoned save hangs"
    actor.load_units((*actor.mine[:4], actor.mine[15]), (0, 1, 2))


def _fill(ring: Ring, claims: Claims, numbers: tuple[int, ...]) -> None:
    for address, content in zip(ring.addresses(claims.slots), payloads_of(GEOMETRY, *numbers), strict=True):
        ctypes.memmove(int(address), content.ctypes.data, content.nbytes)


def collect(actor: Actor) -> None:
    """More than the bound allows: what is old must go, again and again."""
    actor.open(capacity_objects=len(OLD) + 4)
    actor.say("drops", *OLD)
    for begin in range(0, 6, 2):
        actor.save(*actor.mine[begin : begin + 2])


def empty(actor: Actor) -> None:
    """A full ring, emptied in the order in which it was filled: the index closes its gaps."""
    actor.open()
    everything = actor.mine[:SLOTS]
    actor.save(*everything)
    actor.say("drops", *everything)
    actor.store.drop(keys_of(*everything))


def touch(actor: Actor) -> None:
    """In the ring and on the medium."""
    actor.open()
    actor.save(actor.mine[0])
    actor.store.touch(keys_of(*OLD, *actor.mine[:2]))


def books(actor: Actor) -> None:
    """The manifest of a namespace and the generation of an identity."""
    actor.open()
    actor.root.namespace(_Identity())
    actor.say("generation", actor.root.raise_generation(BASE))


class _Identity:
    namespace = NAMESPACE

    def manifest(self) -> dict[str, str]:
        return {"model": "none"}


@dataclass(frozen=True, slots=True)
class Scenario:
    """A script and its circumstances."""

    script: Callable[[Actor], None]
    alone: bool = False
    """Nobody else has the ring open, and the root is new."""
    before: tuple[Callable[[Actor], None], Strike] | None = None
    """Another process does this first and dies there; nobody cleans up."""
    strikes: tuple[Strike, ...] = ()
    """Holds in any case."""
    crowded: bool = False
    """The old objects are in the ring, and what is only there may go."""
    collects: bool = False
    """The bound makes what is oldest go."""
    stirred: bool = False
    """The peer loads and saves all the while, the same objects too."""
    steps: tuple[str, ...] = field(default=("",))
    """Beginnings of the steps worth a strike here, where the rest is another scenario's."""


SCENARIOS = {
    "save": Scenario(save),
    "save_synced": Scenario(save_synced, steps=("files.", "call.")),
    "save_refused": Scenario(
        save, strikes=(Strike("call.rename", 1, Action.FAIL, errno.EIO),), steps=("files.", "call.")
    ),
    "uring": Scenario(uring, steps=("files.",)),
    "load": Scenario(load),
    "prefetch": Scenario(prefetch),
    "donate": Scenario(donate),
    "drop": Scenario(drop),
    "evict": Scenario(evict, crowded=True),
    "empty": Scenario(empty, steps=("ring.index.", "ring.evict.", "call.unlink")),
    "crowd": Scenario(evict, crowded=True, stirred=True, steps=("ring.",)),
    "wait": Scenario(wait),
    "chain": Scenario(chain, crowded=True, steps=("ring.",)),
    "shards": Scenario(shards, steps=("ring.",)),
    "unit_load": Scenario(unit_load),
    "unit_save": Scenario(unit_save, crowded=True),
    "collect": Scenario(collect, collects=True),
    "touch": Scenario(touch),
    "books": Scenario(books),
    "create": Scenario(save, alone=True),
    "repair": Scenario(save, before=(evict, Strike("ring.evict.erased"))),
    "inherit": Scenario(load, before=(save, Strike("ring.claim.inserted", 2))),
}


_SLOW = Strike("call.rename", 1, Action.DELAY, 20, FOR_EVER)
_NO_DIRECT = tuple(
    Strike(step, 2, Action.FAIL, errno.EINVAL, FOR_EVER) for step in ("call.read_direct", "call.write_direct")
)
NETWORK = {
    "network_open": Scenario(
        both,
        crowded=True,
        strikes=(Strike("call.open_direct", 1, Action.FAIL, errno.EINVAL, FOR_EVER), _SLOW),
    ),
    "network_transfer": Scenario(both, crowded=True, strikes=(*_NO_DIRECT, _SLOW)),
}
"""As a network file system does it: renames are slow, direct access is refused at open or (behind a probe)
at the first transfer."""
ALL = {**SCENARIOS, **NETWORK}

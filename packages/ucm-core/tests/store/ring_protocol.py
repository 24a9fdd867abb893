"""The protocol of slots and participants as programs for the explorer, line by line as ring.hpp has it.

What a policy of eviction would decide is left open: every idle slot is tried in every order, so what holds
here holds under all policies.
"""

from __future__ import annotations

from collections.abc import Generator
from functools import cache
from typing import Any

from explorer import Program, Request, Violation
from ring_world import (
    CLOSING,
    EMPTY,
    FAILED,
    LOADING,
    NOBODY,
    PARTICIPANTS,
    READY,
    SLOTS,
    RingWorld,
    SlotModel,
    Word,
)

Steps = Generator[Request, Any, Any]
OWNER = "OWNER"
Held = tuple[int, str, int]
"""Slot, OWNER or READY or LOADING, version."""

QUIET = frozenset({"pop_free", "push_free", "joined", "choose"})
"""Only the holder of the lock looks at the free slots and at who joined."""


class Participant:
    """What one process does; one method per function of ring.hpp and ring_slots.hpp."""

    def __init__(self, me: int) -> None:
        self.me = me

    # Lock-free: ring_slots.hpp

    def find(self, key: int) -> Steps:
        for slot in SLOTS:
            if (yield ("entry", slot)):
                word = yield ("load", slot)
                if word.state not in {EMPTY, CLOSING} and (yield ("key", slot)) == key:
                    return slot, word
        return NOBODY, Word()

    def pin(self, key: int) -> Steps:
        slot, word = yield from self.find(key)
        if slot == NOBODY or not word.pinnable:
            return None
        yield ("pin", slot)
        if not (now := (yield from self.look_again(slot, word))):
            yield ("unpin", slot)
            return None
        yield ("mark_accessed", slot, now.version)
        return slot, now.state, now.version

    def look_again(self, slot: int, word: Word) -> Steps:
        now = yield ("load", slot)
        return now if now.version == word.version and now.pinnable else None

    def publish(self, slot: int, version: int) -> Steps:
        word = yield ("settle", slot, version, READY)
        if word and word.waiting:
            yield ("wake", slot)

    def wait(self, slot: int, version: int) -> Steps:
        while True:
            word = yield ("announce", slot, version)
            if word.version != version:
                return FAILED
            if word.state in {READY, CLOSING}:
                return READY
            if word.state != LOADING:
                return FAILED
            yield ("sleep", slot, word.low)
            if (yield ("awake",)):
                yield from self.reap_owner(slot)

    # Under the exclusive lock: ring.hpp

    def enter(self) -> Steps:
        """Whether the lock was had; whoever waits in vain goes on without it."""
        dirty = yield ("lock",)
        if dirty:
            yield from self.repair()
        return dirty is not None

    def repair(self) -> Steps:
        for slot in SLOTS:
            if (yield ("load", slot)).state == CLOSING:
                yield ("move", slot, READY)
        yield ("clear_index",)
        yield from self.rebuild()
        yield from self.reap_dead()

    def rebuild(self) -> Steps:
        for slot in SLOTS:
            word = yield ("load", slot)
            if word.state == EMPTY:
                yield ("push_free", slot)
            if word.pinnable:
                yield ("index", slot, True)

    def is_pinned(self, slot: int) -> Steps:
        joined = yield ("joined",)
        for k in joined:
            if (yield ("pins", slot, k)):
                return True
        return False

    def free_if_idle(self, slot: int) -> Steps:
        emptied = yield from self.empty_if_idle(slot)
        if emptied:
            yield ("push_free", slot)
        return emptied

    def empty_if_idle(self, slot: int) -> Steps:
        closed = yield from self.close_if_idle(slot)
        if closed:
            yield from self.empty(slot)
        return closed

    def close_if_idle(self, slot: int) -> Steps:
        state = (yield ("load", slot)).state
        if state not in {READY, FAILED} or (yield from self.is_pinned(slot)):
            return False
        return state == FAILED or (yield from self.close_slot(slot))

    def empty(self, slot: int) -> Steps:
        yield ("index", slot, False)
        yield ("move", slot, EMPTY)

    def close_slot(self, slot: int) -> Steps:
        yield ("move", slot, CLOSING)
        if not (yield from self.is_pinned(slot)):
            return True
        yield ("move", slot, READY)
        return False

    def pin_or_forget(self, key: int) -> Steps:
        held = yield from self.pin(key)
        if held:
            return held
        slot, word = yield from self.find(key)
        if word.state == FAILED and not (yield from self.free_if_idle(slot)):
            yield ("index", slot, False)
        return None

    def sweep(self) -> Steps:
        first = yield ("choose", *SLOTS)
        for slot in (first, 1 - first):
            if (yield from self.empty_if_idle(slot)):
                return slot
        return NOBODY

    def allocate(self) -> Steps:
        reaped = False
        while True:
            slot = yield ("pop_free",)
            if slot == NOBODY:
                slot = yield from self.sweep()
            if slot != NOBODY or reaped or not (yield from self.reap_dead()):
                return slot
            reaped = True

    def insert(self, key: int, slot: int) -> Steps:
        yield ("write_key", slot, key)
        yield ("pin", slot)
        before = yield ("move", slot, LOADING)
        yield ("index", slot, True)
        return slot, OWNER, before.version

    def claim(self, key: int) -> Steps:
        held = yield from self.pin(key)
        if held:
            return held
        if not (yield from self.enter()):
            return None
        held = yield from self.pin_or_forget(key)
        if not held:
            slot = yield from self.allocate()
            held = (yield from self.insert(key, slot)) if slot != NOBODY else None
        yield from self.leave()
        return held

    def claim_whole(self, keys: tuple[int, int]) -> Steps:
        """Both keys or none: what `insert` says of each; None where one is there or no room for all."""
        if not (yield from self.enter()):
            return None
        there = False
        for key in keys:
            held = yield from self.pin_or_forget(key)
            if held:
                there = True
                yield ("unpin", held[0])
        del held
        claims = None if there else (yield from self.admit_whole(keys))
        yield from self.leave()
        return claims

    def admit_whole(self, keys: tuple[int, int]) -> Steps:
        room = yield from self.find_room()
        if len(room) < len(keys):
            yield from self.restore(room)
            dead = yield from self.reap_dead()
            room = (yield from self.find_room()) if dead else ()
            if len(room) < len(keys):
                yield from self.restore(room)
                return None
        for slot in room:
            if (yield ("load", slot)).state != EMPTY:
                yield from self.empty(slot)
        first = yield from self.insert(keys[0], room[0])
        return first, (yield from self.insert(keys[1], room[1]))

    def find_room(self) -> Steps:
        """Slots that are free, then those that can be closed: they go when it is certain that all do."""
        room: tuple[int, ...] = ()
        while (slot := (yield ("pop_free",))) != NOBODY:
            room = (*room, slot)
        first = yield ("choose", *SLOTS)
        for slot in (first, 1 - first):
            if slot not in room and (yield from self.close_if_idle(slot)):
                room = (*room, slot)
        return room

    def restore(self, room: tuple[int, ...]) -> Steps:
        for slot in room:
            state = (yield ("load", slot)).state
            if state == CLOSING:
                yield ("move", slot, READY)
            if state == EMPTY:
                yield ("push_free", slot)

    def abort(self, slot: int, version: int) -> Steps:
        locked = yield from self.enter()
        word = yield ("settle", slot, version, FAILED)
        if word and word.waiting:
            yield ("wake", slot)
        yield ("unpin", slot)
        if locked:
            yield from self.free_if_idle(slot)
            yield from self.leave()

    def drop(self, key: int) -> Steps:
        if not (yield from self.enter()):
            return
        slot, _ = yield from self.find(key)
        if slot != NOBODY:
            yield from self.free_if_idle(slot)
        yield from self.leave()

    def is_dead(self, k: int) -> Steps:
        return (yield ("dead", k))

    def expel(self, k: int) -> Steps:
        for slot in SLOTS:
            yield ("zero", slot, k)
            word = yield ("load", slot)
            if word.state == LOADING and (yield ("owner", slot)) == k:
                yield ("move", slot, FAILED)
                yield ("wake", slot)
                yield from self.free_if_idle(slot)
        yield ("forget", k)

    def reap_dead(self) -> Steps:
        dead, joined = 0, (yield ("joined",))
        for k in joined:
            if k != self.me and (yield from self.is_dead(k)):
                yield from self.expel(k)
                dead += 1
        return dead

    def join(self) -> Steps:
        locked = yield from self.enter()
        if locked:
            yield from self.reap_dead()
            yield ("join",)
            yield from self.leave()
        return locked

    def leave(self) -> Steps:
        yield ("unlock",)

    def reap_owner(self, slot: int) -> Steps:
        owner = yield ("owner", slot)
        if owner == self.me or not (yield ("dead", owner)):
            return
        yield from self.reap()

    def reap(self) -> Steps:
        locked = yield from self.enter()
        if locked:
            yield from self.reap_dead()
            yield from self.leave()
        return locked

    # What a process does with it

    def visit(self, key: int) -> Program:
        """Claim ``key``; fill it, or wait for it, and read it."""
        held = yield from self.claim(key)
        if not held:
            return
        slot, outcome, version = held
        if outcome == OWNER:
            outcome = yield from self.settle(slot, key, version)
        elif outcome == LOADING:
            outcome = yield from self.wait(slot, version)
        if outcome == READY:
            yield from self.read(slot, key)
        if outcome:
            yield ("unpin", slot)

    def reserve(self, key: int) -> Program:
        """Claim two keys or none, fill and publish both."""
        claims = yield from self.claim_whole((key, key + 1))
        for place in range(len(claims or ())):
            slot, _, version = claims[place]
            yield ("write", slot, 0, key + place)
            yield ("write", slot, 1, key + place)
            yield from self.publish(slot, version)
            yield ("unpin", slot)

    def settle(self, slot: int, key: int, version: int) -> Steps:
        """Fill and publish, or abort at any point."""
        if (yield ("choose", False, True)):
            yield ("write", slot, 0, key)
            yield ("write", slot, 1, key)
            yield from self.publish(slot, version)
            return READY
        yield from self.abort(slot, version)
        return None

    def read(self, slot: int, key: int) -> Steps:
        yield ("read", slot, 0, key)
        yield ("read", slot, 1, key)

    def lookup(self, key: int) -> Program:
        """Look without a reference: what it says is so at the moment of the second look."""
        slot, word = yield from self.find(key)
        if word.state == READY:
            yield ("confirm", slot, word.version, key)

    def arrive(self, key: int) -> Program:
        """Come late, then `visit`."""
        if (yield from self.join()):
            yield from self.visit(key)

    def there_and_back(self, key: int) -> Program:
        """`visit` two keys, one after the other."""
        yield from self.visit(key)
        yield from self.visit(1)

    def fetch(self, key: int) -> Program:
        """As `visit`, without a claim: what is not there is let be."""
        held = yield from self.pin(key)
        if held and (held[1] == READY or (yield from self.wait(held[0], held[2])) == READY):
            yield from self.read(held[0], key)
        if held:
            yield ("unpin", held[0])


def ring_with(*keys: int) -> RingWorld:
    """A ring that holds those keys, READY."""
    full = tuple(SlotModel(Word(state=READY), key, halves=(key, key), indexed=True) for key in keys)
    empty = (SlotModel(),) * (len(SLOTS) - len(keys))
    return RingWorld(slots=full + empty, free=tuple(SLOTS)[len(keys) :])


@cache
def aftermath(world: RingWorld, kind: type[Participant]) -> None:
    """When all are done or dead, whoever comes then gets both slots, and nothing is left behind."""
    joiner, newcomer = kind(len(PARTICIPANTS)), kind(0)
    world, reaped = alone(world, joiner, joiner.reap())
    if not reaped or any(pins for slot in world.slots for pins in slot.pins):
        raise Violation(f"a newcomer finds what was left behind: {world}")
    world, _ = alone(world, newcomer, newcomer.join())
    for key in (98, 99):
        world, held = alone(world, newcomer, newcomer.claim(key))
        if not held or held[1] != OWNER:
            raise Violation(f"a newcomer cannot have both slots: {world}")
        world.check()


def alone(world: RingWorld, who: Participant, steps: Steps) -> tuple[RingWorld, Any]:
    """Run one program without anybody else; the world afterwards, and what it returned."""
    now, answer = world, None
    while True:
        try:
            request = steps.send(answer)
        except StopIteration as end:
            return now, end.value
        outcome = next(iter(now.apply(who.me, request)), None)
        if outcome is None:
            raise Violation(f"a newcomer waits for ever: {request} {now}")
        now, answer = outcome

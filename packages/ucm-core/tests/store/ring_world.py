"""The shared memory of a ring of two slots as a model: what one atomic step of a participant does to it.

States may move along `_native.RING_MOVES` only, the table that the C++ obeys. A loop of compare-and-swap is
one step here: its attempts that fail change nothing, and the one that succeeds has seen the word as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from explorer import Request, Violation

from ucm_core import _native

PARTICIPANTS = range(3)
SLOTS = range(2)
NOBODY = -1
JUNK = 0
"""The key of no block: what a slot shows that was emptied."""
EMPTY, LOADING, READY, FAILED, CLOSING = "EMPTY", "LOADING", "READY", "FAILED", "CLOSING"

Outcomes = Iterable[tuple["RingWorld", Any]]


class Word(NamedTuple):
    """What one atomic load of a slot's state word shows."""

    version: int = 0
    state: str = EMPTY
    accessed: bool = False
    waiting: bool = False

    @property
    def pinnable(self) -> bool:
        return self.state in {READY, LOADING}

    @property
    def low(self) -> tuple[Any, ...]:
        """The futex word."""
        return self[1:]


class SlotModel(NamedTuple):
    """One slot."""

    word: Word = Word()
    key: int = JUNK
    owner: int = NOBODY
    halves: tuple[int, int] = (JUNK, JUNK)
    """Of which key the bytes of either half are."""
    pins: tuple[int, ...] = (0,) * len(PARTICIPANTS)
    indexed: bool = False
    """The index has an entry; all keys have one tag here, so it says no more."""


class RingWorld(NamedTuple):
    """Everything that participants share."""

    slots: tuple[SlotModel, ...] = (SlotModel(),) * len(SLOTS)
    free: tuple[int, ...] = tuple(SLOTS)
    """The free stack, as a set: which slot is on top does not matter."""
    holder: int = NOBODY
    """Who has the exclusive lock."""
    dirty: bool = False
    joined: tuple[int, ...] = tuple(PARTICIPANTS)
    alive: tuple[int, ...] = tuple(PARTICIPANTS)
    asleep: tuple[int, ...] = (NOBODY,) * len(PARTICIPANTS)
    """On which slot's word each participant sleeps."""
    died: bool = False
    """Somebody has died so far."""

    def apply(self, me: int, request: Request) -> Outcomes:
        """Every (world afterwards, answer) of one step of ``me``."""
        name, *arguments = request
        return getattr(self, f"do_{name}")(me, *arguments)  # type: ignore[no-any-return]

    def crash(self, me: int) -> RingWorld:
        """The kernel takes the locks of the dead back; all else stays as it is."""
        alive = tuple(k for k in self.alive if k != me)
        holder = NOBODY if self.holder == me else self.holder
        return self._replace(alive=alive, holder=holder, asleep=_with(self.asleep, me, NOBODY), died=True)

    def check(self) -> None:
        """What must be so after every step."""
        for number, slot in enumerate(self.slots):
            state = slot.word.state
            _require(min(slot.pins) >= 0, f"slot {number} has less than no references")
            _require(
                all(k in self.joined or not pins for k, pins in enumerate(slot.pins)),
                f"a reference on slot {number} outlives the reaping of its participant",
            )
            _require(
                state not in {READY, CLOSING} or set(slot.halves) == {slot.key},
                f"slot {number} is {state} and does not hold the bytes of its key",
            )
            _require(state != LOADING or slot.owner in self.joined, f"slot {number} is LOADING for nobody")
        if self.holder == NOBODY and not self.dirty:
            self._check_derived()

    def _check_derived(self) -> None:
        for number, slot in enumerate(self.slots):
            state = slot.word.state
            _require(state != CLOSING, f"slot {number} is CLOSING outside an eviction")
            _require(not slot.word.pinnable or slot.indexed, f"slot {number} is {state} and not in the index")
            _require((state == EMPTY) == (number in self.free), f"slot {number} is {state}: free {self.free}")

        keys = [slot.key for slot in self.slots if slot.word.pinnable]
        _require(len(keys) == len({*keys}), f"a key stands twice: {keys}")

    # Words

    def do_load(self, me: int, slot: int) -> Outcomes:
        yield self, self.slots[slot].word

    def do_confirm(self, me: int, slot: int, version: int, key: int) -> Outcomes:
        """A second look at a word; true to the key when it says READY still."""
        word, found = self.slots[slot].word, self.slots[slot].key
        ready = word.version == version and word.state == READY
        _require(not ready or found == key, f"{me} says that key {key} is there, it is {found}")
        yield self, ready

    def do_move(self, me: int, slot: int, to: str) -> Outcomes:
        """Along one edge from whatever state there is; the answer is the word before."""
        word = self.slots[slot].word
        yield self._moved(me, slot, to), word

    def do_settle(self, me: int, slot: int, version: int, to: str) -> Outcomes:
        """LOADING to ``to`` by its owner; the answer is the word before, None where refused."""
        word, owner = self.slots[slot].word, self.slots[slot].owner
        if word.state == LOADING and word.version == version and owner == me:
            yield self._moved(me, slot, to), word
        else:
            yield self, None

    def _moved(self, me: int, slot: int, to: str) -> RingWorld:
        old = self.slots[slot]
        mover = _native.RING_MOVES.get((old.word.state, to))
        movers = {"EXCLUSIVE": self.holder == me, "OWNER": old.owner == me and old.word.state == LOADING}
        movers["OWNER_OR_EXCLUSIVE"] = movers["EXCLUSIVE"] or movers["OWNER"]
        _require(mover is not None and movers[mover], f"slot {slot} cannot go from {old.word.state} to {to}")
        if to == EMPTY:
            word = Word(old.word.version + 1)
            return self._set(slot, word=word, owner=NOBODY, halves=(JUNK, JUNK))
        word = old.word._replace(state=to, waiting=False)
        return self._set(slot, word=word, owner=old.owner if to == LOADING else NOBODY)

    def do_mark_accessed(self, me: int, slot: int, version: int) -> Outcomes:
        word = self.slots[slot].word
        marked = word.version == version and word.pinnable
        yield self._set(slot, word=word._replace(accessed=word.accessed or marked)), None

    def do_announce(self, me: int, slot: int, version: int) -> Outcomes:
        """Set the waiting bit of a LOADING word of that version; the answer is the word afterwards."""
        word = self.slots[slot].word
        if word.version == version and word.state == LOADING:
            word = word._replace(waiting=True)
        yield self._set(slot, word=word), word

    def do_sleep(self, me: int, slot: int, low: tuple[Any, ...]) -> Outcomes:
        """FUTEX_WAIT: to sleep while the word is ``low``, one step with the comparison."""
        sleeps = self.slots[slot].word.low == low
        yield self._replace(asleep=_with(self.asleep, me, slot)) if sleeps else self, None

    def do_awake(self, me: int) -> Outcomes:
        """The return of FUTEX_WAIT; the answer is whether the slice ran out. None does while all live."""
        if self.asleep[me] == NOBODY:
            yield self, False
        elif self.died:
            yield self._replace(asleep=_with(self.asleep, me, NOBODY)), True

    def do_wake(self, me: int, slot: int) -> Outcomes:
        yield self._replace(asleep=tuple(NOBODY if on == slot else on for on in self.asleep)), None

    # References

    def do_pin(self, me: int, slot: int, by: int = 1) -> Outcomes:
        pins = self.slots[slot].pins
        yield self._set(slot, pins=_with(pins, me, pins[me] + by)), None

    def do_unpin(self, me: int, slot: int) -> Outcomes:
        return self.do_pin(me, slot, -1)

    def do_pins(self, me: int, slot: int, k: int) -> Outcomes:
        yield self, self.slots[slot].pins[k]

    # Keys, bytes, index

    def do_entry(self, me: int, slot: int) -> Outcomes:
        yield self, self.slots[slot].indexed

    def do_key(self, me: int, slot: int) -> Outcomes:
        yield self, self.slots[slot].key

    def do_write_key(self, me: int, slot: int, key: int) -> Outcomes:
        _require(self.holder == me and self.slots[slot].word.state == EMPTY, "a key changes in use")
        yield self._set(slot, key=key, owner=me), None

    def do_index(self, me: int, slot: int, there: bool) -> Outcomes:
        yield self._set(slot, indexed=there), None

    def do_clear_index(self, me: int) -> Outcomes:
        yield self._replace(slots=tuple(slot._replace(indexed=False) for slot in self.slots), free=()), None

    def do_write(self, me: int, slot: int, half: int, key: int) -> Outcomes:
        yield self._set(slot, halves=_with(self.slots[slot].halves, half, key)), None

    def do_read(self, me: int, slot: int, half: int, key: int) -> Outcomes:
        found = self.slots[slot].halves[half]
        _require(found == key, f"{me} reads bytes of key {found} in slot {slot}, not of {key}")
        yield self, None

    # The exclusive section and what only it looks at

    def do_lock(self, me: int) -> Outcomes:
        """The lock, and the dirty mark: whether the last holder died inside. None = the patience is over.

        To wait longer is to take this step later.
        """
        if self.holder == NOBODY:
            yield self._replace(holder=me, dirty=True), self.dirty
        else:
            yield self, None

    def do_unlock(self, me: int) -> Outcomes:
        _require(self.holder == me, f"{me} gives a lock back that it does not hold")
        yield self._replace(holder=NOBODY, dirty=False), None

    def do_pop_free(self, me: int) -> Outcomes:
        slot = min(self.free, default=NOBODY)
        yield self._replace(free=tuple(one for one in self.free if one != slot)), slot

    def do_push_free(self, me: int, slot: int) -> Outcomes:
        _require(slot not in self.free, f"slot {slot} is free twice")
        yield self._replace(free=tuple(sorted((*self.free, slot)))), None

    def do_joined(self, me: int) -> Outcomes:
        yield self, self.joined

    def do_dead(self, me: int, k: int) -> Outcomes:
        """Whether the lock byte of ``k`` could be taken."""
        yield self, k != NOBODY and k not in self.alive

    def do_zero(self, me: int, slot: int, k: int) -> Outcomes:
        yield self._set(slot, pins=_with(self.slots[slot].pins, k, 0)), None

    def do_owner(self, me: int, slot: int) -> Outcomes:
        yield self, self.slots[slot].owner

    def do_forget(self, me: int, k: int) -> Outcomes:
        yield self._replace(joined=tuple(one for one in self.joined if one != k)), None

    def do_join(self, me: int) -> Outcomes:
        yield (
            self._replace(joined=tuple(sorted({*self.joined, me})), alive=tuple(sorted({*self.alive, me}))),
            None,
        )

    def do_choose(self, me: int, *values: Any) -> Outcomes:
        """Whatever it will be: the answer is each of ``values``."""
        return ((self, value) for value in values)

    def _set(self, slot: int, **changed: Any) -> RingWorld:
        return self._replace(slots=_with(self.slots, slot, self.slots[slot]._replace(**changed)))


def _with(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise Violation(what)

"""The ring as one would write it on paper: lists, plain loops, copies. Slow, obvious, one participant."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from ucm_core.ops.config import RingPolicy
from ucm_core.store.ring import Outcome

Answer = tuple[int, Outcome]
"""Slot (-1 = none) and outcome."""

LRU_SAMPLE = 8
RESERVE_SHARE = 16


@dataclass
class Block:
    """What a slot holds."""

    key: str
    deadline_s: float
    state: Outcome = Outcome.LOADING
    references: int = 1
    accessed: bool = False
    stamp: int = 0
    parent: int | None = None
    """Slot of the block before this one in its prefix."""
    known: bool = True
    """False for a failed stay that a new claim of its key has passed over."""


class ModelRing:
    """Every slot in a list, free slots on two stacks, and the line of those that may be asked to go."""

    def __init__(self, slots: int, policy: RingPolicy = "clock", ttl_s: int | None = None) -> None:
        self.policy = policy
        self.ttl_s = float("inf") if ttl_s is None else ttl_s
        self.now_s = 1
        self.swept_s = 0
        self.blocks: list[Block | None] = [None] * slots
        self.reserve = slots // RESERVE_SHARE
        self.free = list(reversed(range(slots - self.reserve)))
        self.spare = list(reversed(range(slots - self.reserve, slots)))
        self.line: list[int] = []
        """Blocks that nobody follows, oldest first."""
        self.hand: int | None = None
        """Where SIEVE looks next; None = at the oldest."""
        self.tick = 0
        self.before: dict[str, Any] = {}
        """All of this when room was looked for last."""

    # -- looking

    def find(self, key: str) -> int | None:
        """The slot of a key that is known, in whatever state."""
        for slot, block in enumerate(self.blocks):
            if block is not None and block.key == key and block.known:
                return slot
        return None

    def resident(self, key: str) -> int | None:
        """The slot of a key that is there or coming."""
        slot = self.find(key)
        return None if slot is None or self.at(slot).state is Outcome.FAILED else slot

    def alive(self, key: str) -> int | None:
        """The slot of a key that is there or coming and whose time is not over."""
        slot = self.resident(key)
        return None if slot is None or self.expired(slot) else slot

    def ready(self, key: str) -> bool:
        """What a look-up says."""
        slot = self.alive(key)
        return slot is not None and self.at(slot).state is Outcome.READY

    def count(self, state: Outcome) -> int:
        """How many slots are in ``state``."""
        return sum(block is not None and block.state is state for block in self.blocks)

    def at(self, slot: int) -> Block:
        """The block in a slot that has one."""
        block = self.blocks[slot]
        assert block is not None
        return block

    def expired(self, slot: int) -> bool:
        """Whether the time of a full block is over."""
        return self.at(slot).state is Outcome.READY and self.now_s >= self.at(slot).deadline_s

    def followers(self, slot: int) -> list[int]:
        """The blocks that follow this one."""
        return [other for other, block in enumerate(self.blocks) if block and block.parent == slot]

    def idle(self, slot: int) -> bool:
        """Whether a block could be emptied."""
        return self.at(slot).references == 0 and self.at(slot).state is not Outcome.LOADING

    # -- the calls of a ring

    def pin(self, key: str) -> Answer:
        """One reference on a key that is there or coming."""
        slot = self.alive(key)
        if slot is None:
            return -1, Outcome.ABSENT
        self.at(slot).references += 1
        self.hit(slot)
        return slot, self.at(slot).state

    def claim(
        self,
        keys: list[str],
        parents: dict[str, str] | None = None,
        *,
        whole: bool = False,
        demand: bool = False,
    ) -> list[Answer]:
        """What is there first, then slots for the rest, head first; ``parents``: key -> key before it."""
        parents = parents or {}
        answers = self.claim_known(keys)
        count = [outcome for _, outcome in answers].count(Outcome.ABSENT)
        impossible = whole and (-1, Outcome.NO_SPACE) in answers
        self.before = {}
        taken = []
        if count and not impossible:
            taken = self.room(count, demand=demand, guarded=self.guarded(keys, parents))
        if impossible or (whole and len(taken) < count):
            self.give_back(answers)
            return [(-1, Outcome.NO_SPACE)] * len(keys)
        return self.admit(keys, answers, taken, parents)

    def claim_known(self, keys: list[str]) -> list[Answer]:
        """Pin what is there, then make way for what failed or expired."""
        answers = [self.pin(key) for key in keys]
        return [
            answer if answer[0] >= 0 else self.retry(key) for key, answer in zip(keys, answers, strict=True)
        ]

    def guarded(self, keys: list[str], parents: dict[str, str]) -> set[int]:
        """The slots that a key of the batch follows."""
        slots = (self.resident(parents.get(key, "")) for key in keys)
        return {slot for slot in slots if slot is not None}

    def admit(
        self, keys: list[str], answers: list[Answer], taken: list[int], parents: dict[str, str]
    ) -> list[Answer]:
        """Put the absent keys into the slots that were found for them; what is all there stays as it is."""
        if all(slot >= 0 for slot, _ in answers):
            return answers
        absent = [i for i, (_, outcome) in enumerate(answers) if outcome is Outcome.ABSENT]
        for i, slot in zip(absent, taken + [-1] * len(absent), strict=False):
            answers[i] = self.insert(keys[i], slot)
        for key, (slot, _) in zip(keys, answers, strict=True):
            self.follow(slot, self.resident(parents.get(key, "")))
        self.line_up([answers[i][0] for i in absent if answers[i][1] is Outcome.OWNER])
        return answers

    def publish(self, slot: int) -> None:
        """The owner is done."""
        self.at(slot).state = Outcome.READY

    def abort(self, slot: int) -> None:
        """The owner gives up; what failed goes first."""
        self.at(slot).state = Outcome.FAILED
        self.at(slot).references -= 1
        self.isolate(slot)
        self.leave_line(slot)
        self.line.insert(0, slot)
        self.free_if_idle(slot)

    def release(self, slot: int) -> None:
        """One reference less; what has expired goes with its last one."""
        self.at(slot).references -= 1
        if self.expired(slot):
            self.free_if_idle(slot)

    def touch(self, key: str) -> None:
        """A hit without a reference."""
        slot = self.alive(key)
        if slot is not None:
            self.hit(slot)

    def drop(self, key: str) -> bool:
        """Forget an idle block; True when it was one."""
        slot = self.find(key)
        return slot is not None and self.free_if_idle(slot)

    # -- how keys come in

    def retry(self, key: str) -> Answer:
        """Make room for a new try of a key that failed or expired."""
        slot = self.find(key)
        if slot is None or self.free_if_idle(slot):
            return -1, Outcome.ABSENT
        if self.at(slot).state is not Outcome.FAILED:
            return -1, Outcome.NO_SPACE
        self.at(slot).known = False
        return -1, Outcome.ABSENT

    def room(self, count: int, *, demand: bool, guarded: set[int]) -> list[int]:
        """Up to ``count`` empty slots: free ones, then victims."""
        if len(self.free) + len(self.spare) * demand < count and self.swept_s != self.now_s:
            self.sweep(guarded)
        self.before = {}
        self.before = copy.deepcopy(self.__dict__)
        for slot in guarded:
            self.at(slot).references += 1
        taken: list[int] = []
        while len(taken) < count and (found := self.next_slot(demand=demand)) is not None:
            wanted = demand or found < len(self.blocks) - self.reserve
            (taken if wanted else self.spare).append(found)
        for slot in guarded:
            self.at(slot).references -= 1
        return taken

    def next_slot(self, *, demand: bool) -> int | None:
        """An empty slot, a victim's if need be."""
        if self.free:
            return self.free.pop()
        if demand and self.spare:
            return self.spare.pop()
        victim = self.victim()
        if victim is not None:
            self.evict(victim)
        return victim

    def give_back(self, answers: list[Answer]) -> None:
        """Every reference of a batch; all victims come back."""
        self.__dict__.update(self.before)
        self.before = {}
        for slot, _ in answers:
            if slot >= 0:
                self.at(slot).references -= 1

    def line_up(self, slots: list[int]) -> None:
        """New blocks, the tail first."""
        for slot in reversed(slots):
            self.tick += 2
            self.at(slot).stamp = self.tick
            if not self.followers(slot):
                self.line.append(slot)

    def sweep(self, guarded: set[int]) -> None:
        """Free what has expired, once a second; what a key of the batch follows is held meanwhile."""
        if self.ttl_s == float("inf"):
            return
        self.swept_s = self.now_s
        for slot, block in enumerate(self.blocks):
            if block is not None and slot not in guarded and self.expired(slot):
                self.free_if_idle(slot)

    def insert(self, key: str, slot: int) -> Answer:
        """A new block, or one more reference when the batch names the key twice."""
        if slot < 0:
            return -1, Outcome.NO_SPACE
        twin = self.pin(key)
        if twin[0] >= 0:
            self.put_back(slot)
            return twin
        self.blocks[slot] = Block(key, self.now_s + self.ttl_s)
        return slot, Outcome.OWNER

    def follow(self, slot: int, before: int | None) -> None:
        """Write down which block comes before, unless that would close a circle."""
        if slot < 0 or before is None:
            return
        ancestors = [before]
        while (above := self.at(ancestors[-1]).parent) is not None:
            ancestors.append(above)
        if self.at(slot).parent is None and slot not in ancestors:
            self.at(slot).parent = before
            self.leave_line(before)

    def hit(self, slot: int) -> None:
        """What every policy remembers of a hit."""
        self.at(slot).accessed = self.policy in ("clock", "sieve") or self.at(slot).accessed
        if self.policy == "lru":
            self.at(slot).stamp = self.tick + 1
        self.at(slot).deadline_s = self.now_s + self.ttl_s

    # -- how they go

    def victim(self) -> int | None:
        """Who goes: what failed, then whom the policy names; nobody when two rounds find nobody."""
        if self.line and self.at(self.line[0]).state is Outcome.FAILED and self.idle(self.line[0]):
            return self.line[0]
        choose = {"clock": self.clock, "fifo": self.fifo, "lru": self.lru, "sieve": self.sieve}
        return choose[self.policy]()

    def fifo(self) -> int | None:
        """The first that may go; the others wait once more."""
        for slot in list(self.line):
            if self.idle(slot):
                return slot
            self.send_back(slot)
        return None

    def clock(self) -> int | None:
        """The first that may go and was not hit since its last turn."""
        for _ in range(2 * len(self.line)):
            slot = self.line[0]
            if self.idle(slot) and not self.at(slot).accessed:
                return slot
            if self.idle(slot):
                self.at(slot).accessed = False
            self.send_back(slot)
        return None

    def sieve(self) -> int | None:
        """The hand goes from old to new and round again, and takes bits on its way."""
        for _ in range(2 * len(self.line)):
            slot = self.line[0] if self.hand is None else self.hand
            self.hand = self.newer(slot)
            if self.idle(slot) and not self.at(slot).accessed:
                return slot
            if self.idle(slot):
                self.at(slot).accessed = False
        return None

    def lru(self) -> int | None:
        """The longest unused of the next few that may go."""
        sample: list[int] = []
        for slot in list(self.line):
            if len(sample) < LRU_SAMPLE:
                self.send_back(slot)
                sample += [slot] * self.idle(slot)
        return min(sample, key=lambda slot: self.at(slot).stamp, default=None)

    def newer(self, slot: int) -> int | None:
        """The next in line."""
        place = self.line.index(slot) + 1
        return self.line[place] if place < len(self.line) else None

    def send_back(self, slot: int) -> None:
        """To the end of the line."""
        self.leave_line(slot)
        self.line.append(slot)

    def leave_line(self, slot: int) -> None:
        """Out of the line; the hand passes on."""
        if slot in self.line:
            if self.hand == slot:
                self.hand = self.newer(slot)
            self.line.remove(slot)

    def isolate(self, slot: int) -> None:
        """Nobody's neighbour any more; a block that nobody follows any more is the next to be asked."""
        for other in self.followers(slot):
            self.at(other).parent = None
        before, self.at(slot).parent = self.at(slot).parent, None
        if before is not None and not self.followers(before):
            self.line.insert(0, before)

    def evict(self, slot: int) -> None:
        """Empty a slot, wherever it goes then."""
        self.leave_line(slot)
        self.isolate(slot)
        self.blocks[slot] = None

    def free_if_idle(self, slot: int) -> bool:
        """Empty a slot that nobody references."""
        if not self.idle(slot):
            return False
        self.isolate(slot)
        self.leave_line(slot)
        self.blocks[slot] = None
        self.put_back(slot)
        return True

    def put_back(self, slot: int) -> None:
        """Onto the stack that an empty slot belongs to."""
        (self.free if slot < len(self.blocks) - self.reserve else self.spare).append(slot)

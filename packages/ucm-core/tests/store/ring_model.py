"""The ring as one would write it on paper: a list, a stack, plain loops. Slow, obvious, one participant."""

from __future__ import annotations

from dataclasses import dataclass

from ucm_core.store.ring import Outcome

Answer = tuple[int, Outcome]
"""Slot (-1 = none) and outcome."""


@dataclass
class Block:
    """What a slot holds."""

    key: str
    state: Outcome = Outcome.LOADING
    references: int = 1
    accessed: bool = False
    known: bool = True
    """False for a failed stay that a new claim of its key has passed over."""


class ModelRing:
    """Every slot in a list, free slots on a stack, and the hand of the clock."""

    def __init__(self, slots: int) -> None:
        self.blocks: list[Block | None] = [None] * slots
        self.free = list(reversed(range(slots)))
        self.hand = 0

    def find(self, key: str) -> int | None:
        """The slot of a key that is known, in whatever state."""
        for slot, block in enumerate(self.blocks):
            if block is not None and block.key == key and block.known:
                return slot
        return None

    def count(self, state: Outcome) -> int:
        """How many slots are in ``state``."""
        return sum(block is not None and block.state is state for block in self.blocks)

    def at(self, slot: int) -> Block:
        """The block in a slot that has one."""
        block = self.blocks[slot]
        assert block is not None
        return block

    def pin(self, key: str) -> Answer:
        """One reference on a key that is there or coming."""
        slot = self.find(key)
        if slot is None or self.at(slot).state is Outcome.FAILED:
            return -1, Outcome.ABSENT
        self.at(slot).references += 1
        self.at(slot).accessed = True
        return slot, self.at(slot).state

    def claim(self, keys: list[str]) -> list[Answer]:
        """What is there first, then slots for the rest: the tail gets the one that the hand meets first."""
        answers = {i: self.pin(key) for i, key in enumerate(keys)}
        absent = [i for i, (slot, _) in answers.items() if slot < 0]
        for i in absent:
            self.forget_failed(keys[i])
        taken = self.take(len(absent))
        for i in absent:
            answers[i] = self.insert(keys[i], taken.pop()) if taken else (-1, Outcome.NO_SPACE)
        return [answers[i] for i in range(len(keys))]

    def forget_failed(self, key: str) -> None:
        """Make room for a new try of a key that failed."""
        slot = self.find(key)
        if slot is not None:
            self.at(slot).known = False
            self.free_if_idle(slot)

    def insert(self, key: str, slot: int) -> Answer:
        """A new block, or one more reference when the batch names the key twice."""
        twin = self.pin(key)
        if twin[0] >= 0:
            self.free.append(slot)
            return twin
        self.blocks[slot] = Block(key)
        return slot, Outcome.OWNER

    def take(self, count: int) -> list[int]:
        """Up to ``count`` empty slots: free ones, then victims."""
        taken: list[int] = []
        while len(taken) < count:
            slot = self.free.pop() if self.free else self.victim()
            if slot is None:
                break
            taken.append(slot)
        return taken

    def victim(self) -> int | None:
        """Two rounds of the hand."""
        for _ in range(2 * len(self.blocks)):
            slot = self.hand
            self.hand = (self.hand + 1) % len(self.blocks)
            block = self.blocks[slot]
            if block is None or block.references or block.state is Outcome.LOADING:
                continue
            if block.accessed and block.state is Outcome.READY:
                block.accessed = False
                continue
            self.blocks[slot] = None
            return slot
        return None

    def free_if_idle(self, slot: int) -> bool:
        """Empty a slot that nobody references."""
        if self.at(slot).references or self.at(slot).state is Outcome.LOADING:
            return False
        self.blocks[slot] = None
        self.free.append(slot)
        return True

    def publish(self, slot: int) -> None:
        """The owner is done."""
        self.at(slot).state = Outcome.READY

    def abort(self, slot: int) -> None:
        """The owner gives up."""
        self.at(slot).state = Outcome.FAILED
        self.at(slot).references -= 1
        self.free_if_idle(slot)

    def release(self, slot: int) -> None:
        """One reference less."""
        self.at(slot).references -= 1

    def touch(self, key: str) -> None:
        """A hit without a reference."""
        slot = self.find(key)
        if slot is not None and self.at(slot).state is not Outcome.FAILED:
            self.at(slot).accessed = True

    def drop(self, key: str) -> bool:
        """Forget an idle block; True when it was one."""
        slot = self.find(key)
        return slot is not None and self.free_if_idle(slot)

"""C-34 over any history: news that was told is not overridden by answers that were on their way before it.

Events nest: what happens inside a question happens between the store's answer and its arrival.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from doubles import StoreDouble
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.coordinator.checkpoints import Checkpoints
from ucm_core.spec.keys import Keys

NUMBERS = st.integers(0, 3)
PLAIN = st.tuples(st.sampled_from(["save", "fail", "evict", "heal", "rebuild"]), NUMBERS, st.just([]))
EVENTS = st.lists(
    st.recursive(
        PLAIN,
        lambda inner: st.tuples(st.sampled_from(["held", "confirm"]), NUMBERS, st.lists(inner, max_size=3)),
        max_leaves=6,
    ),
    max_size=12,
)


def keys(number: int) -> Keys:
    made = np.zeros((1, 32), dtype=np.uint8)
    made[0, 0] = number
    return made


class History:
    """A directory over a store that other processes change too, and what was told of each state."""

    def __init__(self) -> None:
        self.store = StoreDouble()
        self.directory = Checkpoints(self.lookup, capacity=100)
        self.meanwhile: list[Any] = []
        self.now = 0
        self.told: dict[int, tuple[int, bool]] = {}
        """Number -> (when, whether it was stored or failed)."""
        self.answers: dict[int, list[tuple[int, str, bool]]] = {}
        """Number -> (when it was asked, how, what the store said)."""
        self.peeking = False

    def lookup(self, wanted: Keys) -> np.ndarray:
        if self.peeking:
            return np.zeros(len(wanted), dtype=np.bool_)
        how, nested = self.meanwhile.pop()
        found = self.store.lookup(wanted).astype(np.bool_)
        self.answers.setdefault(int(wanted[0, 0]), []).append((self.now, how, bool(found[0])))
        for event in nested:
            self.run(event)
        return found

    def run(self, event: tuple[str, int, list[Any]]) -> None:
        kind, number, nested = event
        self.now += 1
        if kind in ("held", "confirm"):
            self.meanwhile.append((kind, nested))
            before = len(self.meanwhile)
            getattr(self.directory, kind)(keys(number))
            del self.meanwhile[before - 1 :]  # answered from memory
        elif kind == "rebuild":
            self.rebuild()
        elif kind in ("save", "heal"):
            self.store.put(keys(number))
        else:
            self.store.drop(keys(number))
        if kind in ("save", "fail"):
            self.told[number] = (self.now, kind == "save")
            tell = self.directory.register if kind == "save" else self.directory.remove
            tell(keys(number))

    def rebuild(self) -> None:
        """An enumeration answers for every state: those it does not list are forgotten."""
        listed = {name[0] for name in self.store.names}
        for number in range(4):
            self.answers.setdefault(number, []).append((self.now, "confirm", number in listed))
        self.directory.rebuild(keys(number) for number in listed)

    def remembered(self, number: int) -> bool:
        self.peeking = True
        found = bool(self.directory.held(keys(number))[0])
        self.peeking = False
        return found

    def check(self) -> None:
        self.directory.check_integrity()
        for number, (when, stored) in self.told.items():
            newer = [(how, said) for asked, how, said in self.answers.get(number, []) if asked > when]
            if stored and not any(how == "confirm" and not said for how, said in newer):
                assert self.remembered(number), f"{number} was stored, an old answer hides it"
            if not stored and not any(said for _, said in newer):
                assert not self.remembered(number), f"{number} failed, an old answer brought it back"


@given(EVENTS)
def test_no_old_answer_overrides_what_was_told_since(events: list[Any]) -> None:
    history = History()
    for event in events:
        history.run(event)
        history.check()

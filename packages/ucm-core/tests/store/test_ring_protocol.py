"""Every interleaving of three participants over two slots, with deaths at every step: `ring_protocol`.

With ``--long`` more of them. The tests of planted mistakes show that the explorer finds what it looks for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import pytest
from explorer import Explorer, Report, Violation
from ring_protocol import QUIET, Participant, Steps, aftermath, ring_with
from ring_world import EMPTY, FAILED, LOADING, READY, SLOTS, RingWorld, Word

from ucm_core import _native

Roles = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Who does what with which key."""

    resident: tuple[int, ...]
    roles: Roles

    def __str__(self) -> str:
        return f"{[*self.resident]} " + " ".join(f"{role}-{key}" for role, key in self.roles)

    def world(self, kind: type[RingWorld] = RingWorld) -> RingWorld:
        here = tuple(k for k, (role, _) in enumerate(self.roles) if role != "arrive")
        return kind(*ring_with(*self.resident)._replace(joined=here, alive=here))

    def explore(self, kind: type[Participant] = Participant, world: type[RingWorld] = RingWorld) -> Report:
        programs = [partial(getattr(kind(k), role), key) for k, (role, key) in enumerate(self.roles)]
        return Explorer(self.world(world), programs, quiet=QUIET, settle=partial(aftermath, kind=kind)).run()


SHARED = Scenario((), (("visit", 1),) * 3)
SCENARIOS = [
    SHARED,  # owner, waiters, take-over
    Scenario((), (("visit", 1), ("fetch", 1), ("visit", 2))),
    Scenario((1,), (("visit", 1), ("drop", 1), ("visit", 1))),
    Scenario((1, 2), (("fetch", 1), ("visit", 3), ("visit", 3))),  # a reader, and evictors
    Scenario((1, 2), (("lookup", 1), ("visit", 3), ("visit", 3))),
    Scenario((1, 2), (("fetch", 1), ("visit", 3), ("arrive", 1))),
    Scenario((1, 2), (("fetch", 1), ("fetch", 2), ("reserve", 3))),  # victims that may be restored
]
LONGER = [
    Scenario((1, 2), (("visit", 1), ("visit", 3), ("visit", 4))),
    Scenario((1, 2), (("visit", 1), ("visit", 1), ("visit", 3))),
    Scenario((1, 2), (("fetch", 1), ("reserve", 3), ("visit", 3))),
    Scenario((1,), (("visit", 1), ("visit", 2), ("visit", 3))),
    Scenario((), (("visit", 1), ("visit", 2), ("visit", 3))),
    Scenario((1, 2), (("drop", 1), ("visit", 3), ("visit", 1))),
    Scenario((1, 2), (("fetch", 1), ("visit", 3), ("there_and_back", 3))),
    Scenario((), (("visit", 1), ("fetch", 1), ("there_and_back", 1))),
]


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    """Millions of small objects and no cycle among them."""
    gc.disable()
    yield
    gc.enable()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "scenario" in metafunc.fixturenames:
        longer = LONGER if metafunc.config.getoption("--long") else []
        metafunc.parametrize("scenario", [*SCENARIOS, *longer], ids=str)


def test_nothing_goes_wrong_whatever_the_order_and_whoever_dies(
    scenario: Scenario, say: Callable[[str], None]
) -> None:
    report = scenario.explore()
    say(f"{scenario}: {report}")
    assert report.states > 10_000


class Watched(RingWorld):
    """A world that notes which moves are made."""

    seen: ClassVar[set[tuple[str, str]]] = set()

    def _moved(self, me: int, slot: int, to: str) -> RingWorld:
        self.seen.add((self.slots[slot].word.state, to))
        return super()._moved(me, slot, to)


def test_every_legal_move_is_made() -> None:
    Scenario((1, 2), (("fetch", 1), ("visit", 3))).explore(world=Watched)
    Scenario((), (("visit", 1), ("visit", 1))).explore(world=Watched)
    assert Watched.seen == set(_native.RING_MOVES)


# Mistakes, each of which must be found: the programs as they are not, and the scenario that shows it.


class PinsWithoutASecondLook(Participant):
    def look_again(self, slot: int, word: Word) -> Steps:
        return word
        yield


class LooksAgainAtTheStateOnly(Participant):
    def look_again(self, slot: int, word: Word) -> Steps:
        now = yield ("load", slot)
        return now if now.pinnable else None


class EvictsWithoutClosing(Participant):
    def close_slot(self, slot: int) -> Steps:
        return True
        yield


class EvictsWithoutASecondLook(Participant):
    def close_slot(self, slot: int) -> Steps:
        yield ("move", slot, "CLOSING")
        return True


class WakesBeforeItPublishes(Participant):
    def publish(self, slot: int, version: int) -> Steps:
        if (yield ("load", slot)).waiting:
            yield ("wake", slot)
        yield ("settle", slot, version, READY)


class WakesNobody(Participant):
    def publish(self, slot: int, version: int) -> Steps:
        yield ("settle", slot, version, READY)


class SleepsWhateverTheWordIs(Participant):
    def wait(self, slot: int, version: int) -> Steps:
        if (yield ("announce", slot, version)).state == LOADING:
            word = yield ("load", slot)
            yield ("sleep", slot, word.low)
            yield ("awake",)
        return FAILED


class SleepsUnannounced(Participant):
    def wait(self, slot: int, version: int) -> Steps:
        word = yield ("load", slot)
        if word.state == LOADING:
            yield ("sleep", slot, word.low)
            yield ("awake",)
        return FAILED


class TakesTheEndOfASleepForReady(Participant):
    def wait(self, slot: int, version: int) -> Steps:
        word = yield ("announce", slot, version)
        if word.state == LOADING:
            yield ("sleep", slot, word.low)
            yield ("awake",)
        return READY


class PublishesBeforeItHasFilled(Participant):
    def settle(self, slot: int, key: int, version: int) -> Steps:
        yield ("write", slot, 0, key)
        yield from self.publish(slot, version)
        yield ("write", slot, 1, key)
        return READY


class ReleasesBeforeTheEndOfTheCopy(Participant):
    def fetch(self, key: int) -> Steps:
        held = yield from self.pin(key)
        if held and held[1] == READY:
            yield ("read", held[0], 0, key)
            yield ("unpin", held[0])
            yield ("read", held[0], 1, key)


class ReleasesTwice(Participant):
    def read(self, slot: int, key: int) -> Steps:
        yield from super().read(slot, key)
        yield ("unpin", slot)


class ExpelsTheLiving(Participant):
    def is_dead(self, k: int) -> Steps:
        return True
        yield


class ExpelsWithoutFailing(Participant):
    def expel(self, k: int) -> Steps:
        for slot in SLOTS:
            yield ("zero", slot, k)
        yield ("forget", k)


class ForgetsTheReferencesOfTheDead(Participant):
    def expel(self, k: int) -> Steps:
        yield ("forget", k)


class RepairsWithoutReopening(Participant):
    def repair(self) -> Steps:
        yield ("clear_index",)
        yield from self.rebuild()
        yield from self.reap_dead()


class RepairsWithoutTheIndex(Participant):
    def rebuild(self) -> Steps:
        for slot in SLOTS:
            if (yield ("load", slot)).state == EMPTY:
                yield ("push_free", slot)


class ClaimsWithoutAThirdLook(Participant):
    def pin_or_forget(self, key: int) -> Steps:
        return None
        yield


class KeysALoadingSlot(Participant):
    def insert(self, key: int, slot: int) -> Steps:
        yield ("pin", slot)
        yield ("move", slot, LOADING)
        yield ("write_key", slot, key)


class RestoresNothing(Participant):
    def restore(self, room: tuple[int, ...]) -> Steps:
        return None
        yield


class AbandonsTheLock(Participant):
    def leave(self) -> Steps:
        return None
        yield


class NoVersions(RingWorld):
    def _moved(self, me: int, slot: int, to: str) -> RingWorld:
        after = super()._moved(me, slot, to)
        return after._set(slot, word=after.slots[slot].word._replace(version=0))


EVICTED = Scenario((1, 2), (("fetch", 1), ("visit", 3)))
RESTORED = Scenario((1, 2), (("fetch", 1), ("reserve", 3)))
JOINED = Scenario((), (("visit", 1), ("visit", 1)))
REPLACED = Scenario((1,), (("fetch", 1), ("visit", 2), ("visit", 3)))
MISTAKES: list[tuple[type[Participant], Scenario, str]] = [
    (PinsWithoutASecondLook, EVICTED, "reads bytes of key"),
    (LooksAgainAtTheStateOnly, EVICTED, "reads bytes of key"),
    (EvictsWithoutClosing, EVICTED, "cannot go from READY to EMPTY"),
    (EvictsWithoutASecondLook, EVICTED, "reads bytes of key"),
    (WakesBeforeItPublishes, JOINED, "nobody can go on"),
    (WakesNobody, JOINED, "nobody can go on"),
    (SleepsWhateverTheWordIs, JOINED, "nobody can go on"),
    (SleepsUnannounced, JOINED, "nobody can go on"),
    (TakesTheEndOfASleepForReady, JOINED, "reads bytes of key"),
    (PublishesBeforeItHasFilled, JOINED, "does not hold the bytes of its key"),
    (ReleasesBeforeTheEndOfTheCopy, EVICTED, "reads bytes of key"),
    (ReleasesTwice, EVICTED, "less than no references"),
    (ExpelsTheLiving, REPLACED, "outlives the reaping"),
    (ExpelsWithoutFailing, JOINED, "LOADING for nobody|cannot have both slots"),
    (ForgetsTheReferencesOfTheDead, EVICTED, "left behind"),
    (RepairsWithoutReopening, EVICTED, "CLOSING outside an eviction"),
    (RepairsWithoutTheIndex, EVICTED, "not in the index"),
    (ClaimsWithoutAThirdLook, JOINED, "stands twice"),
    (KeysALoadingSlot, JOINED, "a key changes in use"),
    (RestoresNothing, RESTORED, "CLOSING outside an eviction"),
    (AbandonsTheLock, JOINED, "newcomer"),
]


@pytest.mark.parametrize(
    ("mistake", "scenario_", "found"), MISTAKES, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_mistake_is_found(mistake: type[Participant], scenario_: Scenario, found: str) -> None:
    with pytest.raises(Violation, match=found):
        scenario_.explore(mistake)


def test_a_version_that_is_not_raised_is_found() -> None:
    with pytest.raises(Violation, match="reads bytes of key"):
        Scenario((1, 2), (("fetch", 1), ("visit", 3))).explore(world=NoVersions)


@pytest.mark.parametrize("move", _native.RING_MOVES, ids="-".join)
def test_a_move_that_the_table_forbids_is_found(
    move: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(_native.RING_MOVES, move)
    with pytest.raises(Violation, match="cannot go from {} to {}".format(*move)):
        explore_each(EVICTED, JOINED)


def explore_each(*scenarios: Scenario) -> None:
    for scenario in scenarios:
        scenario.explore()


def test_a_story_tells_who_did_what() -> None:
    with pytest.raises(Violation) as violation:
        JOINED.explore(WakesNobody)
    lines = str(violation.value).splitlines()
    assert lines[0] == "nobody can go on"
    assert any("('settle', 0, 0, 'READY')" in line for line in lines)

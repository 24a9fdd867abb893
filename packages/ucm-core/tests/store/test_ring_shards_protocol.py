"""Every interleaving of those who publish shards and those who wait for them, with deaths: `ring_shards.hpp`.

The slot itself is `ring_protocol`'s; here it has one stay that is filled, or that is given up and followed by
another while a late thread of its owner still publishes. Time-outs are for deaths only: a sleeper who is not
woken while the owner lives sleeps for ever, and the explorer finds him.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple

import pytest
from explorer import Explorer, Program, Report, Request, Violation

LOADING, READY, FAILED, EMPTY = "LOADING", "READY", "FAILED", "EMPTY"
SHARDS = range(2)
OWNERS = 2
"""Participants below this number are threads of the owner; they die together."""
Steps = Generator[Request, Any, Any]


class SlotWorld(NamedTuple):
    """A slot with two shards."""

    version: int = 1
    state: str = LOADING
    tag: int = 1
    """Version that the bits belong to."""
    bits: frozenset[int] = frozenset()
    content: tuple[int, ...] = (0, 0)
    """Of which stay each shard's bytes are."""
    progress: int = 0
    sleeper: bool = False
    asleep: frozenset[int] = frozenset()
    pins: frozenset[int] = frozenset({0})
    dead: bool = False

    def apply(self, me: int, request: Request) -> Iterable[tuple[Any, Any]]:
        """One step; see `Participant` for who takes it."""
        step: Callable[..., Iterable[tuple[Any, Any]]] = getattr(self, f"do_{request[0]}")
        return step(me, *request[1:])

    def crash(self, me: int) -> SlotWorld:
        """Without ``me``."""
        return self._replace(dead=self.dead or me < OWNERS, asleep=self.asleep - {me}, pins=self.pins - {me})

    def check(self) -> None:
        """What is wrong shows where somebody reads."""

    def do_write(self, _: int, shard: int, version: int) -> Iterable[tuple[Any, Any]]:
        content = tuple(version if i == shard else old for i, old in enumerate(self.content))
        yield self._replace(content=content), None

    def do_word(self, _: int) -> Iterable[tuple[Any, Any]]:
        yield self, (self.version, self.state)

    def do_set(self, _: int, version: int, shard: int) -> Iterable[tuple[Any, Any]]:
        if self.tag != version:
            yield self, False
        else:
            yield self._replace(bits=self.bits | {shard}), True

    def do_has(self, _: int, version: int, shard: int) -> Iterable[tuple[Any, Any]]:
        yield self, self.tag == version and shard in self.bits

    def do_settle(self, _: int, version: int, to: str) -> Iterable[tuple[Any, Any]]:
        ours = (self.version, self.state) == (version, LOADING)
        yield (self._replace(state=to), True) if ours else (self, False)

    def do_raise(self, _: int) -> Iterable[tuple[Any, Any]]:
        yield self._replace(progress=self.progress + 1, sleeper=False), self.sleeper

    def do_wake(self, _: int) -> Iterable[tuple[Any, Any]]:
        yield self._replace(asleep=frozenset()), None

    def do_progress(self, _: int) -> Iterable[tuple[Any, Any]]:
        yield self, (self.progress, self.sleeper)

    def do_mark(self, _: int, seen: tuple[int, bool]) -> Iterable[tuple[Any, Any]]:
        same = (self.progress, self.sleeper) == seen
        yield (self._replace(sleeper=True), True) if same else (self, False)

    def do_sleep(self, me: int, progress: int) -> Iterable[tuple[Any, Any]]:
        same = (self.progress, self.sleeper) == (progress, True)
        yield (self._replace(asleep=self.asleep | {me}) if same else self), None

    def do_awake(self, me: int) -> Iterable[tuple[Any, Any]]:
        if me not in self.asleep:
            yield self, False
        elif self.dead:
            yield self._replace(asleep=self.asleep - {me}), True

    def do_expel(self, _: int) -> Iterable[tuple[Any, Any]]:
        failed = self.dead and self.state == LOADING
        yield (self._replace(state=FAILED), True) if failed else (self, False)

    def do_read(self, _: int, shard: int, version: int) -> Iterable[tuple[Any, Any]]:
        if self.content[shard] != version:
            raise Violation(f"shard {shard} of stay {version} shows stay {self.content[shard]}")
        yield self, None

    def do_unpin(self, me: int) -> Iterable[tuple[Any, Any]]:
        yield self._replace(pins=self.pins - {me}), None

    def do_join(self, me: int, version: int) -> Iterable[tuple[Any, Any]]:
        """Take a reference on a stay as soon as it loads; False when it never will."""
        if (self.version, self.state) == (version, LOADING):
            yield self._replace(pins=self.pins | {me}), True
        elif self.dead or self.version > version or (self.version == version and self.state != EMPTY):
            yield self, False

    def do_empty(self, _: int) -> Iterable[tuple[Any, Any]]:
        if not self.pins:
            yield self._replace(version=self.version + 1, state=EMPTY), self.version + 1

    def do_reset(self, _: int, version: int) -> Iterable[tuple[Any, Any]]:
        yield self._replace(tag=version, bits=frozenset()), None

    def do_fill(self, me: int) -> Iterable[tuple[Any, Any]]:
        yield self._replace(state=LOADING, pins=frozenset({me})), None


class Participant:
    """What the code does, one method per function of ring_shards.hpp, ring_slots.hpp and ring.hpp."""

    def tell(self) -> Steps:
        if (yield ("raise",)):
            yield ("wake",)

    def settle(self, version: int, to: str) -> Steps:
        if (yield ("settle", version, to)):
            yield from self.tell()

    def publish_shard(self, version: int, shard: int) -> Steps:
        word = yield ("word",)
        if word != (version, LOADING):
            return
        done = yield ("set", version, shard)
        if not done:
            return
        for one in SHARDS:
            has = yield ("has", version, one)
            if not has:
                yield from self.tell()
                return
        yield from self.settle(version, READY)

    def outcome(self, version: int, shard: int) -> Steps:
        word = yield ("word",)
        has = yield ("has", version, shard)
        if word[0] == version and has:
            return READY
        if word[0] != version:
            return FAILED
        return FAILED if word[1] == EMPTY else word[1]

    def wait(self, version: int, shard: int) -> Steps:
        while True:
            seen = yield ("progress",)
            now = yield from self.outcome(version, shard)
            if now != LOADING:
                return now
            yield from self.sleep(seen)

    def sleep(self, seen: tuple[int, bool]) -> Steps:
        if not seen[1]:
            marked = yield ("mark", seen)
            if not marked:
                return
        yield ("sleep", seen[0])
        timed_out = yield ("awake",)
        if timed_out and (yield ("expel",)):
            yield from self.tell()

    def insert(self, version: int) -> Steps:
        yield ("reset", version)
        yield ("fill",)

    # Whole lives

    def fills(self) -> Program:
        for shard in SHARDS:
            yield ("write", shard, 1)
            yield from self.publish_shard(1, shard)

    def gives_up_and_fills_again(self) -> Program:
        yield ("write", 0, 1)
        yield from self.publish_shard(1, 0)
        yield from self.settle(1, FAILED)
        yield ("unpin",)
        yield ("empty",)
        yield from self.insert(2)
        for shard in SHARDS:
            yield ("write", shard, 2)
            yield from self.publish_shard(2, shard)

    def is_late(self) -> Program:
        yield from self.publish_shard(1, 1)

    def waits(self, version: int, shard: int) -> Program:
        joined = yield ("join", version)
        if joined:
            outcome = yield from self.wait(version, shard)
            if outcome == READY:
                yield ("read", shard, version)
            yield ("unpin",)


def explore(lives: str, kind: type[Participant] = Participant, world: SlotWorld | None = None) -> Report:
    """Run one of the scenarios: the owner's threads first."""
    one = kind()
    programs: dict[str, list[Callable[[], Program]]] = {
        "filled": [one.fills, idle, lambda: one.waits(1, 0), lambda: one.waits(1, 1)],
        "given up": [one.gives_up_and_fills_again, idle, lambda: one.waits(1, 0), lambda: one.waits(1, 1)],
        "late": [one.gives_up_and_fills_again, one.is_late, lambda: one.waits(2, 1)],
        "joined late": [one.gives_up_and_fills_again, one.is_late, lambda: one.waits(2, 0)],
    }
    return Explorer(world or SlotWorld(), programs[lives]).run()


def idle() -> Program:
    """A thread that does nothing."""
    yield ("word",)


@pytest.mark.parametrize("lives", ["filled", "given up", "late", "joined late"])
def test_each_shard_is_read_when_it_is_there_and_nobody_sleeps_for_ever(lives: str) -> None:
    report = explore(lives)
    assert report.states > 1000


class TellsBeforeItSets(Participant):
    def publish_shard(self, version: int, shard: int) -> Steps:
        yield from self.tell()
        yield ("set", version, shard)


class LooksBeforeItReadsTheProgress(Participant):
    def wait(self, version: int, shard: int) -> Steps:
        while True:
            now = yield from self.outcome(version, shard)
            if now != LOADING:
                return now
            seen = yield ("progress",)
            yield from self.sleep(seen)


class SettlesWithoutTelling(Participant):
    def settle(self, version: int, to: str) -> Steps:
        yield ("settle", version, to)


class WakesBeforeItRaises(Participant):
    def tell(self) -> Steps:
        yield ("wake",)
        yield ("raise",)


class ForgetsTheReset(Participant):
    def insert(self, version: int) -> Steps:
        yield ("fill",)


class BitsWithoutVersion(SlotWorld):
    """A set that trusts the look before it."""

    def do_set(self, _: int, version: int, shard: int) -> Iterable[tuple[Any, Any]]:
        yield self._replace(bits=self.bits | {shard}), True


def test_a_bit_without_its_version_lets_a_late_writer_in() -> None:
    with pytest.raises(Violation, match="shard 1 of stay 2 shows stay"):
        explore("late", world=BitsWithoutVersion())


@pytest.mark.parametrize(
    ("kind", "lives"),
    [
        (TellsBeforeItSets, "filled"),
        (LooksBeforeItReadsTheProgress, "filled"),
        (SettlesWithoutTelling, "given up"),
        (WakesBeforeItRaises, "filled"),
        (ForgetsTheReset, "joined late"),
    ],
)
def test_a_planted_mistake_is_found(kind: type[Participant], lives: str) -> None:
    with pytest.raises(Violation):
        explore(lives, kind)

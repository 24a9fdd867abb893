"""The ledger of leases: pinned once, released once, bounded in number and in time, and at the end zero."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from doubles import Clock, errors_counted
from hypothesis import given
from hypothesis import strategies as st
from ledger_cases import ledger_cases
from ring_double import RingDouble

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.leases import LeasedRow, Leases
from ucm_core.errors import SpecError, StoreError
from ucm_core.spec.keys import Keys

R1, R2, R3 = (Attempt(name) for name in ("r1", "r2", "r3"))


def keys(*blocks: int) -> Keys:
    return np.array([[block] * 32 for block in blocks], dtype=np.uint8).reshape(-1, 32)


class World:
    """A ledger over ring doubles, with everything in the ring."""

    def __init__(self, *rows: str, objects: int = 8, slots: int = 8) -> None:
        self.clock = Clock()
        self.rings = {name: RingDouble(slots) for name in rows or ("full",)}
        leased = {name: LeasedRow(ring.pin, objects) for name, ring in self.rings.items()}
        self.leases = Leases(leased, limit_s=60.0, clock=self.clock)
        for ring in self.rings.values():
            ring.put(keys(*range(slots)))

    @property
    def pins(self) -> dict[int, int]:
        """References per block in the first row's ring."""
        ring = next(iter(self.rings.values()))
        return {name[0]: count for name, count in ring.references.items()}

    def take(self, attempt: Attempt, *blocks: int) -> Any:
        return self.leases.take(attempt, {name: keys(*blocks) for name in self.rings})


@pytest.fixture
def world() -> Any:
    """A world whose balance is zero when all requests have ended."""
    world = World()
    yield world
    world.leases.check_integrity()
    world.leases.close()
    world.leases.check_integrity()
    assert world.pins == {}
    assert (world.leases.statistics().held, world.leases.statistics().objects) == (0, 0)


@pytest.mark.parametrize(("given_", "expected"), ledger_cases("pins"))
def test_pins_of_the_public_cases_balance(
    given_: dict[str, Any], expected: dict[str, Any], world: World
) -> None:
    seen = []
    for verb, request, *blocks in given_["events"]:
        if verb == "verdict":
            world.take(Attempt(request), *blocks[0])
        else:  # an abort is a release that the engine calls otherwise
            world.leases.release(Attempt(request))
        seen.append({str(block): count for block, count in world.pins.items()})
    assert seen == expected["pins"]
    assert next(iter(world.rings.values())).references == Counter()


def test_a_lease_keeps_what_the_ring_holds(world: World) -> None:
    lease = world.take(R1, 2, 3, 200)
    assert lease.pins["full"].keys.tolist() == keys(2, 3).tolist()
    world.rings["full"].press(50)
    assert world.rings["full"].lookup(keys(1, 2, 3)).tolist() == [False, True, True]


def test_a_new_lease_keeps_what_is_in_both_throughout(world: World) -> None:
    world.take(R1, 0, 1)
    ring = world.rings["full"]
    pin, least = ring.pin, []

    def pressing(wanted: Keys) -> Any:
        pins = pin(wanted)
        least.append(dict(world.pins))
        return pins

    world.leases._rows["full"] = LeasedRow(pressing, 8)
    world.take(R1, 1, 2)
    assert least == [{0: 1, 1: 2, 2: 1}]
    assert world.pins == {1: 1, 2: 1}


def test_a_lease_of_nothing_replaces_too(world: World) -> None:
    world.take(R1, 0, 1)
    assert world.take(R1).objects == 0
    assert world.pins == {}


def test_a_second_release_takes_nobody_elses(world: World) -> None:
    world.take(R1, 0, 1)
    world.take(R2, 0)
    for _ in range(3):
        world.leases.release(R1)
    assert world.pins == {0: 1}
    assert world.leases.statistics().idle_releases == 2


def test_an_id_that_is_used_anew_keeps_its_own_lease(world: World) -> None:
    old, new = Attempt("r7", 1), Attempt("r7", 2)
    lease = world.take(old, 0)
    world.leases.release(old)
    world.take(new, 1)
    lease.release()  # the old load ends late
    world.leases.release(old)
    assert world.pins == {1: 1}


def test_a_late_end_of_a_load_leaves_the_next_verdicts_lease(world: World) -> None:
    first = world.take(R1, 0, 1)
    world.take(R1, 2)
    first.release()
    assert world.pins == {2: 1}


def test_a_lease_that_nobody_releases_ends_by_itself(world: World) -> None:
    world.take(R1, 0)
    world.clock.now = 30.0
    world.take(R2, 1)
    world.clock.now = 60.0
    world.leases.release(R3)
    assert world.pins == {1: 1}
    assert world.leases.statistics().expired == 1
    world.leases.release(R1)  # late: a no-op
    assert world.pins == {1: 1}


def test_a_new_verdict_begins_a_new_term(world: World) -> None:
    world.take(R1, 0)
    world.clock.now = 59.0
    world.take(R1, 0)
    world.clock.now = 61.0
    assert world.leases.statistics().held == 1


def test_the_head_of_the_prefix_comes_first_and_the_rest_is_not_pinned() -> None:
    world = World(objects=6)
    world.take(R1, 0, 1, 2, 3)
    assert world.take(R2, 4, 5, 6, 7).pins["full"].keys.tolist() == keys(4, 5).tolist()
    assert world.take(R3, 4, 5).objects == 0
    world.leases.release(R1)
    assert world.take(R3, 4, 5).objects == 2


def test_a_verdict_may_use_the_room_of_the_one_it_replaces() -> None:
    world = World(objects=4)
    world.take(R1, 0, 1, 2, 3)
    assert world.take(R1, 4, 5, 6, 7).objects == 4


def test_every_row_has_its_own_room() -> None:
    world = World("full", "state", objects=2)
    lease = world.take(R1, 0, 1, 2)
    assert {name: len(pins.keys) for name, pins in lease.pins.items()} == {"full": 2, "state": 2}


def test_rows_that_cannot_be_leased_are_left_out(world: World) -> None:
    lease = world.leases.take(R1, {"full": keys(0), "elsewhere": keys(1)})
    assert set(lease.pins) == {"full"}


def test_a_store_that_fails_pins_nothing_and_the_others_go_on() -> None:
    world = World("full", "state")
    world.rings["full"].broken = True
    before = errors_counted("lease")
    assert set(world.take(R1, 0).pins) == {"state"}
    assert world.leases.statistics().failures == 1
    assert errors_counted("lease") == before + 1


def test_a_defect_leaves_no_pin_behind() -> None:
    world = World("full", "state")
    world.leases._rows["state"] = LeasedRow(lambda _: 1 // 0, 8)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        world.take(R1, 0)
    assert world.pins == {}
    world.leases.check_integrity()


def test_after_close_nothing_is_pinned() -> None:
    world = World()
    lease = world.take(R1, 0)
    world.leases.close()
    world.leases.close()
    lease.release()
    assert world.take(R2, 0).objects == 0
    assert world.pins == {}
    assert world.leases.statistics().released == 1


def test_releases_come_from_any_thread(world: World) -> None:
    leases = [world.take(Attempt("r", number), number % 8) for number in range(8)]
    threads = [threading.Thread(target=lease.release) for lease in leases for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert world.pins == {}
    assert world.leases.statistics().released == 8


@pytest.mark.parametrize(("objects", "limit_s"), [(-1, 60.0), (8, 0.0)])
def test_limits_that_make_no_sense_are_refused(objects: int, limit_s: float) -> None:
    with pytest.raises(SpecError, match="must"):
        Leases({"full": LeasedRow(RingDouble().pin, objects)}, limit_s=limit_s)


STEPS = st.tuples(
    st.sampled_from(["take", "release", "end", "wait"]), st.integers(0, 3), st.lists(st.integers(0, 9))
)


class Model:
    """The last verdict of each attempt, cut to the room, until its end or its time."""

    def __init__(self) -> None:
        self.world = World(objects=6)
        self.made: list[Any] = []
        self.held: dict[Attempt, tuple[Any, float]] = {}

    def step(self, verb: str, number: int, blocks: list[int]) -> None:
        attempt = Attempt("r", number)
        if verb == "take":
            self.made.append(self.world.take(attempt, *dict.fromkeys(blocks)))
            self.held[attempt] = (self.made[-1], self.world.clock.now + 60.0)
        elif verb == "release":
            self.world.leases.release(attempt)
            self.held.pop(attempt, None)
        elif verb == "end" and self.made:
            ended = self.made[number % len(self.made)]
            ended.release()
            self.held = {a: each for a, each in self.held.items() if each[0] is not ended}
        elif verb == "wait":
            self.world.clock.now += 25.0

    def pins(self) -> dict[int, int]:
        self.held = {a: each for a, each in self.held.items() if each[1] > self.world.clock.now}
        leases = [lease for lease, _ in self.held.values() if lease.pins]
        return dict(Counter(chain.from_iterable(each.pins["full"].keys[:, 0].tolist() for each in leases)))


@given(st.lists(STEPS, max_size=40))
def test_any_interleaving_balances(steps: list[tuple[str, int, list[int]]]) -> None:
    model = Model()
    for step in steps:
        model.step(*step)
        model.world.leases.statistics()  # expiry is looked after by a call
        model.world.leases.check_integrity()
        assert model.world.pins == model.pins()
        assert sum(model.pins().values()) <= 6


ENDS: dict[str, Callable[[World, Any], object]] = {
    "its release": lambda world, lease: lease.release(),
    "the attempt's release": lambda world, lease: world.leases.release(R1),
    "the next lease": lambda world, lease: world.take(R1),
    "time": lambda world, lease: (setattr(world.clock, "now", 60.0), world.leases.statistics()),
    "closing": lambda world, lease: world.leases.close(),
}


@pytest.mark.parametrize("error", [StoreError("no reference"), OSError(5, "EIO"), RuntimeError("gone")])
@pytest.mark.parametrize("end", ENDS)
def test_whoever_ends_a_lease_does_not_fail_with_a_store(
    end: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World("broken", "sound")
    lease = world.take(R1, 0, 1)
    monkeypatch.setattr(lease.pins["broken"], "release", raising(error))
    before = errors_counted("lease")
    ENDS[end](world, lease)
    assert errors_counted("lease") == before + 1
    assert world.rings["sound"].references == Counter()
    assert world.leases.statistics().held == 0
    world.leases.check_integrity()


def raising(error: Exception) -> Callable[[], None]:
    def release() -> None:
        raise error

    return release

"""What a peer demands of a process that was struck: every promise, every slot, no leftovers."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

from scenarios import BASE, FRESH, OLD, WAIT_S, Actor, Place, fresh
from stores import NAMESPACE

from ucm_core.flow.ticket import ResultCode
from ucm_core.store.names import MANIFEST
from ucm_core.store.usage import object_bytes
from ucm_core.testing.block_store import keys_of


class Peer(Actor):
    """A process that is there all the time, and looks at what the struck one left."""

    def __init__(self, place: Place) -> None:
        super().__init__(place, 0, lambda *_words: None)
        self.open(save_wait_s=20.0, load_wait_s=20.0)
        self._thread: threading.Thread | None = None

    def stir(self, turn: int) -> None:
        """Work until `still`: on the same objects as the one that will be struck."""
        self._stirring = True
        self._trouble: list[BaseException] = []
        self._thread = threading.Thread(target=self._stir, args=(turn,))
        self._thread.start()

    def _stir(self, turn: int) -> None:
        try:
            while self._stirring:
                self.load(*OLD, *fresh(turn)[:4])
                self.save(*fresh(turn)[2:4])
        except BaseException as trouble:  # noqa: BLE001 - raised by `still`
            self._trouble.append(trouble)

    def still(self) -> None:
        """End what `stir` began; raises what went wrong there."""
        if self._thread is not None:
            self._stirring = False
            self._thread.join()
            self._thread = None
            for trouble in self._trouble:
                raise trouble

    def prepare(self, *, in_ring: bool) -> None:
        """The old objects lie on the medium, used long ago, and in the ring only when asked for."""
        self.demand_ok(self.save(*OLD))
        if not in_ring:
            self.store._tiers.ring.drop(keys_of(*OLD))
        for path in self.files():
            os.utime(path, (1_000_000_000, 1_000_000_000))

    def verify(self, turn: int, said: dict[str, list[int]], *, faulty: bool) -> None:
        """Everything that must hold after a strike; ``faulty``: the counter may be too high."""
        self.still()
        self.check_usage()
        dropped, kept = set(said.get("drops", ())), set(said.get("ring", ())) | set(said.get("durable", ()))
        everything = (*OLD, *fresh(turn, FRESH + 2))
        codes = dict(zip(everything, self.load_in_waves(everything), strict=True))
        assert set(codes.values()) <= {ResultCode.OK, ResultCode.MISS}, codes
        there = {n for n in everything if codes[n] == ResultCode.OK}
        assert not (lost := kept - dropped - there), f"lost: {lost}"
        lasting = sorted(set(said.get("durable", ())) - dropped)
        assert self.store._tiers.files.exist(keys_of(*lasting)).all() if lasting else True
        self.root.sweep()
        if faulty:
            self.root.usage.recount()
        self.check_files()
        self.check_restart(turn)
        self.check_ring(turn)
        self.check_generation(said)
        self.forget(everything)

    def load_in_waves(self, numbers: tuple[int, ...]) -> list[int]:
        """Load what the ring has room for at a time."""
        return [code for i in range(0, len(numbers), 6) for code in self.load(*numbers[i : i + 6])]

    def check_usage(self) -> None:
        """The counter is never below the truth."""
        used, there = self.root.usage.used_bytes, object_bytes(self.place.root)
        assert used >= there, f"the counter says {used} bytes, {there} are there"

    def check_files(self) -> None:
        """No temporary, no dead writer, a true counter."""
        assert not (left := [path.name for path in self.place.root.rglob("*.tmp")]), left
        writers = [path.name for path in (self.place.root / ".writers").iterdir()]
        assert writers == [self.root._writer.name], writers
        used, there = self.root.usage.used_bytes, object_bytes(self.place.root)
        assert used == there, f"after the sweep the counter says {used} bytes, {there} are there"

    def check_restart(self, turn: int) -> None:
        """Who comes now can work, and expels the dead."""
        other = Actor(self.place, turn, lambda *_words: None)
        other.open()
        one, two = fresh(turn, FRESH + 4)[-2:]
        self.demand_ok(other.save(one))
        self.demand_ok(self.load(one))
        self.demand_ok(self.save(two))
        self.demand_ok(other.load(two))
        other.close()
        self.store.drop(keys_of(one, two))

    def check_ring(self, turn: int) -> None:
        """No slot is held or lost: all of them can be had at once."""
        self.await_idle()
        self.store.check_integrity()
        ring = self.store._tiers.ring.statistics()
        assert (ring.participants, ring.own_references, ring.pinned, ring.loading) == (1, 0, 0, 0), ring
        slots = self.store.slots
        donations = [self.store.reserve(key) for key in keys_of(*fresh(turn, FRESH + 4 + slots)[-slots:])]
        assert all(donations)
        for donation in donations:
            donation.abort()
        assert self.store._tiers.ring.statistics().empty == slots

    def await_idle(self) -> None:
        """Wait until our own work is over: a ticket is done a moment before its slots are free."""
        assert self.store._work.wait_idle(WAIT_S)
        assert self.store._writer.wait_idle(WAIT_S)

    def check_generation(self, said: dict[str, list[int]]) -> None:
        """A generation that was raised stays raised."""
        assert self.root.generation(BASE) >= max(said.get("generation", [0]))

    def forget(self, numbers: tuple[int, ...]) -> None:
        """Clean up for the next turn, and see that nothing is left."""
        self.store.drop(keys_of(*numbers))
        assert self.files() == []
        assert self.root.usage.used_bytes == 0
        for path in (*self.place.root.glob(f"{NAMESPACE}/row/*"), self.place.root / ".generations"):
            shutil.rmtree(path, ignore_errors=True)
        (self.place.root / NAMESPACE / MANIFEST).unlink(missing_ok=True)

    def files(self) -> list[Path]:
        """All objects on the medium."""
        return [path for path in self.place.root.glob(f"{NAMESPACE}/row/*/*") if path.is_file()]

    def end(self) -> None:
        """Leave; nothing stays behind."""
        self.close()
        assert not self.place.region.exists(), "the region stayed"
        assert list((self.place.root / ".writers").iterdir()) == []

    def demand_ok(self, codes: list[int]) -> None:
        """A living process works."""
        assert set(codes) == {ResultCode.OK}, [ResultCode(code).name for code in codes]

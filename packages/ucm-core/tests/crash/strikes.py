"""Strikes one scenario at every step that it passes: ``python strikes.py '<Job as JSON>'`` with the shim.

This process has everything imported and never opens a store. It forks a peer, which has the store open all
the time, and for every strike a process that plays the scenario and is struck. The peer looks after it.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from peer import Peer
from scenarios import ALL, OLD, Actor, Place
from shim import Action, Shim, Strike

from ucm_core.errors import UcmError

PATIENCE_S = 300.0
"""Nothing takes so long; what does, hangs."""
MAX_FAILURES = 8
LOOKS = ("call.stat", "call.list")
"""Steps before which nothing has changed since the last one."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that can go wrong with a call."""

    step: str
    action: int
    value: int = 0

    def strike(self, nth: int) -> Strike:
        """At the ``nth`` call."""
        return Strike(self.step, nth, Action(self.action), self.value)


@dataclass(frozen=True, slots=True)
class Job:
    """What to do, in JSON."""

    folder: str
    scenario: str
    most: int | None = None
    """Strikes per step, spread over all times that it is passed; None = all."""
    rounds: int = 1
    faults: tuple[Fault, ...] = ()
    """Empty: kill. Else what else can go wrong at every library call of the scenario."""
    width: int | None = None
    """Faults per call, in turns; None = all."""


@dataclass(slots=True)
class Report:
    """What was done, and what was wrong."""

    passed: dict[str, int] = field(default_factory=dict)
    """How often an undisturbed run passes each step."""
    struck: dict[str, int] = field(default_factory=dict)
    missed: int = 0
    """Strikes at steps that this run did not reach."""
    loaded: list[tuple[Strike, list[int]]] = field(default_factory=list)
    """What became of the first load of a run, strike by strike."""
    failures: list[str] = field(default_factory=list)


class Fork:
    """A forked process that serves one function and talks over a pipe."""

    def __init__(self, work: Callable[[Connection], None]) -> None:
        self.pipe, theirs = multiprocessing.Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            self.pipe.close()
            try:
                work(theirs)
            except BaseException:  # noqa: BLE001 - told to the parent, where it is raised
                theirs.send(("failed", traceback.format_exc()))
            os._exit(0)
        theirs.close()

    def receive(self) -> Any:
        """What it says next; EOFError when it is gone."""
        if not self.pipe.poll(PATIENCE_S):
            os.kill(self.pid, signal.SIGABRT)
            raise AssertionError(f"hangs for {PATIENCE_S} s")
        try:
            return self.pipe.recv()
        except ConnectionResetError as error:
            raise EOFError from error

    def end(self) -> int:
        """Wait for it; the signal that it died of, or 0."""
        self.pipe.close()
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class PeerFork(Fork):
    """A `Peer` in a process of its own."""

    def __init__(self, place: Place) -> None:
        super().__init__(lambda pipe: self._serve(pipe, place))

    def call(self, method: str, *arguments: Any, **named: Any) -> None:
        """Let it do that; raises what went wrong."""
        self.pipe.send((method, arguments, named))
        word, *rest = self.receive()
        assert word == "done", "".join(rest)

    @staticmethod
    def _serve(pipe: Connection, place: Place) -> None:
        peer = Peer(place)
        while True:
            method, arguments, named = pipe.recv()
            getattr(peer, method)(*arguments, **named)
            pipe.send(("done",))
            if method == "end":
                return


class Struck(Fork):
    """The process that plays a script and is struck."""

    def __init__(
        self, script: Callable[[Actor], None], place: Place, *, turn: int, strikes: tuple[Strike, ...]
    ) -> None:
        self.said: dict[str, list[int]] = {}
        self.counts: dict[str, int] = {}
        self.refused = ""
        self.loaded: list[int] = []
        super().__init__(lambda pipe: _play(script, place, turn, strikes, pipe))

    def watch(self) -> int:
        """Listen until it ends; the signal that it died of, or 0."""
        while True:
            try:
                word, *rest = self.receive()
            except EOFError:
                return self.end()
            if word == "counts":
                self.counts = rest[0]
            elif word == "refused":
                self.refused = rest[0]
            elif word == "loaded":
                self.loaded = rest
            elif word == "failed":
                raise AssertionError(rest[0])
            else:
                self.said.setdefault(word, []).extend(rest)


def _play(
    script: Callable[[Actor], None], place: Place, turn: int, strikes: tuple[Strike, ...], pipe: Connection
) -> None:
    shim = Shim()
    shim.watch(place.root, place.region)
    shim.strike(*strikes)
    actor = Actor(place, turn, lambda *words: pipe.send(words))
    try:
        script(actor)
        if any(strike.is_over(shim.counts()) for strike in strikes):
            actor.check_use()
        actor.close()
    except (OSError, UcmError) as error:
        if not strikes:
            raise
        pipe.send(("refused", repr(error)))
    pipe.send(("counts", shim.counts()))
    shim.clear()


class Arena:
    """Where one job is done."""

    def __init__(self, job: Job) -> None:
        self.job, self.scenario = job, ALL[job.scenario]
        self.report = Report()
        self._turn = 0
        self._peer: PeerFork | None = None
        self._place = Place(Path(job.folder) / "root", f"crash{os.getpid():x}")

    def run(self) -> Report:
        """An undisturbed run to count steps, then one strike after the other."""
        self.report.passed = self.strike(None).counts
        for _ in range(self.job.rounds):
            for strike in self.plan():
                try:
                    self.strike(strike)
                except (AssertionError, EOFError) as error:
                    self.report.failures.append(f"{strike}: {error}")
                    self._peer = None
                    self._place = Place(
                        Path(self.job.folder) / f"root{self._turn}", f"crash{os.getpid():x}-{self._turn}"
                    )
                if len(self.report.failures) == MAX_FAILURES:
                    return self.report
        if self._peer is not None:
            self._peer.call("end")
            self._peer.end()
        return self.report

    def plan(self) -> Iterator[Strike]:
        """All strikes of one round."""
        for step, count in sorted(self.report.passed.items()):
            for nth in spread(count, self.job.most):
                yield from self._faults(step, nth) if self.job.faults else self._deaths(step, nth)

    def _deaths(self, step: str, nth: int) -> Iterator[Strike]:
        if step.startswith(self.scenario.steps) and step not in LOOKS:
            yield Strike(step, nth)
            if step.startswith("call.write"):
                yield Strike(step, nth, Action.TORN)

    def _faults(self, step: str, nth: int) -> Iterator[Strike]:
        fitting = [fault for fault in self.job.faults if fault.step == step]
        width = len(fitting) if self.job.width is None else min(len(fitting), self.job.width)
        for i in range(width):
            yield fitting[((nth - 1) * width + i) % len(fitting)].strike(nth)

    def strike(self, strike: Strike | None) -> Struck:
        """Prepare, let it happen, look after it."""
        self._turn += 1
        if self.scenario.alone:
            self._place = Place(Path(self.job.folder) / f"root{self._turn}", self._place.ring)
        else:
            self.peer.call("prepare", in_ring=self.scenario.crowded)
        if self.scenario.before is not None:
            script, end = self.scenario.before
            before = Struck(script, self._place, turn=self._turn, strikes=(end,))
            assert before.watch() == -signal.SIGKILL
        if self.scenario.stirred:
            self.peer.call("stir", self._turn)
        strikes = self.scenario.strikes if strike is None else (*self.scenario.strikes, strike)
        struck = Struck(self.scenario.script, self._place, turn=self._turn, strikes=strikes)
        died_of = struck.watch()
        self._note(strike, died_of, struck)
        self.peer.call("verify", self._turn, self._promised(struck), faulty=bool(self.job.faults))
        if self.scenario.alone:
            self._end_alone()
        return struck

    def _promised(self, struck: Struck) -> dict[str, list[int]]:
        """What must be kept: what is old or durable, and what a ring holds that lives and has room."""
        said = dict(struck.said)
        if self.scenario.crowded or self.scenario.alone:
            said["ring"] = []
        if self.scenario.collects and self.job.faults:  # what is older may be where it cannot be listed
            said["durable"] = []
        if not self.scenario.alone:
            said["durable"] = [*said.get("durable", []), *OLD]
        return said

    def _note(self, strike: Strike | None, died_of: int, struck: Struck) -> None:
        assert died_of in ({0, -signal.SIGKILL} if strike is not None and strike.deadly else {0}), died_of
        if strike is None:
            return
        if died_of or strike.nth <= struck.counts.get(strike.step, 0):
            self.report.struck[strike.step] = self.report.struck.get(strike.step, 0) + 1
        else:
            self.report.missed += 1
        if struck.loaded:
            self.report.loaded.append((strike, struck.loaded))

    @property
    def peer(self) -> PeerFork:
        if self._peer is None:
            self._peer = PeerFork(self._place)
        return self._peer

    def _end_alone(self) -> None:
        self.peer.call("end")
        self.peer.end()
        self._peer = None


def spread(count: int, most: int | None) -> list[int]:
    """Up to ``most`` of the numbers from 1 to ``count``, the first and the last among them."""
    if most is None or count <= most:
        return list(range(1, count + 1))
    return sorted({1 + i * (count - 1) // max(1, most - 1) for i in range(most)})


def main() -> None:
    """Do a job and print its report."""
    words = json.loads(sys.argv[1])
    job = Job(**{**words, "faults": tuple(Fault(**fault) for fault in words.get("faults", ()))})
    gc.freeze()
    sys.stdout.write(json.dumps(asdict(Arena(job).run())) + "\n")


if __name__ == "__main__":
    main()

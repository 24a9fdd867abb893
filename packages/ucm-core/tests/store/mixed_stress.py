"""Everything at once: ``python mixed_stress.py <root> <seconds>``; exit status 0 = nothing went wrong.

Four processes of four threads share one ring and one root and do everything a store offers, with more keys
than there are slots and more bytes than the capacity. One after the other is killed at a random moment, a
fresh process verifies all that can be loaded, and a new one takes the place. What must hold: no wrong byte
(the content derives from the key), progress of every thread in every window, nothing left behind in the end.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from stores import open_store

from ucm_core.errors import NoSpace
from ucm_core.flow.copy import BufferBlocks
from ucm_core.flow.ticket import ResultCode, Ticket
from ucm_core.store import region
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.root import CacheRoot
from ucm_core.store.tiers import StoreLimits
from ucm_core.store.usage import object_bytes
from ucm_core.testing.block_store import blank, keys_of

GEOMETRY = Geometry(2, 5000)
PROCESSES, THREADS = 4, 4
NUMBERS = range(64)
SLOTS = 24
OBJECT_BYTES = 4096 + GEOMETRY.payload_bytes
CAPACITY_BYTES = 48 * OBJECT_BYTES
WINDOW_S = 30.0
"""Every thread ends one call at least in it, or the run has failed."""
LIMITS = StoreLimits(save_wait_s=1.0, load_wait_s=5.0)
PR_SET_PDEATHSIG = 1


def payload(number: int) -> np.ndarray:
    """The bytes of a key, ``uint8[shards, shard_bytes]``: every eight of them differ from those of others."""
    shape = (GEOMETRY.shards, GEOMETRY.shard_bytes)
    words = np.arange(GEOMETRY.shards * GEOMETRY.shard_bytes // 8, dtype=np.uint64)
    return ((words << np.uint64(8)) + np.uint64(number)).view(np.uint8).reshape(shape)


PAYLOADS = np.stack([payload(number) for number in NUMBERS])


def fail(what: str) -> None:
    """Say what is wrong and end this process at once."""
    sys.stderr.write(f"mixed stress: {what}\n")
    sys.stderr.flush()
    os._exit(3)


def require(condition: bool, what: str) -> None:
    if not condition:
        fail(what)


class Worker:
    """One thread: random calls until it is killed."""

    def __init__(self, store: BlockStore, seed: int) -> None:
        self.store, self.random = store, random.Random(seed)
        self.calls: list[Callable[[list[int]], object]] = [
            *[self.save] * 5,
            *[self.load] * 6,
            self.prefetch,
            self.drop,
            self.pin,
            self.look,
            self.donate,
        ]

    def step(self) -> None:
        numbers = self.random.sample(NUMBERS, self.random.randint(1, 6))
        self.random.choice(self.calls)(numbers)

    def save(self, numbers: list[int]) -> None:
        ticket = self.store.save(
            keys_of(*numbers), BufferBlocks(PAYLOADS[numbers]), gather_inline=self.random.random() < 0.5
        )
        ended(ticket)
        if self.random.random() < 0.3:
            ticket.wait_durable(WINDOW_S)
            require(ResultCode.PENDING not in ticket.durable_results, "a write did not end")

    def load(self, numbers: list[int]) -> None:
        out = blank(GEOMETRY, len(numbers))
        ticket = self.store.load(keys_of(*numbers), BufferBlocks(out))
        ended(ticket)
        verify(numbers, out, ticket)

    def prefetch(self, numbers: list[int]) -> None:
        ended(self.store.prefetch(keys_of(*numbers)))

    def drop(self, numbers: list[int]) -> None:
        self.store.drop(keys_of(*numbers[:2]))

    def pin(self, numbers: list[int]) -> None:
        with self.store.pin(keys_of(*numbers[:3])):
            self.store.touch(keys_of(*numbers))

    def look(self, numbers: list[int]) -> None:
        self.store.lookup(keys_of(*numbers))
        self.store.lookup_prefix(keys_of(*numbers))

    def donate(self, numbers: list[int]) -> None:
        with suppress(NoSpace):
            donation = self.store.reserve(keys_of(numbers[0])[0])
            if donation is None:
                return
            for shard in range(GEOMETRY.shards):
                donation.view(shard)[:] = PAYLOADS[numbers[0], shard].tobytes()
            if self.random.random() < 0.8:
                ended(donation.commit())
            else:
                donation.abort()


def ended(ticket: Ticket) -> None:
    require(ticket.wait(WINDOW_S), "a ticket did not end")


def verify(numbers: list[int], out: np.ndarray, ticket: Ticket) -> int:
    """How many objects were delivered, every byte as it should be."""
    good = ticket.object_results == ResultCode.OK
    require(ResultCode.CORRUPT not in ticket.object_results, "a file is corrupt")
    wrong = [
        n
        for n, is_good, got in zip(numbers, good, out, strict=True)
        if is_good and (got != PAYLOADS[n]).any()
    ]
    require(not wrong, f"wrong bytes for {wrong}")
    return int(good.sum())


class Progress:
    """How many calls every thread of every place has ended; shared with the children."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 8 * PROCESSES * THREADS)
        self.counts = np.frombuffer(self._memory, dtype=np.int64).reshape(PROCESSES, THREADS)
        self._seen = self.counts.copy()
        self._since = np.full(self.counts.shape, time.monotonic())

    def restart(self, place: int) -> None:
        """A new process has this place."""
        self._since[place] = time.monotonic()

    def stuck(self) -> list[int]:
        """Places with a thread that has ended no call for a window."""
        now = time.monotonic()
        self._since[self.counts != self._seen] = now
        self._seen = self.counts.copy()
        return np.flatnonzero((now - self._since > WINDOW_S).any(axis=1)).tolist()


def fork(work: Callable[[], None]) -> int:
    """A child that runs ``work`` and dies with its parent."""
    pid = os.fork()
    if pid == 0:
        status = 4
        try:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            faulthandler.register(signal.SIGUSR1, all_threads=True)
            work()
            status = 0
        finally:
            if status:
                logging.exception("mixed stress: a process ended by itself")
            os._exit(status)
    return pid


def open_here(root: Path) -> BlockStore:
    return open_store(
        root,
        GEOMETRY,
        slots=SLOTS,
        threads=2,
        limits=LIMITS,
        capacity_bytes=CAPACITY_BYTES,
        ring_name=ring_name(root),
    )


def ring_name(root: Path) -> str:
    return f"stress{abs(hash(str(root))) & 0xFFFFFFFFFFFF:x}"


def hammer(root: Path, counts: np.ndarray, seed: int) -> None:
    """Work on the store until killed."""
    store = open_here(root)

    def work(thread: int) -> None:
        worker = Worker(store, seed * THREADS + thread)
        try:
            while True:
                worker.step()
                counts[thread] += 1
        except BaseException:
            logging.exception("mixed stress: a call raised")
            fail("a call raised")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def verify_all(root: Path) -> None:
    """Load everything in a process that has seen nothing yet."""
    store = open_here(root)
    for begin in range(0, len(NUMBERS), 8):
        numbers = list(NUMBERS[begin : begin + 8])
        out = blank(GEOMETRY, len(numbers))
        ticket = store.load(keys_of(*numbers), BufferBlocks(out))
        ended(ticket)
        verify(numbers, out, ticket)
    store.check_integrity()
    store.close(WINDOW_S)


def check_balances(root: Path, here: int, over: int) -> None:
    """All that others held comes back when they are dead: one who was here before them sees it."""
    store = open_here(root)
    os.write(here, b"!")
    os.read(over, 1)
    open_here(root).close()  # who comes looks for the dead
    store.check_integrity()
    ring = store.statistics().ring
    require(ring is not None and ring.participants == 1, f"participants are left: {ring}")
    require((ring.pinned, ring.loading, ring.own_references) == (0, 0, 0), f"references are left: {ring}")
    require(ring.reaped >= PROCESSES, f"the dead were not reaped: {ring}")
    store.close(WINDOW_S)
    with CacheRoot(root, capacity_bytes=CAPACITY_BYTES) as opened:
        require(opened.usage.used_bytes == object_bytes(root), "bytes in flight are left")
        require(object_bytes(root) <= CAPACITY_BYTES, "the capacity is exceeded")
    sys.stdout.write(f"{ring}\n")
    sys.stdout.flush()


def check_traces(root: Path) -> None:
    """Nothing lies about when the last is gone."""
    names = [path.name for path in root.rglob("*") if path.is_file()]
    require(not [name for name in names if name.endswith(".tmp")], f"temporaries are left: {names}")
    require(not any((root / ".writers").iterdir()), "writers are left")
    left = [path.name for path in region.DIRECTORY.iterdir() if ring_name(root) in path.name]
    require(not left, f"shared memory is left: {left}")


def collect(pid: int, *, killed: bool) -> None:
    """Wait for a child, which must have been killed by us or have ended well."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    require(code == 0 or (killed and code == -signal.SIGKILL), f"a process ended with {code}")


def go_on(children: list[int], seconds: float) -> None:
    """Let the children work so long; none may end by itself."""
    with ExitStack() as open_:
        watched = [os.pidfd_open(pid) for pid in children]
        for descriptor in watched:
            open_.callback(os.close, descriptor)
        ended, _, _ = select.select(watched, [], [], seconds)
    require(not ended, "a process ended by itself")


def check_progress(progress: Progress, children: list[int]) -> None:
    stuck = progress.stuck()
    for place in stuck:
        os.kill(children[place], signal.SIGUSR1)  # tells where its threads are
    if stuck:
        go_on(children, 2.0)
        fail(f"no progress in processes {stuck} for {WINDOW_S:.0f} s")


def end_all(root: Path, children: list[int]) -> None:
    """Kill all and look at what they leave behind."""
    is_here, here = os.pipe()
    over, is_over = os.pipe()
    witness = fork(lambda: check_balances(root, here, over))
    os.close(here)
    os.read(is_here, 1)
    for child in children:
        os.kill(child, signal.SIGKILL)
    for child in children:
        collect(child, killed=True)
    os.write(is_over, b"!")
    collect(witness, killed=False)
    check_traces(root)


def run(root: Path, seconds: float, seed: int) -> None:
    """The whole run; ends this process when something is wrong."""
    chance, progress = random.Random(seed), Progress()

    def start(place: int) -> int:
        progress.restart(place)
        number = chance.getrandbits(32)
        return fork(lambda: hammer(root, progress.counts[place], number))

    children = [start(place) for place in range(PROCESSES)]
    kills, end = 0, time.monotonic() + seconds
    while time.monotonic() < end:
        go_on(children, chance.uniform(0.02, 0.4))
        check_progress(progress, children)
        place = chance.randrange(PROCESSES)
        os.kill(children[place], signal.SIGKILL)
        collect(children[place], killed=True)
        collect(fork(lambda: verify_all(root)), killed=False)
        children[place] = start(place)
        kills += 1
    end_all(root, children)
    sys.stdout.write(f"{kills} kills, {progress.counts.sum()} calls, seed {seed}\n")


if __name__ == "__main__":
    run(
        Path(sys.argv[1]),
        float(sys.argv[2]),
        int(sys.argv[3]) if len(sys.argv) > 3 else random.getrandbits(32),
    )

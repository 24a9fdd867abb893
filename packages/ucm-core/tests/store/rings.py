"""Helpers for tests of the ring: keys, payloads that follow from the key, rings in processes of their own."""

from __future__ import annotations

import ctypes
import hashlib
import multiprocessing
import os
import signal
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kernel_errors import die_at

from ucm_core.store import region
from ucm_core.store.ring import Claims, Outcome, Ring, RingOptions

PAYLOAD_BYTES = 4096
DIGEST = bytes(range(32))


def key(name: object) -> npt.NDArray[np.uint8]:
    """One key, ``uint8[32]``."""
    return np.frombuffer(hashlib.blake2b(str(name).encode(), digest_size=32).digest(), dtype=np.uint8)


def keys(*names: object) -> npt.NDArray[np.uint8]:
    """Keys, ``uint8[n, 32]``."""
    return np.array([key(name) for name in names], dtype=np.uint8).reshape(-1, 32)


def parent_keys(names: Sequence[object], parents: Mapping[Any, object]) -> npt.NDArray[np.uint8]:
    """For each name the key of its parent, ``uint8[n, 32]``; zeros where it has none."""
    rows = [key(parents[name]) if name in parents else np.zeros(32, dtype=np.uint8) for name in names]
    return np.array(rows, dtype=np.uint8).reshape(-1, 32)


def private_ring(slots: int = 8, **changed: Any) -> Ring:
    """A ring that nobody else can join."""
    return shared_ring(None, slots=slots, **changed)


def shared_ring(name: str | None, *, shards: int = 1, **changed: Any) -> Ring:
    """A ring by name, of 8 slots unless told otherwise."""
    usual = {
        "slots": 8,
        "payload_bytes": PAYLOAD_BYTES,
        "geometry_digest": DIGEST,
        "options": RingOptions(shards=shards),
    }
    return Ring.open(name, **usual | changed)


def new_name() -> str:
    """A region name that no other test uses."""
    return f"test{uuid.uuid4().hex[:12]}"


def region_path(name: str) -> Path:
    """Where the region ``name`` of this user lies."""
    return region.DIRECTORY / f"ucm-{os.geteuid()}-{name}"


def payload(ring: Ring, slot: int) -> npt.NDArray[np.uint8]:
    """The bytes of a slot, as memory."""
    address = int(ring.addresses(np.array([slot], dtype=np.int32))[0])
    return np.ctypeslib.as_array((ctypes.c_uint8 * ring.payload_bytes).from_address(address))


def expected_payload(content: npt.NDArray[np.uint8], size: int = PAYLOAD_BYTES) -> npt.NDArray[np.uint8]:
    """The bytes that a slot of the key ``content`` should show."""
    return np.resize(content, size)


def fill(ring: Ring, claims: Claims, wanted: npt.NDArray[np.uint8]) -> None:
    """Write and publish every slot that ``claims`` owns."""
    owned = claims.outcome == Outcome.OWNER
    for slot, content in zip(claims.slots[owned], wanted[owned], strict=True):
        payload(ring, slot)[:] = expected_payload(content, ring.payload_bytes)
    assert ring.publish(claims.slots[owned], claims.version[owned]).all()


def put(ring: Ring, *names: object) -> None:
    """Claim, fill and let go; every name must get a slot."""
    wanted = keys(*names)
    claims = ring.claim(wanted, demand=True)
    assert (claims.slots >= 0).all(), claims
    fill(ring, claims, wanted)
    ring.release(claims.slots)


def shows(ring: Ring, name: object) -> bool:
    """Whether the key is READY and its slot shows its bytes."""
    claims = ring.pin(keys(name))
    if claims.outcome[0] != Outcome.READY:
        return False
    same = bool((payload(ring, claims.slots[0]) == expected_payload(key(name), ring.payload_bytes)).all())
    ring.release(claims.slots)
    return same


def usable(ring: Ring, *names: object) -> int:
    """How many keys are READY from the first on without a gap."""
    return int(np.cumprod(ring.lookup(keys(*names))).sum())


def shard_of(ring: Ring, slot: int, shard: int) -> npt.NDArray[np.uint8]:
    """The bytes of one shard, as memory."""
    return payload(ring, slot).reshape(ring.shards, -1)[shard]


def fill_shards(ring: Ring, claims: Claims, name: object, begin: int, end: int) -> None:
    """Write and publish shards of the first claim, with bytes that follow from name and shard."""
    for shard in range(begin, end):
        part = shard_of(ring, claims.slots[0], shard)
        part[:] = expected_payload(key((name, shard)), part.size)
    assert ring.publish_shards(claims.slots[:1], claims.version[:1], begin=begin, end=end).all()


def shows_shard(ring: Ring, claims: Claims, name: object, shard: int) -> bool:
    """Whether a shard of the first claim shows the bytes that `fill_shards` writes."""
    part = shard_of(ring, claims.slots[0], shard)
    return bool((part == expected_payload(key((name, shard)), part.size)).all())


def wait_shard(ring: Ring, claims: Claims, shard: int, timeout_s: float = 60) -> int:
    """Outcome of a wait for one shard of the first claim."""
    return int(ring.wait(claims.slots[:1], claims.version[:1], timeout_s=timeout_s, shard=shard)[0])


class RingProcess:
    """A process with a ring of its own that does what it is told, until it is killed."""

    def __init__(self, name: str, *, dies_at: str = "", **changed: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        arguments = theirs, region.DIRECTORY, name, dies_at, changed
        self.process = context.Process(target=_serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        assert dies_at or self.result() == "open"

    def start(self, method: str, *arguments: Any) -> None:
        """Begin a call of the ring (or of a function of this module that takes the ring first)."""
        self._pipe.send((method, arguments))

    def result(self) -> Any:
        """What the call returned, or raise what it raised."""
        value = self._pipe.recv()
        if isinstance(value, BaseException):
            raise value
        return value

    def call(self, method: str, *arguments: Any) -> Any:
        """Begin a call and wait for its result."""
        self.start(method, *arguments)
        return self.result()

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.process.kill()
        self.process.join()


@contextmanager
def processes(name: str, count: int, **changed: Any) -> Iterator[list[RingProcess]]:
    """``count`` processes on one ring, killed at the end."""
    started = [RingProcess(name, **changed) for _ in range(count)]
    try:
        yield started
    finally:
        for one in started:
            one.kill()


def fork_and_stay(_ring: Ring) -> int:
    """Fork a child that lives until it is killed; its pid."""
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    return child


def wait(ring: Ring, claims: Claims, timeout_s: float = 60) -> list[int]:
    """Outcomes of a wait for all of ``claims``."""
    return [int(one) for one in ring.wait(claims.slots, claims.version, timeout_s=timeout_s)]


def hammer(ring: Ring, seed: int, rounds: int) -> None:
    """Random claims, fills, aborts and drops."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        wanted = keys(*random.choice(30, size=6, replace=False))
        claims = ring.claim(wanted)
        fill(ring, claims, wanted)
        ring.wait(claims.slots[claims.slots >= 0], claims.version[claims.slots >= 0], timeout_s=10)
        ring.release(claims.slots[claims.slots >= 0])
        ring.drop(wanted[:1])


def die_while_memory_is_taken(ring: Ring, wanted: npt.NDArray[np.uint8]) -> None:
    """Be killed inside the kernel, by a claim that takes memory."""
    die_at("fallocate")
    ring.claim(wanted)


def hammer_forever(ring: Ring, seed: int) -> None:
    """As `hammer`, until killed."""
    while True:
        hammer(ring, seed, 1)


def _serve(pipe: Connection, regions: Path, name: str, dies_at: str, changed: dict[str, Any]) -> None:
    region.DIRECTORY = regions
    if dies_at:
        die_at(dies_at)
    ring = shared_ring(name, **changed)
    pipe.send("open")
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        call = partial(globals()[method], ring) if method in globals() else getattr(ring, method)
        try:
            pipe.send(call(*arguments))
        except Exception as error:  # noqa: BLE001 - raised again on the other side
            pipe.send(error)

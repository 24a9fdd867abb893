"""What a process sees of a small ``/dev/shm``; run by ``test_ring_memory.py``, tells by one line of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

from rings import PAYLOAD_BYTES, fill, keys, put, shared_ring, shows

from ucm_core import _native
from ucm_core.errors import NoSpace
from ucm_core.store import region

JUNK = region.DIRECTORY / "junk"
SHAPE = {"slots": 16, "payload_bytes": 16 * PAYLOAD_BYTES}


def free_bytes() -> int:
    there = os.statvfs(region.DIRECTORY)
    return there.f_bavail * there.f_frsize


def taken() -> dict[str, object]:
    """Somebody takes the memory that was free when the ring was made, and gives it back later."""
    wanted = keys(*range(16))
    with shared_ring("ring", **SHAPE) as ring:
        JUNK.write_bytes(bytes(free_bytes() - 5 * ring.payload_bytes))
        claims = ring.claim(wanted)
        fits = int((claims.slots >= 0).sum())
        fill(ring, claims, wanted)
        ring.release(claims.slots[claims.slots >= 0])
        ring.check_integrity()
        JUNK.unlink()
        end = time.monotonic() + 60
        while not ring.lookup(wanted).all() and time.monotonic() < end:  # for a while blocks still make room
            put(ring, *(number for number in range(16) if not ring.lookup(keys(number)).any()))
        afterwards = [shows(ring, number) for number in range(16)]
    return {"meanwhile": claims.outcome.tolist(), "fits": fits, "afterwards": afterwards}


def promised() -> dict[str, object]:
    """A second ring while the first may still take more than half of the memory."""
    needed = _native.ring_bytes(SHAPE["slots"], SHAPE["payload_bytes"])
    with shared_ring("one", **SHAPE):
        free = free_bytes() - SHAPE["slots"] * SHAPE["payload_bytes"]
        try:
            shared_ring("two", **SHAPE)
        except NoSpace as error:
            refused = str(error)
        regions = sorted(path.name for path in region.DIRECTORY.iterdir())
    return {"needed": needed, "free": free - MARK_BYTES, "refused": refused, "regions": regions}


def given_back() -> dict[str, object]:
    """Free memory before and after a ring that was closed, and after one whose process was killed."""
    before = free_bytes()
    with shared_ring("ring", **SHAPE) as ring:
        put(ring, *range(16))
    closed = free_bytes()
    subprocess.run([sys.executable, __file__, "die"], check=False)
    region.sweep()
    return {"before": before, "closed": closed, "killed": free_bytes()}


def die() -> dict[str, object]:
    """Be killed with a full ring open."""
    put(shared_ring("ring", **SHAPE), *range(16))
    os.kill(os.getpid(), 9)
    return {}


MARK_BYTES = 4096
"""The first page of a region that is being made."""
CASES: dict[str, Callable[[], dict[str, object]]] = {
    "taken": taken,
    "promised": promised,
    "given back": given_back,
    "die": die,
}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(CASES[sys.argv[1]]()))

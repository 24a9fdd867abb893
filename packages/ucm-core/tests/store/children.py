"""Real processes for tests: ``python children.py <work> <root> ...``, one line per event."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from kernel_errors import failing
from objects import Payloads, Shelf, make_keys, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.store.gc import Collector
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import IoPool

LARGE = Geometry(16, 1 << 20)
"""Large enough that a write can be stopped in the middle."""


def say(*words: object) -> None:
    """Tell the parent one event."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def write_forever(path: Path) -> None:
    """Write large objects, each under a new key, and say so."""
    shelf = open_shelf(path, geometry=LARGE)
    payloads = Payloads(1, geometry=LARGE, seed=None)
    say("ready")
    for seed in range(1_000_000):
        shelf.tier.write(make_keys(1, seed=seed), payloads.addresses)


def write_and_fail(path: Path) -> None:
    """Write the objects that a rival writes too; the kernel refuses the last step."""
    shelf = open_shelf(path, geometry=LARGE)
    payloads = Payloads(1, geometry=LARGE)
    say("ready")
    codes = failing("renameat", errno.EIO, lambda: shelf.tier.write(make_keys(1), payloads.addresses))
    say(codes.tolist()[0])


def fill(path: Path, capacity_bytes: int, count: int) -> None:
    """Write until the medium or the bound refuses, then read; tell the codes and what is left behind."""
    shelf = open_shelf(path, capacity_bytes=capacity_bytes)
    keys = make_keys(count)
    say("available", shelf.root.available)
    say("written", *tell(shelf, keys))
    say("read", *shelf.read(keys))
    say("temporaries", len(shelf.temporaries()))
    shelf.tier.drop(keys[:2])
    say("again", *shelf.write(keys[:1]), *shelf.read(keys[:1]))
    shelf.root.close()


def tell(shelf: Shelf, keys) -> list[int]:
    """Write one by one, as a stream of saves would."""
    return [shelf.write(keys[i : i + 1])[0] for i in range(len(keys))]


def fill_and_collect(path: Path, capacity_bytes: int, count: int) -> None:
    """Write through a bound, making room whenever it is refused; tell the codes and what is left behind."""
    shelf, pool = open_shelf(path, capacity_bytes=capacity_bytes), IoPool(1)
    collector = Collector(shelf.root, pool)
    codes = []
    for number in range(count):
        key = make_keys(1, seed=number)
        codes += shelf.write(key)
        if codes[-1] == ResultCode.NO_SPACE and collector.make_room():
            codes[-1] = shelf.write(key)[0]
    say("written", *codes)
    say("kept", sum(shelf.read(make_keys(1, seed=number))[0] == 0 for number in range(count)))
    say("used", shelf.root.usage.recount())
    say("temporaries", len(shelf.temporaries()))
    pool.close()


WORKS = {"write_forever": write_forever, "write_and_fail": write_and_fail}


def start(work: str, path: Path) -> subprocess.Popen[str]:
    """Start a child and wait until it is ready."""
    child = subprocess.Popen([sys.executable, __file__, work, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


if __name__ == "__main__":
    if sys.argv[1] in {"fill", "fill_and_collect"}:
        work = fill if sys.argv[1] == "fill" else fill_and_collect
        work(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        WORKS[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)

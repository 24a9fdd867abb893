"""Real processes for tests: ``python children.py <work> <root> ...``, one line per event."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

from kernel_errors import failing
from objects import Payloads, Shelf, make_keys, open_shelf

from ucm_core.store.geometry import Geometry

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


WORKS = {"write_forever": write_forever, "write_and_fail": write_and_fail}


def start(work: str, path: Path) -> subprocess.Popen[str]:
    """Start a child and wait until it is ready."""
    child = subprocess.Popen([sys.executable, __file__, work, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        WORKS[sys.argv[1]](Path(sys.argv[2]))
    os._exit(0)

"""Open-file-description locks: held by an open file, gone with its last descriptor, so never stale.

Unlike a pid, a lock that can be taken proves across containers and reboots that its holder is gone.
A process that forks shares its locks with the child: the holder counts as alive while either lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_WHOLE_FILE = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock_file(path: Path, *, create: bool) -> int:
    """Open ``path`` for locking, without following a link; OSError when that fails."""
    return os.open(path, _FLAGS | (os.O_CREAT if create else 0), 0o666)


def try_lock(descriptor: int) -> bool:
    """Take the exclusive lock if nobody has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


@contextmanager
def exclusive(path: Path) -> Iterator[int]:
    """Hold the exclusive lock of ``path`` (created when absent) and yield its descriptor.

    Each call opens the file anew, so threads of one process exclude each other too.
    """
    descriptor = open_lock_file(path, create=True)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, _WHOLE_FILE)
        yield descriptor
    finally:
        os.close(descriptor)


def read_number(descriptor: int) -> int | None:
    """Return the unsigned number that a counter file holds; None when it is new or damaged."""
    data = os.pread(descriptor, 9, 0)
    return int.from_bytes(data, "little") if len(data) == 8 else None


def write_number(descriptor: int, value: int) -> None:
    """Make ``value`` the content of a counter file of 8 bytes."""
    os.pwrite(descriptor, value.to_bytes(8, "little"), 0)

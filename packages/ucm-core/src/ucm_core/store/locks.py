"""Open-file-description locks: held by an open file, gone with its last descriptor, so never stale.

Unlike a pid, a lock that can be taken proves across containers and reboots that its holder is gone.
A process that forks shares its locks with the child: the holder counts as alive while either lives.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Self

WAIT_S = 10.0
"""Longer than anybody who goes on holds a lock."""

_LARGEST = (1 << 64) - 1
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.0002, 0.01
_FLOCK = struct.Struct("hhqqi0q")  # type, whence, begin, length (0: to the end), pid
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock_file(path: Path, *, create: bool, mode: int = 0o666) -> int:
    """Open ``path`` for locking, without following a link; OSError when that fails."""
    return os.open(path, _FLAGS | (os.O_CREAT if create else 0), mode)


def try_lock(descriptor: int, begin: int = 0, *, length: int = 0) -> bool:
    """Take the exclusive lock of ``length`` bytes if nobody has any of it; 0 = to the end of the file."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_WRLCK, begin, length))
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            return False
        raise
    return True


def unlock(descriptor: int, begin: int, *, length: int) -> None:
    """Let go of the lock of ``length`` bytes; 0 = to the end of the file."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _request(fcntl.F_UNLCK, begin, length))


def let_go(descriptor: int) -> None:
    """Let go of all locks of an open file and close it.

    Closing alone would leave them to a child that was forked meanwhile, for as long as it lives.
    """
    try:
        unlock(descriptor, 0, length=0)
    finally:
        os.close(descriptor)


def held_elsewhere(descriptor: int, begin: int, *, length: int) -> bool:
    """Whether any other open file holds a lock within ``length`` bytes."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _request(fcntl.F_WRLCK, begin, length))
    kind: int = _FLOCK.unpack(answer)[0]
    return kind != fcntl.F_UNLCK


def wait_for(lock: Callable[[], bool], timeout_s: float, *, what: Path) -> None:
    """Ask for a lock again and again, because waiting in the kernel has no end; TimeoutError after that."""
    deadline, pause_s = time.monotonic() + timeout_s, _FIRST_PAUSE_S
    while not lock():
        if time.monotonic() >= deadline:
            raise TimeoutError(
                errno.ETIMEDOUT, "its lock is held by a process that does not go on", str(what)
            )
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


@contextmanager
def exclusive(path: Path, *, create: bool = True, timeout_s: float | None = None) -> Iterator[int]:
    """Hold the exclusive lock of ``path`` (made when absent and ``create``) and yield its descriptor.

    Each call opens the file anew, so threads of one process exclude each other too. TimeoutError when the
    holder does not let go in time (`WAIT_S`): a process that is stopped must not stop the others.
    """
    # An object of the interpreter's own has it, so that it is closed wherever a signal's handler ends this.
    file = FileIO(path, "r+", opener=lambda _name, _flags: open_lock_file(path, create=create))
    descriptor = file.fileno()
    try:
        wait_for(lambda: try_lock(descriptor), WAIT_S if timeout_s is None else timeout_s, what=path)
        yield descriptor
    finally:
        try:
            unlock(descriptor, 0, length=0)  # a child that was forked meanwhile would keep it
        finally:
            file.close()


class KeptLock:
    """The lock of a file, kept over many calls, until `release`. A forked child does not keep it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        _held.add(self)

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Take the lock of ``path``, made when absent; None when anybody has it."""
        descriptor = open_lock_file(path, create=True)
        if try_lock(descriptor):
            return cls(descriptor)
        os.close(descriptor)
        return None

    def release(self) -> None:
        """Let others have it. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            let_go(descriptor)

    def forget(self) -> None:
        """Close a forked child's copy: the lock stays the parent's."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


_held: weakref.WeakSet[KeptLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    for lock in list(_held):
        lock.forget()


os.register_at_fork(after_in_child=_forget_in_child)


def read_number(descriptor: int) -> int | None:
    """Return the unsigned number that a counter file holds; None when it is new or damaged."""
    data = read_most(descriptor, 9)
    return int.from_bytes(data, "little") if len(data) == 8 else None


def write_number(descriptor: int, value: int) -> None:
    """Make ``value`` the content of a counter file of 8 bytes; what needs more becomes the largest."""
    write_all(descriptor, min(value, _LARGEST).to_bytes(8, "little"))


def read_most(descriptor: int, size_bytes: int) -> bytes:
    """Return the first ``size_bytes`` of a file; fewer only where it has no more, never by a short answer."""
    data = b""
    while len(data) < size_bytes and (more := os.pread(descriptor, size_bytes - len(data), len(data))):
        data += more
    return data


def write_all(descriptor: int, data: bytes) -> None:
    """Put ``data`` at the beginning of a file, whatever a single call takes of it."""
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], done)


def _request(kind: int, begin: int, length: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, begin, length, 0)

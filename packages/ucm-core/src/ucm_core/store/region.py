"""Regions of shared memory that processes create, join and leave; none outlives its last user for long.

A region is the file ``/dev/shm/ucm-<uid>-<name>``. Who lives is told by locks on bytes of that file, never by
pids: participant k of a ring holds byte k for as long as it lives, and whoever creates, joins, leaves or
removes a region holds the lifecycle byte meanwhile. A region without a living participant is garbage: it is
made anew when its name is opened, and removed when any other is.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ucm_core import _native
from ucm_core.errors import NoSpace, StoreError
from ucm_core.store import locks

DIRECTORY = Path("/dev/shm")  # noqa: S108 - names carry the user, links are refused

UNBOUNDED = 1 << 62

LOCK_WAIT_S = 120.0
"""Longer than anybody who goes on makes a region: hundreds of gigabytes are cleared meanwhile."""
LEAVE_WAIT_S = 5.0
"""Who holds the lock for longer makes the region or joins it, and removes it in the end."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A region whose lifecycle lock is held."""

    descriptor: int
    """Open for reading and writing until the context ends."""
    path: Path
    fresh: bool
    """Nobody lives in it and it is empty: the caller makes it."""


@contextmanager
def enter(name: str) -> Iterator[Entered]:
    """Hold the lifecycle lock of the region ``name``, created when absent or dead.

    A fresh region is removed again when the body raises. Raises StoreError when the file is not ours, and
    when somebody holds the lock for longer than `LOCK_WAIT_S`.
    """
    path = _path(name)
    descriptor = _open_locked(path)
    fresh = os.fstat(descriptor).st_size == 0
    try:
        yield Entered(descriptor, path, fresh)
    except BaseException:
        if fresh:
            path.unlink(missing_ok=True)
        raise
    finally:
        _unlock(descriptor)
        os.close(descriptor)


def leave(descriptor: int, path: Path | None, *, leave_ring: Callable[[], None]) -> None:
    """Call ``leave_ring`` under the lifecycle lock, then remove the region if nobody lives there any more.

    When somebody holds that lock for longer than `LEAVE_WAIT_S`, he or the next sweep removes it.
    """
    try:
        _wait_for_lock(descriptor, path, LEAVE_WAIT_S)
    except StoreError:
        path = None
    try:
        leave_ring()
        if path is not None and _is_named(descriptor) and not _has_participants(descriptor):
            path.unlink(missing_ok=True)
    finally:
        _unlock(descriptor)


def allocate(region: Entered, size: int, *, structure: int) -> None:
    """Give a fresh region ``size`` bytes, of which the first ``structure`` are really there from now on.

    The rest is taken piece by piece by whoever needs it first. It fits at this moment, what other rings of
    this user may still take included; others may have taken it by then. Raises NoSpace with the size needed
    and the size there.
    """
    os.pwrite(region.descriptor, _native.RING_MAGIC, 0)  # from here on a leftover is known as ours
    free = free_bytes(region.descriptor)
    if size > free:
        raise NoSpace(no_space(region.path, needed=size, there=free))
    take(region.descriptor, size, structure=structure, path=region.path)


def take(descriptor: int, size: int, *, structure: int, path: Path | None) -> None:
    """Make an empty file ``size`` bytes long and take memory for the first ``structure``, or NoSpace."""
    free = free_bytes(descriptor)
    try:
        os.truncate(descriptor, size)
        os.posix_fallocate(descriptor, 0, structure)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise NoSpace(no_space(path, needed=size, there=free)) from error
        raise


def free_bytes(place: int | Path) -> int:
    """Shared memory that is left where ``place`` (a path or an open file) lies, less what is promised.

    As good as endless on a file system without a limit. OSError where there is none.
    """
    there = os.statvfs(place)
    left = there.f_bavail * there.f_frsize if there.f_blocks else UNBOUNDED
    return max(0, left - promised_bytes())


def promised_bytes() -> int:
    """Shared memory that this user's regions are large but have not taken yet."""
    return sum(map(_untaken_bytes, DIRECTORY.glob(f"ucm-{os.geteuid()}-*")))


def _untaken_bytes(path: Path) -> int:
    try:
        status = path.lstat()
    except OSError:  # gone meanwhile
        return 0
    return max(0, status.st_size - status.st_blocks * 512) if _is_ours(status) else 0


def sweep() -> list[Path]:
    """Remove this user's regions that nobody lives in, and return them. Others' files and the living stay."""
    return [path for path in DIRECTORY.glob(f"ucm-{os.geteuid()}-*") if _remove_if_dead(path)]


def _path(name: str) -> Path:
    if not name or "/" in name:
        raise StoreError(f"a region's name is a plain file name, not {name!r}")
    return DIRECTORY / f"ucm-{os.geteuid()}-{name}"


def no_space(path: Path | None, *, needed: int, there: int) -> str:
    """Say that shared memory is short, with both numbers; None = a ring without a name."""
    who = "a private ring" if path is None else path
    return f"{who} needs {needed} bytes of shared memory, {there} are free: give the ring fewer slots"


def _open_locked(path: Path) -> int:
    while True:
        descriptor = _open(path)
        try:
            _wait_for_lock(descriptor, path, LOCK_WAIT_S)
            dead = os.fstat(descriptor).st_size > 0 and not _has_participants(descriptor)
            if _is_named(descriptor) and not dead:
                return descriptor
            if dead and _is_named(descriptor):
                path.unlink()  # made anew under the same name; whoever still maps the old one keeps it
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        descriptor = locks.open_lock_file(path, create=True, mode=0o600)
    except OSError as error:
        raise StoreError(f"{path} cannot be opened as shared memory: {error.strerror}") from error
    if not _is_ours(os.fstat(descriptor)):
        owner = os.fstat(descriptor).st_uid
        os.close(descriptor)
        raise StoreError(
            f"{path} belongs to user {owner}, not to {os.geteuid()}: remove it or use another root"
        )
    return descriptor


def _remove_if_dead(path: Path) -> bool:
    try:
        if not _is_ours(path.lstat()):
            return False
        descriptor = locks.open_lock_file(path, create=False)
    except OSError:  # gone meanwhile, or not for us
        return False
    try:
        if not _try_lock(descriptor) or not _is_garbage(descriptor):
            return False
        path.unlink()
    finally:
        os.close(descriptor)
    return True


def _is_garbage(descriptor: int) -> bool:
    magic = locks.read_most(descriptor, len(_native.RING_MAGIC))
    return magic in {b"", _native.RING_MAGIC} and _is_named(descriptor) and not _has_participants(descriptor)


def _is_ours(status: os.stat_result) -> bool:
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def _is_named(descriptor: int) -> bool:
    """Whether the file still has its name: only the holder of the lifecycle lock removes it."""
    return os.fstat(descriptor).st_nlink > 0


def _wait_for_lock(descriptor: int, path: Path | None, timeout_s: float) -> None:
    """Take the lifecycle byte; StoreError when its holder does not go on."""
    try:
        locks.wait_for(lambda: _try_lock(descriptor), timeout_s, what=path or DIRECTORY)
    except TimeoutError as error:
        raise StoreError(f"shared memory cannot be used: {error}") from error


def _unlock(descriptor: int) -> None:
    locks.unlock(descriptor, _native.RING_LIFECYCLE_BYTE, length=1)


def _try_lock(descriptor: int) -> bool:
    return locks.try_lock(descriptor, _native.RING_LIFECYCLE_BYTE, length=1)


def _has_participants(descriptor: int) -> bool:
    """Whether any other open file holds a participant's byte."""
    return locks.held_elsewhere(descriptor, 0, length=_native.RING_PARTICIPANTS)

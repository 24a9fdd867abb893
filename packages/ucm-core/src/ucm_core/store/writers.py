"""Writers: who is writing under a root, and what the dead ones left behind.

Every writer holds the lock of its own file ``<root>/.writers/<32 hex>`` for as long as it lives; the name is
part of its temporaries' names. The file holds the bytes it has reserved and not settled yet, 8 bytes.
"""

from __future__ import annotations

import errno
import itertools
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ucm_core.store import locks, names

_ATTEMPTS = 16


class Writer:
    """One process's right to write under a root, from construction to `close`."""

    def __init__(self, directory: Path) -> None:
        self.name, self._descriptor = _register(directory)
        self._path = directory / self.name
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._clean = True

    def temporary_names(self, count: int) -> list[bytes]:
        """Return file names that nobody has used. The pid keeps forked children apart and helps people."""
        begin = f".{self.name}.{os.getpid()}-"
        return [f"{begin}{number}.tmp".encode() for number in itertools.islice(self._numbers, count)]

    @property
    def in_flight_bytes(self) -> int:
        """Bytes reserved and not settled yet; the usage counter's lock guards them."""
        return locks.read_number(self._descriptor) or 0

    @in_flight_bytes.setter
    def in_flight_bytes(self, value: int) -> None:
        locks.write_number(self._descriptor, value)

    def suspect(self) -> None:
        """One of its temporaries may still lie there, because it could not be removed."""
        self._clean = False

    @property
    def registered(self) -> bool:
        """Whether others can see that this writer lives: False once its file was deleted or moved away."""
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self._descriptor))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def renew(self) -> None:
        """Register under a new name, because the file is gone; what is in flight goes along."""
        in_flight_bytes = self.in_flight_bytes
        name, descriptor = _register(self._path.parent)
        locks.write_number(descriptor, in_flight_bytes)
        # In one step, as other threads use the number. The lock belongs to the open file, not to the number.
        os.dup2(descriptor, self._descriptor, inheritable=False)
        os.close(descriptor)
        self.name, self._path = name, self._path.with_name(name)

    def close(self) -> None:
        """Give the name up. No write may be under way. In a forked child it stays the parent's.

        Where the file cannot be removed, and where a temporary may be left, a sweeper will do it: the lock is
        gone, so the writer counts as dead.
        """
        with suppress(OSError):
            if os.getpid() == self._pid and self._clean:
                self._path.unlink()
        os.close(self._descriptor)


def _register(directory: Path) -> tuple[str, int]:
    """Create and lock a file of a new name; a sweeper may catch it between the two, then another is made."""
    for _ in range(_ATTEMPTS):
        name = uuid.uuid4().hex
        descriptor = locks.open_lock_file(directory / name, create=True)
        if locks.try_lock(descriptor) and os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)
    raise OSError(f"no lock of {_ATTEMPTS} new files in {directory} could be taken")


@contextmanager
def dead_writers(directory: Path) -> Iterator[list[str]]:
    """Yield the writers whose lock can be taken, and hold their locks meanwhile."""
    with ExitStack() as held:
        yield [name for name in _registered(directory) if _take(directory / name, held)]


def living_in_flight_bytes(directory: Path) -> int:
    """Return what the living writers have reserved and not settled; the usage counter's lock must be held."""
    total = 0
    for name in _registered(directory):
        with ExitStack() as held:
            if not _take(directory / name, held):
                total += _in_flight(directory / name)
    return total


def forget(directory: Path, dead: list[str]) -> None:
    """Remove the files of dead writers, after everything they left is gone and while their locks are held."""
    for name in dead:
        (directory / name).unlink(missing_ok=True)


def remove_temporaries(root: Path, writers: frozenset[str]) -> int:
    """Remove the temporaries of these writers everywhere under ``root``; return how many."""
    removed = 0
    for entry in names.files_of_root(root):
        if names.parse_temporary(entry.name) in writers:
            Path(entry.path).unlink(missing_ok=True)
            removed += 1
    return removed


def _registered(directory: Path) -> list[str]:
    return [name for name in os.listdir(directory) if names.is_namespace(name)]  # noqa: PTH208 - names only


def _take(path: Path, held: ExitStack) -> bool:
    descriptor = _open(path)
    if descriptor is None:
        return False
    held.callback(locks.let_go, descriptor)
    return locks.try_lock(descriptor)


def _in_flight(path: Path) -> int:
    descriptor = _open(path)
    if descriptor is None:
        return 0
    try:
        return locks.read_number(descriptor) or 0
    finally:
        os.close(descriptor)


def _open(path: Path) -> int | None:
    """Open a writer's file; None when it is gone, or is no writer's: a directory, a link, somebody else's."""
    try:
        return locks.open_lock_file(path, create=False)
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.EISDIR, errno.ELOOP, errno.EACCES}:
            return None
        raise

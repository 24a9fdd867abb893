"""The cache directory: who may use it, what lies in it, how full it is.

A root that cannot be used (read-only, missing and not to be made, full) is not an error: it says so once in
the log, `CacheRoot.available` is False, and everything in it is a miss. Only a root that can never work, a
file for example, is refused, before anything is touched.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from ucm_core import _native
from ucm_core.errors import StoreError
from ucm_core.ops import metrics
from ucm_core.ops.quiet import quiet_logger
from ucm_core.store import locks, names, writers
from ucm_core.store.journal import Journal
from ucm_core.store.names import slug
from ucm_core.store.usage import Usage

__all__ = ["CacheRoot", "Namespace", "NamespaceIdentity", "RootStatistics", "slug"]

MAX_GENERATION = 1 << 63
"""A counter above it is damaged."""

_log = logging.getLogger("ucm_core.store")
_once = quiet_logger("ucm_core.store.root")  # both halves of an engine hold the root, often in one process


class NamespaceIdentity(Protocol):
    """What a root needs to know of an identity."""

    @property
    def namespace(self) -> str:
        """32 hex digits that two engines have in common exactly when they may share bytes."""

    def manifest(self) -> Mapping[str, Any]:
        """Return the identity for readers, as JSON data."""


@dataclass(frozen=True, slots=True)
class RootStatistics:
    """A root at one moment."""

    available: bool
    """Whether anything is stored or found."""
    direct: bool
    """Whether files are read and written past the page cache."""
    used_bytes: int
    """Bytes of all objects, writes under way included."""
    capacity_bytes: int
    """The bound on `used_bytes`."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The directory of everything that engines of one identity share."""

    root: Path
    """The cache directory."""
    path: Path
    """This namespace's directory, below it."""

    def row_directory(self, row_name: str) -> Path:
        """Return the directory of a row; StoreError when a link leads it out of the root."""
        return _confined(self.root, self.path / slug(row_name))


class CacheRoot:
    """One process's hold on a cache directory. Thread-safe between `open` and `close`.

    ``capacity_bytes`` bounds the bytes of all objects together, for this process's writes; None = no bound.
    ``uring`` asks for io_uring instead of one system call after the other, where the kernel allows it.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        capacity_bytes: int | None = None,
        ttl_s: float | None = None,
        uring: bool = False,
    ) -> None:
        self.path = _absolute(os.fspath(path))
        """The cache directory, absolute."""
        self.ttl_s = ttl_s
        """Seconds after its last use after which an object is not found any more; None = no end."""
        self._capacity_bytes = capacity_bytes
        self._writer: writers.Writer | None = None
        self._usage: Usage | None = None
        self._direct = False
        self._wants_uring, self._uring = uring, False
        self._lost = False
        self._renewing = threading.Lock()
        self._namespaces: dict[Path, Mapping[str, Any]] = {}
        self.journal = Journal()
        """What this process does to the objects, for whoever listens."""

    def open(self) -> Self:
        """Make the directory, become a writer, remove what dead writers left.

        StoreError when the path is a file. Opening an open root does nothing.
        """
        if self._writer is not None:
            return self
        try:
            self._refuse_file()
            self._become_writer()
        except OSError as error:
            self.lose(error)
        else:
            self.sweep()
            self._decide_direct()
            self._decide_engine()
        return self

    def close(self) -> None:
        """Give up the hold; no write may be under way. A second call does nothing."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def available(self) -> bool:
        """Whether objects can be stored and found; once False, only a new root brings it back."""
        return self._writer is not None and not self._lost

    @property
    def direct(self) -> bool:
        """Whether the file system takes O_DIRECT; decided once, by a real write and read."""
        return self._direct

    @property
    def uring(self) -> bool:
        """Whether the files of one call are moved through io_uring; decided once, when the root is opened."""
        return self._uring

    @property
    def usage(self) -> Usage:
        """The shared usage counter; StoreError when the root is not available."""
        if self._usage is None:
            raise StoreError(f"cache root {self.path} is not available; see the log for the reason")
        return self._usage

    def keep_hold(self) -> None:
        """Make the directory again, and register in it, should it be gone; OSError when that fails.

        To be called before something is written below it; costs two system calls.
        """
        if self._writer is not None and not self._writer.registered:
            with self._renewing:
                self._renew(self._writer)

    def temporary_name(self) -> bytes:
        """Return a new file name for a write under way; StoreError when the root is not available."""
        return self.temporary_names(1)[0]

    def temporary_names(self, count: int) -> list[bytes]:
        """As many of them; StoreError when the root is not available."""
        if self._writer is None:
            raise StoreError(f"cache root {self.path} is not open")
        return self._writer.temporary_names(count)

    def suspect_temporaries(self) -> None:
        """A write failed, perhaps its clean-up too: whoever opens the root later looks for temporaries."""
        if self._writer is not None:
            self._writer.suspect()

    def sweep(self) -> int:
        """Remove the temporaries of writers that are proved dead; return how many.

        Files of living writers, foreign files and links stay. The usage is counted anew where one had died.
        """
        try:
            with writers.dead_writers(self._writers_path) as dead:
                if not dead:
                    return 0
                removed = writers.remove_temporaries(self.path, frozenset(dead))
                writers.forget(self._writers_path, dead)
            self.usage.recount()
        except OSError as error:
            _log.warning("could not sweep cache root %s: %s", self.path, error)
            return 0
        return removed

    def namespace(self, identity: NamespaceIdentity) -> Namespace:
        """Return the identity's directory, made with its manifest when it is new.

        StoreError when the name is none of a namespace or a link leads it out of the root.
        """
        if not names.is_namespace(identity.namespace):
            raise StoreError(f"namespace {identity.namespace!r} is not 32 hex digits")
        namespace = Namespace(self.path, _confined(self.path, self.path / identity.namespace))
        if self.available:
            try:
                namespace.path.mkdir(exist_ok=True)
                self._write_manifest(namespace.path / names.MANIFEST, manifest := identity.manifest())
                self._namespaces[namespace.path] = manifest
            except OSError as error:
                self.lose(error)
        return namespace

    def generation(self, base_digest: bytes) -> int:
        """Return the persistent counter of an identity's base, 0 when it was never raised.

        Where it cannot be read the root becomes unavailable, because an old generation must not be found.
        """
        path = self._generation_path(base_digest)
        try:
            _refuse_link(path.parent)
            with locks.exclusive(path, create=False) as descriptor:
                return _valid_generation(descriptor)
        except FileNotFoundError:
            return 0
        except OSError as error:
            self.lose(error)
            return 0

    def raise_generation(self, base_digest: bytes) -> int:
        """Raise the counter, on the device before this returns; return the new value.

        StoreError when it cannot be kept: then others might still find what must not be found any more.
        """
        path = self._generation_path(base_digest)
        try:
            path.parent.mkdir(exist_ok=True)
            _refuse_link(path.parent)
            with locks.exclusive(path) as descriptor:
                raised = _valid_generation(descriptor) + 1
                locks.write_number(descriptor, raised)
                os.fsync(descriptor)
            for directory in (path.parent, self.path):  # the names too, which are new the first time
                _sync_directory(directory)
        except OSError as error:
            self.lose(error)
            raise StoreError(f"generation counter {path} cannot be raised: {error}") from error
        return raised

    def leave(self, namespace: str) -> None:
        """Note that ``namespace`` is of a past generation, for the case that the counter is deleted."""
        with contextlib.suppress(OSError):  # nothing lies there; or the counter cannot be raised either
            path = _confined(self.path, self.path / namespace)
            (path / names.LEFT).touch()
            _sync_directory(path)

    def left(self, namespace: str) -> bool:
        """Whether ``namespace`` is of a past generation, as far as that was noted."""
        return (self.path / namespace / names.LEFT).exists()

    def holds(self, namespace: str) -> bool:
        """Whether there is a directory of ``namespace``."""
        return (self.path / namespace).exists()

    def lose(self, error: OSError) -> None:
        """Make the root unavailable because of ``error``; one log line a minute and process says so."""
        if not self._lost:
            _once.warning("cache root %s is not available, everything is a miss: %s", str(self.path), error)
        self._lost = True
        self.suspect_temporaries()
        self.journal.lose()

    def statistics(self) -> RootStatistics:
        """Return the state of the root; counts are 0 while it is not available or cannot be read."""
        used, capacity = 0, 0
        if self.available:
            with contextlib.suppress(OSError):
                used, capacity = self.usage.used_bytes, self.usage.capacity_bytes
        return RootStatistics(self.available, self._direct, used, capacity)

    @property
    def _writers_path(self) -> Path:
        return self.path / ".writers"

    def _generation_path(self, base_digest: bytes) -> Path:
        return self.path / ".generations" / base_digest.hex()

    def _refuse_file(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"cache root {self.path} is a file; name a directory")

    def _become_writer(self) -> None:
        self._writers_path.mkdir(parents=True, exist_ok=True)
        self._writer = writers.Writer(self._writers_path)
        self._usage = Usage(self.path, self._writer, self._capacity_bytes)

    def _decide_direct(self) -> None:
        temporary = self.temporary_name()
        self._direct = _native.probe_direct(os.fsencode(self.path), temporary)
        if os.path.lexists(self.path / os.fsdecode(temporary)):
            self.suspect_temporaries()
        mode = "O_DIRECT" if self._direct else "buffered, because the file system refuses O_DIRECT"
        _log.info("cache root %s: file access is %s", self.path, mode)

    def _decide_engine(self) -> None:
        self._uring = self._wants_uring and _native.probe_uring()
        if self._wants_uring and not self._uring:
            _once.warning("cache root %s: the kernel refuses io_uring; threads do the work", str(self.path))

    def _renew(self, writer: writers.Writer) -> None:
        if writer.registered:
            return  # another thread was first
        self._writers_path.mkdir(parents=True, exist_ok=True)
        writer.renew()
        for path, identity in self._namespaces.items():
            path.mkdir(exist_ok=True)
            self._write_manifest(path / names.MANIFEST, identity)
        metrics.ERRORS.labels(where="root_gone").inc()
        _once.warning("cache root %s was deleted or moved away, and is made again", str(self.path))

    def _write_manifest(self, path: Path, identity: Mapping[str, Any]) -> None:
        if path.exists():
            return
        content = {"fan_out_digits": names.FAN_OUT_DIGITS, "identity": dict(identity)}
        temporary = path.with_name(os.fsdecode(self.temporary_name()))
        try:
            with temporary.open("x", encoding="utf-8") as file:
                json.dump(content, file, indent=2, sort_keys=True)
            temporary.rename(path)
        finally:
            temporary.unlink(missing_ok=True)


def _absolute(path: str) -> Path:
    """Return ``path`` from the file system's root; StoreError when no such path can exist."""
    if not path or "\0" in path:
        raise StoreError(f"cache root {path!r} is no path; name a directory")
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as error:
        raise StoreError(f"cache root {path!r} cannot be made absolute: {error}") from error


def _confined(root: Path, path: Path) -> Path:
    """Return ``path`` if its real place is under ``root``; StoreError otherwise."""
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(root)):
        raise StoreError(f"{path} leads to {real}, outside of the cache root {root}")
    return path


def _refuse_link(directory: Path) -> None:
    """Raise OSError for a link: behind a broken one no counter would be seen, and old bytes found."""
    if directory.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(directory))


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _valid_generation(descriptor: int) -> int:
    """Return the counter; a damaged one goes on at a number that nobody has used: nothing old is found."""
    value = locks.read_number(descriptor)
    if value is None or value > MAX_GENERATION:
        value = secrets.randbits(62) if os.fstat(descriptor).st_size else 0
        locks.write_number(descriptor, value)
        os.ftruncate(descriptor, 8)
    return value

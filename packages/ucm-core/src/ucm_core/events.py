"""Events of a cache: what came to its medium and what is gone, for an index that somebody else keeps.

>>> index = set()
>>> def follow(events: EventStream) -> None:
...     for event in events.take():
...         if event.kind is EventKind.RESYNC:
...             index.clear()
...             index.update((row, name) for row, names in events.contents() for name in names)
...         elif event.kind is EventKind.STORED:
...             index.add((event.row, event.name))
...         else:
...             index.discard((event.row, event.name))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ucm_core.coordinator.origins import Origin, Origins
from ucm_core.store.absent import ObjectStore
from ucm_core.store.journal import Change, Listener, Place


class EventKind(Enum):
    """What happened."""

    STORED = "stored"
    """An object is whole on the medium."""
    REMOVED = "removed"
    """It is not there any more."""
    RESYNC = "resync"
    """Events were lost, or there were none yet: forget the index and begin with `EventStream.contents`."""


@dataclass(frozen=True, slots=True)
class CacheEvent:
    """One event; a RESYNC has nothing but its kind."""

    kind: EventKind
    row: str = ""
    """The row's name: the group."""
    name: bytes = b""
    """The first 16 bytes of the object's key, which are its file's name."""
    medium: str = ""
    """Where: ``file``."""
    size_bytes: int = 0
    """What the object takes there."""
    origin: Origin | None = None
    """Parent and tokens; None for what this cache did not save itself, or not lately."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What a stream sees of its cache, now."""

    places: Mapping[str, Place]
    """Per row where its objects lie; none while nothing is kept."""
    stores: Mapping[str, ObjectStore]


class EventStream:
    """The events of one cache, from `ucm_core.Cache.events` to `close`. For one thread.

    It tells what this process stored, removed, or asked for and found gone. It does not tell what other
    processes do, nor what the ring holds.
    """

    def __init__(self, listener: Listener, origins: Origins, followed: Callable[[], Followed]) -> None:
        self._listener, self._origins, self._followed = listener, origins, followed

    def take(self) -> list[CacheEvent]:
        """Everything since the last call, oldest first; the first event ever is a RESYNC."""
        changes = self._listener.take()
        if changes is None:
            return [CacheEvent(EventKind.RESYNC)]
        return [event for change in changes for event in self._events(change)]

    def contents(self) -> Iterator[tuple[str, list[bytes]]]:
        """(row, names) of all that is stored now, in slices; for the answer to a RESYNC."""
        followed = self._followed()
        for row, place in followed.places.items():
            for names in followed.stores[row].names():
                self._listener.enumerated(place, names)
                yield row, [name.tobytes() for name in names]

    def close(self) -> None:
        """Hear nothing more. Idempotent."""
        self._listener.close()

    def _events(self, change: Change) -> Iterator[CacheEvent]:
        followed = self._followed()
        row = next((row for row, place in followed.places.items() if place == change.place), None)
        if row is None:
            return  # of weights that changed since
        size_bytes = followed.stores[row].geometry.object_bytes
        kind = EventKind.STORED if change.stored else EventKind.REMOVED
        for name in map(np.ndarray.tobytes, change.names):
            origin = self._origins.of(row, name)
            yield CacheEvent(kind, row, name, change.place.medium, size_bytes, origin)

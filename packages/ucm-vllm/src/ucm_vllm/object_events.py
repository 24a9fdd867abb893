"""What came to the medium and went, as the worker half tells it: the truth, also where events were lost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ucm_core.cache import Cache
from ucm_core.events import EventKind, EventStream
from ucm_core.ops import border
from ucm_vllm.metadata import Happened

MEDIUM = "file"


class ObjectEvents:
    """Follows one cache after the other; for the worker's thread.

    Whoever adds what is stored to a set and takes what is removed out of it has what the medium holds: where
    events were lost, everything is enumerated and the difference is told.
    """

    def __init__(self) -> None:
        self._cache: Cache | None = None
        self._stream: EventStream | None = None
        self._told: set[tuple[str, bytes]] = set()
        self._behind = False
        """Something was not told, so only an enumeration says what."""

    def take(self, cache: Cache | None) -> list[Happened]:
        """Everything since the last call, in order; for a cache that was not followed yet all it holds.

        What cannot be found out now is told by a later call: whatever else a worker reports does not wait.
        """
        try:
            if cache is not self._cache:
                self.close()
                self._stream = None if cache is None else cache.events()
                self._cache = cache
            return [] if self._stream is None else list(self._news(self._changes(self._stream)))
        except Exception as error:  # noqa: BLE001 (the border: an index is behind, the engine goes on)
            border.failed("kv_events", error)
            self._behind = True
            return []

    def close(self) -> None:
        """Follow nothing any more."""
        if self._stream is not None:
            self._stream.close()
        self._cache = self._stream = None

    def _changes(self, stream: EventStream) -> list[tuple[str, bytes, bool]]:
        events = stream.take()
        if self._behind or any(event.kind is EventKind.RESYNC for event in events):
            self._behind = True  # until the enumeration has come to its end
            changes = list(self._difference(stream))
            self._behind = False
            return changes
        return [(event.row, event.name, event.kind is EventKind.STORED) for event in events]

    def _difference(self, stream: EventStream) -> Iterator[tuple[str, bytes, bool]]:
        held = {(row, name) for row, names in stream.contents() for name in names}
        yield from ((row, name, False) for row, name in sorted(self._told - held))
        yield from ((row, name, True) for row, name in sorted(held - self._told))

    def _news(self, changes: Iterable[tuple[str, bytes, bool]]) -> Iterator[Happened]:
        """Neighbours of one row and kind together; what was told before is not told again."""
        row, stored = "", True
        names: list[bytes] = []
        for each_row, name, is_stored in changes:
            if ((each_row, name) in self._told) == is_stored:
                continue
            (self._told.add if is_stored else self._told.discard)((each_row, name))
            if names and (each_row, is_stored) != (row, stored):
                yield Happened(row, tuple(names), stored, MEDIUM)
                names = []
            row, stored = each_row, is_stored
            names.append(name)
        if names:
            yield Happened(row, tuple(names), stored, MEDIUM)

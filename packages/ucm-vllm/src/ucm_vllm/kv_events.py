"""KV events of the medium, for an index that somebody else keeps; parents and tokens where they are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ucm_core.cache import Cache
from ucm_core.coordinator.origins import Origins
from ucm_core.spec.keys import NAME_BYTES
from ucm_vllm.metadata import Happened
from ucm_vllm.spec_from_engine import EngineSpec


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object that came to the medium, or is not there any more."""

    stored: bool
    name: bytes
    """The first 16 bytes of its key."""
    group: int
    """Engine group that holds its row, the first where there are several."""
    kind: str
    """Of that group, as vLLM calls it."""
    block_tokens: int
    window_tokens: int | None
    parent: bytes | None = None
    """Name of the object before it; None at the beginning of a request, and where it is not known."""
    token_ids: tuple[int, ...] = ()
    """Its own tokens; none where they are not known: this engine did not save it, or not lately."""


class KvEvents:
    """Gives what the workers tell its place in requests; for the scheduler's thread."""

    def __init__(self, spec: EngineSpec) -> None:
        self._spec = spec
        self._events: dict[tuple[str, bytes], StoredObject] = {}  # the last word about each object
        self.origins = Origins()
        """Of what was planned to be saved."""

    def add(self, cache: Cache, happened: Iterable[Happened]) -> None:
        """What the workers told."""
        for each in happened:
            for event in self._objects(cache, each):
                self._events.pop((each.row, event.name), None)  # the last word stands where it was said
                self._events[each.row, event.name] = event

    def take(self) -> list[StoredObject]:
        """What became of each object since the last call, in order; none is left out, however many."""
        taken, self._events = self._events, {}
        return list(taken.values())

    def _objects(self, cache: Cache, happened: Happened) -> Iterator[StoredObject]:
        row, group = self._spec.table.row(happened.row), self._spec.rows[happened.row][0]
        for name in happened.names:
            origin = self.origins.of(row.name, name) if happened.stored else None
            parent = (
                None if origin is None or origin.parent is None else _name(cache, row.name, origin.parent)
            )
            yield StoredObject(
                happened.stored,
                name,
                group.index,
                group.kind,
                row.block_tokens,
                row.window,
                parent,
                () if origin is None else origin.tokens,
            )


def _name(cache: Cache, row: str, digest: bytes) -> bytes:
    (key,) = cache.keys(row, np.frombuffer(digest, dtype=np.uint8)[None])
    return bytes(key[:NAME_BYTES])

"""Saves that are under way, by unit key: who holds the bytes meanwhile does not matter.

::

    (absent) --begin--> under way --acknowledge, last unit--> saved --forget--> (absent)
                            |                                   ^
                            +--fail or abort--> (absent)        +-- only while somebody wants to know

A tree may split, shorten or evict a node while its save is under way: an answer names the unit it is about,
and a node asks for the objects that it has now. An answer of a job that failed or was aborted is too late and
counts for nothing, even where the same object is under way again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ucm_position_key.pools import ObjectKey, UnitKey

__all__ = ["SaveJob", "SaveLedger", "SaveStatistics"]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """One call of a store: which units it writes."""

    number: int
    """Counted up by the ledger."""
    units: tuple[UnitKey, ...]
    """What it writes; empty when everything is saved or under way."""


@dataclass(frozen=True, slots=True)
class SaveStatistics:
    """What a ledger holds now."""

    jobs: int
    """Jobs with unanswered units."""
    objects_under_way: int
    """Objects with unanswered units."""
    objects_saved: int
    """Objects that are saved and not forgotten."""


@dataclass(frozen=True, slots=True)
class _Pending:
    job: int
    missing: frozenset[UnitKey]
    wanted: bool = True


class SaveLedger:
    """Which objects are saved, and which are under way; flat in memory when what leaves is forgotten.

    Not thread-safe.
    """

    def __init__(self) -> None:
        """Start with nothing saved."""
        self._last_job = 0
        self._pending: dict[ObjectKey, _Pending] = {}
        self._jobs: dict[int, set[ObjectKey]] = {}
        self._saved: set[ObjectKey] = set()

    def begin(self, units: Iterable[UnitKey]) -> SaveJob:
        """Begin a job of those objects that are neither saved nor under way, all their given units.

        An object of which one unit is given counts as saved once the given ones are.
        """
        wanted: dict[ObjectKey, list[UnitKey]] = {}
        for unit in units:
            if unit.object not in self._saved:
                wanted.setdefault(unit.object, []).append(unit)
        for key in [key for key in wanted if key in self._pending]:
            self._pending[key] = replace(self._pending[key], wanted=True)
            del wanted[key]
        self._last_job += 1
        job = SaveJob(self._last_job, tuple(unit for group in wanted.values() for unit in group))
        self._pending |= {key: _Pending(job.number, frozenset(group)) for key, group in wanted.items()}
        if wanted:
            self._jobs[job.number] = set(wanted)
        return job

    def acknowledge(self, job: SaveJob, unit: UnitKey) -> None:
        """Take the news that a unit is on the medium; twice, too late or foreign it changes nothing."""
        pending = self._pending_of(job, unit)
        if pending is None:
            return
        missing = pending.missing - {unit}
        self._pending[unit.object] = replace(pending, missing=missing)
        if not missing:
            self._end(unit.object)
            if pending.wanted:
                self._saved.add(unit.object)

    def fail(self, job: SaveJob, unit: UnitKey) -> None:
        """Take the news that a unit was not written: its object is not saved and may begin again."""
        if self._pending_of(job, unit) is not None:
            self._end(unit.object)

    def abort(self, job: SaveJob) -> None:
        """Give up what is unanswered of a job, at any stage; a second time it changes nothing."""
        for key in tuple(self._jobs.get(job.number, ())):
            self._end(key)

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        """Drop what nobody asks about any more: a node left. What is under way goes on to its end."""
        for key in keys:
            self._saved.discard(key)
            if key in self._pending:
                self._pending[key] = replace(self._pending[key], wanted=False)

    def saved(self, keys: Iterable[ObjectKey]) -> tuple[bool, ...]:
        """Return for each object whether all its units are on the medium."""
        return tuple(key in self._saved for key in keys)

    def under_way(self, keys: Iterable[ObjectKey]) -> tuple[bool, ...]:
        """Return for each object whether units are unanswered: its memory may still be read."""
        return tuple(key in self._pending for key in keys)

    def statistics(self) -> SaveStatistics:
        """Return what is held now."""
        return SaveStatistics(len(self._jobs), len(self._pending), len(self._saved))

    def check_integrity(self) -> None:
        """AssertionError unless the books agree."""
        owned = {(key, number) for number, keys in self._jobs.items() for key in keys}
        assert owned == {(key, pending.job) for key, pending in self._pending.items()}
        assert all(pending.missing for pending in self._pending.values())
        assert not self._saved & self._pending.keys()

    def _pending_of(self, job: SaveJob, unit: UnitKey) -> _Pending | None:
        """What is unanswered of a unit's object, if it is this job's."""
        pending = self._pending.get(unit.object)
        return pending if pending is not None and pending.job == job.number else None

    def _end(self, key: ObjectKey) -> None:
        number = self._pending.pop(key).job
        self._jobs[number].discard(key)
        if not self._jobs[number]:
            del self._jobs[number]

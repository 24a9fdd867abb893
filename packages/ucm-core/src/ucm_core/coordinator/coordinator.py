"""The coordinator: verdicts over what the stores hold, asked in batches and no further than they can matter.

A library in each scheduler process. It knows rows, keys and positions; it touches no bytes and starts no
transfers. The stores are asked by `Survey`, the answer is always made by the resolver, so asking less never
makes it say more.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Protocol

import numpy as np

from ucm_core.coordinator.checkpoints import Checkpoints, CheckpointStatistics
from ucm_core.coordinator.coverage import cached_rows, voter, voters
from ucm_core.coordinator.explain import Explanation, explain
from ucm_core.coordinator.leases import Lease
from ucm_core.coordinator.lookups import Clock, Lookup, LookupStatistics, RowLookup, Suspects
from ucm_core.coordinator.presence import Mask
from ucm_core.coordinator.resolve import Ask, Hit, resolve_rows, with_local
from ucm_core.coordinator.shelf import Shelf
from ucm_core.coordinator.soon import Soon
from ucm_core.coordinator.survey import Survey
from ucm_core.errors import SpecError, shown
from ucm_core.spec.keys import Keys, PrefixChain, following
from ucm_core.spec.rows import MAX_NUMBER
from ucm_core.spec.table import RowKind, SpecRow, SpecTable

__all__ = ["Coordinator", "CoordinatorLimits", "CoordinatorStatistics", "Verdict"]


@dataclass(frozen=True, slots=True)
class CoordinatorLimits:
    """Bounds of what a coordinator remembers."""

    suspect_s: float = 60.0
    """Seconds for which a key that failed to load counts as absent, unless it is saved again."""
    suspects: int = 65_536
    """Suspects remembered per row."""
    checkpoints: int = 65_536
    """States remembered per snapshot row."""


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """Where a request resumes and what must be loaded for it.

    What is only on a medium may still vanish, and without a lease what is in the ring may too: then the load
    says so, and the next verdict is shorter.
    """

    hit: Hit
    """The answer in tokens."""
    blocks: Mapping[str, range]
    """Per cached row the blocks to load: the coverage at ``hit.resume_tokens`` less what lies wholly in the
    engine's ``[0, local_tokens)``. A block that the engine holds in part is in it; never write over that
    part."""
    keys: Mapping[str, Keys] = field(repr=False)
    """Per cached row the object keys of ``blocks``, ``uint8[len(blocks[row]), 32]``."""
    moment: int = 0
    """Counts the saves that were known when it was given: what was saved later is newer than its failures."""
    lease: Lease | None = field(default=None, repr=False)
    """What keeps it in the ring; None: nothing does."""
    prefetch: Prefetch | None = field(default=None, repr=False)
    """What brings it into the ring meanwhile; None: nothing does."""


class Prefetch(Protocol):
    """Reads under way for a verdict (`ucm_core.TicketGroup`)."""

    def cancel(self) -> None:
        """Nobody wants them any more; a further call is a no-op."""


@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """What a coordinator was asked and asked in turn; counts only grow."""

    verdicts: int
    """Verdicts given, clamps and rewinds included."""
    hits: int
    """Verdicts that gained the engine anything."""
    hit_tokens: int
    """Tokens gained by them, summed."""
    suspects: Mapping[str, int]
    """Per row the keys that count as absent now."""
    lookups: Mapping[str, LookupStatistics]
    """Per row what was asked of its store."""
    checkpoints: Mapping[str, CheckpointStatistics]
    """Per snapshot row what its directory holds."""


class Coordinator:
    """Answers where requests resume. Verdicts are for one thread; `failed` and `saved` may come from any.

    ``lookups`` has one function per voting row (a follower's is needed only for `clamp`): from object keys
    ``uint8[n, 32]`` to ``bool[n]``, what is there. ``seeds`` has the 32-byte row seeds; a follower without
    one of its own uses its source's. A lookup that raises counts as absent, in the answer and in
    `statistics`. SpecError names a row that has no lookup or no seed.
    """

    def __init__(
        self,
        table: SpecTable,
        lookups: Mapping[str, Lookup],
        seeds: Mapping[str, bytes],
        *,
        limits: CoordinatorLimits | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Check that every row can be asked, and know nothing yet."""
        _check_lookups(table, lookups)
        limits = limits or CoordinatorLimits()
        self.table = table
        self._shelves = {
            row.name: _shelf(row, _seed(table, row, seeds), lookups.get(row.name, _nothing), limits, clock)
            for row in cached_rows(table)
        }
        self._verdicts = self._hits = self._hit_tokens = 0
        self._moments = itertools.count(1)
        self._moment = 0

    def verdict(
        self,
        chain: PrefixChain,
        *,
        request_tokens: int,
        local_tokens: int = 0,
        tail_tokens: int = 1,
        align_tokens: int = 1,
    ) -> Verdict:
        """Return where the request of ``chain`` resumes; never raises for a store that fails.

        ``chain`` covers the request's prefix; what it does not cover is absent. SpecError when its grain is
        not the table's or a number is negative.
        """
        ask = Ask(request_tokens, tail_tokens, align_tokens, local_tokens)
        return self._answer(chain, ask, voters(self.table))

    def explain(
        self,
        chain: PrefixChain,
        *,
        request_tokens: int,
        local_tokens: int = 0,
        tail_tokens: int = 1,
        align_tokens: int = 1,
    ) -> Explanation:
        """Return why the request of ``chain`` resumes where it does: every store is asked about all of it.

        For people: slower than `verdict`, which it is not counted as; it changes nothing.
        """
        self._check_grain(chain)
        ask = Ask(request_tokens, tail_tokens, align_tokens, local_tokens)
        known_tokens = min(ask.limit_tokens(self.table), chain.hashed_tokens)
        shelves = self._shelves.items()
        return explain(
            self.table, {name: shelf.presence(chain, known_tokens) for name, shelf in shelves}, ask=ask
        )

    def clamp(self, chain: PrefixChain, verdict: Verdict) -> Verdict:
        """Return ``verdict`` cut to what the followers hold now; for the start of a load, before any use."""
        return self._answer(chain, verdict.hit.ask, cached_rows(self.table), cap=verdict.hit)

    def rewind(
        self, chain: PrefixChain, verdict: Verdict, *, failed: Mapping[str, Collection[int]]
    ) -> Verdict:
        """Return where all rows resume together after units of ``verdict`` failed to load.

        ``failed`` names blocks of chain rows and followers, and positions of snapshot rows. They are suspects
        from now on, so the next verdict of any request avoids them as well; not so what was saved again since
        ``verdict`` was given, which may be loaded once more.
        """
        for name, units in failed.items():
            shelf = self._shelf(name)
            shelf.failed(shelf.keys(chain, shelf.unit_ends(sorted(units))), moment=verdict.moment)
        return self._answer(chain, verdict.hit.ask, cached_rows(self.table), cap=verdict.hit)

    def soon_tokens(self, chain: PrefixChain, verdict: Verdict, *, in_flight: Mapping[str, Lookup]) -> int:
        """Return where the request could resume once what is in flight is there; see `Soon.tokens`.

        ``in_flight`` has for voting rows which keys are on their way into a ring. More than
        ``verdict.hit.resume_tokens`` means "not yet": an adapter that can ask again may do so, a limited
        number of times.
        """
        return Soon(self.table, self._shelves, in_flight).tokens(chain, verdict.hit)

    def failed(self, row_name: str, keys: Keys, *, moment: float = math.inf) -> None:
        """Note that ``keys`` (``uint8[n, 32]``) of a row did not load: absent until saved or a time limit.

        ``moment`` is that of the verdict whose load it was; without it no save is newer than the failure.
        """
        self._shelf(row_name).failed(keys, moment=moment)

    def held(self, row_name: str, keys: Keys) -> Mask:
        """Return which of ``keys`` (``uint8[n, 32]``) of a row are there and not suspects, ``bool[n]``.

        For adapters that see keys and no tokens; any thread. Nothing is there of a store that fails.
        """
        return self._shelf(row_name).lookup(keys)

    @property
    def moment(self) -> int:
        """Counts the saves that are known: to be asked before a load, for `failed` (`Verdict.moment`)."""
        return self._moment

    def saved(self, row_name: str, keys: Keys) -> None:
        """Note that ``keys`` of a row were stored: suspects are cleared, states enter the directory."""
        shelf = self._shelf(row_name)
        self._moment = moment = next(self._moments)
        shelf.saved(keys, moment=moment)

    def rebuild(self, row_name: str, slices: Iterable[Keys]) -> int:
        """Fill a snapshot row's directory from an enumeration of its store; see `Checkpoints.rebuild`."""
        directory = self._shelf(row_name).checkpoints
        if directory is None:
            raise SpecError(f"row {row_name!r} has no directory; only snapshot rows have one")
        return directory.rebuild(slices)

    def keys(self, chain: PrefixChain, row_name: str, *, begin_block: int, end_block: int) -> Keys:
        """Return the object keys of the blocks ``[begin_block, end_block)`` of a row, ``uint8[n, 32]``.

        SpecError when the chain is shorter or has another grain.
        """
        shelf = self._shelf(row_name)
        for block in (begin_block, end_block):
            _check_block(row_name, block)
        self._check_grain(chain)
        return shelf.block_keys(chain, begin=int(begin_block), end=int(end_block))

    def parents(self, chain: PrefixChain, row_name: str, *, begin_block: int, end_block: int) -> Keys | None:
        """For the blocks of `keys` those of the blocks before them, zeros where there is none.

        None: no block of this row needs the one before it (`needs_parents`).
        """
        if not needs_parents(self._shelf(row_name).row):
            return None
        keys = self.keys(chain, row_name, begin_block=max(begin_block - 1, 0), end_block=end_block)
        return keys[:-1] if begin_block else following(keys)

    def missing(self, chain: PrefixChain, row_name: str, *, begin_block: int, end_block: int) -> Mask:
        """Return which of the blocks ``[begin_block, end_block)`` are still to be stored, ``bool[n]``.

        For the save path. Suspects and everything of a lookup that failed are missing. SpecError when the
        chain is shorter.
        """
        return ~self._shelf(row_name).lookup(
            self.keys(chain, row_name, begin_block=begin_block, end_block=end_block)
        )

    def statistics(self) -> CoordinatorStatistics:
        """Return a moment of the counts."""
        return CoordinatorStatistics(
            self._verdicts,
            self._hits,
            self._hit_tokens,
            suspects={name: len(shelf.suspects) for name, shelf in self._shelves.items()},
            lookups={name: shelf.lookup.statistics() for name, shelf in self._shelves.items()},
            checkpoints={
                name: shelf.checkpoints.statistics()
                for name, shelf in self._shelves.items()
                if shelf.checkpoints is not None
            },
        )

    def check_integrity(self) -> None:
        """Raise SpecError when a bound does not hold."""
        for shelf in self._shelves.values():
            shelf.check_integrity()

    def _shelf(self, row_name: str) -> Shelf:
        shelf = self._shelves.get(row_name)
        if shelf is None:
            raise SpecError(f"no cached row {row_name!r} in the table; it has {', '.join(self._shelves)}")
        return shelf

    def _answer(
        self, chain: PrefixChain, ask: Ask, rows: Sequence[SpecRow], *, cap: Hit | None = None
    ) -> Verdict:
        self._check_grain(chain)
        moment = self._moment  # before the stores are asked
        hit = self._resolve(chain, ask, rows, cap, remembered=True)
        if not self._confirmed(chain, hit):
            hit = self._resolve(chain, ask, rows, cap, remembered=False)
        self._verdicts += 1
        self._hits += hit.new_tokens > 0
        self._hit_tokens += hit.new_tokens
        return self._to_load(chain, hit, moment)

    def _check_grain(self, chain: PrefixChain) -> None:
        if chain.grain_tokens != self.table.grain_tokens:
            raise SpecError(
                f"the chain has {chain.grain_tokens} tokens per grain, the table {self.table.grain_tokens}"
            )

    def _resolve(
        self, chain: PrefixChain, ask: Ask, rows: Sequence[SpecRow], cap: Hit | None, *, remembered: bool
    ) -> Hit:
        limit = cap.hit_tokens if cap else ask.limit_tokens(self.table)
        survey = Survey(self.table, self._shelves, chain, ask)
        found = survey.run(rows, limit, remembered=remembered)
        return resolve_rows(self.table, with_local(self.table, found, ask=ask), ask=ask, rows=rows, cap=cap)

    def _confirmed(self, chain: PrefixChain, hit: Hit) -> bool:
        """Ask the stores about the states that ``hit`` would promise: the directories may be stale."""
        if not hit.resume_tokens:
            return True
        shelves = (self._shelves[row.name] for row in self.table.snapshot_rows)
        at = np.array([hit.resume_tokens], dtype=np.int64)
        return all(bool(shelf.states(shelf.keys(chain, at), remembered=False).all()) for shelf in shelves)

    def _to_load(self, chain: PrefixChain, hit: Hit, moment: int) -> Verdict:
        local = min(hit.ask.local_tokens, hit.ask.request_tokens)
        blocks = {}
        for row in cached_rows(self.table):
            needed = hit.coverage[row.name]
            begin = max(needed.start, local // row.block_tokens)
            blocks[row.name] = range(min(begin, needed.stop), needed.stop)
        keys = {
            name: self.keys(chain, name, begin_block=span.start, end_block=span.stop)
            for name, span in blocks.items()
        }
        return Verdict(hit, blocks, keys, moment)


def needs_parents(row: SpecRow) -> bool:
    """Whether a block of ``row`` is of no use without the one before it: not in a window, and no state."""
    return row.kind is RowKind.CHAIN and row.window is None


def _shelf(row: SpecRow, seed: bytes, lookup: Lookup, limits: CoordinatorLimits, clock: Clock) -> Shelf:
    suspects = Suspects(limit_s=limits.suspect_s, capacity=limits.suspects, clock=clock)
    safe = RowLookup(row.name, lookup, suspects)
    if row.kind is not RowKind.SNAPSHOT:
        return Shelf(row, seed, suspects, safe)
    return Shelf(row, seed, suspects, safe, Checkpoints(safe, capacity=limits.checkpoints))


def _nothing(keys: Keys) -> Mask:
    """Answer for a follower without a lookup: it holds nothing."""
    return np.zeros(len(keys), dtype=np.bool_)


def _seed(table: SpecTable, row: SpecRow, seeds: Mapping[str, bytes]) -> bytes:
    seed = seeds.get(row.name, seeds.get(voter(table, row).name))
    if seed is None:
        raise SpecError(f"row {row.name!r} has no seed; seeds were given for {sorted(seeds)}")
    return seed


def _check_block(row_name: str, block: object) -> None:
    """Refuse what is no index: rounded or wrapped around it would name another block's key."""
    if not isinstance(block, Integral) or not 0 <= int(block) <= MAX_NUMBER:
        raise SpecError(f"row {row_name!r}: block {shown(block)} is no int from 0 to {MAX_NUMBER}")


def _check_lookups(table: SpecTable, lookups: Mapping[str, Lookup]) -> None:
    """Refuse gaps: a voting row that cannot be asked would turn every verdict into 0 without a word."""
    lacking = [row.name for row in voters(table) if row.name not in lookups]
    unknown = sorted(set(lookups) - {row.name for row in cached_rows(table)})
    if lacking or unknown:
        raise SpecError(f"rows without a lookup: {lacking}; lookups without a row: {unknown}")

"""The reference engine: a scheduler and its ranks over a cache, every byte that is read compared.

It is how an engine adapter uses the core, without an engine: a verdict where a request resumes, loads and
saves by units through `ucm_core.flow.pipeline.LayerPipeline`, each rank's part of every row from
`ucm_core.spec.segments.slices_of`. Ranks are threads here; each has memory and stores of its own and knows of
the others only what the scheduler tells it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ucm_core.cache import Cache
from ucm_core.errors import StoreError
from ucm_core.flow.pipeline import LayerPipeline, StepReport
from ucm_core.flow.trace import Trace
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.segments import Parallelism, Rank, Share, slices_of
from ucm_core.spec.table import RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap, stage_ranges
from ucm_core.store.absent import ObjectStore
from ucm_core.testing.engine.memory import PagedMemory
from ucm_core.testing.engine.model import PrefixModel
from ucm_core.testing.engine.rank import EngineRank
from ucm_core.testing.engine.request import Request
from ucm_core.testing.engine.scheduler import Counts, Feed, Scheduler
from ucm_core.testing.engine.tables import BlockTables
from ucm_core.testing.engine.work import Step

__all__ = ["EngineShape", "ReferenceEngine", "WrongBytesError"]

SETTLE_S = 60.0
"""Longer than any copy takes here."""


class WrongBytesError(AssertionError):
    """A layer read bytes that are not the model's, and nobody had said that their load failed."""


@dataclass(frozen=True, slots=True)
class EngineShape:
    """How an engine is cut and how much it has."""

    parallel: Parallelism = field(default_factory=Parallelism)
    """Its ranks."""
    feed: Feed = field(default_factory=Feed)
    """What a step computes."""
    pages: int = 256
    """Pages of each group, the null page included."""
    pages_per_block: int = 1
    """A page is smaller than a block of the cache by this factor."""
    shared: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Layers that share a tensor, see `ucm_core.UnitMap`."""
    follows: Mapping[int, int] = field(default_factory=dict)
    """Layers that read the bytes of another one."""
    depth: int | None = None
    """Layers that are loaded ahead; None = what the pipeline finds best."""
    trace_dir: Path | None = None
    """Where each rank's pipeline writes its trace, see `ucm_core.flow.trace`; None = nowhere."""
    pipeline: type[LayerPipeline] = LayerPipeline
    """What moves units beside the layers."""
    seed: int = 0
    """Of all that is random."""


class ReferenceEngine:
    """A scheduler and its ranks. For one thread; a context manager that closes its caches.

    ``cache`` is the scheduler's, of all ranks; ``workers`` has one of each of ``shape.parallel.ranks()``. See
    `ReferenceEngine.open`.
    """

    def __init__(self, cache: Cache, workers: Sequence[Cache], shape: EngineShape) -> None:
        self.shape = shape
        self.cache = cache
        """Gives the verdicts."""
        self.workers = workers
        """Load and save."""
        self.table = table = cache.table
        """The rows, whole."""
        self.model = PrefixModel()
        """Says which bytes are right."""
        self.units = UnitMap(table, shape.parallel.partition, shared=shape.shared, follows=shape.follows)
        """Which layers have which units."""
        self.luck = Random(shape.seed)
        """Everything random comes from it."""
        sizes = {row.name: row.block_tokens // shape.pages_per_block for row in _paged(table)}
        tables = BlockTables(table, pages=shape.pages, page_tokens=sizes)
        self.scheduler = Scheduler(cache.coordinator, tables, shape.feed, luck=self.luck)
        """Who computes what."""
        self.ranks = [
            self._rank(rank, worker.stores, sizes)
            for rank, worker in zip(shape.parallel.ranks(), workers, strict=True)
        ]
        """Who computes it."""
        self.reports: list[StepReport] = []
        """What the ranks said of the last step."""
        self.change: Callable[[Step], Step] = lambda step: step
        """Changes a step before it runs: an engine that forgets hooks or calls layers again."""
        self._pool = ThreadPoolExecutor(len(self.ranks)) if len(self.ranks) > 1 else None

    @classmethod
    def open(
        cls,
        config: CacheConfig,
        table: SpecTable,
        *,
        identity: ModelIdentity,
        shape: EngineShape | None = None,
    ) -> Self:
        """An engine over caches of its own: the scheduler's and one for each rank."""
        shape = shape or EngineShape()
        open_cache = partial(Cache.open, config, table, identity=identity)
        with ExitStack() as opened:
            cache = opened.enter_context(open_cache(share=Share(shape.parallel)))
            workers = [
                opened.enter_context(open_cache(share=Share(shape.parallel, rank)))
                for rank in shape.parallel.ranks()
            ]
            engine = cls(cache, workers, shape)
            opened.pop_all()
        return engine

    # -- what is asked of it

    def submit(self, name: str, prompt: Sequence[int], *, output_tokens: int = 1) -> Request:
        """Queue a request; it runs when `step` is called."""
        chain = self.cache.chain(prompt)
        request = Request(name, list(prompt), len(prompt), output_tokens, chain, self.model)
        self.scheduler.waiting.append(request)
        return request

    def step(self) -> None:
        """Plan, admit, compute, commit; what is admitted loads while this step computes, and joins the next.

        WrongBytesError: a layer read what it must not; that request starts again.
        """
        self.collect()
        step = self.change(self.scheduler.plan())
        loads = self.scheduler.admit()
        self._cancel()
        for load in loads:
            for rank in self.ranks:
                rank.begin_load(load)
        self.reports = self._run(step) if step.works or step.saves else []
        failed = self._failed(step)
        wrong = [each for rank in self.ranks for each in rank.tally.take_wrong()]
        silent = [each for each in wrong if each.request not in failed]
        self.scheduler.commit(failed | {each.request: {} for each in silent})
        self._cancel()
        if silent:
            raise WrongBytesError(f"{len(silent)} reads were wrong and nobody said so, first {silent[0]}")

    def run(self, *, most_steps: int = 100_000) -> Counts:
        """Step until nothing is left to do."""
        for _ in range(most_steps):
            if self.scheduler.idle:
                break
            self.step()
        else:
            raise StoreError(f"requests are left after {most_steps} steps; give the engine more pages")
        self.settle()
        return self.scheduler.counts

    def abort(self, request: Request) -> None:
        """Nobody wants ``request`` any more. Between steps."""
        self.scheduler.abort(request)
        self._cancel()

    def preempt(self, request: Request) -> None:
        """Take the pages of a running request. Between steps."""
        if request in self.scheduler.running:
            self.scheduler.preempt(request)
            self._cancel()

    # -- balances

    def collect(self) -> None:
        """Free the pages that no copy needs any more, and fill them with garbage."""
        kept = []
        for key, pages in self.scheduler.freed:
            if all(rank.idle(key) for rank in self.ranks):
                self.scheduler.tables.give_back(pages)
                for rank in self.ranks:
                    rank.spoil(pages)
            else:
                kept.append((key, pages))
        self.scheduler.freed = kept
        for rank in self.ranks:
            for row, keys in rank.stored():
                self.scheduler.coordinator.saved(row, keys)

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until all copies have ended. StoreError: some have not, or pages are missing then."""
        for rank in self.ranks:
            rank.drain(timeout_s)
        self.collect()
        held = self.scheduler.tables.held_count
        if self.scheduler.idle and held:
            raise StoreError(f"{held} pages are held and nobody computes; each must come back")

    def entries_read(self) -> int:
        """Entries and states that were read and compared, by all ranks."""
        return sum(rank.tally.entries_read for rank in self.ranks)

    def close(self) -> None:
        """Let copies end, then close the caches."""
        for rank in self.ranks:
            rank.pipeline.close(SETTLE_S)
        if self._pool is not None:
            self._pool.shutdown()
        for cache in (*self.workers, self.cache):
            cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- private

    def _rank(self, place: Rank, stores: Mapping[str, ObjectStore], sizes: Mapping[str, int]) -> EngineRank:
        slices, shape = slices_of(self.table, self.shape.parallel, rank=place), self.shape
        memories = {
            name: PagedMemory(held, pages=shape.pages, page_tokens=sizes.get(name, 1))
            for name, held in slices.items()
        }
        partition = shape.parallel.partition
        known = self.units.layers
        layers = range(known[-1] + 1) if partition is None else range(*stage_ranges(partition)[place.stage])
        hooked = [layer for layer in layers if layer in known]
        first = {name: held.segment.units[0] for name, held in slices.items()}
        pipeline = shape.pipeline(
            self.units, layers=hooked, first_units=first, depth=shape.depth, trace=Trace(shape.trace_dir)
        )
        return EngineRank(stores, memories, pipeline, layers=hooked, follows=shape.follows)

    def _run(self, step: Step) -> list[StepReport]:
        """Stage after stage; the ranks of a stage side by side."""
        if self._pool is None:
            return [rank.run(step) for rank in self.ranks]
        size = len(self.ranks) // self.shape.parallel.stages
        stages = [self.ranks[begin : begin + size] for begin in range(0, len(self.ranks), size)]
        return [report for stage in stages for report in self._pool.map(lambda rank: rank.run(step), stage)]

    def _failed(self, step: Step) -> dict[Hashable, dict[str, set[int]]]:
        """What did not load on any rank; a request whose layers were not all hooked has lost everything."""
        failed: dict[Hashable, dict[str, set[int]]] = {}
        for report in self.reports:
            for key in step.loads if report.unseen else ():
                failed.setdefault(key, {})
            for key, rows in report.failed.items():
                for row, mask in rows.items():
                    failed.setdefault(key, {}).setdefault(row, set()).update(self._units(key, row, mask))
        return failed

    def _units(self, key: Hashable, row: str, mask: npt.NDArray[np.bool_]) -> list[int]:
        """What the objects of ``mask`` are: blocks, or positions of states."""
        spec = self.table.row(row)
        request = next(request for request in self.scheduler.running if request.key == key)
        blocks = request.verdict.blocks[row] if request.verdict is not None else ()
        found = [blocks[place] for place in np.flatnonzero(mask)]
        return (
            [(block + 1) * spec.block_tokens for block in found] if spec.kind is RowKind.SNAPSHOT else found
        )

    def _cancel(self) -> None:
        for key in self.scheduler.given_up:
            for rank in self.ranks:
                rank.cancel(key)
        self.scheduler.given_up.clear()


def _paged(table: SpecTable) -> tuple[SpecRow, ...]:
    return (*table.chain_rows, *table.follower_rows)

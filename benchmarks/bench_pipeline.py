"""The layer pipeline: one step that loads a prefix, against the longer of its loads and its layers alone.

The reference engine computes 16 layers of 10 ms; the prefix is loaded from a double of a medium that takes
10 ms for each layer's units, one after the other, and then from files with nothing in memory. The request is
admitted while the step before runs, as in an engine, so its first units are there when its own step begins.
What every policy does beside loading (reads that are compared, saves) is in both sides of a ratio.

A figure is the time of that step over the ideal: nothing can be done sooner than what takes longer.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from benchmarks.frame import WALL, Cost, Figure, Round, compare, in_turns
from benchmarks.rig import work_folder
from ucm_core.flow.handles import UnitLoad
from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepSave
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_core.testing.engine.engine import EngineShape, ReferenceEngine
from ucm_core.testing.engine.medium import SerialMedium, SlowStore
from ucm_core.testing.engine.scheduler import Feed

LAYERS, LAYER_S = 16, 0.010
BLOCK, PREFIX, CHUNK = 64, 256, 64
MOST = 1.05
"""Of the ideal: exposed time below 5 %."""
TURNS = 7
IDEAL = "the longer of its loads and its layers, alone"


def figures() -> Iterator[Figure]:
    """A medium whose times are known, then real files."""
    with work_folder() as folder, SerialMedium() as medium:
        yield from of("balanced", Rounds(folder / "double", medium, token_bytes=64), limit=MOST)
    with work_folder() as folder:
        yield from of("cold files", Rounds(folder / "files", None, token_bytes=4096), limit=None)


def of(name: str, rounds: Rounds, *, limit: float | None) -> Iterator[Figure]:
    """Ours, and what else could be done, over the ideal; all in turns."""
    with rounds.opened() as policies:
        costs = in_turns(policies, TURNS)
    ideal = [
        Cost(max(layers.wall_s, loads.wall_s), 0.0)
        for layers, loads in zip(costs["layers alone"], costs["loads alone"], strict=True)
    ]
    for policy in ("pipeline", "depth 1, submit after wait", "load all first", "no cache"):
        most = limit if policy == "pipeline" else None
        what = f"one step, {name}: {policy}"
        yield compare(what, costs[policy], ideal, peer=IDEAL, limit=most, measure=WALL)


class AllFirst(LayerPipeline):
    """Another policy: everything is loaded before the first layer."""

    def prefetch(self, load: StepLoad) -> None:
        """Nothing comes early."""

    def begin_step(self, loads: Sequence[StepLoad], saves: Sequence[StepSave]) -> None:
        """Load everything."""
        fetch_all(loads)
        super().begin_step([], saves)


class AfterWait(LayerPipeline):
    """Another policy: the next layer's units are submitted when those of this one have come."""

    _handles: Sequence[UnitLoad] = ()

    def prefetch(self, load: StepLoad) -> None:
        """Nothing comes early."""

    def begin_step(self, loads: Sequence[StepLoad], saves: Sequence[StepSave]) -> None:
        """Ask for the first layer only."""
        self._handles = [handle for load in loads for handle in load.rows.values()]
        self._ask_for(0)
        super().begin_step([], saves)

    def before_layer(self, layer: int, *, requests: Collection[Hashable] | None = None) -> None:  # noqa: ARG002
        """Wait for this layer, then ask for the next."""
        for handle in self._handles:
            handle.ticket.wait(shard=layer)
        self._ask_for(layer + 1)

    def _ask_for(self, layer: int) -> None:
        for handle in self._handles if layer < LAYERS else ():
            handle.submit(slice(layer, layer + 1))


class Landed(LayerPipeline):
    """The layers alone: everything is there before the step; ``loads`` says what that took."""

    loads = Cost(0.0, 0.0)

    def prefetch(self, load: StepLoad) -> None:
        """Load everything, and take the time."""
        begin_s = time.perf_counter()
        fetch_all([load])
        Landed.loads = Cost(time.perf_counter() - begin_s, 0.0)

    def begin_step(self, loads: Sequence[StepLoad], saves: Sequence[StepSave]) -> None:  # noqa: ARG002
        """There is nothing to wait for."""
        super().begin_step([], saves)


def fetch_all(loads: Sequence[StepLoad]) -> None:
    """Submit everything and wait for it."""
    handles = [handle for load in loads for handle in load.rows.values()]
    for handle in handles:
        handle.submit(slice(None))
    for handle in handles:
        handle.ticket.wait()


class Rounds:
    """Engines over one cache that differ in their policy, and what each of them is timed doing."""

    def __init__(self, root: Path, medium: SerialMedium | None, *, token_bytes: int) -> None:
        part = Part("kv", (token_bytes,), "uint8")
        row = SpecRow("full", RowKind.CHAIN, BLOCK, tuple(range(LAYERS)), (part,))
        self._table = SpecTable((row,), BLOCK)
        # without a double the files are read each time: there is no ring
        self._config = CacheConfig(root=root, ring_bytes="64MB" if medium else 0, disk_bytes="8GB")
        self._medium = medium
        self._prefix = list(range(PREFIX))
        self._fresh = itertools.count(1000)

    @contextmanager
    def opened(self) -> Iterator[dict[str, Round]]:
        """What is timed, by name."""
        classes = {
            "pipeline": LayerPipeline,
            "load all first": AllFirst,
            "depth 1, submit after wait": AfterWait,
            "layers alone": Landed,
        }
        with ExitStack() as stack:
            engines = {
                name: stack.enter_context(self._engine(pipeline)) for name, pipeline in classes.items()
            }
            self._run(engines["pipeline"], [*self._prefix, 7])
            yield {
                **{name: partial(self._loading_step, engine) for name, engine in engines.items()},
                "loads alone": lambda: Landed.loads,  # of the round before
                "no cache": lambda: self._no_cache(engines["pipeline"]),
            }

    def _engine(self, pipeline: type[LayerPipeline]) -> ReferenceEngine:
        shape = EngineShape(feed=Feed(chunk_tokens=CHUNK), pages=64, pipeline=pipeline)
        engine = ReferenceEngine.open(self._config, self._table, identity=self._identity(), shape=shape)
        (rank,) = engine.ranks
        rank.loop.time.layer_s = LAYER_S
        if self._medium is not None:
            rank.stores = {
                row: SlowStore(store, self._medium, lambda _: LAYER_S) for row, store in rank.stores.items()
            }
        return engine

    def _identity(self) -> ModelIdentity:
        return ModelIdentity(
            config='{"model_type": "benchmark"}',
            weights="00" * 32,
            revision=None,
            compute_dtype="uint8",
            kv_dtype="uint8",
            table=self._table.digest.hex(),
            grain_tokens=BLOCK,
        )

    def _loading_step(self, engine: ReferenceEngine) -> Cost:
        """The step of a request whose prefix is cached; it was admitted while another one computed."""
        engine.submit("before", [next(self._fresh)] * 16)
        engine.step()
        request = engine.submit("measured", [*self._prefix, *[next(self._fresh)] * 16])
        engine.step()
        assert request.resumed == PREFIX
        begin_s = time.perf_counter()
        engine.step()
        cost = Cost(time.perf_counter() - begin_s, 0.0)
        assert request.done
        assert engine.scheduler.counts.rewound == 0
        engine.run()
        return cost

    def _no_cache(self, engine: ReferenceEngine) -> Cost:
        """All steps of a request of this length of which nothing is cached."""
        prompt = [next(self._fresh) for _ in range(PREFIX + 16)]
        begin_s = time.perf_counter()
        self._run(engine, prompt)
        return Cost(time.perf_counter() - begin_s, 0.0)

    def _run(self, engine: ReferenceEngine, prompt: list[int]) -> None:
        engine.submit("whole", prompt)
        engine.run()

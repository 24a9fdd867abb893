"""One rank of the reference engine: its memory, its stores, its pipeline.

Between steps `EngineRank.begin_load` begins what a verdict promised; within a step::

    begin_step       loads that this step waits for, saves that it completes
    (layers)         `ucm_core.testing.engine.layers`
    end_step         what failed to load, what was never seen

Pages may be given to another request once `EngineRank.idle` says that no copy needs them any more.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from ucm_core.flow.handles import UnitLoad, UnitSave
from ucm_core.flow.pipeline import LayerPipeline, StepLoad, StepReport, StepSave
from ucm_core.flow.ticket import Ticket
from ucm_core.spec.keys import Keys
from ucm_core.spec.segments import writers
from ucm_core.store.absent import ObjectStore
from ucm_core.testing.engine.layers import LayerLoop, Reads
from ucm_core.testing.engine.memory import PagedMemory
from ucm_core.testing.engine.work import Copy, Step, Tally

__all__ = ["EngineRank"]


class EngineRank:
    """One worker. Its steps come one after the other, from any thread."""

    def __init__(
        self,
        stores: Mapping[str, ObjectStore],
        memories: Mapping[str, PagedMemory],
        pipeline: LayerPipeline,
        *,
        layers: Sequence[int],
        follows: Mapping[int, int],
    ) -> None:
        self.stores = stores
        """The store of each row, for this rank's segment of it."""
        self.memories = memories
        """Its memory, by row; rows without a layer here are left out."""
        self.pipeline = pipeline
        """Moves units beside the layers."""
        self.tally = Tally()
        """What it did so far."""
        self.loop = LayerLoop(_reads(layers, memories, follows), pipeline, tally=self.tally)
        """Computes its layers."""
        self._loads: dict[Hashable, StepLoad] = {}
        self._copies: dict[Hashable, list[UnitLoad | UnitSave]] = {}
        self._saving: list[tuple[str, Keys, Ticket]] = []

    # -- between steps

    def begin_load(self, load: Copy) -> None:
        """Begin to load, and bring the first units before the step comes that needs them."""
        handles = {
            row: self.stores[row].begin_load(
                load.keys[row], memory.blocks(load, row), parents=load.parents[row]
            )
            for row, memory in self.memories.items()
            if len(load.keys.get(row, ()))
        }
        self._loads[load.request] = StepLoad(load.request, handles)
        self._copies.setdefault(load.request, []).extend(handles.values())
        self.pipeline.prefetch(self._loads[load.request])

    def cancel(self, request: Hashable) -> None:
        """The engine wants the pages of ``request`` back; they are free once `idle` says so."""
        self._loads.pop(request, None)
        self.pipeline.cancel(request)

    def idle(self, request: Hashable) -> bool:
        """Whether nothing reads or writes the pages of ``request``."""
        left = [copy for copy in self._copies.pop(request, ()) if not copy.ticket.done]
        if left:
            self._copies[request] = left
        return not left

    def drain(self, timeout_s: float) -> None:
        """Wait until all copies that were begun have ended, each ``timeout_s`` at most."""
        for copies in self._copies.values():
            for copy in copies:
                copy.ticket.wait(timeout_s)

    def stored(self) -> list[tuple[str, Keys]]:
        """What was stored since the last call: (row, keys)."""
        ended = [save for save in self._saving if save[2].done]
        self._saving = [save for save in self._saving if not save[2].done]
        return [(row, keys[ticket.stored]) for row, keys, ticket in ended]

    def spoil(self, pages: Mapping[str, Sequence[int]]) -> None:
        """Fill pages, by group, with garbage."""
        for row, memory in self.memories.items():
            group = memory.row.follows or row
            memory.spoil([page for page in pages.get(group, ()) if page])

    # -- the step

    def run(self, step: Step) -> StepReport:
        """Compute ``step``; what did not come, and what was not seen."""
        loads = [self._loads.pop(request) for request in step.loads]
        self.pipeline.begin_step(loads, [self._begin_save(save) for save in step.saves])
        self.loop.run(step)
        self.tally.steps += 1
        return self.pipeline.end_step()

    # -- private

    def _begin_save(self, save: Copy) -> StepSave:
        """Of ranks that hold equal bytes each saves its share."""
        handles = {}
        for row in save.keys.keys() & self.memories.keys():
            mine = self._share(save, row)
            if len(mine.keys[row]):
                source = self.memories[row].blocks(mine, row)
                handle = self.stores[row].begin_save(mine.keys[row], source, parents=mine.parents[row])
                self._saving.append((row, mine.keys[row], handle.ticket))
                handles[row] = handle
        self._copies.setdefault(save.request, []).extend(handles.values())
        return StepSave(save.request, handles)

    def _share(self, save: Copy, row: str) -> Copy:
        held, keys, parents = self.memories[row].slice, save.keys[row], save.parents[row]
        if held.replicas == 1:
            return save
        mine = writers(keys, held.replicas) == held.replica
        return replace(
            save,
            keys={row: keys[mine]},
            parents={row: None if parents is None else parents[mine]},
            blocks={row: tuple(np.array(save.blocks[row])[mine].tolist())},
        )


def _reads(
    layers: Sequence[int], memories: Mapping[str, PagedMemory], follows: Mapping[int, int]
) -> dict[int, Reads]:
    """Per layer what it reads: its own units, or those of the layer that it follows."""
    sources = {layer: follows.get(layer, layer) for layer in layers}
    return {
        layer: [(source, memory) for memory in memories.values() if source in memory.row.units]
        for layer, source in sources.items()
    }

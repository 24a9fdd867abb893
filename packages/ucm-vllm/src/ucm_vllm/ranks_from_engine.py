"""How vLLM spreads the model over its workers, and what one of them holds and writes.

The scheduler's half plans for all workers alike: the keys of an object are the same on every rank, and so are
vLLM's block tables. Each worker takes out of a plan what is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ucm_core.errors import ConfigError
from ucm_core.spec.segments import Parallelism, Rank, Share, Slice, slices_of, writers
from ucm_core.spec.table import RowKind, SpecTable
from ucm_vllm.metadata import RowTransfer, SavePlan, StepPlan

StageLayers = Callable[[int, int, int], tuple[int, int]]
"""vLLM's ``get_pp_indices``: (layers of the model, stage, stages) -> layers ``[begin, end)`` of the stage."""


@dataclass(frozen=True, slots=True)
class RankView:
    """The canonical table as one half of the connector sees it."""

    share: Share
    """What its cache serves: the segments of this worker's rank, or of all for the scheduler's half."""
    table: SpecTable
    """As a worker holds it: its layers, its heads. The scheduler's half has that of the first worker."""
    slices: Mapping[str, Slice]
    """The worker's part of every row that it holds."""

    @property
    def workers(self) -> int:
        """Workers of the engine."""
        return len(list(self.share.parallel.ranks()))

    @property
    def worker(self) -> int:
        """This worker's number; 0 in the scheduler's half."""
        return list(self.share.parallel.ranks()).index(self.share.rank or Rank())


def rank_view(table: SpecTable, vllm_config: Any, *, stage_layers: StageLayers, is_worker: bool) -> RankView:
    """What this half sees of ``table``; ConfigError, naming the setting, for what is not supported."""
    parallel = parallelism_of(vllm_config, stage_layers=stage_layers)
    rank = _rank_of(vllm_config.parallel_config, parallel) if is_worker else Rank()
    slices = slices_of(table, parallel, rank=rank)
    _require_first_stage(table, slices_of(table, parallel, rank=Rank()))
    held = SpecTable(tuple(one.row for one in slices.values()), table.grain_tokens)
    return RankView(Share(parallel, rank if is_worker else None), held, slices)


def parallelism_of(vllm_config: Any, *, stage_layers: StageLayers) -> Parallelism:
    """How vLLM cuts the model; ConfigError for sizes of which nothing was ever run."""
    parallel = vllm_config.parallel_config
    for setting in (
        "data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size",
    ):  # fmt: skip
        size = getattr(parallel, setting, 1)
        if size > 1:
            raise ConfigError(
                f"{setting} = {size}: ucm-vllm supports 1 for now; set it to 1 or remove the connector"
            )
    stages = parallel.pipeline_parallel_size
    if stages == 1:
        return Parallelism(parallel.tensor_parallel_size)
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    ranges = [stage_layers(layers, stage, stages) for stage in range(stages)]
    return Parallelism(parallel.tensor_parallel_size, tuple(end - begin for begin, end in ranges))


class RankPart:
    """Takes out of a plan what one worker holds and writes."""

    def __init__(self, view: RankView) -> None:
        self._slices = view.slices
        self._alone = view.workers == 1
        self._last: tuple[StepPlan, StepPlan] | None = None

    def of(self, plan: StepPlan) -> StepPlan:
        """``plan`` without rows that this worker has no layer of, and without saves that are another's turn.

        Asked several times in a step; the same plan gives the same part.
        """
        if self._alone:
            return plan
        if self._last is None or self._last[0] is not plan:
            self._last = plan, self._part(plan)
        return self._last[1]

    def _part(self, plan: StepPlan) -> StepPlan:
        loads = tuple(replace(load, rows=self._held(load.rows)) for load in plan.loads)
        saves = tuple(replace(save, rows=self._written(save)) for save in plan.saves)
        return replace(plan, loads=loads, saves=saves)

    def _held(self, rows: tuple[RowTransfer, ...]) -> tuple[RowTransfer, ...]:
        return tuple(transfer for transfer in rows if transfer.row in self._slices)

    def _written(self, save: SavePlan) -> tuple[RowTransfer, ...]:
        """Of equal holders one writes an object; the next of them after every try that failed."""
        own = []
        for transfer in self._held(save.rows):
            piece = self._slices[transfer.row]
            mine = writers(transfer.keys, piece.replicas, failed=save.failed) == piece.replica
            if mine.any():
                own.append(transfer if mine.all() else transfer.only(np.asarray(mine)))
        return tuple(own)


def _rank_of(parallel_config: Any, parallel: Parallelism) -> Rank:
    stage, tensor = divmod(int(parallel_config.rank), parallel.tensor)
    return Rank(tensor, stage % parallel.stages)


def _require_first_stage(table: SpecTable, first: Mapping[str, Slice]) -> None:
    """VLLM's scheduler is told the groups of the first worker only."""
    lacking = [row.name for row in table.rows if row.kind is not RowKind.NONE and row.name not in first]
    if lacking:
        raise ConfigError(
            f"pipeline stage 0 has no layer of the rows {', '.join(lacking)}, so vLLM's scheduler cannot say"
            f" where their blocks are; choose another pipeline_parallel_size or VLLM_PP_LAYER_PARTITION"
        )

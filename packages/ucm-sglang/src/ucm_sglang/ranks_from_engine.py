"""How SGLang cuts the model over its ranks, and which part of it this process has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.spec.rows import RankRule, RowKind
from ucm_core.spec.segments import Parallelism, Rank, Share
from ucm_core.spec.table import SpecTable

__all__ = ["partition_of", "share_of"]


def share_of(config: Any, table: SpecTable, *, partition: Sequence[int] | None = None) -> Share:
    """What this rank serves, by SGLang's ``HiCacheStorageConfig``.

    ``partition``: the layers of each pipeline stage, where there are several. Data-parallel replicas run
    other requests on the same model, so ``dp_rank`` is no part of it (with attention groups of their own,
    ``tp_rank`` counts inside a group). ConfigError for what is not dealt with.
    """
    for name in ("attn_cp_size", "dcp_size"):
        size = getattr(config, name, 1)
        if size != 1:
            raise ConfigError(
                f"SGLang runs with {name} = {size}: caches of context-parallel ranks are not supported,"
                " start it without"
            )
    stages = getattr(config, "pp_size", 1)
    if stages != (1 if partition is None else len(partition)):
        raise ConfigError(f"SGLang has {stages} pipeline stages, the layers are partitioned as {partition}")
    if config.is_mla_model and config.tp_size > 1:
        _check_replicated(table, config.tp_size)
    parallel = Parallelism(tensor=config.tp_size, partition=None if stages == 1 else tuple(partition or ()))
    return Share(parallel, rank=Rank(config.tp_rank, getattr(config, "pp_rank", 0)))


def partition_of(config: Any, table: SpecTable) -> tuple[int, ...] | None:
    """The layers of each pipeline stage, as SGLang deals them out; None where there is one stage."""
    stages = getattr(config, "pp_size", 1)
    if stages == 1:
        return None
    from sglang.srt.distributed.utils import get_pp_indices  # noqa: PLC0415 (the engine)

    layers = 1 + max(unit for row in table.rows for unit in row.units)
    bounds = (get_pp_indices(layers, stage, stages) for stage in range(stages))
    return tuple(end - begin for begin, end in bounds)


def _check_replicated(table: SpecTable, ranks: int) -> None:
    """ConfigError where one rank writes for others that hold other bytes: nothing would ever be found."""
    kinds = (RowKind.CHAIN, RowKind.FOLLOWER)
    cut = [row.name for row in table.rows if row.kind in kinds and row.rank_rule is RankRule.INTERSECTION]
    if cut:
        raise ConfigError(
            f"SGLang lets one of {ranks} tensor ranks write for all of them, but rows {', '.join(cut)}"
            " are cut by heads: run this model with one tensor rank"
        )

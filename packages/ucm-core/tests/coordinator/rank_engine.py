"""An engine of several ranks: a cache for each and one for its scheduler, over one root, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from models import RING_BYTES, identity_of

from ucm_core.cache import Cache
from ucm_core.flow.copy import BufferBlocks
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.segments import Parallelism, Rank, Share, slices_of
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow, SpecTable

GRAIN = 16
BLOCKS = 6
HEADS = (Part("k", (2, 4), "int8"),)
TABLE = SpecTable(
    (
        SpecRow("full", RowKind.CHAIN, GRAIN, (0, 2, 3), HEADS),
        SpecRow(
            "latent", RowKind.CHAIN, GRAIN, (1, 4), (Part("c", (6,), "int8"),), rank_rule=RankRule.ALL_UNION
        ),
        SpecRow("window", RowKind.CHAIN, GRAIN, (1,), HEADS, window=24),
        SpecRow("state", RowKind.SNAPSHOT, GRAIN, (4,), (Part("ssm", (2, 5), "float32"),)),
    ),
    GRAIN,
)
CUT = Parallelism(2, (3, 2))
"""Two stages of two ranks: full is on both stages, window on the first, state on the second."""
RANKS = tuple(CUT.ranks())


class RankEngine:
    """A cache for every rank and one for the scheduler, in one process."""

    def __init__(self, root: Path, table: SpecTable = TABLE, cut: Parallelism = CUT, **more: object) -> None:
        config = CacheConfig(**{"root": root, "ring_bytes": RING_BYTES, "disk_bytes": 1 << 30} | more)
        self.table, self.cut = table, cut
        self.scheduler = self._open(config, None)
        self.ranks = {rank: self._open(config, rank) for rank in cut.ranks()}

    def _open(self, config: CacheConfig, rank: Rank | None) -> Cache:
        return Cache.open(config, self.table, identity=identity_of(self.table), share=Share(self.cut, rank))

    def chain(self, number: int, blocks: int = BLOCKS) -> PrefixChain:
        block_tokens = max(row.block_tokens for row in self.table.rows)
        return self.scheduler.chain([number, *range(blocks * block_tokens)])

    def payload(self, rank: Rank, row: str, blocks: int = BLOCKS) -> npt.NDArray[np.uint8]:
        """Bytes that are a function of segment and row: holders of one segment hold the same."""
        geometry = self.ranks[rank].stores[row].geometry
        segment = slices_of(self.table, self.cut, rank=rank)[row].segment
        seed = [*segment.name.encode(), *row.encode()]
        shape = (blocks, geometry.shards, geometry.shard_bytes)
        return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)

    def save(self, rank: Rank, row: str, chain: PrefixChain, mask: npt.NDArray[np.bool_]) -> bool:
        """Save the blocks of ``mask``; whether all are on the medium."""
        keys = self.scheduler.coordinator.keys(chain, row, begin_block=0, end_block=len(mask))
        bytes_of_all = self.payload(rank, row, len(mask))
        ticket = self.ranks[rank].stores[row].save(keys[mask], BufferBlocks(bytes_of_all[mask]))
        return ticket.wait_durable(60)

    def close(self) -> None:
        for cache in (self.scheduler, *self.ranks.values()):
            cache.close()
            cache.check_integrity()

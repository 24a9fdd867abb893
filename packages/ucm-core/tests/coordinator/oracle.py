"""A brute-force resolver: tries every position token by token and knows nothing of blocks, masks or sums.

It takes rows and presences as data and shares no arithmetic with the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ucm_core.coordinator.presence import Presence
from ucm_core.spec.table import RankRule, RowKind, SpecRow


@dataclass(frozen=True)
class World:
    """What is stored where: per slice of the model one presence map per rank, and what the engine holds."""

    rows: Sequence[SpecRow]
    slices: Sequence[Sequence[Mapping[str, Presence]]]
    local_tokens: int = 0
    lost: frozenset[tuple[str, int]] = frozenset()
    """Blocks (snapshot rows: positions) that failed to load, by the name of their row."""
    _looked_up: dict[tuple[str, int], bool] = field(default_factory=dict)

    def holds_token(self, row: SpecRow, token: int) -> bool:
        place = (row.name, token // row.block_tokens)
        if place not in self._looked_up:
            self._looked_up[place] = self._finds_block(row, place[1])
        return self._looked_up[place]

    def holds_state(self, row: SpecRow, position: int) -> bool:
        if position % row.block_tokens or (row.name, position) in self.lost:
            return False
        return self._held(row, lambda presence: position in presence.positions)

    def serves(self, row: SpecRow, position: int) -> bool:
        if row.kind is RowKind.SNAPSHOT:
            return self.holds_state(row, position)
        source = self._source(row)
        return all(self.holds_token(row, t) for t in range(position) if is_seen(source, t, position))

    def of(self, kinds: set[RowKind]) -> list[SpecRow]:
        return [row for row in self.rows if row.kind in kinds]

    def serve(self, rows: Iterable[SpecRow], position: int) -> bool:
        return all(self.serves(row, position) for row in rows)

    def _finds_block(self, row: SpecRow, block: int) -> bool:
        if (row.name, block) in self.lost:
            return False
        if (block + 1) * row.block_tokens <= self.local_tokens:
            return True
        return self._held(row, lambda presence: _has_block(presence, block))

    def _held(self, row: SpecRow, has: Callable[[Presence], bool]) -> bool:
        """Every slice that has the row needs it from all of its ranks, from any where it is replicated."""
        combine = any if self._source(row).rank_rule is RankRule.ALL_UNION else all
        having = [ranks for ranks in self.slices if any(row.name in rank for rank in ranks)]
        whole = [combine(row.name in rank and has(rank[row.name]) for rank in ranks) for ranks in having]
        return bool(whole) and all(whole)

    def _source(self, row: SpecRow) -> SpecRow:
        return next((other for other in self.rows if other.name == row.follows), row)


def _has_block(presence: Presence, block: int) -> bool:
    return presence.blocks is not None and block < len(presence.blocks) and bool(presence.blocks[block])


def is_seen(row: SpecRow, token: int, position: int) -> bool:
    """Can any token from ``position`` on see ``token``? The one at ``position`` looks back furthest."""
    return row.window is None or token >= position - (row.window - 1) - row.extra


@dataclass(frozen=True)
class Answer:
    """What trying every position found."""

    hit_tokens: int
    resume_tokens: int
    joint: frozenset[int]


def brute_force(
    world: World, *, request_tokens: int, tail_tokens: int, align_tokens: int, followers: bool = False
) -> Answer:
    """Try every position; ``followers`` lets those vote, too, as they do when a load begins."""
    blocks = world.of({RowKind.CHAIN, RowKind.FOLLOWER} if followers else {RowKind.CHAIN})
    states = world.of({RowKind.SNAPSHOT})
    steps = [align_tokens, *(row.block_tokens for row in world.of({RowKind.CHAIN}))]
    tried = [p for p in range(1, request_tokens - tail_tokens + 1) if not any(p % step for step in steps)]
    hits = [p for p in tried if world.serve(blocks, p)]
    joint = [p for p in hits if world.serve(states, p)]
    resume = max(joint, default=0)
    return Answer(max(hits, default=0) if blocks else resume, resume, frozenset(joint))

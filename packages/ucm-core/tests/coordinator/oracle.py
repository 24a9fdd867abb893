"""A brute-force resolver: tries every position token by token and knows nothing of blocks, masks or sums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ucm_core.coordinator.resolve import Presence
from ucm_core.spec.table import RankRule, RowKind, SpecRow


@dataclass(frozen=True)
class World:
    """What is stored where: one presence map per rank, and what the engine holds."""

    rows: Sequence[SpecRow]
    ranks: Sequence[Mapping[str, Presence]]
    local_tokens: int = 0

    def holds_token(self, row: SpecRow, token: int) -> bool:
        block = token // row.block_tokens
        if (block + 1) * row.block_tokens <= self.local_tokens:
            return True
        return self._combine(row, [_has_block(rank.get(row.name), block) for rank in self.ranks])

    def holds_state(self, row: SpecRow, position: int) -> bool:
        held = [row.name in rank and position in rank[row.name].positions for rank in self.ranks]
        return position % row.block_tokens == 0 and self._combine(row, held)

    def serves(self, row: SpecRow, position: int) -> bool:
        if row.kind is RowKind.SNAPSHOT:
            return self.holds_state(row, position)
        seen = (token for token in range(position) if _is_seen(row, token, position))
        return all(self.holds_token(row, token) for token in seen)

    def serve(self, rows: Sequence[SpecRow], position: int) -> bool:
        return all(self.serves(row, position) for row in rows)

    def _combine(self, row: SpecRow, pieces: list[bool]) -> bool:
        decider = next((r for r in self.rows if r.name == row.follows), row)
        return any(pieces) if decider.rank_rule is RankRule.ALL_UNION else all(pieces)


def _has_block(presence: Presence | None, block: int) -> bool:
    blocks = [] if presence is None or presence.blocks is None else presence.blocks.tolist()
    return block < len(blocks) and blocks[block]


def _is_seen(row: SpecRow, token: int, position: int) -> bool:
    """Can any token from ``position`` on see ``token``? The one at ``position`` looks back furthest."""
    return row.window is None or token >= position - (row.window - 1) - row.extra


def brute_force(world: World, *, request_tokens: int, tail_tokens: int, align_tokens: int) -> tuple[int, int]:
    """Return (l, p*)."""
    chains = [row for row in world.rows if row.kind is RowKind.CHAIN]
    states = [row for row in world.rows if row.kind is RowKind.SNAPSHOT]
    steps = [align_tokens, *(row.block_tokens for row in chains)]
    hit = resume = 0
    for position in range(1, request_tokens - tail_tokens + 1):
        if any(position % step for step in steps) or not world.serve(chains, position):
            continue
        hit = position
        resume = position if world.serve(states, position) else resume
    return hit, resume

"""Small spec rows and presences for the coordinator's tests."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from ucm_core.coordinator.presence import Presence
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow, SpecTable

PARTS = (Part("k", (1, 2), "bfloat16"),)


def chain(name: str, block: int, window: int | None = None, **more: Any) -> SpecRow:
    return SpecRow(name, RowKind.CHAIN, block, (0,), PARTS, window, **more)


def snapshot(name: str, grid: int, **more: Any) -> SpecRow:
    return SpecRow(name, RowKind.SNAPSHOT, grid, (0,), PARTS, **more)


def follower(name: str, source: SpecRow) -> SpecRow:
    return SpecRow(name, RowKind.FOLLOWER, source.block_tokens, (0,), PARTS, follows=source.name)


def table(*rows: SpecRow, grain: int | None = None) -> SpecTable:
    """A table whose grain divides every block size."""
    sizes = [row.block_tokens for row in rows if row.kind is not RowKind.NONE]
    return SpecTable(rows, grain or math.gcd(*sizes))


def blocks(*ranges: Iterable[int]) -> Presence:
    """Present blocks as half-open ranges, as in cases.json."""
    spans = [tuple(span) for span in ranges]
    mask = np.zeros(max((end for _, end in spans), default=0), dtype=np.bool_)
    for begin, end in spans:
        mask[begin:end] = True
    return Presence(mask)


def whole(count: int) -> Presence:
    return blocks((0, count))


def states(*positions: int) -> Presence:
    return Presence(positions=frozenset(positions))


def row_of_case(row: dict[str, Any], rows: Iterable[dict[str, Any]] = ()) -> SpecRow:
    """A row as cases.json spells it; `interval` there is the grid, and a follower has its source's blocks."""
    rule = {"rank_rule": RankRule(row.get("rank_rule", "intersection"))}
    if row["kind"] == "snapshot":
        return snapshot(row["name"], row["interval"], **rule)
    if row["kind"] == "follower":
        return follower(row["name"], row_of_case(next(r for r in rows if r["name"] == row["follows"])))
    return chain(row["name"], row["block_size"], row.get("window"), extra=row.get("extra", 0), **rule)


def table_of_case(rows: list[dict[str, Any]]) -> SpecTable:
    return table(*(row_of_case(row, rows) for row in rows))


def presence_of_case(spec: SpecTable, stored: dict[str, Any]) -> dict[str, Presence]:
    snapshots = {row.name for row in spec.snapshot_rows}
    return {name: states(*v) if name in snapshots else blocks(*v) for name, v in stored.items()}

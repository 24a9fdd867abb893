"""The one coverage function: the sweep of C-24 token by token, and what a writer must keep."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from coordinator_strategies import asks, tables
from hypothesis import given, settings
from spec_rows import chain, snapshot, table

from ucm_core.coordinator.resolve import Ask, Presence, alignment, coverage, coverage_bounds, resolve_hit
from ucm_core.spec.table import RowKind, SpecRow, SpecTable


def needed_by_tokens(block: int, lookback: int, boundary: int) -> set[int]:
    return {token // block for token in range(max(0, boundary - lookback), boundary)}


@pytest.mark.parametrize("block", [6, 24, 96])
@pytest.mark.parametrize("window", [5, 33, 200])
@pytest.mark.parametrize("extra", [0, 1, 2])
def test_a_window_touches_exactly_the_blocks_of_its_tokens(block: int, window: int, extra: int) -> None:
    row = chain("w", block, window, extra=extra)
    for boundary in range(1, 3001):
        assert set(coverage(row, boundary)) == needed_by_tokens(block, window - 1 + extra, boundary)


@pytest.mark.parametrize("block", [6, 24, 96])
def test_a_full_row_needs_everything_before_the_boundary(block: int) -> None:
    for boundary in range(3001):
        assert set(coverage(chain("full", block), boundary)) == needed_by_tokens(block, boundary, boundary)


@pytest.mark.parametrize("row", [chain("w", 16, 40), chain("f", 16), snapshot("s", 16), chain("w1", 16, 1)])
def test_nothing_is_needed_at_the_start(row: SpecRow) -> None:
    assert not coverage(row, 0)


def test_a_window_of_the_token_itself_needs_nothing_anywhere() -> None:
    assert not any(coverage(chain("w", 24, 1), boundary) for boundary in range(200))


def test_a_snapshot_needs_its_one_state() -> None:
    row = snapshot("s", 64)
    assert [coverage(row, at) for at in (64, 640)] == [range(1), range(9, 10)]
    assert not coverage(row, 100)


def test_a_row_that_is_not_cached_needs_nothing() -> None:
    assert not coverage(SpecRow("cross", RowKind.NONE, 0, (0,), ()), 4096)


@pytest.mark.parametrize("row", [chain("w", 24, 50), chain("f", 24), snapshot("s", 24)])
def test_many_boundaries_at_once_give_the_same_ranges(row: SpecRow) -> None:
    boundaries = np.arange(0, 500, dtype=np.int64)
    begin, end = coverage_bounds(row, boundaries)
    assert [range(*pair) for pair in zip(begin.tolist(), end.tolist(), strict=True)] == [
        coverage(row, boundary) for boundary in boundaries.tolist()
    ]


@pytest.mark.parametrize("row", [chain("w", 24, 50), chain("f", 24)])
def test_bounds_never_move_backwards(row: SpecRow) -> None:
    begin, end = coverage_bounds(row, np.arange(0, 500, dtype=np.int64))
    assert min(np.diff(begin).min(), np.diff(end).min()) >= 0


@settings(deadline=None, max_examples=150)
@given(spec=tables(), ask=asks())
def test_what_a_writer_keeps_resolves(spec: SpecTable, ask: dict[str, Any]) -> None:
    """C-23: keep just the coverage of the reachable boundary, and the same prompt still resumes there."""
    ask["local_tokens"] = 0
    step = math.lcm(alignment(spec, ask["align_tokens"]), *(row.block_tokens for row in spec.rows))
    boundary = Ask(**ask).limit_tokens(spec) // step * step
    kept = {row.name: keep_only(row, boundary) for row in spec.rows}
    assert resolve_hit(spec, kept, **ask).resume_tokens >= boundary


def keep_only(row: SpecRow, boundary: int) -> Presence:
    mask = np.zeros(200, dtype=np.bool_)
    mask[list(coverage(row, boundary))] = True
    return Presence(mask, frozenset([boundary]))


def test_a_writer_that_keeps_only_the_newest_window_is_wrong() -> None:
    spec = table(chain("full", 128), chain("w", 48, 100), grain=16)
    newest = {"full": Presence(np.ones(11, np.bool_)), "w": Presence(np.arange(31) >= 29)}
    assert resolve_hit(spec, newest, request_tokens=1500).resume_tokens == 0

"""The one coverage function: the sweeps of C-24 and C-25, token by token."""

from __future__ import annotations

import numpy as np
import pytest
from spec_rows import chain, snapshot

from ucm_core.coordinator.coverage import coverage, coverage_bounds
from ucm_core.spec.table import RowKind, SpecRow


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

"""Random tables, presences and questions for the property tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from spec_rows import chain, follower, snapshot, table

from ucm_core.coordinator.presence import Presence
from ucm_core.spec.table import RankRule, RowKind, SpecRow, SpecTable

REQUEST_TOKENS = 96
BLOCKS = [1, 2, 3, 4, 6, 8, 9, 12, 16, 24]
RULES = st.sampled_from(RankRule)


@st.composite
def chain_rows(draw: st.DrawFn, name: str) -> SpecRow:
    window = draw(st.none() | st.integers(1, 40))
    extra = draw(st.integers(0, 5)) if window else 0
    return chain(name, draw(st.sampled_from(BLOCKS)), window, extra=extra, rank_rule=draw(RULES))


@st.composite
def snapshot_rows(draw: st.DrawFn, name: str) -> SpecRow:
    return snapshot(name, draw(st.sampled_from([1, 2, 3, 4, 8, 12])), rank_rule=draw(RULES))


@st.composite
def tables(draw: st.DrawFn) -> SpecTable:
    """One to six rows, at least one of them a chain, some with followers."""
    chains = [draw(chain_rows(f"c{index}")) for index in range(draw(st.integers(1, 3)))]
    states = [draw(snapshot_rows(f"s{index}")) for index in range(draw(st.integers(0, 2)))]
    followers = [follower("f", draw(st.sampled_from(chains)))] if draw(st.booleans()) else []
    return table(*chains, *states, *followers, grain=1)


@st.composite
def presences(draw: st.DrawFn, row: SpecRow) -> Presence:
    """Mostly there, with holes: uniform noise would hardly ever give a deep hit."""
    count = REQUEST_TOKENS // row.block_tokens
    if row.kind is RowKind.SNAPSHOT:
        kept = draw(st.sets(st.integers(1, count))) if count else set()
        astray = draw(st.sets(st.integers(1, REQUEST_TOKENS), max_size=2))
        return Presence(positions=frozenset({index * row.block_tokens for index in kept} | astray))
    mask = np.ones(draw(st.integers(0, count) | st.just(count)), dtype=np.bool_)
    for hole in draw(st.sets(st.integers(0, max(count - 1, 0)), max_size=3)):
        mask[hole : hole + 1] = False
    return Presence(mask)


@st.composite
def worlds(draw: st.DrawFn, ranks: int = 4) -> tuple[SpecTable, list[dict[str, Presence]]]:
    """A table and what each of 1 to ``ranks`` ranks holds."""
    spec = draw(tables())
    count = draw(st.integers(1, ranks))
    return spec, [{row.name: draw(presences(row)) for row in spec.rows} for _ in range(count)]


@st.composite
def asks(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "request_tokens": draw(st.integers(0, REQUEST_TOKENS) | st.just(REQUEST_TOKENS)),
        "tail_tokens": draw(st.integers(0, 9)),
        "align_tokens": draw(st.sampled_from([1, 1, 2, 5, 8])),
        "local_tokens": draw(st.just(0) | st.integers(0, REQUEST_TOKENS + 8)),
    }

"""Random tables, presences and questions from a seed: one seed is one case, the same on every machine.

For the bulk of the checks; Hypothesis, which shrinks, tries fewer with strategies of its own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
from oracle import World
from spec_rows import chain, follower, snapshot, table

from ucm_core.coordinator.presence import Presence
from ucm_core.spec.table import RankRule, RowKind, SpecRow, SpecTable

REQUEST_TOKENS = 120
# Families of sizes that meet within a request; across them a table would hardly ever have a boundary.
SIZES = [
    (1, 2, 3, 4, 6, 12, 24),
    (5, 10, 15, 30),
    (7, 14, 21, 42),
    (9, 18, 27),
    (16, 24, 48),
    (11, 33),
    (8, 40),
]
WINDOWS = [None, None, 1, 2, 3, 5, 8, 13, 24, 25, 40, 97]
DENSITIES = [0.0, 0.01, 0.03, 0.1, 0.3]


@dataclass(frozen=True)
class Case:
    """One case: what is stored, what is asked, what fails and what followers have when the load begins."""

    spec: SpecTable
    slices: list[list[dict[str, Presence]]]
    ask: dict[str, int]
    failed: dict[str, list[int]]
    at_load: dict[str, Presence]

    def world(self, **changes: Any) -> World:
        local = min(self.ask["local_tokens"], self.ask["request_tokens"])
        return World(self.spec.rows, **{"slices": self.slices, "local_tokens": local, **changes})


def case_of(seed: int) -> Case:
    """Return the case of ``seed``."""
    dice = random.Random(seed)
    spec = random_table(dice)
    holes = dice.choice(DENSITIES)
    ranks = dice.choice([1, 1, 2, 3, 4])
    stages = [spec.rows] if len(spec.rows) < 2 or dice.random() < 0.8 else [spec.rows[:-1], spec.rows[1:]]
    slices = [
        [{row.name: presence_of(row, dice, holes) for row in rows} for _ in range(ranks)] for rows in stages
    ]
    return Case(
        spec,
        slices,
        ask_of(dice),
        failed={row.name: failures_of(row, dice) for row in spec.rows if dice.random() < 0.4},
        at_load={
            row.name: presence_of(row, dice, holes) for row in spec.follower_rows if dice.random() < 0.9
        },
    )


def random_table(dice: random.Random) -> SpecTable:
    """One to six rows; one in twenty tables has no chain row."""
    sizes = dice.choice(SIZES)
    chains = 0 if dice.random() < 0.05 else dice.choice([1, 1, 2, 3])
    rows = [chain_row(f"c{index}", sizes, dice) for index in range(chains)]
    rows += [
        snapshot_row(f"s{index}", sizes, dice) for index in range(dice.choice([0, 1, 1, 2]) or not chains)
    ]
    if chains:
        sources = rows[:chains]
        rows += [follower(f"f{index}", dice.choice(sources)) for index in range(dice.choice([0, 0, 1, 1]))]
    dice.shuffle(rows)
    return table(*rows, grain=1)


def chain_row(name: str, sizes: tuple[int, ...], dice: random.Random) -> SpecRow:
    window = dice.choice(WINDOWS)
    extra = dice.choice([0, 0, 1, 2, 7]) if window else 0
    return chain(name, dice.choice(sizes), window, extra=extra, rank_rule=dice.choice(list(RankRule)))


def snapshot_row(name: str, sizes: tuple[int, ...], dice: random.Random) -> SpecRow:
    grid = dice.choice(sizes)
    interval = dice.choice([None, None, grid, 2 * grid, 5 * grid])
    return snapshot(name, grid, interval=interval, rank_rule=dice.choice(list(RankRule)))


def presence_of(row: SpecRow, dice: random.Random, holes: float) -> Presence:
    """Mostly there, with holes and an end; states also where no grid is."""
    if row.kind is RowKind.SNAPSHOT:
        kept = dice.choice([0.2, 0.6, 0.95])
        on_grid = range(row.block_tokens, REQUEST_TOKENS + 1, row.block_tokens)
        astray = dice.sample(range(1, REQUEST_TOKENS), dice.choice([0, 0, 2]))
        return Presence(positions=frozenset([p for p in on_grid if dice.random() < kept] + astray))
    count = REQUEST_TOKENS // row.block_tokens
    end = count if dice.random() < 0.7 else dice.randint(0, count)
    return Presence(np.array([dice.random() >= holes for _ in range(end)], dtype=np.bool_))


def ask_of(dice: random.Random) -> dict[str, int]:
    return {
        "request_tokens": REQUEST_TOKENS if dice.random() < 0.5 else dice.randint(0, REQUEST_TOKENS),
        "tail_tokens": dice.choice([0, 1, 1, 1, 2, 9]),
        "align_tokens": dice.choice([1, 1, 1, 1, 2, 5, 8]),
        "local_tokens": 0 if dice.random() < 0.6 else dice.randint(0, REQUEST_TOKENS + 8),
    }


def failures_of(row: SpecRow, dice: random.Random) -> list[int]:
    """One or two units: positions of a snapshot row, blocks of any other."""
    units = dice.sample(
        range(REQUEST_TOKENS // row.block_tokens), dice.choice([1, 1, 2]) if row.block_tokens < 40 else 1
    )
    return [(unit + 1) * row.block_tokens for unit in units] if row.kind is RowKind.SNAPSHOT else units

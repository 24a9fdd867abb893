"""The order in which ranks read one list (EXAMPLES.md 10)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stores import open_store

from ucm_core.flow.copy import BufferBlocks
from ucm_core.store.geometry import Geometry
from ucm_core.store.rotation import rotated
from ucm_core.testing.block_store import WAIT_S, blank, keys_of, payloads_of

ranks_of = st.integers(1, 9).flatmap(lambda ranks: st.tuples(st.integers(0, ranks - 1), st.just(ranks)))


def test_the_example_of_the_design() -> None:
    assert rotated(8, 1, ranks=4).tolist() == [1, 5, 2, 6, 3, 7, 0, 4]


@given(st.integers(0, 100), ranks_of)
def test_every_number_comes_once(count: int, who: tuple[int, int]) -> None:
    assert sorted(rotated(count, who[0], ranks=who[1])) == list(range(count))


@given(st.integers(0, 100), ranks_of)
def test_the_order_is_the_one_that_the_design_counts_out(count: int, who: tuple[int, int]) -> None:
    rank, ranks = who
    columns = [(rank + step) % ranks for step in range(ranks)]
    counted = [number for column in columns for number in range(column, count, ranks)]
    assert rotated(count, rank, ranks=ranks).tolist() == counted


@given(st.integers(1, 12), st.integers(1, 9))
def test_ranks_in_step_read_everything_once_in_their_first_turns(turns: int, ranks: int) -> None:
    orders = np.array([rotated(turns * ranks, rank, ranks=ranks) for rank in range(ranks)])
    assert sorted(orders[:, :turns].ravel()) == list(range(turns * ranks))
    assert all(np.unique(column).size == ranks for column in orders.T)


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 4), (4, 4), (0, 0)])
def test_a_rank_that_is_none_is_refused_with_both_numbers(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=rf"rank {rank} is not in \[0, {ranks}\)"):
        rotated(8, rank, ranks=ranks)


class NotingBlocks(BufferBlocks):
    """Buffers that note in which order they are filled."""

    def __init__(self, payloads: np.ndarray) -> None:
        super().__init__(payloads)
        self.order: list[int] = []

    def scatter(self, index: np.ndarray, addresses: np.ndarray) -> None:
        self.order += index.tolist()
        super().scatter(index, addresses)


def test_a_store_loads_in_the_order_of_its_rank(tmp_path: Path) -> None:
    geometry = Geometry(3, 8192)
    numbers = range(8)
    store = open_store(tmp_path, geometry, threads=1)
    blocks = BufferBlocks(payloads_of(geometry, *numbers))
    assert store.save(keys_of(*numbers), blocks).wait_durable(WAIT_S)
    store._tiers.ring.drop(keys_of(*numbers))
    store._tiers = replace(store._tiers, rank=1, ranks=4)
    target = NotingBlocks(blank(geometry, len(numbers)))
    assert store.load(keys_of(*numbers), target).wait(WAIT_S)
    assert target.order == [1, 5, 2, 6, 3, 7, 0, 4]
    assert (target.payloads == payloads_of(geometry, *numbers)).all()
    store.close()

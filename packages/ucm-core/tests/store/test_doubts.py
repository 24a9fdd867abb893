"""Doubts: bounded, by name, forgotten when told."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from objects import make_keys

from ucm_core.store.doubts import Doubts


def test_nothing_is_doubted_at_first():
    doubts = Doubts()
    assert not doubts
    assert not doubts.among(make_keys(3)).any()
    doubts.clear(make_keys(3))


def test_a_key_is_doubted_by_its_name_until_it_is_cleared():
    doubts, keys = Doubts(), make_keys(3)
    twin = keys[1:2].copy()
    twin[0, 16:] ^= 1
    doubts.add(keys[1:2])
    assert doubts.among(keys).tolist() == [False, True, False]
    assert doubts.among(twin).tolist() == [True]
    doubts.clear(twin)
    assert not doubts


@given(st.lists(st.integers(0, 9), max_size=30), st.integers(1, 5))
def test_the_oldest_are_forgotten_first(numbers, capacity):
    doubts, keys = Doubts(capacity), make_keys(10)
    model: list[int] = []
    for number in numbers:
        doubts.add(keys[number : number + 1])
        model = [*(each for each in model if each != number), number][-capacity:]
    assert np.flatnonzero(doubts.among(keys)).tolist() == sorted(model)

"""Which pieces of vLLM's pages hold something."""

from __future__ import annotations

import numpy as np

from ucm_core.spec.layout import block_pieces
from ucm_vllm.block_tables import held, of_payloads, state_pieces, whole


def test_held_leaves_null_pages_out() -> None:
    pieces = block_pieces(np.array([0]), 64, page_ids=[0, 9], page_tokens=32)
    assert held(pieces).tolist() == [[0, 32, 9, 0, 32]]


def test_a_block_with_a_null_page_is_not_whole() -> None:
    pieces = block_pieces(np.array([0, 64]), 64, page_ids=[0, 9, 4, 5], page_tokens=32)
    assert whole(pieces, 2).tolist() == [False, True]


def test_chosen_payloads_are_renumbered() -> None:
    pieces = block_pieces(np.array([0, 64, 128]), 64, page_ids=[7, 8, 9], page_tokens=64)
    chosen = of_payloads(pieces, np.array([True, False, True]))
    assert chosen[:, [0, 2]].tolist() == [[0, 7], [1, 9]]


def test_a_state_is_one_page_of_one_token() -> None:
    assert state_pieces([7, 3]).tolist() == [[0, 0, 7, 0, 1], [1, 0, 3, 0, 1]]

"""Where the tokens of UCM's blocks lie in vLLM's pages, against a token-by-token oracle."""

from __future__ import annotations

import numpy as np
import pytest

from ucm_vllm.block_tables import block_pieces, held, of_payloads, state_pieces, whole

FIRST = np.array([0, 64, 192], dtype=np.int64)


def places(pieces: np.ndarray) -> dict[tuple[int, int], tuple[int, int]]:
    """(payload, token in block) -> (page, token in page), one entry per token."""
    found = {}
    for payload, token, page, in_page, count in pieces.tolist():
        for step in range(count):
            assert (payload, token + step) not in found
            found[payload, token + step] = (page, in_page + step)
    return found


def expected(first: np.ndarray, block: int, *, table: list[int], page: int, from_token: int = 0) -> dict:
    oracle = {}
    for payload, begin in enumerate(first.tolist()):
        for token in range(max(begin, from_token), begin + block):
            index = token // page
            oracle[payload, token - begin] = (table[index] if index < len(table) else 0, token % page)
    return oracle


@pytest.mark.parametrize("page_tokens", [16, 32, 48, 64, 100, 128, 384])
@pytest.mark.parametrize("from_token", [0, 64, 80, 300])
def test_every_token_has_its_place(page_tokens: int, from_token: int) -> None:
    table = list(range(1, 3 + 256 // page_tokens))
    pieces = block_pieces(FIRST, 64, table=table, page_tokens=page_tokens, from_token=from_token)
    assert places(pieces) == expected(FIRST, 64, table=table, page=page_tokens, from_token=from_token)


def test_pages_past_the_table_are_null_pages() -> None:
    pieces = block_pieces(np.array([64]), 64, table=[5], page_tokens=64)
    assert pieces.tolist() == [[0, 0, 0, 0, 64]]


def test_an_empty_table_has_only_null_pages() -> None:
    assert block_pieces(np.array([0]), 64, table=[], page_tokens=64)[:, 2].tolist() == [0]


def test_no_blocks_have_no_pieces() -> None:
    assert block_pieces(np.zeros(0, np.int64), 64, table=[1], page_tokens=64).shape == (0, 5)


def test_held_leaves_null_pages_out() -> None:
    pieces = block_pieces(np.array([0]), 64, table=[0, 9], page_tokens=32)
    assert held(pieces).tolist() == [[0, 32, 9, 0, 32]]


def test_a_block_with_a_null_page_is_not_whole() -> None:
    pieces = block_pieces(np.array([0, 64]), 64, table=[0, 9, 4, 5], page_tokens=32)
    assert whole(pieces, 2).tolist() == [False, True]


def test_chosen_payloads_are_renumbered() -> None:
    pieces = block_pieces(np.array([0, 64, 128]), 64, table=[7, 8, 9], page_tokens=64)
    chosen = of_payloads(pieces, np.array([True, False, True]))
    assert chosen[:, [0, 2]].tolist() == [[0, 7], [1, 9]]


def test_a_state_is_one_page_of_one_token() -> None:
    assert state_pieces([7, 3]).tolist() == [[0, 0, 7, 0, 1], [1, 0, 3, 0, 1]]

"""Legal lengths against brute force: every length is tried, page by page and token by token."""

import numpy as np
import pytest
from backend_world import FULL, GRAIN, HYBRID, KEYS, STATE, WINDOW
from hypothesis import given
from hypothesis import strategies as st

from ucm_core import boundaries
from ucm_core.coordinator.presence import Presence
from ucm_sglang.restorable import NOTHING, Demand, needed_pages, restorable

KV = Demand("kv", ("full",))
MASK = st.lists(st.booleans(), max_size=12)


def masks(*rows):
    return st.fixed_dictionaries(dict.fromkeys(rows, MASK))


def there(found, row, page):
    return page < len(found[row]) and found[row][page]


def sees_whole_window(found, length):
    """Every token that attention past the boundary still sees lies in a page that is there."""
    end = length * GRAIN
    return all(there(found, "window-40", token // GRAIN) for token in range(max(0, end - 39), end))


def last_pages(found, row, length, count):
    return all(there(found, row, page) for page in range(max(0, length - count), length))


def serves(found, length, trailing):
    """The oracle, in SGLang's words and in tokens; nothing of the product."""
    return (
        all(there(found, row, page) for row in ("full", "keys") for page in range(length))
        and last_pages(found, "state", length, 1)
        and last_pages(found, "window-40", length, trailing)
        and sees_whole_window(found, length)
    )


@given(masks("full", "keys", "state", "window-40"), st.integers(1, 5), st.integers(0, 14))
def test_every_length_is_judged_as_by_hand(found, trailing, pages):
    demands = (
        KV,
        Demand("indexer", ("keys",)),
        Demand("swa", ("window-40",), trailing),
        Demand("mamba", ("state",), 1),
    )
    answer = restorable(
        HYBRID, demands, found={row: np.array(each, np.bool_) for row, each in found.items()}, pages=pages
    )
    assert answer.lengths == tuple(n for n in range(1, pages + 1) if serves(found, n, trailing))
    assert answer.pages == max(answer.lengths, default=0)


@given(masks("full", "state", "window-40"))
def test_what_sglang_can_restore_ucm_calls_a_boundary(found):
    """From the beginning of a prefix on the two agree, where SGLang reads just what the row needs."""
    demands = (KV, Demand("swa", ("window-40",), 3), Demand("mamba", ("state",), 1))
    given_masks = {row: np.array(each, np.bool_) for row, each in found.items()}
    answer = restorable(HYBRID, demands, found=given_masks, pages=12)
    states = frozenset(GRAIN * (page + 1) for page, held in enumerate(found["state"]) if held)
    presence = {row: Presence(given_masks[row]) for row in ("full", "window-40")} | {
        "state": Presence(positions=states)
    }
    assert {length * GRAIN for length in answer.lengths} == boundaries(
        HYBRID, presence, limit_tokens=12 * GRAIN
    )


@pytest.mark.parametrize(
    ("row", "trailing", "pages"),
    [
        (FULL, None, None),
        (FULL, 3, None),  # a row without a window is needed whole, whatever SGLang reads
        (KEYS, 3, None),
        (WINDOW, None, None),  # a window in the full pool: SGLang may cut a node anywhere
        (WINDOW, 1, 3),  # 39 tokens
        (WINDOW, 5, 5),
        (STATE, 1, 1),
        (STATE, 0, 1),
        (STATE, None, None),
    ],
)
def test_the_pages_that_a_length_needs(row, trailing, pages):
    assert needed_pages(HYBRID, row, demand=Demand("pool", (row.name,), trailing)) == pages


def test_each_pool_has_its_own_deepest_length():
    found = {"full": np.ones(6, np.bool_), "state": np.array([0, 1, 0, 0, 0, 0], np.bool_)}
    answer = restorable(HYBRID, (KV, Demand("mamba", ("state",), 1)), found=found, pages=6)
    assert answer.deepest == {"kv": 6, "mamba": 2}
    assert answer.lengths == (2,)


def test_a_row_that_nothing_is_known_of_serves_no_length():
    assert restorable(HYBRID, (KV,), found={}, pages=3).lengths == ()


def test_nothing_has_no_pages():
    assert NOTHING.pages == 0

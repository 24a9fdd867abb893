"""Single moves of the index of nodes: where things belong, what is refused, what is left behind."""

import gc
import weakref

import numpy as np
import pytest
from worlds import as_keys, formula, index_of, key_of, pools_of

from ucm_core.errors import SpecError
from ucm_position_key import KeyView, NodeIndex, NodeIndexStatistics, NodeSpan, Span

TOKENS = list(range(1000, 1044))
DIGESTS = formula(TOKENS, 4)  # 11 pages


def eleven_pages(**sizes):
    index = index_of(4, **sizes)
    index.insert("a", DIGESTS, end=44, held={"kv": Span(0, 44), "swa": Span(32, 44), "mamba": Span(0, 44)})
    return index


def positions_of(index, row, node):
    return [spans[0].begin for spans in index.locate(row, as_keys(index.objects(node, row)))]


def test_a_node_gives_its_blocks_its_window_and_its_state():
    index = eleven_pages()
    expected = {
        "full": DIGESTS,
        "keys": DIGESTS,
        "window": DIGESTS[8:],
        "state": DIGESTS[10:],
        "cross": DIGESTS[:0],
    }
    for row, digests in expected.items():
        found = [item.key for item in index.objects("a", row)]
        assert found == [key_of(index.pools, row, digest) for digest in digests], row


def test_a_split_gives_windows_by_position_and_the_state_to_the_lower_half():
    index = eleven_pages()
    index.split("a", 36, upper="b")
    assert index.path("a") == (NodeSpan("b", 0, 36), NodeSpan("a", 36, 44))
    assert positions_of(index, "full", "b") == list(range(0, 36, 4))
    assert positions_of(index, "window", "b") == [32]
    assert positions_of(index, "window", "a") == [36, 40]
    assert index.objects("b", "state") == ()
    assert [item.key for item in index.objects("a", "state")] == [key_of(index.pools, "state", DIGESTS[10])]


def test_a_coarse_block_is_named_by_its_last_grain_and_spans_nodes():
    index = eleven_pages(blocks=3)
    index.split("a", 16, upper="b")
    (first,) = index.objects("b", "full")
    second, third = index.objects("a", "full")
    assert [item.key for item in (first, second, third)] == [
        key_of(index.pools, "full", DIGESTS[n]) for n in (2, 5, 8)
    ]
    assert index.locate("full", as_keys([second])) == ((NodeSpan("b", 12, 16), NodeSpan("a", 16, 24)),)


def test_a_block_of_which_a_node_above_lost_its_part_cannot_be_saved():
    index = eleven_pages(blocks=3)
    index.split("a", 16, upper="b")
    index.hold("b", "kv", span=Span(0, 0))
    assert index.objects("b", "full") == index.objects("b", "keys") == ()
    assert [item.key for item in index.objects("a", "full")] == [key_of(index.pools, "full", DIGESTS[8])]


def test_a_state_off_the_grid_has_no_key():
    index = eleven_pages(grid=2)
    assert index.objects("a", "state") == ()
    index.split("a", 40, upper="b")
    index.hold("b", "mamba", span=Span(0, 40))
    assert [item.key for item in index.objects("b", "state")] == [key_of(index.pools, "state", DIGESTS[9])]


def test_a_state_is_found_with_the_positions_before_it():
    index = eleven_pages()
    index.split("a", 36, upper="b")
    keys = index.pools.keys("state", DIGESTS[[8, 10]])
    assert index.locate("state", keys) == ((NodeSpan("b", 0, 36),), (NodeSpan("a", 36, 44),))


def test_short_names_find_the_same_nodes():
    index = eleven_pages()
    keys = index.pools.keys("full", DIGESTS)
    assert index.locate("full", keys[:, :16]) == index.locate("full", keys)
    assert index.locate("full", keys)[3] == (NodeSpan("a", 12, 16),)


def test_a_key_with_the_same_name_and_another_rest_is_a_miss():
    index = eleven_pages()
    keys = index.pools.keys("full", DIGESTS)
    keys[3, 31] ^= 1
    assert [len(spans) for spans in index.locate("full", keys)] == [1, 1, 1, 0, *[1] * 7]


@pytest.mark.parametrize(("row", "asked"), [("full", "window"), ("state", "full"), ("window", "keys")])
def test_a_key_of_another_row_is_a_miss(row, asked):
    index = eleven_pages()
    assert set(index.locate(asked, index.pools.keys(row, DIGESTS))) == {()}


def test_what_no_block_ends_at_is_a_miss():
    index = eleven_pages(blocks=3)
    found = index.locate("full", index.pools.keys("full", DIGESTS))
    assert [bool(spans) for spans in found] == [grain % 3 == 2 for grain in range(11)]


def test_a_child_goes_on_where_its_parent_ends_inside_a_grain():
    index = index_of(4)
    index.insert("a", DIGESTS[:1], end=6)
    index.insert("b", DIGESTS[1:3], end=13, parent="a")
    (second, third) = index.objects("b", "full")
    assert index.locate("full", as_keys([second])) == ((NodeSpan("a", 4, 6), NodeSpan("b", 6, 8)),)
    assert index.locate("full", as_keys([third])) == ((NodeSpan("b", 8, 12),),)


def test_an_empty_span_is_a_tombstone_wherever_it_is_said():
    index = index_of(4)
    index.insert("a", DIGESTS, end=44, held={"kv": Span(0, 44), "mamba": Span(0, 0)})
    assert index.objects("a", "state") == ()
    index.split("a", 16, upper="b")
    index.hold("a", "kv", span=Span(0, 0))
    assert index.objects("a", "full") == ()
    assert len(index.objects("b", "full")) == 4


def refused(index, call, message):
    before = index.statistics(), index.path("a")
    with pytest.raises(SpecError, match=message):
        call()
    index.check_integrity()
    assert (index.statistics(), index.path("a")) == before


OTHER = formula(range(8), 4)


def like(digests):
    """Others, with the same names."""
    return digests ^ np.arange(32).astype(np.uint8) // 16


REFUSED = {
    "node 'a' of 44 positions is none, empty or there already": lambda i: i.insert("a", DIGESTS, end=44),
    "node None of 8 positions is none": lambda i: i.insert(None, OTHER, end=8),
    "node 'b' of 0 positions is none, empty": lambda i: i.insert("b", DIGESTS[:0], end=44, parent="a"),
    r"got \[44, 40\)": lambda i: i.insert("b", DIGESTS[:0], end=40, parent="a"),
    "no node 'z' among 1": lambda i: i.insert("b", OTHER, end=8, parent="z"),
    r"ends 2 grains of 4, got digests uint8 \(1, 32\)": lambda i: i.insert("b", OTHER[:1], end=8),
    "got digests int64": lambda i: i.insert("b", OTHER.astype(np.int64), end=8),
    "as node 'a' names another, its grain 1": lambda i: i.insert("b", DIGESTS[1:3], end=8),
    "as node 'a' names another, its grain 0": lambda i: i.insert("b", like(DIGESTS[:2]), end=8),
    "has two grains of one digest": lambda i: i.insert("b", OTHER[[0, 0]], end=8),
    "no pool 'kw'": lambda i: i.insert("b", OTHER, end=8, held={"kw": Span(0, 8)}),
    r"cannot hold \[0, 12\) of a node": lambda i: i.insert("b", OTHER, end=8, held={"kv": Span(0, 12)}),
    r"pool 'mamba' \(mamba\) cannot hold \[4, 44\)": lambda i: i.hold("a", "mamba", span=Span(4, 44)),
    "pool 'indexer' uses the indices of 'kv'": lambda i: i.hold("a", "indexer", span=Span(0, 44)),
    r"cannot split node 'a' of positions \[0, 44\) at 0": lambda i: i.split("a", 0, upper="b"),
    "at 44 into 'b'": lambda i: i.split("a", 44, upper="b"),
    "at 4 into 'a'": lambda i: i.split("a", 4, upper="a"),
    "at 4 into None": lambda i: i.split("a", 4, upper=None),
    "no node 'b' among 1": lambda i: i.split("b", 4, upper="c"),
    "no row 'fool'": lambda i: i.objects("a", "fool"),
    "no node 'b' among 1: never inserted": lambda i: i.span("b"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_call_changes_nothing(message):
    index = eleven_pages()
    refused(index, lambda: REFUSED[message](index), message)


def test_a_node_with_children_stays():
    index = eleven_pages()
    index.split("a", 4, upper="b")
    refused(index, lambda: index.remove("b"), "node 'b' has 1 children")
    index.insert("c", formula([*TOKENS, 7, 7, 7, 7], 4)[11:], end=48, parent="a")
    refused(index, lambda: index.remove("a"), "node 'a' has 1 children")


def test_a_second_removal_is_detected():
    index = eleven_pages()
    index.remove("a")
    assert index.statistics() == NodeIndexStatistics(0, 0)
    with pytest.raises(SpecError, match="no node 'a' among 0: never inserted, or removed before"):
        index.remove("a")


def test_a_node_keeps_no_large_array_alive():
    index = index_of(4)
    large = np.concatenate([DIGESTS] * 1000)
    gone = weakref.ref(large)
    index.insert("a", large[:11], end=44)
    large = None
    gc.collect()
    assert gone() is None
    assert len(index.objects("a", "full")) == 11


def siblings():
    """Pages of 16 with grains of 4: the first pages differ in their last 8 tokens only."""
    index = index_of(4)
    for name, last in (("a", 5), ("b", 6)):
        index.insert(name, formula([1] * 8 + [last] * 8, 4), end=16)
    return index


def test_siblings_share_the_grains_before_the_page_differs():
    index = siblings()
    assert index.statistics() == NodeIndexStatistics(2, 6)
    assert index.objects("a", "full")[:2] == index.objects("b", "full")[:2]
    assert not {*index.objects("a", "full")[2:]} & {*index.objects("b", "full")[2:]}
    index.check_integrity()


@pytest.mark.parametrize(("gone", "left"), ["ab", "ba"])
def test_a_shared_grain_stays_while_one_sibling_does(gone, left):
    index = siblings()
    keys = as_keys(index.objects(left, "full"))
    index.remove(gone)
    assert [spans[0].node for spans in index.locate("full", keys)] == [left] * 4
    index.remove(left)
    assert index.statistics() == NodeIndexStatistics(0, 0)


@pytest.mark.parametrize(("lost", "held"), ["ab", "ba"])
def test_a_shared_grain_is_found_where_it_is_held(lost, held):
    index = siblings()
    index.hold(lost, "kv", span=Span(0, 0))
    found = index.locate("full", as_keys(index.objects(held, "full")))
    assert [spans[0].node for spans in found] == [held] * 4


def test_what_was_lost_meanwhile_still_ends_in_its_node():
    index = eleven_pages()
    before = index.objects("a", "window")
    index.hold("a", "swa", span=Span(0, 0))
    assert index.objects("a", "window") == ()
    assert index.endings("a", "window")[8:] == before
    assert len(index.endings("a", "window")) == 11
    assert index.endings("a", "cross") == ()


def test_nodes_of_pairs_give_the_keys_of_pairs():
    pools = pools_of(4, view=KeyView.BIGRAM)
    path, index = pools.path(), NodeIndex(pools)
    path.extend(range(100, 109))
    index.insert("a", path.digests, end=path.positions)
    pairs = [token for first in range(100, 108) for token in (first, first + 1)]
    expected = [key_of(pools, "full", digest) for digest in formula(pairs, 8)]
    assert [item.key for item in index.objects("a", "full")] == expected


def test_a_state_is_found_in_the_node_that_ends_at_it():
    index = index_of(4)
    for name, tokens in (("long", [1] * 16), ("short", [1] * 8)):
        index.insert(name, formula(tokens, 4), end=len(tokens), held={"mamba": Span(0, len(tokens))})
    (key,) = as_keys(index.objects("short", "state"))
    assert index.locate("state", key[None]) == ((NodeSpan("short", 0, 8),),)

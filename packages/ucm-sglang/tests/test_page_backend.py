"""Pages there and back through a real store, with doubles of host pools: every byte is compared."""

import pytest
from backend_world import HYBRID, INDEXER, KV, MAMBA, MIXED, SWA, World, hashes_of, indices_of

from ucm_core import LayoutError, SpecError
from ucm_position_key import Component, KeyView, Pool
from ucm_sglang.page_cache import Pages

P4 = hashes_of(4)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def world(root):
    made = World(root)
    yield made
    made.backend.close()


def test_pages_come_back_to_other_places(world):
    assert world.save(KV, P4, [3, 1, 0, 7]) == [True] * 4
    assert world.load(KV, P4, [10, 20, 30, 40]) == [True] * 4
    assert all(world.memory.holds(KV, P4, [10, 20, 30, 40]))


def test_a_new_backend_finds_them_on_the_files(root):
    first = World(root)
    assert all(first.save(KV, P4, range(4)))
    first.backend.close()
    second = World(root)
    assert second.leading(P4) == 4
    assert all(second.load(KV, P4, range(20, 24)))
    assert all(second.memory.holds(KV, P4, range(20, 24)))
    second.backend.close()


def test_the_leading_run_ends_at_the_first_hole(world):
    hashes = hashes_of(6)
    world.save(KV, [hashes[i] for i in (0, 1, 3, 4)], range(4))
    assert world.leading(hashes) == 2
    assert world.leading(hashes[3:]) == 2
    assert world.leading(hashes[2:]) == 0


def test_a_long_run_is_asked_in_steps_and_found_whole(root):
    world = World(root, ring_bytes=32 << 20)
    hashes = hashes_of(300)
    for begin in range(0, 300, 50):
        world.save(KV, hashes[begin : begin + 50], range(50))
    assert world.leading(hashes) == 300
    assert world.leading([*hashes[:200], *hashes_of(100, seed=9)]) == 200
    world.backend.close()


def test_a_load_is_true_up_to_the_first_page_that_did_not_come(world):
    world.save(KV, [P4[0], P4[2], P4[3]], range(3))
    assert world.load(KV, P4, range(10, 14)) == [True, False, False, False]


def test_of_a_pool_with_two_rows_both_must_be_there(root):
    mixed = Pool("kv", Component.FULL, ("full", "window-40"))
    world = World(root, MIXED, pools=(mixed,))
    world.save(mixed, P4, range(4), durably=True)
    view = world.backend._open()
    view.space.stores["window-40"].drop(view.keys("window-40", [P4[1]]))
    assert world.leading(P4) == 1
    world.backend.close()


def test_nothing_is_found_of_an_empty_list(world):
    assert world.leading([]) == 0
    assert world.load(KV, [], []) == []


def test_before_the_pools_are_registered_everything_is_a_miss(world):
    world.backend._memory = None
    assert world.leading(P4) == 0
    assert world.save(KV, P4, range(4)) == [False] * 4


def test_fewer_indices_than_pages_are_refused(world):
    world.save(KV, P4, range(4))
    with pytest.raises(LayoutError, match="4 pages need 64 indices, SGLang gave 48"):
        world.backend.load(Pages("kv", P4, indices_of(KV, range(3))))


def test_an_unknown_pool_is_refused(world):
    with pytest.raises(SpecError, match="no pool 'nonsense'"):
        world.backend.restorable(P4, {"nonsense": None})


def test_a_pool_that_does_not_fit_the_table_is_refused_when_it_is_registered(world):
    world.memory.pools = (Pool("kv", Component.SWA, ("full",)),)
    with pytest.raises(SpecError, match="has no window"):
        world.backend.register(world.memory)


def test_placeholders_are_no_hashes(world):
    with pytest.raises(ValueError, match="placeholder"):
        world.leading(["__placeholder__"])


def test_views_do_not_share_pages(root):
    plain, pairs = World(root), World(root, view=KeyView.BIGRAM)
    assert all(plain.save(KV, P4, range(4)))
    assert (plain.leading(P4), pairs.leading(P4)) == (4, 0)
    plain.backend.close()
    pairs.backend.close()


# -- side pools


@pytest.fixture
def hybrid(root):
    made = World(root, HYBRID)
    yield made
    made.backend.close()


SIDES = {"swa": 3, "mamba": 1, "indexer": None}


def save_node(world, hashes):
    """As SGLang backs a node up: what is besides KV first, a state only of the last page."""
    count = len(hashes)
    assert all(world.save(SWA, hashes[-3:], range(min(3, count)), durably=True))
    assert all(world.save(MAMBA, hashes[-1:], [5], durably=True))
    assert all(world.save(INDEXER, hashes, range(count), durably=True))
    assert all(world.save(KV, hashes, range(count)))


def test_lengths_end_where_windows_and_states_are(hybrid):
    hashes = hashes_of(9)
    save_node(hybrid, hashes[:4])
    save_node(hybrid, hashes[4:])
    answer = hybrid.backend.restorable(hashes, SIDES)
    assert answer.lengths == (4, 9)
    assert answer.deepest == {"kv": 9, "swa": 9, "mamba": 9, "indexer": 9}


def test_without_the_state_a_length_is_none(hybrid):
    hashes = hashes_of(4)
    hybrid.save(KV, hashes, range(4))
    hybrid.save(SWA, hashes[-3:], range(3))
    hybrid.save(INDEXER, hashes, range(4))
    assert hybrid.backend.restorable(hashes, SIDES).lengths == ()
    assert hybrid.backend.restorable(hashes, {"swa": 3, "indexer": None}).lengths == (4,)


def test_a_window_asks_for_what_its_row_needs_although_sglang_reads_less(hybrid):
    hashes = hashes_of(5)
    hybrid.save(KV, hashes, range(5))
    hybrid.save(SWA, hashes[3:], range(2))
    assert hybrid.backend.restorable(hashes, {"swa": 1}).lengths == ()  # 39 tokens back are three pages
    hybrid.save(SWA, hashes[2:3], range(1))
    assert hybrid.backend.restorable(hashes, {"swa": 1}).lengths == (5,)


def test_states_come_back_to_other_slots(hybrid):
    assert hybrid.save(MAMBA, P4[3:], [9], durably=True) == [True]
    assert hybrid.load(MAMBA, P4[3:], [30]) == [True]
    assert hybrid.memory.holds(MAMBA, P4[3:], [30]) == [True]


def test_one_hash_names_a_page_of_each_pool(hybrid):
    for pool in (KV, SWA, MAMBA, INDEXER):
        assert hybrid.load(pool, P4[:1], [2]) == [False]
        assert hybrid.save(pool, P4[:1], [1]) == [True]
    for pool in (KV, SWA, MAMBA, INDEXER):
        assert hybrid.load(pool, P4[:1], [3]) == [True]
        assert hybrid.memory.holds(pool, P4[:1], [3]) == [True]


def test_what_is_saved_durably_is_on_files_when_the_call_returns(hybrid):
    assert hybrid.save(MAMBA, P4[:1], [0], durably=True) == [True]
    assert len(hybrid.files("state")) == 1


def test_without_files_what_is_in_the_ring_is_kept(root):
    world = World(root, HYBRID, disk_bytes=0)
    assert world.save(MAMBA, P4[:1], [0], durably=True) == [True]
    assert world.load(MAMBA, P4[:1], [1]) == [True]
    world.backend.close()

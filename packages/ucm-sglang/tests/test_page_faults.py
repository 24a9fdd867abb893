"""What goes wrong with pages: damaged, vanished and failing media, new weights in the midst of a call."""

import os

import numpy as np
import pytest
from backend_world import HYBRID, KV, MAMBA, MIXED, SWA, StoreDouble, World, hashes_of, indices_of

from ucm_core.spec.keys import NAME_BYTES
from ucm_position_key import Component, Pool
from ucm_sglang.page_cache import Pages

P4 = hashes_of(4)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def world(root):
    """Four pages on files, none of them in a ring."""
    made = World(root, ring_bytes=0)
    assert all(made.save(KV, P4, range(4), durably=True))
    yield made
    made.backend.close()


def file_of(world, row, text):
    """The file of an object, by its name."""
    key = world.backend._open().keys(row, [text])
    name = bytes(key[0, :NAME_BYTES]).hex()
    return next(path for path in world.files(row) if path.name.startswith(name))


def flip(path):
    with path.open("r+b") as file:
        file.seek(-10, os.SEEK_END)
        file.write(b"damaged!")


def truncate(path):
    os.truncate(path, 100)


def swap(path):
    """Another object's file under this name."""
    other = next(each for each in path.parent.parent.rglob("*") if each.is_file() and each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip, truncate, swap, os.unlink])
def test_a_damaged_page_is_a_miss_now_and_at_the_next_lookup(world, damage):
    assert world.leading(P4) == 4
    damage(file_of(world, "full", P4[2]))
    assert world.load(KV, P4, range(10, 14)) == [True, True, False, False]
    assert world.memory.holds(KV, P4[:2], [10, 11]) == [True, True]
    assert world.leading(P4) == 2


@pytest.mark.parametrize("damage", [flip, os.unlink])
def test_saved_again_it_is_there_again(world, damage):
    damage(file_of(world, "full", P4[2]))
    assert world.load(KV, P4, range(10, 14)) == [True, True, False, False]
    assert world.save(KV, P4[2:3], [2]) == [True]
    assert world.leading(P4) == 4
    assert world.load(KV, P4, range(20, 24)) == [True] * 4


class TargetDouble:
    """Memory to which nothing can be copied."""

    def scatter(self, index, address, *, span=None):
        raise OSError("no such memory")


def test_what_did_not_load_is_there_and_promised_no_more(world):
    """The files are whole and stay: only that the load failed says so."""
    store = StoreDouble.before(world, "full")
    load = store._store.load
    store.load = lambda keys, target, **more: load(keys, TargetDouble(), **more)
    assert world.load(KV, P4, range(10, 14)) == [False] * 4
    assert len(world.files("full")) == 4
    assert world.leading(P4) == 0


def test_a_state_that_is_lost_takes_its_length_with_it(root):
    world = World(root, HYBRID, ring_bytes=0)
    for pool, hashes in ((SWA, P4), (MAMBA, [P4[1], P4[3]]), (KV, P4)):
        assert all(world.save(pool, hashes, range(len(hashes)), durably=True))
    asked = {"swa": 3, "mamba": 1}
    assert world.backend.restorable(P4, asked).lengths == (2, 4)
    file_of(world, "state", P4[3]).unlink()
    assert world.backend.restorable(P4, asked).lengths == (2,)
    world.save(MAMBA, [P4[3]], [3], durably=True)
    flip(file_of(world, "state", P4[3]))
    assert world.backend.restorable(P4, asked).lengths == (2, 4)
    assert world.load(MAMBA, [P4[3]], [9]) == [False]
    assert world.backend.restorable(P4, asked).lengths == (2,)
    world.backend.close()


def test_what_is_damaged_is_never_copied(world):
    world.memory.bytes["full"][10:14] = 7
    flip(file_of(world, "full", P4[0]))
    world.load(KV, P4[:1], [10])
    assert (world.memory.bytes["full"][10] == 7).all()


def test_after_a_store_that_raises_nothing_is_copied_any_more(root):
    """The first row's load has begun when the second's raises: it is over before the error leaves."""
    world = World(root, MIXED, pools=(Pool("kv", Component.FULL, ("full", "window-40")),))
    begun = []

    def refuse():
        raise OSError("no such store")

    first = StoreDouble.before(world, "full")
    load = first._store.load
    first.load = lambda *args, **more: begun.append(load(*args, **more)) or begun[-1]
    StoreDouble.before(world, "window-40", refuse)
    with pytest.raises(OSError, match="no such store"):
        world.backend.load(Pages("kv", P4, indices_of(KV, range(4))))
    assert begun[0].done
    world.backend.close()


# -- new weights


def test_weights_that_change_after_the_lookup_leave_nothing_to_load(world):
    assert world.leading(P4) == 4
    world.backend.weights_changed(flushed=True)
    assert world.load(KV, P4, range(10, 14)) == [False] * 4
    assert world.memory.holds(KV, P4, range(10, 14)) == [False] * 4
    assert world.save(KV, P4, range(4)) == [True] * 4
    assert world.leading(P4) == 4


@pytest.mark.parametrize("flushed", [True, False])
def test_weights_that_change_within_a_load_make_it_fail(world, flushed):
    StoreDouble.before(world, "full", lambda: world.backend.weights_changed(flushed=flushed))
    assert world.load(KV, P4, range(10, 14)) == [False] * 4


def test_weights_that_change_after_the_copy_make_the_load_fail(world):
    """The bytes came, all of them; they are of weights that are gone."""
    store = StoreDouble.before(world, "full")
    load = store._store.load

    def change_after(*args, **more):
        ticket = load(*args, **more)
        assert ticket.wait(60)
        assert ticket.ok
        world.backend.weights_changed(flushed=True)
        return ticket

    store.load = change_after
    assert world.load(KV, P4, range(10, 14)) == [False] * 4


def test_weights_that_change_within_a_lookup_make_it_a_miss(world):
    coordinator = world.coordinator
    held = coordinator.held

    def answer_late(row, keys):
        answer = held(row, keys)
        world.backend.weights_changed(flushed=True)
        return answer

    coordinator.held = answer_late
    assert world.leading(P4) == 0


def test_what_is_saved_while_weights_change_is_found_by_nobody(root):
    world = World(root)
    StoreDouble.before(world, "full", lambda: world.backend.weights_changed(flushed=True))
    world.save(KV, P4, range(4))
    assert world.leading(P4) == 0
    world.backend.close()
    again = World(root)
    assert again.leading(P4) == 0
    again.backend.close()


def test_nothing_of_an_unflushed_engine_is_saved_under_new_weights(root):
    world = World(root)
    world.backend.weights_changed(flushed=False)
    assert world.save(KV, P4, range(4)) == [False] * 4
    world.backend.weights_changed(flushed=True)
    assert world.leading(P4) == 0
    assert world.save(KV, P4, range(4)) == [True] * 4
    assert world.leading(P4) == 4
    world.backend.close()


def test_weights_that_are_not_known_are_a_miss(root):
    world = World(root, weights=None)
    assert world.leading(P4) == 0
    assert world.save(KV, P4, range(4)) == [False] * 4
    assert world.load(KV, P4, range(4)) == [False] * 4
    world.backend.close()


@pytest.mark.parametrize("weights", ["5b" * 32])
def test_other_weights_find_nothing(world, root, weights):
    other = World(root, weights=weights, ring_bytes=0)
    assert other.leading(P4) == 0
    other.backend.close()


# -- promises


def leases(world):
    return world.cache.current.statistics().leases


def test_what_a_lookup_promises_stays_in_the_ring_until_it_is_loaded(root):
    world = World(root, HYBRID)
    for pool in (SWA, MAMBA, KV):
        world.save(pool, P4, range(4))
    assert world.backend.restorable(P4, {"swa": 2, "mamba": 1}).pages == 4
    assert (leases(world).held, leases(world).objects) == (3, 4 + 3 + 1)
    world.load(KV, P4, range(10, 14))
    assert (leases(world).held, leases(world).objects) == (2, 3 + 1)
    world.load(SWA, P4[1:], range(10, 13))
    world.load(MAMBA, P4[3:], [10])
    assert leases(world).held == 0
    world.cache.current.check_integrity()
    world.backend.close()


def test_a_lookup_that_is_repeated_holds_one_promise(root):
    world = World(root)
    world.save(KV, P4, range(4))
    for _ in range(3):
        world.leading(P4)
    assert (leases(world).held, leases(world).replaced) == (1, 2)
    world.backend.close()


# -- parents


def parents_of(world, hashes, before):
    store = StoreDouble.before(world, "full")
    world.memory.fill(KV, hashes, range(len(hashes)))
    world.backend.save(Pages("kv", hashes, indices_of(KV, range(len(hashes))), before))
    return store.parents[0]


def test_the_first_page_follows_the_last_of_what_is_before_it(root):
    world = World(root)
    keys = world.backend._open().keys("full", P4)
    assert np.array_equal(parents_of(world, P4[2:], P4[1]), keys[1:3])
    world.backend.close()


def test_where_nothing_is_known_before_it_the_first_page_follows_none(root):
    world = World(root)
    keys = world.backend._open().keys("full", P4)
    found = parents_of(world, P4, None)
    assert not found[0].any()
    assert np.array_equal(found[1:], keys[:3])
    world.backend.close()

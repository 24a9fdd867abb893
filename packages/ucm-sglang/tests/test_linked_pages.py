"""Pages of device pools there and back through a real store: what is promised is leased, and comes whole."""

import threading
import time

import pytest
from backend_world import FULL, HYBRID, INDEXER, KV, MAMBA, SWA, StoreDouble, hashes_of
from linked_world import SIDES, WAIT_S, LinkedWorld, medium, pages_of  # noqa: F401 (a fixture)
from test_page_faults import TargetDouble, flip

from ucm_core.store.files import FileTier
from ucm_sglang import linked_pages
from ucm_sglang.asker import Asker

P4, P9 = hashes_of(4), hashes_of(9)
WINDOWED = {"swa": 3, "mamba": 1, "indexer": None}


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


@pytest.fixture
def world(root):
    made = LinkedWorld(root)
    assert made.save((KV, P4, range(4)))
    yield made
    made.close()


@pytest.fixture
def hybrid(root):
    """A prompt of nine pages, inserted as two nodes."""
    made = LinkedWorld(root, HYBRID, ring_bytes=16 << 20)
    for hashes in (P9[:4], P9[4:]):
        count = len(hashes)
        node = (KV, hashes, range(count)), (INDEXER, hashes, range(count))
        assert made.save(*node, (SWA, hashes[-3:], range(3)), (MAMBA, hashes[-1:], [5]))
    yield made
    made.close()


def until(ask, wanted):
    """Ask again until the answer is this: what goes on in the background wakes nobody here."""
    deadline_s, pause = time.monotonic() + WAIT_S, threading.Event()
    while (found := ask()) != wanted:
        assert time.monotonic() < deadline_s, found
        pause.wait(0.01)


# -- lookups


def test_pages_come_back_to_other_places(world):
    assert world.lookup(P4) == (1, 2, 3, 4)
    assert world.load((KV, P4, [10, 30, 20, 40]))
    assert world.holds(KV, P4, [10, 30, 20, 40])


def test_lengths_end_at_the_first_hole(world):
    assert world.lookup([*P4[:2], *hashes_of(2, seed=9), *P4[2:]]) == (1, 2)
    assert world.lookup(hashes_of(4, seed=9)) == ()
    assert world.lookup([]) == ()


def test_lengths_are_where_all_pools_have_what_is_read(hybrid):
    assert hybrid.lookup(P9, WINDOWED) == (4, 9)
    assert hybrid.lookup(P9[:8], WINDOWED) == (4,)
    assert hybrid.lookup(P9[:3], WINDOWED) == ()


def test_what_every_length_needs_is_leased_not_only_the_deepest(hybrid):
    """Ranks may agree on the shorter one: windows and states of both, by their definition."""
    hybrid.lookup(P9, WINDOWED)
    windows = set(range(1, 4)) | set(range(6, 9))  # 39 tokens back are three pages
    assert hybrid.leases.objects == 9 + 9 + len(windows) + 2
    assert hybrid.leases.held == 1


@pytest.mark.parametrize("pages", [4, 9])
def test_every_pool_comes_back_at_each_length(hybrid, pages):
    hybrid.lookup(P9, WINDOWED)
    hashes, there = P9[:pages], range(20, 20 + pages)
    parts = (KV, hashes, there), (INDEXER, hashes, there), (SWA, hashes[-3:], range(50, 53))
    assert hybrid.load(*parts, (MAMBA, hashes[-1:], [60]))
    assert all(hybrid.holds(*part) for part in (*parts, (MAMBA, hashes[-1:], [60])))
    assert hybrid.leases.held == 0


@pytest.mark.parametrize("row", ["full", "window-40", "state", "keys"])
def test_a_page_that_is_damaged_on_its_file_is_not_promised(root, hybrid, row):
    hybrid.close()
    for path in (path for path in root.rglob("*") if path.is_file() and path.parts[-3] == row):
        flip(path)
    again = LinkedWorld(root, HYBRID, ring_bytes=16 << 20)
    assert again.lookup(P9, WINDOWED) == ()
    assert again.leases.held == 0
    again.close()


def test_what_only_files_hold_is_read_while_a_lookup_waits(root, world):
    world.close()
    again = LinkedWorld(root)
    assert again.lookup(P4) == (1, 2, 3, 4)
    assert again.leases.objects == 4
    again.close()


def test_a_lookup_that_may_not_wait_promises_nothing_and_finds_it_later(root, world):
    world.close()
    again = LinkedWorld(root, lookup_budget_s=0.0)
    until(lambda: again.lookup(P4), (1, 2, 3, 4))
    assert again.load((KV, P4, range(10, 14)))
    again.close()


def test_while_a_medium_hangs_only_the_ring_is_promised(root, world, medium):  # noqa: F811
    world.close()
    again = LinkedWorld(root, lookup_budget_s=0.0)
    medium.hangs = True
    assert again.save((KV, hashes_of(2, seed=5), range(2)))
    assert again.lookup(hashes_of(2, seed=5)) == (1, 2)
    assert again.lookup(P4) == ()
    medium.go.set()
    again.close()


def test_a_medium_that_does_not_say_what_it_has_hangs_no_lookup(root, world, monkeypatch):
    """SGLang's scheduler asks: it is answered, and asks again what is known, although nobody answers it."""
    world.close()
    again, go = LinkedWorld(root), threading.Event()
    exist = FileTier.exist
    monkeypatch.setattr(FileTier, "exist", lambda *asked: go.wait(WAIT_S) and exist(*asked))
    again.pages._asker = Asker(wait_s=0.0)
    assert [again.lookup(P4) for _ in range(3)] == [(), (), ()]
    assert again.leases.held == 0
    again.pages._asker._wait_s = WAIT_S
    go.set()
    until(lambda: again.lookup(P4), (1, 2, 3, 4))
    again.close()


def test_what_was_promised_comes_while_a_medium_keeps_every_thread(root, world, medium):  # noqa: F811
    """Each lookup reads one page that only a file has: as many as there are threads, and more, hang there."""
    world.close()
    again = LinkedWorld(root, lookup_budget_s=0.0)
    mine = hashes_of(2, seed=5)
    assert again.save((KV, mine, range(2)))
    medium.hangs = True
    for number, page in enumerate(P4):
        assert again.lookup([page], name=f"cold{number}") == ()
    until(lambda: len(medium.waiting), min(4, again.cache.config.thread_count()))
    assert again.lookup(mine) == (1, 2)
    assert again.load((KV, mine, range(10, 12)))
    assert again.holds(KV, mine, range(10, 12))
    medium.go.set()
    again.close()


def test_a_lookup_that_is_repeated_has_one_lease_and_release_ends_it(world):
    for _ in range(3):
        world.lookup(P4)
    assert (world.leases.held, world.leases.replaced) == (1, 2)
    world.pages.release("r")
    world.pages.release("r")
    assert world.leases.held == 0
    world.cache.current.check_integrity()


def test_no_more_is_promised_than_leases_may_keep(root):
    """Slots of 8 KiB, of which leases keep three quarters: the head of the prompt, not all of it.

    The ring holds the prompt: it has more room than saves must leave for loads.
    """
    small = LinkedWorld(root, ring_bytes=1 << 20)
    slots = small.cache.current.stores["full"].slots
    hashes = hashes_of(7 * slots // 8)
    for begin in range(0, len(hashes), 32):
        part = hashes[begin : begin + 32]
        small.save((KV, part, range(len(part))))
    assert small.lookup(hashes, name="a") == tuple(range(1, 3 * slots // 4 + 1))
    assert small.lookup(hashes, name="b") == ()
    small.pages.release("a")
    assert len(small.lookup(hashes, name="b")) == 3 * slots // 4
    small.close()


# -- loads


def test_what_is_leased_comes_although_the_ring_is_written_over(root):
    """The files are away and the ring has seen four times its size since: only the lease kept the pages."""
    small = LinkedWorld(root, ring_bytes=1 << 20)
    assert small.save((KV, P4, range(4)))
    assert small.lookup(P4) == (1, 2, 3, 4)
    store = small.cache.current.stores["full"]
    for seed in range(1, 5 * store.slots // 32):
        small.save((KV, hashes_of(32, seed=seed), range(20, 52)))
    until(lambda: (store.statistics().working, store.statistics().pending_writes), (0, 0))
    for path in [path for path in root.rglob("*") if path.is_file() and path.parts[-3] == "full"]:
        path.unlink()
    assert small.load((KV, P4, range(10, 14)))
    assert small.holds(KV, P4, range(10, 14))
    small.close()


@pytest.mark.parametrize("shard", range(len(FULL.units)))
def test_a_layer_that_cannot_be_written_fails_the_batch_and_is_not_promised_again(world, shard):
    """The target refuses one layer; SGLang's memory holds what came before, and the requests are aborted."""
    store = StoreDouble.before(world, "full")
    begin = store._store.begin_load
    store.begin_load = lambda keys, target, **more: begin(keys, LayerDouble(target, shard), **more)
    assert world.lookup(P4) == (1, 2, 3, 4)
    index = world.start((KV, P4, range(10, 14)))
    for layer in range(4):
        world.counter.wait_until(layer)
    assert world.counter.finish(index) is False
    assert world.lookup(P4) == ()
    assert world.save((KV, P4, range(4)))


class LayerDouble(TargetDouble):
    """Memory one of whose layers cannot be written."""

    def __init__(self, target, shard):
        self._target, self._begin = target, shard * 4096

    def scatter(self, index, address, *, span=None):
        if span is None or span[0] <= self._begin < span[1]:
            super().scatter(index, address, span=span)
        self._target.scatter(index, address, span=span)


def test_a_row_that_cannot_begin_fails_and_nothing_of_the_others_goes_on(hybrid):
    def refuse():
        raise OSError("no such store")

    store = StoreDouble.before(hybrid, "state", refuse)
    store.begin_load = lambda *_, **__: refuse()
    parts = (KV, P9, range(20, 29)), (MAMBA, P9[-1:], [60])
    assert hybrid.load(*parts) is False


def test_a_load_that_hangs_in_a_read_fails_and_writes_nothing_later(root, world, medium, monkeypatch):  # noqa: F811
    """Nothing was promised, and files hang: the batch ends when its time is over, and its memory is free."""
    world.close()
    again = LinkedWorld(root)
    monkeypatch.setattr(linked_pages, "LOADS_WAIT_S", 0.05)
    medium.hangs = True
    index = again.start((KV, P4, range(10, 14)))
    again.counter.wait_until(0)
    assert again.counter.finish(index) is False
    assert medium.reached.is_set()
    medium.go.set()
    again.close()
    assert not again.memory.bytes["full"][10:14].any()


def test_a_load_of_two_requests_brings_both(world):
    other = hashes_of(3, seed=4)
    assert world.save((KV, other, range(3)))
    world.lookup(P4, name="a")
    world.lookup(other, name="b")
    loads = {"a": [pages_of(KV, P4, range(10, 14))], "b": [pages_of(KV, other, range(20, 23))]}
    assert world.counter.finish(world.counter.begin(world.pages.begin_loads(loads)))
    assert world.holds(KV, P4, range(10, 14))
    assert world.holds(KV, other, range(20, 23))
    assert world.leases.held == 0


# -- new weights


def test_weights_that_change_after_the_lookup_leave_nothing_to_load(world):
    world.lookup(P4)
    world.pages.weights_changed(flushed=True)
    assert world.load((KV, P4, range(10, 14))) is False
    assert world.lookup(P4) == ()


def test_weights_that_change_after_everything_came_fail_the_batch(world):
    world.lookup(P4)
    index = world.start((KV, P4, range(10, 14)))
    for layer in range(4):
        world.counter.wait_until(layer)
    world.pages.weights_changed(flushed=True)
    assert world.counter.finish(index) is False


def test_weights_that_change_within_a_lookup_make_it_a_miss(world):
    coordinator = world.cache.current.coordinator
    held = coordinator.held

    def answer_late(row, keys):
        answer = held(row, keys)
        world.pages.weights_changed(flushed=True)
        return answer

    coordinator.held = answer_late
    assert world.lookup(P4) == ()


def test_weights_that_change_once_all_is_leased_make_the_lookup_a_miss(world):
    leased = world.pages._leased

    def lease_early(*arguments, **more):
        answer = leased(*arguments, **more)
        world.pages.weights_changed(flushed=True)
        return answer

    world.pages._leased = lease_early
    assert world.lookup(P4) == ()


def test_an_offload_that_ended_under_weights_that_are_gone_is_not_kept(world):
    offload = world.pages.offload([pages_of(KV, hashes_of(2, seed=5), range(2))])
    offload.wait(time.monotonic() + WAIT_S)
    world.pages.weights_changed(flushed=True)
    assert world.pages.is_kept(offload) is False


@pytest.mark.parametrize("flushed", [True, False])
def test_an_offload_of_weights_that_are_gone_is_not_kept(root, flushed):
    world = LinkedWorld(root)
    StoreDouble.before(world, "full", lambda: world.pages.weights_changed(flushed=flushed))
    assert world.save((KV, P4, range(4))) is False
    assert world.lookup(P4) == ()
    world.close()


def test_nothing_of_an_unflushed_engine_is_kept_or_found(world):
    world.pages.weights_changed(flushed=False)
    assert world.save((KV, P4, range(4))) is False
    assert world.lookup(P4) == ()
    world.pages.weights_changed(flushed=True)
    assert world.save((KV, P4, range(4)))
    assert world.lookup(P4) == (1, 2, 3, 4)


# -- offloads


def test_one_pool_that_cannot_begin_makes_the_whole_offload_fail(hybrid):
    other = hashes_of(4, seed=3)
    store = StoreDouble.before(hybrid, "state")
    store.save = None
    assert hybrid.save((KV, other, range(4)), (MAMBA, other[-1:], [7])) is False


def test_after_it_was_closed_nothing_is_found_or_kept(world):
    world.close()
    assert world.lookup(P4) == ()
    assert world.save((KV, P4, range(4))) is False
    assert world.load((KV, P4, range(10, 14))) is False
    world.close()

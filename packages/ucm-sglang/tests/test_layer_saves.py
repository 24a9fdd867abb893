"""A step that saves layer by layer: over a real cache, with doubles of pools, batches and forwards."""

from types import SimpleNamespace

import pytest
from backend_world import (
    DENSE,
    FULL,
    GRAIN,
    KV,
    MIXED,
    SWA,
    MemoryDouble,
    Pages,
    content,
    hashes_of,
    indices_of,
)
from linked_world import LinkedWorld
from prometheus_client import REGISTRY
from step_doubles import DECODE, EAGLE, batch_of, forward_of, prompt, request
from step_doubles import MIXED as MIXED_MODE

from ucm_position_key import Component, Pool
from ucm_sglang.layer_saves import REST_S, LayerSaves, LinkedSave, Outcome
from ucm_sglang.prefills import prefills_of, whole_pages

WAIT_S = 120
LAYERS = FULL.units


def counted(outcome):
    """Requests with this outcome so far."""
    return REGISTRY.get_sample_value("ucm_layer_saves_total", {"result": outcome.value}) or 0.0


def written():
    """Objects of the full row that reached files so far."""
    return REGISTRY.get_sample_value("ucm_objects_saved_total", {"row": "full", "tier": "file"}) or 0.0


class Stepping(LinkedWorld):
    """One linker's pages, and its saves layer by layer."""

    def __init__(self, root, table=DENSE, *, wait_s=WAIT_S, **settings):
        super().__init__(root, table, **settings)
        self.now_s = 1000.0
        self.saves = LayerSaves(self.pages, GRAIN, wait_s=wait_s, clock=lambda: self.now_s)

    def step(self, *requests, layers=LAYERS, between=lambda: None, **batch):
        """A whole step; each layer writes what the pages' hashes say, as it is computed."""
        batch = batch_of(*requests, **batch)
        forward = forward_of(batch)
        self.saves.begin(batch)
        for layer in layers:
            self.compute(batch, layer)
            self.saves.layer_is_over(layer, forward)
        between()
        self.saves.end()

    def compute(self, batch, layer):
        for pages in whole_pages(prefills_of(batch), GRAIN):
            memory = self.memory.bytes["full"]
            for text, slot in zip(pages.hashes, pages.indices[::GRAIN] // GRAIN, strict=True):
                unit = LAYERS.index(layer)
                memory[slot, unit] = content("full", text, memory[slot].shape)[unit]

    def forget(self):
        """As SGLang does between steps."""
        for memory in self.memory.bytes.values():
            memory[:] = 0

    def found(self, asked, to=range(40, 44)):
        """Whether the request's pages are found, and bring what its layers computed."""
        hashes = hashes_of_request(asked)
        lengths = self.lookup(hashes)
        if not lengths:
            return False
        assert lengths[-1] == len(hashes)
        assert self.load((KV, hashes, list(to)[: len(hashes)]))
        return self.holds(KV, hashes, list(to)[: len(hashes)])


def hashes_of_request(asked):
    (pages,) = whole_pages(prefills_of(batch_of(asked)), GRAIN)
    return pages.hashes


def asked(pages=(3, 9, 4), *, seed=0, **more):
    """A request whose prompt fills these pages, and begins another."""
    return request(prompt(GRAIN * len(pages) + 5, seed), (*pages, 60), **more)


@pytest.fixture
def world(tmp_path):
    world = Stepping(tmp_path / "root")
    yield world
    world.close()


@pytest.fixture
def grew():
    """By how much an outcome's count has grown since the test began."""
    before = {outcome: counted(outcome) for outcome in Outcome}
    return lambda outcome: counted(outcome) - before[outcome]


def refused(world, grew, outcome, *, requests=1):
    """Whether nothing was kept, for this reason only."""
    counts = {each: grew(each) for each in Outcome if grew(each)}
    world.forget()
    return not world.found(asked()) and counts == {outcome: requests}


def test_pages_are_kept_layer_by_layer_and_not_read_behind_the_step(world, grew):
    world.step(asked())
    world.forget()
    assert world.found(asked())
    assert (grew(Outcome.SAVED), sum(map(grew, Outcome))) == (1, 1)


def test_another_process_resumes_from_what_layers_left(world, tmp_path):
    world.step(asked())
    world.close()
    other = Stepping(tmp_path / "root")
    assert other.found(asked())
    other.close()


def test_chunks_make_one_prefix(world, grew):
    whole = asked()
    world.step(asked(end=GRAIN))
    world.step(asked(begin=GRAIN))
    world.forget()
    assert world.found(whole)
    assert grew(Outcome.SAVED) == 2


def test_requests_of_one_step_are_kept_together(world, grew):
    other = asked((11, 12), seed=7, name="s")
    world.step(asked(), other)
    world.forget()
    assert (world.found(asked()), world.found(other), grew(Outcome.SAVED)) == (True, True, 2)


def test_what_an_offload_brings_later_is_not_written_again(world):
    hashes, before = hashes_of_request(asked()), written()
    world.step(asked())
    assert world.save((KV, hashes, (3, 9, 4)))  # returns when files are down
    assert written() - before == 3
    assert world.save((KV, hashes_of(1), (20,)))
    assert written() - before == 4


def test_a_layer_that_comes_twice_is_kept_as_it_was_last(world):
    batch = batch_of(asked())
    forward = forward_of(batch)
    world.saves.begin(batch)
    world.saves.layer_is_over(LAYERS[0], forward)  # of zeros
    for layer in LAYERS:
        world.compute(batch, layer)
        world.saves.layer_is_over(layer, forward)
    world.saves.end()
    world.forget()
    assert world.found(asked())


def test_layers_that_are_no_row_s_say_nothing(world, grew):
    world.step(asked(), layers=LAYERS)
    batch = batch_of(asked(seed=1))
    world.saves.begin(batch)
    world.saves.layer_is_over(99, forward_of(batch))
    world.saves.end()
    assert (grew(Outcome.SAVED), grew(Outcome.LAYERS)) == (1, 1)


@pytest.mark.parametrize("layers", [(), LAYERS[:1], LAYERS[1:]])
def test_a_layer_whose_hook_does_not_come_keeps_nothing(world, grew, layers):
    world.step(asked(), layers=layers)
    assert refused(world, grew, Outcome.LAYERS)


def test_a_load_that_failed_keeps_nothing(world, grew):
    world.step(asked(), between=world.saves.load_failed)
    assert refused(world, grew, Outcome.LOAD)


def test_weights_that_change_in_between_keep_nothing(world, grew):
    world.step(asked(), between=lambda: world.pages.weights_changed(flushed=True))
    assert refused(world, grew, Outcome.WEIGHTS)


def test_stale_weights_keep_nothing(world, grew):
    world.pages.weights_changed(flushed=False)
    world.step(asked())
    world.pages.weights_changed(flushed=True)
    assert refused(world, grew, Outcome.WEIGHTS)


def test_the_step_after_a_change_is_kept(world, grew):
    world.pages.weights_changed(flushed=True)
    world.step(asked())
    world.forget()
    assert (world.found(asked()), grew(Outcome.SAVED)) == (True, 1)


def test_a_forward_of_other_tokens_keeps_nothing(world, grew):
    batch, forward = batch_of(asked()), forward_of(batch_of(asked(seed=1)))
    world.saves.begin(batch)
    for layer in LAYERS:
        world.saves.layer_is_over(layer, forward)
    world.saves.end()
    assert refused(world, grew, Outcome.TOKENS)


def test_a_second_forward_in_one_step_keeps_nothing(world, grew):
    batch = batch_of(asked())
    world.saves.begin(batch)
    for layer in LAYERS:
        world.compute(batch, layer)
        world.saves.layer_is_over(layer, forward_of(batch))
    world.saves.end()
    assert refused(world, grew, Outcome.TOKENS)


@pytest.mark.parametrize("mode", [{"mode": MIXED_MODE}, {"drafts": EAGLE}])
def test_another_kind_of_step_keeps_nothing(world, grew, mode):
    world.step(asked(), **mode)
    assert refused(world, grew, Outcome.MODE)


def test_a_decode_is_not_counted(world, grew):
    world.step(asked(), mode=DECODE)
    assert not any(map(grew, Outcome))


def test_a_request_that_depends_on_more_is_left_out_and_the_others_are_kept(world, grew):
    other = asked((11, 12), seed=7, name="s")
    world.step(asked(lora_id="a"), other)
    world.forget()
    assert (world.found(asked()), world.found(other)) == (False, True)
    assert (grew(Outcome.REQUEST), grew(Outcome.SAVED)) == (1, 1)


def test_salts_are_apart(world):
    world.step(asked(salt="tenant-a"))
    world.forget()
    assert (world.found(asked()), world.found(asked(salt="tenant-a"))) == (False, True)


def test_what_raises_in_a_step_keeps_nothing(world, grew):
    world.step(asked(), between=world.saves.failed)
    assert refused(world, grew, Outcome.FAILED)


def test_a_row_with_a_window_is_left_to_the_offload(tmp_path):
    world = Stepping(tmp_path / "root", MIXED)
    world.step(asked())
    hashes = hashes_of_request(asked())
    assert world.lookup(hashes, {"swa": 3}) == ()
    assert world.save((KV, hashes, (3, 9, 4)), (SWA, hashes, (1, 2, 3)))
    assert world.lookup(hashes, {"swa": 3})[-1] == 3
    world.close()


def test_a_window_in_the_pool_of_keys_and_values_is_none_of_its_layers(tmp_path):
    world = LinkedWorld(tmp_path / "root", MIXED)
    world.pages.register(MemoryDouble(MIXED, (Pool("kv", Component.FULL, ("full", "window-40")),)))
    assert tuple(world.pages.layers) == FULL.units
    world.close()


class TicketDouble:
    """Stands for a ticket that is never done: how long it was waited for, and whether that ended in time."""

    def __init__(self):
        self.waits = []

    def wait(self, timeout_s):
        self.waits.append(timeout_s)
        return timeout_s is None


def test_what_is_given_up_is_waited_for_until_nothing_reads_any_more():
    ticket, deeds = TicketDouble(), []
    handle = SimpleNamespace(ticket=ticket, seal=lambda: deeds.append("seal"))
    handle.abandon = lambda: deeds.append("abandon")
    save = LinkedSave(handles={"full": handle})
    assert not save.seal(0.0)
    save.give_up()
    assert (deeds, ticket.waits) == (["seal", "abandon"], [0.0, None])


def test_pages_that_somebody_else_fills_hold_no_step_up_and_then_none_is_begun(tmp_path, grew):
    world = Stepping(tmp_path / "root", wait_s=0.01)
    view = world.pages._open()
    pages = Pages("kv", hashes_of_request(asked()), indices_of(KV, (3, 9, 4)))
    other = view.space.stores["full"].begin_save(view.keys("full", pages.hashes), view.blocks("full", pages))
    world.step(asked())
    other.abandon()
    assert grew(Outcome.LATE) == 1
    world.step(asked())
    assert grew(Outcome.RESTING) == 1
    world.now_s += REST_S
    world.step(asked())
    world.forget()
    assert (grew(Outcome.SAVED), world.found(asked())) == (1, True)
    world.close()


def test_a_store_that_raises_keeps_nothing_and_the_step_goes_on(world, grew, monkeypatch):
    store = world.cache.current.space.stores["full"]
    monkeypatch.setattr(type(store), "begin_save", lambda *_args, **_more: 1 / 0)
    world.step(asked())
    monkeypatch.undo()
    assert refused(world, grew, Outcome.FAILED)


def test_pages_of_nobody_else_are_touched(world):
    other = hashes_of(2, seed=9)
    assert world.save((KV, other, (20, 21)))
    world.step(asked())
    assert world.load((KV, other, (30, 31)))
    assert world.holds(KV, other, (30, 31))

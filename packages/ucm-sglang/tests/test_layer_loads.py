"""Batches of loads, and the counter that SGLang's pools wait by; tickets are settled by the tests."""

import threading
from dataclasses import replace

import pytest
from backend_world import FULL, STATE, WINDOW
from counted import errors
from handle_doubles import HandleDouble, R, ViewDouble

from ucm_core.flow.ticket import ResultCode
from ucm_sglang.layer_loads import LayerCounter, LoadBatch, failed_batch, plan_of

OK, MISS = ResultCode.OK, ResultCode.MISS
PLAN = plan_of([FULL, WINDOW, STATE])  # layers 0 and 2, 1 and 3, 4
LAYERS = [("full", 0), ("window", 0), ("full", 1), ("window", 1), ("state", 0)]


class Loads:
    """One request's load of all three rows."""

    def __init__(self, *, wait_s=60.0, current=lambda _: True):
        self.view = ViewDouble()
        self.rows = {"full": HandleDouble(2), "window": HandleDouble(2), "state": HandleDouble(1)}
        named = {"full": self.rows["full"], "window-40": self.rows["window"], "state": self.rows["state"]}
        self.batch = LoadBatch([self.view.load(**named)], PLAN, is_current=current, wait_s=wait_s)

    def bring(self, *layers, code=OK):
        for layer in layers:
            row, shard = LAYERS[layer]
            self.rows[row].settle(code, shard)


def test_every_layer_is_asked_for_at_once_the_first_most_urgently():
    loads = Loads()
    assert loads.rows["full"].submitted == [(0, 0), (1, 1)]
    assert loads.rows["window"].submitted == [(0, 1)]  # and the other of its layers, by the same call
    assert loads.rows["state"].submitted == [(0, 1)]
    loads.batch.give_up()


@pytest.mark.parametrize("layers", [1, 4, 5, 33])
def test_every_unit_is_asked_for_once_and_not_after_its_layer(layers):
    plan = plan_of([replace(FULL, units=tuple(range(layers)))])
    asked = [shard for layer in plan for run in layer.brings for shard in run]
    assert asked == [shard for layer in plan for shard in layer.needs]
    for end in range(layers):
        seen = {shard for layer in plan[: end + 1] for run in layer.brings for shard in run}
        assert seen.issuperset(plan[end].needs)


def test_a_layer_does_not_wait_for_those_behind_it():
    loads = Loads()
    loads.bring(0, 1)
    loads.batch.wait_until(1)  # would wait for a minute if it waited for any other
    assert not loads.rows["full"].ticket.done
    loads.batch.give_up()


@pytest.mark.parametrize("layer", range(4))
def test_the_last_layer_waits_for_those_before_it(layer):
    """SGLang waits for it alone before it replays a whole forward, or copies the states of all layers."""
    loads, seen = Loads(), []
    loads.bring(*(other for other in range(5) if other != layer))
    waiter = threading.Thread(target=lambda: (loads.batch.wait_until(4), seen.append("read")))
    waiter.start()
    seen.append("brought")
    loads.bring(layer)
    waiter.join(60)
    assert seen == ["brought", "read"]
    loads.batch.give_up()


@pytest.mark.parametrize("layer", range(4))
def test_what_never_comes_has_failed_when_the_last_layer_was_waited_for(layer):
    loads = Loads(wait_s=0.0)
    loads.bring(*(other for other in range(5) if other != layer))
    loads.batch.wait_until(4)
    assert all(handle.ticket.done for handle in loads.rows.values())
    assert loads.batch.finish() is False


def test_a_layer_waits_until_its_bytes_are_there():
    loads, seen = Loads(), []
    waiter = threading.Thread(target=lambda: (loads.batch.wait_until(0), seen.append("read")))
    waiter.start()
    seen.append("brought")
    loads.bring(0)
    waiter.join(60)
    assert seen == ["brought", "read"]
    loads.batch.give_up()


@pytest.mark.parametrize("layer", [-1, 0])
def test_a_layer_with_nothing_to_load_up_to_it_waits_for_nothing(layer):
    view = ViewDouble()
    batch = LoadBatch(
        [view.load(state=HandleDouble(1))], plan_of([STATE]), is_current=lambda _: True, wait_s=60.0
    )
    batch.wait_until(layer)
    batch.give_up()


def test_all_that_came_is_finished_whether_or_not_a_layer_waited():
    loads = Loads()
    loads.bring(*range(5))
    loads.batch.wait_until(3)
    assert loads.batch.finish() is True
    assert (loads.view.failed, loads.view.released) == ([], [R])


@pytest.mark.parametrize("layer", range(5))
def test_a_layer_that_fails_fails_the_batch_and_is_distrusted(layer):
    loads = Loads()
    loads.bring(*(other for other in range(5) if other != layer))
    loads.bring(layer, code=MISS)
    for each in range(5):
        loads.batch.wait_until(each)  # the forward runs on, whatever lies there
    assert loads.batch.finish() is False
    row = {"window": "window-40"}.get(LAYERS[layer][0], LAYERS[layer][0])
    assert loads.view.failed == [(row, 2, 7)]
    assert loads.view.released == [R]


@pytest.mark.parametrize("layer", range(5))
def test_a_medium_that_hangs_fails_the_batch_and_comes_no_more(layer):
    loads, before = Loads(wait_s=0.0), errors("load")
    loads.bring(*range(layer))
    for each in range(5):
        loads.batch.wait_until(each)
    assert loads.batch.finish() is False
    assert errors("load") == before + 1
    row = loads.rows[LAYERS[layer][0]]
    assert row.cancelled
    assert all(handle.ticket.done for handle in loads.rows.values())


def test_it_is_not_finished_while_anything_is_copied():
    """One copy has begun when the batch is given up: SGLang may not have its memory back before it ends."""
    loads, copying, seen = Loads(wait_s=0.0), threading.Event(), []
    handle = loads.rows["full"]
    given_up = threading.Event()
    abandon = handle.cancel
    handle.cancel = lambda: (abandon(), given_up.set())

    def copy():
        with handle.ticket.copying():
            copying.set()
            assert given_up.wait(60)
            seen.append("copied")

    copier = threading.Thread(target=copy)
    copier.start()
    assert copying.wait(60)
    assert loads.batch.finish() is False
    seen.append("finished")
    copier.join(60)
    assert seen == ["copied", "finished"]


def test_weights_that_are_gone_fail_what_came():
    loads = Loads(current=lambda _: False)
    loads.bring(*range(5))
    assert loads.batch.finish() is False
    assert loads.view.failed == []


def test_a_load_that_could_not_begin_fails_the_batch_of_the_others():
    whole = Loads()
    whole.bring(*range(5))
    batch = LoadBatch([None, *whole.batch._loads], PLAN, is_current=lambda _: True, wait_s=60.0)
    assert batch.finish() is False
    assert failed_batch().finish() is False


def test_a_handle_that_raises_fails_the_batch():
    loads = Loads()
    loads.bring(*range(5))
    loads.rows["full"].submit = None
    again = LoadBatch(loads.batch._loads, PLAN, is_current=lambda _: True, wait_s=60.0)
    assert again.finish() is False


# -- the counter


def test_batches_are_told_apart_by_number():
    counter, first, second = LayerCounter(), Loads(), Loads()
    assert (counter.begin(first.batch), counter.begin(second.batch)) == (0, 1)
    second.bring(*range(5))
    counter.set_consumer(1)
    counter.wait_until(4)
    assert counter.finish(1) is True
    first.bring(0, 1, 2, 3)
    first.bring(4, code=MISS)
    assert counter.finish(0) is False


def test_layers_count_from_the_first_of_the_stage():
    counter, loads = LayerCounter(first_layer=2), Loads()
    counter.set_consumer(counter.begin(loads.batch))
    loads.bring(0, 1, 2, 3)
    counter.wait_until(1)
    counter.reset()


@pytest.mark.parametrize("first_layer", [0, 2])
def test_the_layers_are_as_many_as_may_have_to_wait(first_layer):
    """SGLang waits for the last of them where it waits for all."""
    counter, loads = LayerCounter(first_layer), Loads()
    counter.set_consumer(counter.begin(loads.batch))
    assert counter.num_layers == 5 - first_layer
    loads.bring(*range(5))
    counter.wait_until(counter.num_layers - 1)
    assert counter.finish(0) is True
    counter.set_consumer(counter.begin(failed_batch()))
    assert counter.num_layers == 0
    counter.wait_until(counter.num_layers - 1)


@pytest.mark.parametrize(("index", "came"), [(-1, True), (5, False)])
def test_where_nothing_was_begun_nothing_is_waited_for(index, came):
    """-1 says that nothing had to come; of another number nobody knows that anything did."""
    counter = LayerCounter()
    counter.set_consumer(index)
    counter.wait_until(0)
    assert counter.num_layers == 0
    assert counter.finish(index) is came


def test_a_batch_is_finished_once():
    counter, loads = LayerCounter(), Loads()
    loads.bring(*range(5))
    index = counter.begin(loads.batch)
    assert [counter.finish(index), counter.finish(index)] == [True, False]
    assert loads.view.released == [R]


def test_a_reset_ends_every_batch_and_a_number_is_never_used_again():
    counter, loads = LayerCounter(), Loads()
    counter.set_consumer(counter.begin(loads.batch))
    counter.reset()
    assert counter.finish(0) is False
    assert all(handle.ticket.done for handle in loads.rows.values())
    assert loads.view.released == [R]
    assert counter.consumer_index == -1
    assert counter.begin(Loads().batch) == 1
    counter.reset()

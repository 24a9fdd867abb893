"""Saves outlive what is done to their nodes (C-66), and end exactly once however they end (C-67)."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import formula, key_of, pools_of

from ucm_position_key import NodeIndex, ObjectKey, SaveLedger, SaveStatistics, Span, UnitKey

DIGESTS = formula(range(44), 4)  # 11 pages
NOTHING = SaveStatistics(0, 0, 0)


class StoreDouble(dict):
    """Stands for a store: units that were written, and their bytes."""

    def write(self, ledger, job, units):
        for unit in units:
            self[unit] = unit.object.key + bytes([unit.shard])
            ledger.acknowledge(job, unit)


def units_of(index, node, row="full"):
    layers = index.pools.table.row(row).units
    return [unit for item in index.objects(node, row) for unit in index.pools.units(item, "s", layers=layers)]


def saved(index, ledger, node):
    return ledger.saved(index.objects(node, "full"))


@pytest.fixture
def held():
    """A node of 11 pages whose save is under way, split into 4 + 2 + 5, without the last five."""
    index, ledger = NodeIndex(pools_of(4)), SaveLedger()
    index.insert("n", DIGESTS, end=44)
    job = ledger.begin(units_of(index, "n"))
    index.split("n", 16, upper="top")
    index.split("n", 24, upper="middle")
    ledger.forget(index.endings("n", "full"))
    index.remove("n")
    return index, ledger, job


def test_a_split_while_a_save_is_under_way_loses_nothing(held):
    index, ledger, job = held
    store = StoreDouble()
    store.write(ledger, job, job.units)
    names = [key_of(index.pools, "full", digest) for digest in DIGESTS]
    expected = {
        UnitKey(ObjectKey("full", key), "s", shard): key + bytes([shard]) for key in names for shard in (0, 1)
    }
    assert list(store.items()) == list(expected.items())
    assert saved(index, ledger, "top") == (True,) * 4
    assert saved(index, ledger, "middle") == (True,) * 2
    assert ledger.statistics() == SaveStatistics(0, 0, 6)


def test_an_answer_for_pages_below_marks_nothing_above(held):
    index, ledger, job = held
    StoreDouble().write(ledger, job, job.units[8:])
    assert saved(index, ledger, "top") == (False,) * 4
    assert saved(index, ledger, "middle") == (True,) * 2


def test_a_failed_save_marks_none(held):
    index, ledger, job = held
    for unit in job.units:
        ledger.fail(job, unit)
        ledger.acknowledge(job, unit)
    assert saved(index, ledger, "top") + saved(index, ledger, "middle") == (False,) * 6
    assert ledger.statistics() == NOTHING


def test_one_failed_unit_leaves_its_object_alone_unsaved(held):
    index, ledger, job = held
    ledger.fail(job, job.units[3])
    StoreDouble().write(ledger, job, job.units)
    assert saved(index, ledger, "top") == (True, False, True, True)
    assert ledger.begin(units_of(index, "top")).units == job.units[2:4]


@settings(max_examples=50)
@given(st.integers(1, 20), st.data())
def test_pages_are_saved_however_their_node_is_split_meanwhile(pages, data):
    index, ledger = NodeIndex(pools_of(4)), SaveLedger()
    index.insert(0, formula(range(4 * pages), 4), end=4 * pages)
    job = ledger.begin(units_of(index, 0))
    lost = data.draw(st.sets(st.sampled_from(job.units)))
    nodes = [0]
    for number, unit in enumerate(data.draw(st.permutations(job.units)), 1):
        (ledger.fail if unit in lost else ledger.acknowledge)(job, unit)
        span = index.span(node := data.draw(st.sampled_from(nodes)))
        if span.end - span.begin > 4:
            at = data.draw(st.integers(span.begin // 4 + 1, span.end // 4 - 1)) * 4
            index.split(node, at, upper=number)
            nodes.append(number)
    found = {
        item: ok for node in nodes for item in index.objects(node, "full") for ok in ledger.saved([item])
    }
    expected = {unit.object: True for unit in job.units} | {unit.object: False for unit in lost}
    assert found == expected
    assert ledger.statistics() == SaveStatistics(0, 0, sum(expected.values()))


OBJECTS = [ObjectKey("full", bytes([n]) * 32) for n in range(3)]
UNITS = [UnitKey(key, "s", shard) for key in OBJECTS for shard in (0, 1)]


def test_what_is_saved_or_under_way_does_not_begin_again():
    ledger = SaveLedger()
    first = ledger.begin(UNITS[:4])
    second = ledger.begin(UNITS)
    assert (first.units, second.units) == (tuple(UNITS[:4]), tuple(UNITS[4:]))
    StoreDouble().write(ledger, first, first.units)
    assert ledger.begin(UNITS).units == ()
    assert ledger.under_way(OBJECTS) == (False, False, True)
    assert ledger.saved(OBJECTS) == (True, True, False)


def test_an_answer_that_is_too_late_does_not_count_for_the_next_job():
    ledger = SaveLedger()
    first = ledger.begin(UNITS[:2])
    ledger.acknowledge(first, UNITS[0])
    ledger.abort(first)
    second = ledger.begin(UNITS[:2])
    ledger.acknowledge(first, UNITS[1])
    ledger.acknowledge(second, UNITS[0])
    ledger.fail(first, UNITS[1])
    assert ledger.saved(OBJECTS) == (False,) * 3
    ledger.acknowledge(second, UNITS[1])
    assert ledger.saved(OBJECTS) == (True, False, False)


def test_who_comes_back_while_its_save_is_under_way_finds_it_saved():
    ledger = SaveLedger()
    job = ledger.begin(UNITS[:2])
    ledger.forget(OBJECTS)
    ledger.begin(UNITS[:2])
    StoreDouble().write(ledger, job, job.units)
    assert ledger.saved(OBJECTS) == (True, False, False)


def test_a_unit_that_a_job_does_not_write_changes_nothing():
    ledger = SaveLedger()
    job = ledger.begin(UNITS[:2])
    ledger.acknowledge(job, UNITS[4])
    ledger.acknowledge(job, UnitKey(OBJECTS[0], "other", 0))
    ledger.acknowledge(job, UNITS[0])
    assert ledger.saved(OBJECTS) == (False,) * 3
    assert ledger.under_way(OBJECTS) == (True, False, False)


@pytest.mark.parametrize("answered", range(7))
def test_an_abort_at_any_stage_leaves_every_balance_at_zero(answered):
    ledger = SaveLedger()
    job = ledger.begin(UNITS)
    StoreDouble().write(ledger, job, UNITS[:answered])
    ledger.abort(job)
    ledger.abort(job)
    assert ledger.saved(OBJECTS) == tuple(n < answered // 2 for n in range(3))
    ledger.forget(OBJECTS)
    assert ledger.statistics() == NOTHING
    ledger.check_integrity()


def test_a_held_state_goes_to_whom_the_split_gives_it():
    index, ledger = NodeIndex(pools_of(4)), SaveLedger()
    index.insert("n", DIGESTS, end=44, held={"kv": Span(0, 44), "mamba": Span(0, 44)})
    job = ledger.begin(units_of(index, "n", "state"))
    index.split("n", 16, upper="top")
    StoreDouble().write(ledger, job, job.units)
    assert ledger.saved(index.objects("n", "state")) == (True,)
    assert index.objects("top", "state") == ()

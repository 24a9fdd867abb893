"""What crosses between the halves: it survives pickling, and reports of several workers are one."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from ucm_core.coordinator.attempts import Attempt
from ucm_vllm.metadata import FailedLoad, LoadPlan, RowTransfer, StepPlan, WorkerReport

PIECES = np.array([[0, 0, 7, 0, 64], [1, 0, 7, 64, 64], [2, 0, 0, 0, 64], [2, 0, 9, 0, 64]], dtype=np.int64)
KEYS = np.arange(96, dtype=np.uint8).reshape(3, 32)


def transfer() -> RowTransfer:
    return RowTransfer("full", KEYS, ((0, PIECES), (3, PIECES[:2] + np.array([0, 0, 10, 0, 0]))))


@pytest.mark.parametrize(
    ("objects", "pages"),
    [
        ([True, False, False], {7, 17}),
        ([False, True, False], {7, 17}),
        ([False, False, True], {9}),
        ([False, False, False], set()),
    ],
)
def test_the_engine_blocks_of_some_objects(objects: list[bool], pages: set[int]) -> None:
    assert transfer().pages(np.array(objects)) == pages


def test_null_blocks_are_nobodys() -> None:
    assert 0 not in transfer().pages(np.ones(3, dtype=bool))


def test_a_load_writes_the_engine_blocks_of_all_its_rows() -> None:
    assert LoadPlan("r", (transfer(), transfer()), asynchronous=False).pages() == {7, 9, 17}
    assert LoadPlan("r", (), asynchronous=True).pages() == set()


def test_a_plan_survives_pickling() -> None:
    plan = StepPlan(
        "ns", 3, "token", loads=(LoadPlan("r", (transfer(),), asynchronous=True),), failures_seen=2
    )
    again = pickle.loads(pickle.dumps(plan))
    assert (again.namespace, again.generation, again.private_token, again.failures_seen) == (
        "ns",
        3,
        "token",
        2,
    )
    assert (again.loads[0].rows[0].keys == KEYS).all()
    assert (again.loads[0].rows[0].pieces[0][1] == PIECES).all()


def test_reports_of_two_workers_are_one() -> None:
    left = WorkerReport("ns", failed=(FailedLoad("a", "full", KEYS),), dropped=frozenset({"x"}), failures=1)
    right = WorkerReport("ns", stored=(("full", KEYS),), broken_pages=frozenset({4}), failures=3)
    both = left.merged(right)
    assert (both.namespace, both.failures, both.dropped, both.broken_pages) == ("ns", 3, {"x"}, {4})
    assert (len(both.failed), len(both.stored)) == (1, 1)


def test_every_end_of_a_load_is_counted() -> None:
    left, right = (WorkerReport("ns", ended=(Attempt("r", 1),)) for _ in range(2))
    assert left.merged(right).ended == (Attempt("r", 1), Attempt("r", 1))
    assert LoadPlan("r", (), asynchronous=True, use=2).attempt == Attempt("r", 2)


def test_workers_in_different_namespaces_are_not_ready() -> None:
    assert WorkerReport("ns").merged(WorkerReport("other")).namespace is None
    assert WorkerReport("ns").merged(WorkerReport(None)).namespace is None

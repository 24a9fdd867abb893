"""Errors, short transfers and delays at the n-th call of the C library: typed results, right bytes, no hang.

After each the store is usable, in this process and in others; what was on the medium still is.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from faults import ERRORS, FAULTS, URING
from scenarios import NETWORK, OLD
from shim import Action
from strikes import Fault, Job

from ucm_core import _native
from ucm_core.flow.ticket import ResultCode

pytestmark = pytest.mark.timeout(7200)

NAMES = ("load", "save_synced", "prefetch", "donate", "drop", "collect", "touch", "books", "create")
NAMES += ("unit_load", "unit_save")
STALE = tuple(
    Fault(step, Action.FAIL, errno.ESTALE) for step, errors in ERRORS.items() if errno.ESTALE in errors
)


@pytest.fixture(scope="module")
def reports(do: Callable[..., dict], request: pytest.FixtureRequest) -> dict:
    most, width = (None, None) if request.config.getoption("--long") else (8, 1)
    jobs = [Job("", name, most=most, width=width, faults=FAULTS) for name in NAMES]
    jobs += [Job("", name, most=most, faults=STALE) for name in NETWORK]
    return do([*jobs, Job("", "uring", most=most, faults=URING)])


@pytest.mark.parametrize("name", [*NAMES, *NETWORK, "uring"])
def test_whatever_call_fails_results_are_typed_and_bytes_right(reports: dict, name: str) -> None:
    assert not reports[name]["failures"], "\n".join(reports[name]["failures"])


def test_every_call_that_a_scenario_makes_has_its_faults(reports: dict) -> None:
    calls = {step for name in NAMES for step in reports[name]["passed"] if step.startswith("call.")}
    struck = {step for name in NAMES for step in reports[name]["struck"]}
    assert sorted(calls - struck) == []


def test_every_stage_of_a_load_has_its_fault(reports: dict) -> None:  # case C-35
    """The stages are the calls that a load makes; in between processes die (`test_deaths`)."""
    stages = {step for step in reports["load"]["passed"] if step.startswith("call.")}
    only_new = {"call.allocate"}  # when a slot is filled for the first time: "create" is struck there
    assert sorted(stages - only_new - set(reports["load"]["struck"])) == []


def test_a_failed_read_fails_the_object_and_no_other(reports: dict) -> None:  # case C-35
    failing = ("call.read_direct", "call.open_direct")
    told = [(strike, codes) for strike, codes in reports["load"]["loaded"] if strike["step"] in failing]
    hard = [codes for strike, codes in told if strike["value"] in {errno.EIO, errno.ESTALE, errno.EACCES}]
    assert hard
    for codes in hard:
        failed = [code for code in codes[: len(OLD)] if code != ResultCode.OK]
        assert failed in ([], [ResultCode.UNAVAILABLE]), "the first call is the probe of the root"


@pytest.mark.skipif(not _native.probe_uring(), reason="this kernel refuses io_uring")
def test_transfers_through_io_uring_meet_everything_that_the_kernel_can_say(reports: dict) -> None:
    assert reports["uring"]["struck"]["files.uring.answer"] >= 2 * len(URING)


def test_no_error_of_the_system_is_taken_for_damage(reports: dict) -> None:  # case C-56
    codes = {code for _, loaded in reports["load"]["loaded"] for code in loaded}
    assert ResultCode.CORRUPT not in codes


def test_enough_calls_failed(reports: dict) -> None:
    assert sum(sum(report["struck"].values()) for report in reports.values()) >= 500

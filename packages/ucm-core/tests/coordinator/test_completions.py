"""The ledger of completions: one report per promise, after the last job, for the right use of the id."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ledger_cases import CASES, ledger_cases

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.completions import Completions, CompletionStatistics
from ucm_core.errors import SpecError

R7 = Attempt("r7", 1)


def attempt(text: str) -> Attempt:
    name, _, generation = text.partition("#")
    return Attempt(name, int(generation or 0))


def play(ledger: Completions, event: list[str]) -> list[str] | None:
    """Carry one event out; what a poll reports, None for others."""
    verb, *details = event
    if verb == "poll":
        return sorted(each.request_id + f"#{each.use}" * bool(each.use) for each in ledger.poll())
    who = attempt(details[0])
    if verb == "submit":
        ledger.submit(who, details[1])
    elif verb == "end":
        ledger.end(who, details[1])
    else:
        ledger.promise(who)
    return None


def test_all_ledger_cases_are_here() -> None:
    assert (len(CASES), len(ledger_cases("completions")), len(ledger_cases("pins"))) == (6, 5, 1)


@pytest.mark.parametrize(("given_", "expected"), ledger_cases("completions"))
def test_completions_of_the_public_cases_are_reported_right(
    given_: dict[str, Any], expected: dict[str, Any]
) -> None:
    ledger = Completions()
    answers = [play(ledger, event) for event in given_["events"]]
    assert [answer for answer in answers if answer is not None] == expected["reported"]
    ledger.check_integrity()
    assert (ledger.statistics().jobs, ledger.statistics().promised) == (0, 0)


def test_the_end_of_an_unknown_job_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Completions()
    with caplog.at_level(logging.WARNING):
        ledger.end(Attempt("r11", 1), "w")
    assert [record.getMessage() for record in caplog.records] == [
        "the end of a job that is not known: w of r11#1"
    ]
    assert ledger.poll() == ()
    assert ledger.statistics() == CompletionStatistics(0, 0, 0, 1)


def test_a_new_job_holds_the_report_back() -> None:
    ledger = Completions()
    ledger.submit(R7, "x")
    ledger.promise(R7)
    ledger.end(R7, "x")
    ledger.submit(R7, "y")
    assert ledger.poll() == ()
    ledger.end(R7, "y")
    assert ledger.poll() == (R7,)


def test_a_promise_that_is_repeated_is_one_report() -> None:
    ledger = Completions()
    ledger.promise(R7)
    ledger.promise(R7)
    assert (ledger.poll(), ledger.poll()) == ((R7,), ())


def test_reports_come_in_the_order_of_the_promises() -> None:
    ledger = Completions()
    for name in "cab":
        ledger.promise(Attempt(name))
    assert [each.request_id for each in ledger.poll()] == ["c", "a", "b"]


def test_a_job_that_is_under_way_is_not_begun_again() -> None:
    ledger = Completions()
    ledger.submit(R7, "x")
    with pytest.raises(SpecError, match="job 'x' of r7#1 is under way"):
        ledger.submit(R7, "x")
    assert ledger.statistics().jobs == 1


EVENTS = st.tuples(
    st.sampled_from(["submit", "end", "promise", "poll"]), st.integers(1, 2), st.sampled_from("xy")
)


@given(st.lists(EVENTS, max_size=40))
def test_every_promise_is_reported_once_and_never_early(events: list[tuple[str, int, str]]) -> None:
    """Against a model that keeps a plain list of what is open."""
    ledger, running, promised = Completions(), set(), set()
    for verb, generation, job in events:
        who = Attempt("r", generation)
        if verb == "submit" and (who, job) not in running:
            ledger.submit(who, job)
            running.add((who, job))
        elif verb == "end":
            ledger.end(who, job)
            running.discard((who, job))
        elif verb == "promise":
            ledger.promise(who)
            promised.add(who)
        elif verb == "poll":
            done = {each for each in promised if all(owner != each for owner, _ in running)}
            assert set(ledger.poll()) == done
            promised -= done
        ledger.check_integrity()
        assert (ledger.statistics().jobs, ledger.statistics().promised) == (len(running), len(promised))

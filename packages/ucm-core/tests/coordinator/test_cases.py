"""Every `resolve` and `coverage` case of the public failures, number for number."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from spec_rows import presence_of_case, row_of_case, table_of_case

from ucm_core.coordinator.coverage import coverage
from ucm_core.coordinator.presence import Presence, combine_ranks, unite
from ucm_core.coordinator.resolve import Ask, Hit, clamp_followers, resolve_hit, rewind
from ucm_core.spec.table import SpecTable

CASES = json.loads((Path(__file__).parents[1] / "data" / "cases-verdict.json").read_text())["cases"]


def cases(check: str, form: str | None = None) -> list[Any]:
    chosen = [case for case in CASES if case["check"] == check and case["input"].get("form") == form]
    return [pytest.param(case["input"], case["expected"], id=case["id"]) for case in chosen]


def known(spec: SpecTable, given: dict[str, Any]) -> dict[str, Presence]:
    if "ranks" in given:
        return combine_ranks(spec, [presence_of_case(spec, rank) for rank in given["ranks"]])
    stored = presence_of_case(spec, given["stored"])
    return unite(stored, presence_of_case(spec, given.get("local", {})))


def resolve(spec: SpecTable, given: dict[str, Any]) -> Hit:
    return resolve_hit(
        spec,
        known(spec, given),
        request_tokens=given["n"],
        tail_tokens=given["tail"],
        align_tokens=given["align"],
        local_tokens=given.get("local_tokens", 0),
    )


def failed_units(given: dict[str, Any]) -> dict[str, list[int]]:
    failed: dict[str, list[int]] = {}
    for row, unit in given["failed"]:
        failed.setdefault(row, []).append(unit)
    return failed


def test_all_cases_of_this_area_are_here() -> None:
    assert (len(cases("resolve")), len(cases("coverage", "blocks")), len(cases("coverage", "keep"))) == (
        60,
        10,
        3,
    )


@pytest.mark.parametrize(("given", "expected"), cases("resolve"))
def test_verdicts_are_those_of_the_public_cases(given: dict[str, Any], expected: dict[str, int]) -> None:
    spec = table_of_case(given["rows"])
    hit = resolve(spec, given)
    answer = {"hit_tokens": hit.hit_tokens, "resume_tokens": hit.resume_tokens, "new_tokens": hit.new_tokens}
    if "failed" in given:
        after = rewind(spec, known(spec, given), hit=hit, failed=failed_units(given))
        answer["resume_after_failure_tokens"] = after.resume_tokens
    if "at_load" in given:
        at_load = presence_of_case(spec, given["at_load"])
        answer["committed_tokens"] = clamp_followers(
            spec, known(spec, given), hit=hit, at_load=at_load
        ).resume_tokens
    assert {name: answer[name] for name in expected} == expected


@pytest.mark.parametrize(("given", "expected"), cases("coverage", "blocks"))
def test_coverage_is_that_of_the_public_cases(given: dict[str, Any], expected: dict[str, list[int]]) -> None:
    begin, end = expected["blocks"]
    needed = coverage(row_of_case(given["row"]), given["boundary"])
    assert set(needed) == set(range(begin, end))


@pytest.mark.parametrize(("given", "expected"), cases("coverage", "keep"))
def test_what_the_writer_must_keep(given: dict[str, Any], expected: dict[str, Any]) -> None:
    spec = table_of_case(given["rows"])
    boundary = Ask(given["n"], given["tail"], given["align"]).limit_tokens(spec)
    keep = {row.name: coverage(row, boundary) for row in spec.rows}
    assert (boundary, {name: [r.start, r.stop] for name, r in keep.items()}) == (
        expected["boundary"],
        expected["keep"],
    )

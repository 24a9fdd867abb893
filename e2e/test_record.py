"""The file that says what was run: a part of the cases replaces its own lines only."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from e2e.conditions import CASES, CONDITIONS, Played
from e2e.harness import Driven
from e2e.record import Condition, count_tests, lines_of, record

MODE, FAMILY = CASES[0]
LAST: Condition = (*CASES[-1], CONDITIONS[-1])


def played(*, external_tokens: int) -> Played:
    counts = {"ucm_objects_failed_total": 2.0, "vllm:spec_decode_num_accepted_tokens": 0.0}
    return Played((), (Driven((), external_tokens),), {}, counts)


def case(tokens: int) -> dict[Condition, Played]:
    return {(MODE, FAMILY, condition): played(external_tokens=tokens) for condition in CONDITIONS}


def test_a_line_for_each_condition(tmp_path: Path) -> None:
    file = tmp_path / "record.txt"
    record(file, case(77), tests=dict.fromkeys(case(0), 3))
    lines = lines_of(file.read_text())
    assert lines.keys() == case(0).keys()
    assert all(line.split()[3:9] == ["3", "0", "0", "0", "77", "2"] for line in lines.values())


def test_lines_of_other_cases_stay(tmp_path: Path) -> None:
    file = tmp_path / "record.txt"
    record(file, {LAST: played(external_tokens=1)}, tests={LAST: 1})
    before = lines_of(file.read_text())[LAST]
    record(file, case(5), tests=dict.fromkeys(case(0), 1))
    record(file, case(6), tests=dict.fromkeys(case(0), 1))
    lines = lines_of(file.read_text())
    assert lines.pop(LAST) == before
    assert {line.split()[7] for line in lines.values()} == {"6"}
    assert list(lines_of(file.read_text())) == [*case(0), LAST]


def test_tests_are_counted_by_what_they_are_about() -> None:
    about = dict(zip(("mode", "family", "condition"), LAST, strict=True))
    given: list[Any] = [about, about, {"family": FAMILY}]
    items = [SimpleNamespace(callspec=SimpleNamespace(params=each)) for each in given]
    found = count_tests(cast(list[pytest.Item], [*items, SimpleNamespace()]))
    assert found == {LAST: 2}

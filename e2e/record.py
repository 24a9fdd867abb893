"""What `test_conditions.py` did, in a file for people, a line for each condition of a case.

A run of some cases replaces their lines and leaves those of others.
"""

import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from e2e.conditions import CASES, CONDITIONS, Played

Condition = tuple[str, str, str]
"""Mode, family, condition."""

HEAD = """\
What passed of test_conditions.py with --record (`tox -e e2e-long` has 300 requests a condition): all tokens
were those of vLLM without UCM, and nothing stayed held. The conditions of a case are one process, so that
"failed" and "drafts" grow from line to line. Lines are of the day and the commit that they name.
"""
COLUMNS = ("tests", "requests", "aborted", "preempted", "loaded", "failed", "drafts")
"""Tests that passed; requests of which kind; prompt tokens loaded; objects not loaded; right drafts."""


def record(file: Path, played: Mapping[Condition, Played], *, tests: Mapping[Condition, int]) -> None:
    """Write down what was played, in a session in which every test passed."""
    run = f"{time.strftime('%Y-%m-%d', time.gmtime())} {_commit(file)}"
    lines = lines_of(file.read_text() if file.exists() else "")
    lines |= {where: line(where, (tests[where], *figures(one)), run=run) for where, one in played.items()}
    ordered = [lines[each] for each in every_condition() if each in lines]
    title = line(("mode", "model", "condition"), COLUMNS, run="day        commit")
    file.write_text("\n".join([HEAD, title, *ordered]) + "\n")


def count_tests(items: Iterable[pytest.Item]) -> Counter[Condition]:
    """How many tests are about each condition."""
    given = (item.callspec.params for item in items if hasattr(item, "callspec"))
    return Counter(
        (each["mode"], each["family"], each["condition"])
        for each in given
        if {"mode", "condition"} <= each.keys()
    )


def every_condition() -> Iterable[Condition]:
    """In the order of the file."""
    return ((mode, family, condition) for mode, family in CASES for condition in CONDITIONS)


def lines_of(text: str) -> dict[Condition, str]:
    """The lines of a file by what they are about."""
    words = ((tuple(line.split()[:3]), line) for line in text.splitlines())
    known = set(every_condition())
    return {where: line for where, line in words if where in known}


def line(where: Condition, cells: Iterable[object], *, run: str) -> str:
    """One line, whose columns are those of all."""
    mode, family, condition = where
    return " ".join([f"{mode:12} {family:7} {condition:9}", *(f"{cell:>9}" for cell in cells), run])


def figures(played: Played) -> tuple[int, ...]:
    """`COLUMNS` without the first."""
    outcomes, counts = [outcome for _, outcome in played.pairs], played.counts
    return (
        len(outcomes),
        sum(outcome.aborted for outcome in outcomes),
        sum(outcome.preemptions for outcome in outcomes),
        sum(wave.external_tokens for wave in played.waves),
        int(counts["ucm_objects_failed_total"]),
        int(counts["vllm:spec_decode_num_accepted_tokens"]),
    )


def _commit(file: Path) -> str:
    """What was tested, with a plus where it was changed since."""
    here = Path(__file__).parent.parent
    changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ".", f":!{file}")
    return _git(here, "rev-parse", "--short=12", "HEAD") + "+" * bool(changed)


def _git(place: Path, *words: str) -> str:
    return subprocess.run(
        ["git", *words], cwd=place, capture_output=True, text=True, check=False
    ).stdout.strip()

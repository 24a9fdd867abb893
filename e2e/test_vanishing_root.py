"""The root is removed while the engine serves: right tokens, one clear line, counters; it is made again."""

import shutil
from dataclasses import dataclass

import pytest

from e2e.harness import Answer
from e2e.runs import Runs, complaints, serve_apart


@dataclass(frozen=True, slots=True)
class Vanished:
    """A process whose root went away after its first prompt."""

    before: tuple[Answer, ...]
    after: tuple[Answer, ...]
    lines: list[str]
    failures: float


@pytest.fixture(scope="module")
def vanished(runs: Runs) -> Vanished:
    root, prompts = runs.root_copy("dense", "vanishing"), runs.prompts("dense")
    with runs.engine("vanishing", "dense", root) as engine:
        before = serve_apart(engine, prompts.first[:1])
        shutil.rmtree(root)
        after = serve_apart(engine, prompts.first + prompts.other)
        engine.settle()
        failures = engine.counter("ucm_objects_failed_total") + engine.counter("ucm_errors_total")
        return Vanished(before, after, complaints(engine.log_text(), root), failures)


def test_tokens_are_right(runs: Runs, vanished: Vanished) -> None:
    plain = runs.plain("dense")
    assert [answer.tokens for answer in vanished.before] == [plain.first[0].tokens]
    assert [a.tokens for a in vanished.after] == [a.tokens for a in plain.first + plain.other]


def test_it_was_served_before(vanished: Vanished) -> None:
    assert vanished.before[0].external_tokens == 256


def test_one_clear_line_is_logged(vanished: Vanished) -> None:
    (line,) = vanished.lines
    assert "was deleted or moved away, and is made again" in line


def test_it_is_counted(vanished: Vanished) -> None:
    assert vanished.failures > 0

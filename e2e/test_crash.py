"""kill -9 in the middle of saving: the next process serves right tokens and cleans up."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e import objects
from e2e.harness import Answer, Engine, Prompt
from e2e.models import tokens
from e2e.runs import Runs, serve_apart

LIMIT_S = 120.0
SLOW_SAVES = {"sync": True, "block_tokens": 128}
"""Every object is flushed to the device before it is visible, so that most moments are "in the middle"."""

PROMPTS = tuple(Prompt(tokens(1900, seed=20 + number)) for number in range(12))


@dataclass(frozen=True, slots=True)
class Crash:
    """What a killed process left, and what the next one made of it."""

    left: list[Path]
    whole: dict[Path, bool]
    """Every object that was visible after the kill -> whether it was whole."""
    regions: set[Path]
    """Shared memory that the killed process had mapped."""
    answers: tuple[Answer, ...]
    temporaries_after: list[Path]
    regions_after: set[Path]
    """What of it is still there."""


def regions_of(engine: Engine) -> set[Path]:
    words = Path(f"/proc/{engine.pid}/maps").read_text().split()
    return {Path(word) for word in words if word.startswith("/dev/shm/ucm-")}


def under_way(root: Path) -> bool:
    return bool(objects.temporaries(root)) and len(objects.objects(root)) > 3


def kill_while_saving(engine: Engine, root: Path) -> set[Path]:
    """Watch until a write is under way, freeze the engine, and kill it if the write still is; its regions."""
    assert engine.pid is not None
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if under_way(root):
            engine.signal(signal.SIGSTOP)
            os.waitid(os.P_PID, engine.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all threads stand still
            if under_way(root):
                regions = regions_of(engine)
                engine.kill()
                return regions
            engine.signal(signal.SIGCONT)
    pytest.fail(f"no write was seen under way within {LIMIT_S} s")


@pytest.fixture(scope="module")
def crash(runs: Runs) -> Crash:
    root = runs.empty_root("crash")
    with runs.engine("crashing", "dense", root, settings=SLOW_SAVES) as engine:
        engine.begin_generate(PROMPTS)
        regions = kill_while_saving(engine, root)
    left, whole = objects.temporaries(root), {path: objects.is_whole(path) for path in objects.objects(root)}
    with runs.engine("after-crash", "dense", root, settings=SLOW_SAVES) as engine:
        answers = serve_apart(engine, PROMPTS)
    regions_after = set(filter(Path.exists, regions))
    return Crash(left, whole, regions, answers, objects.temporaries(root), regions_after)


def test_the_kill_came_in_the_middle_of_a_write(crash: Crash) -> None:
    assert crash.left


def test_nothing_half_written_is_visible(crash: Crash) -> None:
    assert crash.whole
    assert all(crash.whole.values())


def test_the_next_process_serves_right_tokens(runs: Runs, crash: Crash) -> None:
    with runs.engine("crash-oracle", "dense", None) as engine:
        right = serve_apart(engine, PROMPTS)
    assert [answer.tokens for answer in crash.answers] == [answer.tokens for answer in right]


def test_the_next_process_profits_from_what_was_down(crash: Crash) -> None:
    assert 0 < sum(answer.external_tokens for answer in crash.answers) < len(PROMPTS) * 1900


def test_no_temporary_is_left(crash: Crash) -> None:
    assert crash.temporaries_after == []


def test_no_shared_memory_is_left(crash: Crash) -> None:
    assert crash.regions
    assert not crash.regions_after

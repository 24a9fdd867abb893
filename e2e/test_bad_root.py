"""The root is read-only, full, getting full, or missing: right tokens, one clear log line, counters."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.harness import Answer
from e2e.models import MODELS, connector, llm_arguments
from e2e.runs import Runs, complaints, serve_apart


def read_only(root: Path) -> str:
    return f"mount --bind {root} {root}\nmount -o remount,bind,ro {root}"


def full(root: Path) -> str:
    fill = f"dd if=/dev/zero of={root}/fill bs=4096 2>/dev/null || true"
    return f"mount -t tmpfs -o size=256k none {root}\nmkdir {root}/.writers\n{fill}"


def filling(root: Path) -> str:
    # Room for some objects, not for all; `disk_bytes` promises more than the disk has.
    return f"mount -t tmpfs -o size=600k none {root}"


def missing(root: Path) -> str:
    # The directory that would hold the root exists and takes nothing new.
    return f"mount -t tmpfs -o ro none {root.parent}"


@dataclass(frozen=True, slots=True)
class Served:
    """A process whose root cannot be used."""

    root: Path
    answers: tuple[Answer, ...]
    log: str
    failures: float


@pytest.fixture(scope="module", params=[read_only, full, filling, missing], ids=lambda mount: mount.__name__)
def served(runs: Runs, request: pytest.FixtureRequest) -> Served:
    mount: Callable[[Path], str] = request.param
    root = runs.root_copy("dense", mount.__name__) if mount is read_only else made(runs, mount.__name__)
    transfer = connector(root, disk_bytes="1GB")
    arguments = llm_arguments(MODELS["dense"], runs.checkpoint("dense"), kv_transfer_config=transfer)
    with runs.process(f"dense-{mount.__name__}", prelude=mount(root)).start(arguments) as engine:
        answers = serve_apart(engine, runs.prompts("dense").first * 2)
        engine.settle()
        failures = engine.counter("ucm_objects_failed_total") + engine.counter("ucm_errors_total")
        return Served(root, answers, engine.log_text(), failures)


def made(runs: Runs, name: str) -> Path:
    root = runs.empty_root(name) / "ucm"
    root.mkdir(parents=True)
    return root


def test_tokens_are_right(runs: Runs, served: Served) -> None:
    right = [answer.tokens for answer in runs.plain("dense").first] * 2
    assert [answer.tokens for answer in served.answers] == right


def test_one_clear_line_is_logged(served: Served) -> None:
    (line,) = complaints(served.log, served.root)
    assert any(reason in line for reason in ("Read-only file system", "No space left on device"))


def test_no_traceback_is_logged(served: Served) -> None:
    assert "ucm_" not in "".join(
        line for line in served.log.splitlines() if line.lstrip().startswith("File ")
    )


def test_it_is_counted(served: Served) -> None:
    assert served.failures > 0

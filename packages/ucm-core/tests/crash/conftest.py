"""Starts the processes that strike others, two at a time."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "store")]

import last_long  # noqa: E402
import shim  # noqa: E402
from strikes import Job  # noqa: E402

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 256 << 20
WORKERS = 2

Reports = dict[str, dict[str, Any]]
BEGAN = time.monotonic()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """After a long run of deaths that passed, write down what it did."""
    if exitstatus == pytest.ExitCode.OK and config.getoption("--long") and last_long.DEATHS in config.stash:
        outcomes = ", ".join(text for text, _ in terminalreporter.build_summary_stats_line()[0])
        run = last_long.LongRun(outcomes, time.monotonic() - BEGAN, config.stash[last_long.DEATHS])
        last_long.FILE.write_text(run.text(last_long.commit()))


@pytest.fixture(scope="session")
def folder() -> Iterator[Path]:
    """Where roots lie: in memory where there is room, so that the time goes into deaths."""
    roomy = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > NEEDED_BYTES
    with tempfile.TemporaryDirectory(dir=MEMORY if roomy else None, prefix="strikes-") as path:
        yield Path(path)


@pytest.fixture(scope="session")
def library(folder: Path) -> Path:
    """The compiled shim."""
    return shim.build(folder)


@pytest.fixture(scope="session")
def do(folder: Path, library: Path) -> Callable[[list[Job]], Reports]:
    """Does jobs, each in a process of its own; their reports by scenario."""
    paths = [str(HERE), str(HERE.parent / "store"), *filter(None, sys.path)]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(library),
        "OPENBLAS_NUM_THREADS": "1",  # a process that forks has one thread
        "PYTHONPATH": os.pathsep.join(paths),
    }

    def run(job: Job) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            words = json.dumps(asdict(replace(job, folder=place)))
            command = [sys.executable, str(HERE / "strikes.py"), words]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    def run_all(jobs: list[Job]) -> Reports:
        with ThreadPoolExecutor(WORKERS) as workers:
            return {job.scenario: report for job, report in zip(jobs, workers.map(run, jobs), strict=True)}

    return run_all

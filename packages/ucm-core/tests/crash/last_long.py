"""What the last whole run of ``tox -e core-long`` did, written by itself into ``last-long.txt``."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DEATHS = pytest.StashKey[Mapping[str, Mapping[str, Any]]]()
"""What `test_deaths` did, in pytest's own store, by scenario as a `strikes.Report` says it."""
FILE = Path(__file__).with_name("last-long.txt")


@dataclass(frozen=True, slots=True)
class LongRun:
    """A run that passed."""

    outcomes: str
    """As pytest counts them."""
    took_s: float
    reports: Mapping[str, Mapping[str, Any]]
    """By scenario, what a `strikes.Report` says."""

    def text(self, commit: str) -> str:
        """For people."""
        return "\n".join(self._lines(commit)) + "\n"

    def _lines(self, commit: str) -> Iterator[str]:
        deaths = {name: sum(report["struck"].values()) for name, report in self.reports.items()}
        yield "The last whole run of `tox -e core-long`, written by the run itself (crash/last_long.py)."
        yield ""
        yield time.strftime("ended    %Y-%m-%d %H:%M UTC", time.gmtime())
        yield f"took     {self.took_s / 60:.0f} minutes"
        yield f"commit   {commit}"
        yield f"machine  {machine()}"
        yield f"pytest   {self.outcomes}"
        yield ""
        yield f"{sum(deaths.values()):7,} processes died, of them in the scenario"
        yield from (f"{count:7,} {name}" for name, count in deaths.items())


def machine() -> str:
    """This one, in words."""
    system = f"{platform.system()} {platform.release().partition('-')[0]} on {platform.machine()}"
    return f"{os.cpu_count()} processors, {system}, Python {platform.python_version()}"


def commit() -> str:
    """What was tested, and whether it was changed since."""
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{FILE.name}")
    return f"{_git('rev-parse', 'HEAD') or 'unknown'}{' and changes' if changed else ''}"


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], cwd=FILE.parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()

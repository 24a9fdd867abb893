"""Makes the helpers of this folder importable; says how property tests run.

Without a deadline, for machines are shared, and each with the same examples in every run until its code
changes. ``--hypothesis-profile=drawn`` draws new ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("drawn", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("shared", settings.get_profile("drawn"), derandomize=True)
settings.load_profile("shared")

SAID = "said"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="larger models and more deaths than CI has time for")


@pytest.fixture
def say(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Tell the reader of the run something, also when all is well."""
    return partial(record_property, SAID)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in (*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")):
        for name, text in report.user_properties:
            if name == SAID:
                terminalreporter.write_line(str(text))

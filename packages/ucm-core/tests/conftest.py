"""Makes the helpers of this folder importable; property tests have no deadline: machines are shared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
settings.register_profile("shared", deadline=None)
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

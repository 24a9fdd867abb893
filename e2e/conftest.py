"""What the stories share."""

import os
from pathlib import Path

import pytest

from e2e.pair import Pair
from e2e.runs import Runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requests", type=int, default=30, help="requests of each condition")
    parser.addoption("--record", type=Path, help="file that says what was served, when all tests passed")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Engines, and the runs that several stories look at."""
    return Runs(_python("UCM_VLLM_PYTHON", "vLLM, ucm-core and ucm-vllm"), tmp_path_factory.mktemp("e2e"))


@pytest.fixture(scope="session")
def pair(runs: Runs) -> Pair:
    """Both engines, and the runs that several stories look at."""
    needed = "SGLang, ucm-core, ucm-position-key and ucm-sglang"
    return Pair(runs, _python("UCM_SGLANG_PYTHON", needed))


def _python(variable: str, needed: str) -> Path:
    python = os.environ.get(variable)
    if python is None:
        pytest.fail(f"{variable} must name the python of an environment with {needed}")
    return Path(python)

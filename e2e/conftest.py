"""What the stories share."""

import os
from pathlib import Path

import pytest

from e2e.runs import Runs


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--requests", type=int, default=30, help="requests of each condition")
    parser.addoption("--record", type=Path, help="file that says what was served, when all tests passed")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Engines, and the runs that several stories look at."""
    python = os.environ.get("UCM_VLLM_PYTHON")
    if python is None:
        pytest.fail("UCM_VLLM_PYTHON must name the python of an environment with vLLM, ucm-core and ucm-vllm")
    return Runs(Path(python), tmp_path_factory.mktemp("e2e"))

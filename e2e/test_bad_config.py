"""Settings that cannot work: the engine refuses to start, with one message that names field and remedy."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import Engine
from e2e.models import MODELS, connector, llm_arguments
from e2e.runs import Runs

Refusal = dict[str, Any]


@pytest.fixture(scope="module")
def process(runs: Runs) -> Iterator[Engine]:
    """One process for all: a refused engine leaves nothing behind."""
    with runs.process("dense-refused") as engine:
        yield engine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def refusal(runs: Runs, process: Engine, transfer: dict[str, Any]) -> str:
    arguments = llm_arguments(MODELS["dense"], runs.checkpoint("dense"), kv_transfer_config=transfer)
    text = process.refusal(arguments)
    assert text is not None, "the engine started"
    return text


def test_an_unknown_setting_is_refused_with_the_nearest_one(runs: Runs, process: Engine, root: Path) -> None:
    text = refusal(runs, process, connector(root, block_token=128))
    assert "'block_token'" in text
    assert "did you mean 'block_tokens'" in text
    assert not root.exists()


def test_a_root_that_is_a_file_is_refused(runs: Runs, process: Engine, root: Path) -> None:
    root.write_text("mine")
    text = refusal(runs, process, connector(root))
    assert str(root) in text
    assert "name a directory" in text
    assert root.read_text() == "mine"


def test_a_policy_that_ends_requests_is_refused(runs: Runs, process: Engine, root: Path) -> None:
    text = refusal(runs, process, connector(root, policy="fail"))
    assert "kv_load_failure_policy" in text
    assert "recompute" in text
    assert not root.exists()


def test_blocks_that_are_no_grains_are_refused_with_both_numbers(
    runs: Runs, process: Engine, root: Path
) -> None:
    text = refusal(runs, process, connector(root, block_tokens=100))
    assert "block_tokens = 100" in text
    assert "grain_tokens = 64" in text
    assert not root.exists()

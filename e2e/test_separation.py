"""Nothing that is not the same computation is ever served: whatever differs, the cache gives 0 tokens."""

from pathlib import Path
from typing import Any

import pytest

from e2e.answers import cached, tokens_of
from e2e.models import MODELS
from e2e.runs import Runs, serve_apart


@pytest.mark.parametrize("family", MODELS)
def test_another_salt_is_served_nothing_at_first_and_right_tokens(runs: Runs, family: str) -> None:
    resumed = runs.resumed(family)
    assert cached(resumed.salted) == [0, 0]
    assert tokens_of(resumed.salted) == tokens_of(runs.plain(family).first)


@pytest.mark.parametrize("family", MODELS)
def test_the_same_salt_again_is_served(runs: Runs, family: str) -> None:
    resumed = runs.resumed(family)
    assert cached(resumed.salted_again) == cached(resumed.first)
    assert tokens_of(resumed.salted_again) == tokens_of(runs.plain(family).first)


@pytest.mark.parametrize("family", MODELS)
def test_another_checkpoint_is_served_nothing(runs: Runs, family: str) -> None:
    root = runs.root_copy(family, "altered")
    with runs.engine("altered", family, root, checkpoint=runs.altered_checkpoint(family)) as engine:
        answers = serve_apart(engine, runs.prompts(family).first)
    assert cached(answers) == [0, 0]


def served_with(runs: Runs, name: str, **changed: Any) -> list[int]:
    """Tokens served from the root of the dense model to an engine that differs in `changed`."""
    with runs.engine(name, "dense", runs.root_copy("dense", name), **changed) as engine:
        answers = serve_apart(engine, runs.prompts("dense").first)
    if "dtype" not in changed:
        assert tokens_of(answers) == tokens_of(runs.plain("dense").first)
    return cached(answers)


def test_float32_for_bfloat16_is_served_nothing(runs: Runs) -> None:
    assert served_with(runs, "float32", dtype="float32") == [0, 0]


def test_blocks_of_another_size_are_served_nothing(runs: Runs) -> None:
    assert served_with(runs, "block-tokens", settings={"block_tokens": 128}) == [0, 0]


def test_grains_of_another_size_are_served_nothing(runs: Runs) -> None:
    assert served_with(runs, "grain-tokens", settings={"grain_tokens": 32}) == [0, 0]


def test_the_engines_own_block_size_separates_nothing(runs: Runs) -> None:
    """What is stored does not know the engine's blocks: smaller ones resume from it too, and deeper."""
    assert served_with(runs, "engine-blocks", block_size=32, num_gpu_blocks_override=256) == [256, 448]


def test_an_altered_checkpoint_differs_in_one_byte(runs: Runs) -> None:
    files = [
        path / "model.safetensors" for path in (runs.checkpoint("dense"), runs.altered_checkpoint("dense"))
    ]
    before, after = (Path(file).read_bytes() for file in files)
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1

"""Loads whose results an engine asks for before it ends the step."""

from __future__ import annotations

import pytest
from test_pipeline import Bench, of


def seen(*layers: int) -> Bench:
    """A step with one load, of which the hooks of these layers came."""
    bench = Bench()
    bench.pipeline.begin_step([of("r", bench.load())], [])
    for layer in layers:
        bench.pipeline.before_layer(layer)
    return bench


def test_a_load_that_all_layers_waited_for_is_good() -> None:
    pipeline = seen(0, 1, 2, 3).pipeline
    assert pipeline.end_loads() == {}
    assert pipeline.end_step().failed == {}


@pytest.mark.parametrize("layers", [(0, 2, 3), (0, 1, 2), (0,), ()])
def test_a_hook_that_did_not_come_fails_the_load(layers: tuple[int, ...]) -> None:
    pipeline = seen(*layers).pipeline
    assert list(pipeline.end_loads()) == ["r"]
    assert list(pipeline.end_step().failed) == ["r"]


def test_without_a_step_nothing_has_failed() -> None:
    assert Bench().pipeline.end_loads() == {}

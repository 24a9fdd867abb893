"""Nothing passes the border as an exception; what would have is counted and logged, not too often."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import REGISTRY

from ucm_vllm.border import Complaints, guarded


def errors(where: str) -> float:
    return REGISTRY.get_sample_value("ucm_errors_total", {"where": where}) or 0.0


def test_an_exception_becomes_the_fallback_and_a_count() -> None:
    @guarded("test_hook", lambda: (0, False))
    def hook() -> tuple[int, bool]:
        raise RuntimeError("storage is gone")

    before = errors("test_hook")
    assert hook() == (0, False)
    assert errors("test_hook") == before + 1


def test_what_works_passes_unchanged() -> None:
    @guarded("test_works", lambda: 0)
    def hook(value: int, *, twice: bool) -> int:
        return value * 2 if twice else value

    assert hook(21, twice=True) == 42
    assert errors("test_works") == 0


def test_an_interrupt_passes() -> None:
    @guarded("test_interrupt", lambda: None)
    def hook() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hook()


def test_one_line_per_kind_and_interval(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    complaints = Complaints(interval_s=60, clock=lambda: now[0])
    with caplog.at_level(logging.WARNING, logger="ucm_vllm"):
        said = [
            complaints.say("disk", "no space"),
            complaints.say("disk", "no space"),
            complaints.say("net", "down"),
        ]
        now[0] = 61.0
        said.append(complaints.say("disk", "no space"))
    assert said == [True, False, True, True]
    assert "1 more of this kind" in caplog.records[-1].message

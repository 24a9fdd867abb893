"""Nothing passes the border as an exception; what would have is counted and logged, not too often."""

from __future__ import annotations

import io
import logging

import pytest
from prometheus_client import REGISTRY

from ucm_core.ops.border import Complaints, guarded, join_log

ADAPTER = "ucm_of_some_engine"


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
    with caplog.at_level(logging.WARNING, logger="ucm_core"):
        said = [
            complaints.say("disk", "no space"),
            complaints.say("disk", "no space"),
            complaints.say("net", "down"),
        ]
        now[0] = 61.0
        said.append(complaints.say("disk", "no space"))
    assert said == [True, False, True, True]
    assert "1 more of this kind" in caplog.records[-1].message


# -- what is logged is read where the engine's own lines are


def loggers_not_set_up(monkeypatch: pytest.MonkeyPatch) -> list[logging.Logger]:
    """The packages' loggers as an engine finds them; for a test to call, the test runner sets them up."""
    loggers = [logging.getLogger(name) for name in ("ucm_core", ADAPTER)]
    for logger in loggers:
        for name, value in (("propagate", False), ("handlers", []), ("level", logging.NOTSET)):
            monkeypatch.setattr(logger, name, value)
    return loggers


def test_lines_go_where_the_engine_s_go(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    engine = logging.getLogger("test_engine")
    engine.setLevel(logging.INFO)
    engine.addHandler(logging.StreamHandler(written))
    loggers_not_set_up(monkeypatch)
    for _ in range(2):  # both halves may live in one process
        join_log("test_engine", adapter=ADAPTER)
    logging.getLogger("ucm_core.store.root").info("a root")
    logging.getLogger(ADAPTER).debug("too small to tell")
    assert written.getvalue() == "a root\n"


def test_loggers_that_were_set_up_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    loggers, mine = loggers_not_set_up(monkeypatch), logging.NullHandler()
    for logger in loggers:
        logger.addHandler(mine)
    logging.getLogger("test_engine").addHandler(logging.NullHandler())
    join_log("test_engine", adapter=ADAPTER)
    assert [logger.handlers for logger in loggers] == [[mine], [mine]]

"""The file that a long run leaves."""

from __future__ import annotations

import last_long


def test_a_long_run_says_how_many_processes_died_and_where() -> None:
    reports = {
        "save": {"struck": {"call.open": 1000, "ring.claim": 34}},
        "load": {"struck": {"call.read": 5}},
    }
    text = last_long.LongRun("79 passed", took_s=1230.0, reports=reports).text("abc")
    assert "took     20 minutes" in text
    assert "commit   abc\n" in text
    assert "pytest   79 passed\n" in text
    assert "  1,039 processes died" in text
    assert "  1,034 save\n      5 load\n" in text

"""The `ledger` cases of the public failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

CASES = json.loads((Path(__file__).parents[1] / "data" / "cases-ledger.json").read_text())["cases"]


def ledger_cases(form: str) -> list[Any]:
    chosen = [case for case in CASES if case["input"]["form"] == form]
    return [pytest.param(case["input"], case["expected"], id=case["id"]) for case in chosen]

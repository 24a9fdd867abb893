"""The measures themselves: a bar that cannot be crossed is no bar."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import measure

SAMPLE = '''"""Module."""
import os


class Box:
    """A class."""

    def put(self, a, b, *, c, **rest):
        """Put."""
        # why
        if a and b:

            return [x for x in c if x]
        return """two
lines"""


def plain(): return os
'''


@pytest.fixture
def sample(tmp_path: Path) -> measure.Module:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLE)
    return measure.parse(path)


def test_code_lines_leave_out_docstrings_comments_and_blanks(sample: measure.Module) -> None:
    assert sample.code_lines == {2, 5, 8, 11, 13, 14, 15, 18}


def test_function_measures(sample: measure.Module) -> None:
    put, plain = sample.functions()
    assert put == measure.Function("Box.put", lines=5, complexity=5, positional=2, parameters=4)
    assert plain == measure.Function("plain", lines=1, complexity=1, positional=0, parameters=0)


def test_a_nested_function_does_not_count_for_the_outer_one() -> None:
    outer = ast.parse("def f():\n    def g(x):\n        return 1 if x else 2\n    return g").body[0]
    assert isinstance(outer, ast.FunctionDef)
    assert [name for name, _ in measure.named_nodes(ast.Module([outer], []))] == ["f", "f.g"]


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([], 0.95, 0), ([7], 0.95, 7), (list(range(1, 101)), 0.95, 95), ([3, 1, 2], 0.5, 2)],
)
def test_percentile(values: list[int], share: float, expected: int) -> None:
    assert measure.percentile(values, share) == expected


@pytest.mark.parametrize(
    ("name", "public"), [("", True), ("A.b", True), ("_a", False), ("A._b", False), ("A.__init__", False)]
)
def test_public_names(name: str, public: bool) -> None:
    assert measure.is_public(name) is public

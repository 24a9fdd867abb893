"""Counters only grow, are all told in the operator's page, and have few series (C-68)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from repository import ROOT, source_files

NAMED = {"self._tiers.row", "tiers.row", "tier", "reason", "order.operation", "operation", "where"}
NAMED |= {"counted_under", "outcome.value"}
"""Label values that are no literals: a row of the table, a parameter whose callers are in `BORDERS`, the
labels under which another process counted, or one of an enumeration."""
LABELS = {"row", "tier", "operation", "reason", "where", "when", "result"}
BORDERS = {"guarded", "failed", "border.failed", "count_failures", "self._remove"}


def definitions() -> list[ast.Call]:
    """What the module of counters assigns, from its source: this room has no package built."""
    source = (ROOT / "packages/ucm-core/src/ucm_core/ops/metrics.py").read_text(encoding="utf-8")
    values = [node.value for node in ast.parse(source).body if isinstance(node, ast.Assign)]
    return [value for value in values if isinstance(value, ast.Call)]


def made_by(kind: str) -> list[ast.Call]:
    """Those of one class of the library."""
    return [call for call in definitions() if ast.unparse(call.func) == kind]


def counters() -> list[tuple[str, list[str]]]:
    """Name and labels of each counter."""
    arguments = [[ast.literal_eval(argument) for argument in call.args] for call in made_by("Counter")]
    return [(name, labels[0] if labels else []) for name, _, *labels in arguments]


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Every call in the packages' sources, by the text of what is called."""
    for path in source_files():
        for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                yield ast.unparse(node.func), node


def test_everything_in_the_module_is_a_counter_or_a_time_of_ours() -> None:
    assert {ast.unparse(call.func) for call in definitions()} == {"Counter", "Histogram"}
    times = [ast.literal_eval(call.args[0]) for call in made_by("Histogram")]
    assert all(re.fullmatch(r"ucm_\w+_seconds", name) for name in times)
    names = [name for name, _ in counters()]
    assert len(names) >= 7
    assert all(re.fullmatch(r"ucm_\w+_total", name) for name in names)
    assert len(set(names)) == len(names)


def test_labels_are_few_and_known() -> None:
    labels = [labels for _, labels in counters()]
    assert max(map(len, labels)) <= 2
    assert {name for names in labels for name in names} == LABELS


def test_the_operators_page_names_each_counter_with_its_labels_and_no_other() -> None:
    page = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
    told = set(re.findall(r"`(ucm_\w+_total)(?:\{([\w,]+)\})?` \|", page))
    assert told == {(name, ",".join(labels)) for name, labels in counters()}


def test_nothing_is_done_to_a_counter_but_to_raise_it() -> None:
    uses = {text.removeprefix("metrics.") for text, _ in calls() if text.startswith("metrics.")}
    allowed = re.compile(r"[A-Z_]+\.(inc|observe|labels|labels\(.*\)\.inc)")
    assert len(uses) > 10
    assert [use for use in uses if not allowed.fullmatch(use)] == []


def test_nothing_negative_is_added() -> None:
    added = [ast.unparse(arg) for text, call in calls() if text.endswith(".inc") for arg in call.args]
    assert added
    assert [text for text in added if re.search(r"(^|[^\w)\]])-", text)] == []


def test_label_values_are_literals_or_bounded_names() -> None:
    values = [word.value for text, call in calls() if text.endswith(".labels") for word in call.keywords]
    loose = [value for value in values if not isinstance(value, ast.Constant)]
    assert {ast.unparse(value) for value in loose} <= NAMED


def test_who_names_a_border_or_a_cause_does_it_by_a_literal() -> None:
    found = [(text, call.args) for text, call in calls() if text in BORDERS]
    assert len(found) > 10
    named = [
        (text, args)
        for text, args in found
        if any(isinstance(arg, ast.Constant) or ast.unparse(arg) in NAMED for arg in args)
    ]
    assert named == found

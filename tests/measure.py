"""What the bar of the house measures in Python files: code lines, branches, parameters."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | FunctionNode

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
_BRANCHES = (
    ast.If,
    ast.IfExp,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.comprehension,
    ast.match_case,
)


@dataclass(frozen=True, slots=True)
class Function:
    """One function or method: its dotted name in the module, and its measures."""

    name: str
    lines: int
    """Code lines of the body, plus one for the signature; no docstring, comment or blank line."""
    complexity: int
    """1 + branches (cyclomatic); nested functions are measured on their own."""
    positional: int
    """Parameters that can be passed by position, without self and cls."""
    parameters: int
    """All parameters, without self and cls."""


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed Python file."""

    path: Path
    tree: ast.Module
    code_lines: frozenset[int]
    """Line numbers that hold code: no blank lines, comments or docstrings."""

    def functions(self) -> Iterator[Function]:
        """Every function of the module, nested ones and methods included."""
        for name, node in named_nodes(self.tree):
            if isinstance(node, FunctionNode):
                yield _measure(name, node, self.code_lines)


def parse(path: Path) -> Module:
    """Read one Python file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return Module(path, tree, frozenset(_code_lines(text) - _docstring_lines(tree)))


def named_nodes(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.ClassDef | FunctionNode]]:
    """Classes and functions at any depth, with their dotted names, outermost first."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.ClassDef | FunctionNode):
            yield prefix + child.name, child
            yield from named_nodes(child, f"{prefix}{child.name}.")
        else:
            yield from named_nodes(child, prefix)


def is_public(name: str) -> bool:
    """Whether no part of a dotted name starts with an underscore."""
    return not any(part.startswith("_") for part in name.split("."))


def percentile(values: list[int], share: float) -> int:
    """The smallest value that at least `share` of the values do not exceed; 0 when there are none."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)] if ordered else 0


def _code_lines(text: str) -> set[int]:
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines


def _docstring_lines(tree: ast.Module) -> set[int]:
    # A string that stands alone is a docstring, of a module, class, function or (below it) of a field.
    lines: set[int] = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def _measure(name: str, node: FunctionNode, code_lines: frozenset[int]) -> Function:
    begin, end = node.body[0].lineno, (node.end_lineno or node.lineno) + 1
    positional = [*node.args.posonlyargs, *node.args.args]
    if positional and positional[0].arg in {"self", "cls"}:
        positional = positional[1:]
    stars = [star for star in (node.args.vararg, node.args.kwarg) if star]
    return Function(
        name=name,
        lines=1 + sum(1 for line in range(max(begin, node.lineno + 1), end) if line in code_lines),
        complexity=1 + sum(_branches(child) for child in node.body),
        positional=len(positional),
        parameters=len(positional) + len(node.args.kwonlyargs) + len(stars),
    )


def _branches(node: ast.AST) -> int:
    if isinstance(node, ast.ClassDef | FunctionNode):
        return 0
    own = int(isinstance(node, _BRANCHES))
    if isinstance(node, ast.BoolOp):
        own = len(node.values) - 1
    if isinstance(node, ast.comprehension):
        own += len(node.ifs)
    return own + sum(_branches(child) for child in ast.iter_child_nodes(node))

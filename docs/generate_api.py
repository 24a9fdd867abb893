"""Write docs/api.md: the public surface of ucm_core, from `__all__`, signatures and docstrings.

Read from the source, not from an import, so it needs neither a compiler nor an installed package.
`python docs/generate_api.py` writes the file; with `--check` its exit status says whether it is current.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "packages/ucm-core/src"
TARGET = ROOT / "docs/api.md"
HEADER = """# The public surface of ucm_core

Made by `docs/generate_api.py` from `ucm_core.__all__` and the docstrings; change it there.
Import every name from `ucm_core` (the examples leave it out); a heading says only where it is defined.
Everything else in the package may change without notice.

Users of the facade need `Cache`, `CacheConfig`, `canonical_table`, and `ModelIdentity` or `read_model`;
the rest is for engine adapters.
"""

Definition = ast.ClassDef | ast.FunctionDef


def main(arguments: list[str]) -> int:
    """Write or check the file; 0 when it is (now) current."""
    text = render()
    if "--check" not in arguments:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    current = TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text
    if not current:
        sys.stderr.write("docs/api.md is not current: run python docs/generate_api.py\n")
    return 0 if current else 1


def render() -> str:
    """The whole document."""
    package = _parse("ucm_core")
    homes = _imports(package)
    by_module: dict[str, list[str]] = {}
    for name in _public_names(package):
        by_module.setdefault(_home(name, homes[name]), []).append(name)
    parts = [HEADER]
    for module, names in by_module.items():
        definitions = _definitions(_parse(module))
        parts.append(f"## {module}\n")
        parts.extend(_describe(definitions[name]) for name in names)
    return "\n".join(parts)


def _home(name: str, module: str) -> str:
    """The module that defines ``name``; ``module`` may take it from there."""
    tree = _parse(module)
    return module if name in _definitions(tree) else _home(name, _imports(tree)[name])


def _parse(module: str) -> ast.Module:
    path = SOURCE / module.replace(".", "/")
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _public_names(package: ast.Module) -> list[str]:
    for node in package.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
                names: list[str] = ast.literal_eval(node.value)
                return names
    raise SystemExit("ucm_core has no literal __all__")


def _imports(package: ast.Module) -> dict[str, str]:
    """Where each re-exported name is defined."""
    return {
        alias.asname or alias.name: f"ucm_core.{node.module}" if node.level else str(node.module)
        for node in package.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }


def _definitions(tree: ast.Module) -> dict[str, Definition]:
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def _describe(node: Definition) -> str:
    lines = [f"### {node.name}\n", "```python", *_signature(node), "```\n"]
    lines.extend(_docstring(node))
    if isinstance(node, ast.ClassDef):
        for member, after in itertools.zip_longest(node.body, node.body[1:]):
            lines.extend(_member(member))
            lines.extend(_field(member, after))
    return "\n".join(lines)


def _signature(node: Definition) -> Iterator[str]:
    if isinstance(node, ast.FunctionDef):
        result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
        yield f"{node.name}({ast.unparse(node.args)}){result}"
        return
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    yield f"class {node.name}({bases})" if bases else f"class {node.name}"
    for member in node.body:
        if isinstance(member, ast.AnnAssign | ast.Assign) and not ast.unparse(member).startswith("_"):
            yield f"    {ast.unparse(member)}"
        elif isinstance(member, ast.FunctionDef) and member.name == "__init__":
            yield f"    {next(_signature(member))}"


def _member(node: ast.stmt) -> Iterator[str]:
    if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
        return
    if any(ast.unparse(decorator).endswith((".setter", "overload")) for decorator in node.decorator_list):
        return
    is_property = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
    yield f"**`{node.name}`**\n" if is_property else f"**`{next(_signature(node))}`**\n"
    yield from _docstring(node)


def _field(node: ast.stmt, after: ast.stmt | None) -> Iterator[str]:
    """A field and the text under it."""
    if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(after, ast.Expr):
        name = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        yield f"**`{name}`**: {inspect.cleandoc(ast.literal_eval(after.value))}\n"


def _docstring(node: Definition) -> Iterator[str]:
    text = ast.get_docstring(node)
    if text:
        yield from _fenced(inspect.cleandoc(text))
        yield ""


def _fenced(text: str) -> Iterator[str]:
    """Markdown of a docstring: examples in fences, the rest as it is."""
    inside = False
    for line in text.splitlines():
        begins = line.startswith(">>> ") and not inside
        ends = inside and not line.strip()
        if begins or ends:
            yield "```python" if begins else "```"
            inside = begins
        yield line
    if inside:
        yield "```"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

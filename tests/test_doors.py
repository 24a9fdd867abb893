"""Nothing executable is ever parsed, nothing is started, nothing listens (C-70): a search of all sources."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from repository import ROOT, committable, is_native, python_files

MODULES = {
    "objects that run when they are read": {
        *("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"),
        *("code", "codeop", "runpy", "xml", "plistlib"),
    },
    "processes": {"subprocess", "pty", "multiprocessing"},
    "doors to the network": {
        "socket",
        "socketserver",
        "http",
        "asyncio",
        "ssl",
        "xmlrpc",
        "urllib",
        "ftplib",
    },
}
CALLS = {
    *("eval", "exec", "compile", "__import__", "builtins.eval", "builtins.exec"),
    *("os.system", "os.popen", "os.startfile", "os.posix_spawn", "os.fork"),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "yaml.full_load_all"),
    *("torch.load", "np.load", "numpy.load", "np.memmap", "ctypes.CDLL", "ctypes.cdll.LoadLibrary"),
}
PATTERNS = re.compile(r"os\.(exec|spawn)\w+")
WORDS = {"shell", "allow_pickle"}
NATIVE = re.compile(r"\b(system|popen|dlopen|execv\w*|execl\w*|posix_spawn\w*|fork|socket|listen)\s*\(")


def faults(source: str) -> Iterator[str]:
    """What in a source could run or let in what comes from outside."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node)
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            keywords = {word.arg: ast.unparse(word.value) for word in node.keywords if word.arg}
            if (text in CALLS or PATTERNS.fullmatch(text)) and keywords.get("weights_only") != "True":
                yield text
            yield from WORDS & keywords.keys()


def imported(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Forbidden modules, and forbidden functions that an import would hide behind a plain name."""
    names = [alias.name for alias in node.names]
    module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
    roots = {module.partition(".")[0]} if module else {name.partition(".")[0] for name in names}
    yield from (name for modules in MODULES.values() for name in roots & modules)
    yield from (f"{module}.{name}" for name in names if f"{module}.{name}" in CALLS)


PACKAGED = [path for path in python_files() if "src" in path.parts]


def test_no_source_of_any_package_opens_a_door() -> None:
    assert len(PACKAGED) > 60
    found = {str(path): list(faults((ROOT / path).read_text(encoding="utf-8"))) for path in PACKAGED}
    assert {path: what for path, what in found.items() if what} == {}


def test_the_native_sources_start_nothing_and_load_nothing() -> None:
    sources = [path for path in committable() if is_native(path)]
    found = {str(path): NATIVE.findall((ROOT / path).read_text(encoding="utf-8")) for path in sources}
    assert sources
    assert {path: what for path, what in found.items() if what and not path.endswith("stress.cc")} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "from torch import load",
        "from yaml import unsafe_load as load",
        "import marshal as m",
        "import shelve",
        "import http.server",
        "from multiprocessing import Pool",
        "import socket",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "f(path, allow_pickle=True)",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "os.system(text)",
        "os.execvp(text, [])",
        "run(text, shell=True)",
    ],
)
def test_the_search_finds(source: str) -> None:
    assert list(faults(source))


@pytest.mark.parametrize(
    "source",
    ["torch.load(path, weights_only=True)", "yaml.safe_load(text)", "re.compile(text)", "model.eval()"],
)
def test_the_search_passes(source: str) -> None:
    assert list(faults(source)) == []

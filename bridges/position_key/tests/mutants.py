"""Shows that the suite would notice a wrong translation: `tox -e bridge` runs it after the tests.

Each mistake is planted in a copy of the package, alone, and the tests named with it must fail; on a copy
without one they must pass. Exit status 1: one was not noticed, or could not be tried.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

# What all trials need, imported once: each runs in a fork. The bridge itself comes from the copy.
import _hypothesis_pytestplugin  # noqa: F401
import hypothesis.stateful
import pytest
import pytest_timeout  # noqa: F401

import ucm_core.testing.memory_store  # noqa: F401

# Whether there is a failure is asked, not which is the smallest; never whether chance would find it.
hypothesis.settings.register_profile("mistakes", deadline=None, phases=[hypothesis.Phase.explicit])

TESTS = Path(__file__).parent
PASSED, FAILED, NOT_THE_COPY = 0, 1, 99

NODES, PATHS, POOLS, SAVES = "test_nodes.py", "test_paths.py", "test_pools.py", "test_saves.py"
GOLDEN = PATHS + "::test_page_hashes_are_those_of_the_contract"
CORE = "test_with_the_core.py"

# By module: what is wrong, text that it has exactly once, what takes its place, who notices.
MISTAKES: dict[str, list[tuple[str, str, str, str]]] = {
    "nodes.py": [
        (
            "the upper half gets no grain",
            "node, upper)\n        self._nodes[node]",
            "node, node)\n        self._nodes[node]",
            NODES,
        ),
        (
            "the upper half takes the state",
            "component is not Component.MAMBA\n        }",
            "component is not None\n        }",
            NODES,
        ),
        (
            "the upper half gets what the lower has",
            "self._held_in(old, above)",
            "self._held_in(old, below)",
            NODES,
        ),
        ("the lower half keeps all digests", "old.digests[cut:]", "old.digests", NODES),
        ("a split counts no child", "held_above, children=1)", "held_above)", NODES),
        ("a leaf is not counted", "self._count_child(parent, +1)", "self._count_child(parent, 0)", NODES),
        (
            "what left stays in the index",
            "self._grain_tokens), node)",
            "self._grain_tokens), node, node)",
            NODES,
        ),
        (
            "a block by its first grain",
            "end // self._grain_tokens - 1 for",
            "(end - row.block_tokens) // self._grain_tokens for",
            NODES,
        ),
        ("a part of a block is enough", "return all(", "return any(", NODES),
        (
            "a state off its grid",
            "math.lcm(row.block_tokens, self._grain_tokens)",
            "self._grain_tokens",
            NODES,
        ),
        ("a name is enough", ".startswith(digest)", ".startswith(digest[:NAME_BYTES])", NODES),
        ("a block ends at every grain", "if not nodes or end % row.block_tokens:", "if not nodes:", NODES),
        ("the last sibling takes a grain", "(*others, node)", "(node,)", NODES),
        (
            "the first sibling answers",
            "next((node for node in nodes if self._holds(node, row, end)), nodes[0])",
            "nodes[0]",
            NODES,
        ),
        ("a state in the midst of a node", " and end == self._nodes[node].span.end", "", NODES),
        (
            "a lost object is forgotten by nobody",
            "self._keys(node, row, self._ends(row, self._node(node).span))",
            "self.objects(node, row_name)",
            NODES,
        ),
    ],
    "paths.py": [
        ("pairs side by side", "np.repeat(ids, 2)[1:-1]", "ids", GOLDEN),
        (
            "a grain of ids",
            "grain_tokens=grain_tokens * view.ids_per_position",
            "grain_tokens=grain_tokens",
            GOLDEN,
        ),
        ("forget the salt", "PrefixChain(identity,", "PrefixChain(None,", GOLDEN),
        ("a first token for ever", "self._first = self._first[:token_count]", "pass", PATHS),
        (
            "pairs in the model's own namespace",
            "if self is KeyView.PLAIN:\n            return model",
            "if self:\n            return model",
            CORE,
        ),
        (
            "take what begins as a hash",
            "_PAGE_HASH.fullmatch",
            "_PAGE_HASH.match",
            PATHS + "::test_what_is_no_page_hash_is_refused_by_its_number",
        ),
    ],
    "pools.py": [
        ("a follower has names of its own", "row.follows or row.name", "row.name", CORE),
        (
            "rows are not told apart",
            "row_seed(namespace, row.follows or row.name)",
            'row_seed(namespace, "full")',
            POOLS,
        ),
        (
            "the namespace without the view",
            "namespace = self.identity.digest",
            "namespace = model.digest",
            CORE,
        ),
        (
            "the identity without the view",
            "self.identity = view.identity_of(model)",
            "self.identity = model",
            CORE,
        ),
        ("unknown weights have keys", "if not self.identity.known:", "if False:", POOLS),
        (
            "a side-car is there by itself",
            "return pool if pool.source is None else self._by_name[pool.source]",
            "return pool",
            POOLS,
        ),
        (
            "shards by layer",
            "UnitKey(key, segment, shards[layer])",
            "UnitKey(key, segment, shards[layer] and layer)",
            POOLS,
        ),
        ("any pool holds any row", "if row.kind is not _KINDS[pool.component]:", "if False:", POOLS),
        ("a row in no pool", "        self._check_cover()\n", "", POOLS),
    ],
    "saves.py": [
        ("one unit is the object", "pending.missing - {unit}", "frozenset[UnitKey]()", SAVES),
        ("an answer of another job", " and pending.job == job.number", "", SAVES),
        (
            "failed is saved",
            "is not None:\n            self._end(unit.object)",
            "is not None:\n            self._saved.add(unit.object)\n            self._end(unit.object)",
            SAVES,
        ),
        ("saved for a node that left", "if pending.wanted:", "if pending:", SAVES),
        (
            "who comes back is not wanted",
            "wanted=True)\n            del",
            "wanted=False)\n            del",
            SAVES,
        ),
        ("save again", "if unit.object not in self._saved:", "if unit:", SAVES),
        ("jobs for ever", "            del self._jobs[number]", "            pass", SAVES),
    ],
    "spans.py": [
        (
            "a block belongs where it begins",
            "range(span.begin // block_tokens, span.end",
            "range(-(-span.begin // block_tokens), span.end",
            "test_spans.py",
        ),
        (
            "the last piece is a whole page",
            "min(span.end - page * page_tokens, page_tokens)",
            "page_tokens",
            "test_spans.py",
        ),
        (
            "a tail before its span",
            "max(span.begin, span.end // block_tokens * block_tokens)",
            "span.end // block_tokens * block_tokens",
            "test_spans.py",
        ),
    ],
    "radix_blocks.py": [
        ("page 0 is none", "if page >= 0:", "if page > 0:", "test_radix_blocks.py"),
        (
            "two tenants on one path",
            "if before.identity != after.identity:",
            "if False:",
            "test_radix_blocks.py",
        ),
        (
            "blocks without their salt",
            "blocks[0].identity if blocks else None",
            "None",
            "test_radix_blocks.py",
        ),
        (
            "a short block in the midst",
            "tokens_per_block if number + 1 < len(blocks) else 1",
            "1",
            "test_radix_blocks.py",
        ),
    ],
}


def copied(folder: Path) -> Path:
    """Copy the installed package, which is not imported here."""
    (origin,) = find_spec("ucm_position_key").submodule_search_locations
    return Path(shutil.copytree(origin, folder / "ucm_position_key", ignore=shutil.ignore_patterns("*.pyc")))


def run_tests(folder: Path, tests: list[str]) -> None:
    """Test the copy in ``folder``; the exit status is pytest's, what it wrote is in ``said``."""
    sys.path[:0] = [str(folder)]
    sys.dont_write_bytecode = True
    os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder)
    with (folder / "said").open("w") as said, contextlib.redirect_stdout(said):
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mistakes"]
        status = pytest.main([*options, *(str(TESTS / test) for test in tests)])
    tested = Path(sys.modules["ucm_position_key"].__file__)
    sys.exit(int(status) if tested.is_relative_to(folder) else NOT_THE_COPY)


def tried(tests: list[str], module: str = "__init__.py", old: str = "", new: str = "") -> tuple[int, str]:
    """Exit status of the tests on a copy with ``new`` for ``old``, and the first test that failed."""
    with tempfile.TemporaryDirectory() as folder:
        path = copied(Path(folder)) / module
        text = path.read_text(encoding="utf-8")
        assert not old or text.count(old) == 1, f"{old!r} is {text.count(old)} times in {module}"
        path.write_text(text.replace(old, new) if old else text, encoding="utf-8")
        trial = multiprocessing.get_context("fork").Process(target=run_tests, args=(Path(folder), tests))
        trial.start()
        trial.join()
        failed = re.search(
            r"^(?:FAILED|ERROR) (?:.*/)?(\S+)", (Path(folder) / "said").read_text(), re.MULTILINE
        )
        return trial.exitcode, failed[1] if failed else ""


def main() -> int:
    planted = [(module, *mistake) for module, mistakes in MISTAKES.items() for mistake in mistakes]
    status, failed = tried(sorted({tests for *_, tests in planted}))
    if status != PASSED:
        sys.stdout.write(f"unchanged sources: pytest ended with {status} {failed}; nothing was tried\n")
        return 1
    gc.freeze()  # what is imported is there for good: no trial needs to look at it
    missed = 0
    for module, name, old, new, tests in planted:
        status, failed = tried([tests], module, old, new)
        missed += status != FAILED
        sys.stdout.write(f"{name:40} {f'caught by {failed}' if status == FAILED else f'MISSED ({status})'}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(planted)} mistakes, {missed} not caught\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Shows that the suite would notice a wrong hit: `tox -e mutants`.

Each mutation is applied to a copy of the package, alone, and the tests named with it must fail; on a copy
without a mutation they must pass. Names of mutations as arguments run only those. Exit status 1: one
survived, or could not be tried.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mutations_given_up import GIVEN_UP

import ucm_core

TESTS = Path(__file__).parent
PACKAGE = Path(ucm_core.__file__).parent
# What pytest exits with: anything else than these two means that the tests did not run.
PASSED, FAILED = 0, 1

WINDOWS = "coordinator/test_coverage.py::test_a_window_touches_exactly_the_blocks_of_its_tokens"
CASES = "coordinator/test_cases.py"
TRIED = "coordinator/test_brute_force.py::test_verdicts_are_those_of_trying_every_token[0]"
AFTER = "coordinator/test_brute_force.py::test_clamps_and_rewinds_are_those_of_trying_every_token[0]"
FOLLOWER_RULE = "coordinator/test_boundaries.py::test_a_follower_combines_as_its_source_does"
FOLLOWER_REACH = "coordinator/test_boundaries.py::test_a_follower_of_a_row_that_needs_nothing_needs_nothing"
SLICES = "coordinator/test_boundaries.py::test_slices_of_the_model_are_always_anded"
OFF_GRID = "coordinator/test_boundaries.py::test_a_state_off_its_grid_is_no_point"
REWIND = "coordinator/test_boundaries.py::test_a_rewind_avoids_what_a_follower_lacks"
NOT_DEEPER = "coordinator/test_boundaries.py::test_a_rewind_never_goes_deeper_than_the_hit"
SENSELESS = "coordinator/test_senseless.py"
TO_LOAD = "coordinator/test_coordinator.py::TestWhatToLoad"
FAILURES = "coordinator/test_coordinator.py::TestFailures"
LATE = "coordinator/test_coordinator.py::TestAnswersOnTheirWay"
LEASES, COMPLETIONS = "coordinator/test_leases.py", "coordinator/test_completions.py"
RETENTION = "coordinator/test_retention.py"
PIPELINE = "flow/test_pipeline.py::"
LOADS, SAVES, SHARED = PIPELINE + "TestLoads", PIPELINE + "TestSaves", PIPELINE + "TestSharedTensors"
MEMORY = "flow/test_loads_in_memory.py"
HOOKLESS, QUEUES = PIPELINE + "TestHooksThatDoNotCome", PIPELINE + "TestQueues"
DUE = "flow/test_lookahead.py::test_due_is_what_an_oracle_says"
JOINED = "flow/test_lookahead.py::test_neighbours_are_joined_as_an_oracle_says"
DEPTH = "flow/test_lookahead.py::test_as_many_layers_as_a_load_takes"
KEYS, ALL_KEYS, IDENTITY = "test_keys_cases.py", "test_keys.py", "test_identity.py"

# Wrong edits of more than a word.
MIN_OF_MAXIMA = """each = ([row] for row in [*chains, *states])
    served_by = [joint(table, known, candidates=candidates, rows=row) for row in each]
    resume = min(deepest(candidates, legal) for legal in served_by)"""
UNCHECKED_BY_CHAINS = "by_all = (candidates <= deepest(candidates, by_chains)) &"
ASK_FOLLOWERS_AT_LOAD = "cached_rows(self.table), cap=verdict.hit)\n\n    def rewind"
ASK_VOTERS_AT_LOAD = "voters(self.table), cap=verdict.hit)\n\n    def rewind"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong edit, and the tests that must notice it."""

    name: str
    module: str
    """Path below the package."""
    old: str
    """Text that the module has exactly once."""
    new: str
    tests: tuple[str, ...]

    def apply(self, package: Path) -> None:
        """Edit the copy."""
        path = package / self.module
        text = path.read_text(encoding="utf-8")
        assert text.count(self.old) == 1, f"{self.name}: {text.count(self.old)} times in {self.module}"
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


# By module: what is wrong, the text, what takes its place, the tests that notice.
MUTATIONS: dict[str, list[tuple[str, str, str, tuple[str, ...]]]] = {
    "coordinator/coverage.py": [
        ("forget the extra tokens", "row.window - 1 + row.extra", "row.window - 1", (WINDOWS,)),
        ("a window too short", "row.window - 1 + row.extra", "row.window - 2 + row.extra", (WINDOWS,)),
        (
            "a window from the next block edge",
            "first // row.",
            "-(-first // row.block_tokens) + 0 * row.",
            (WINDOWS,),
        ),
        (
            "round the last block down",
            "-(-boundaries // row.block_tokens)",
            "boundaries // row.block_tokens",
            (WINDOWS,),
        ),
        (
            "a full row needs its end only",
            "return np.zeros_like(end), end",
            "return end - 1, end",
            (CASES,),
        ),
        (
            "forget the adapter's alignment",
            "alignment_of((table.alignment_tokens, align_tokens))",
            "table.alignment_tokens",
            (CASES,),
        ),
        (
            "a follower decides for itself",
            "return row if row.follows is None else table.row(row.follows)",
            "return row",
            (AFTER,),
        ),
    ],
    "coordinator/presence.py": [
        ("swap the rank rules", "return _any_of if rule", "return _all_of if rule", (CASES,)),
        ("any rank is enough", "else _all_of", "else _any_of", (CASES,)),
        (
            "a follower has a rank rule of its own",
            "voter(table, row).rank_rule",
            "row.rank_rule",
            (FOLLOWER_RULE,),
        ),
        ("any stage is enough", "{name: _all_of([piece[name]", "{name: _any_of([piece[name]", (SLICES,)),
        (
            "what a rank does not mention is there",
            "padded = np.zeros(",
            "padded = np.ones(",
            (CASES,),
        ),
        ("a failed block stays", "< len(blocks)]] = False", "< len(blocks)]] = True", (CASES,)),
        ("a failed state stays", "presence.positions - frozenset(units)", "presence.positions", (CASES,)),
    ],
    "coordinator/boundaries.py": [
        (
            "ignore holes",
            'blocks.tobytes().find(b"\\0") % (len(blocks) + 1)',
            "len(blocks)",
            (CASES,),
        ),
        ("ignore holes of windows", "(inside & (absent == 0))", "inside", (CASES,)),
        (
            "one block more than there is",
            "candidates <= prefix_blocks(blocks) * row.block_tokens",
            "candidates <= (prefix_blocks(blocks) + 1) * row.block_tokens",
            (CASES,),
        ),
        (
            "the shallowest instead of the deepest",
            "legal.tobytes().rfind(",
            "legal.tobytes().find(",
            (CASES,),
        ),
        (
            "round a state to the next boundary",
            "legal[nearest[candidates[nearest] == held]]",
            "legal[nearest]",
            (CASES,),
        ),
        ("a state off its grid", "held[held % row.block_tokens == 0]", "held[held > 0]", (OFF_GRID,)),
        ("the last row decides", "legal &= served(", "legal = served(", (CASES,)),
        ("any row is enough", "legal &= served(", "legal |= served(", (CASES,)),
        ("take negative numbers", "if least <= count <= MAX_NUMBER", "if count <= MAX_NUMBER", (SENSELESS,)),
        ("take any length", "if least <= count <= MAX_NUMBER", "if least <= count", (SENSELESS,)),
        ("a reach of its own for a follower", "reach(voter(table, row),", "reach(row,", (FOLLOWER_REACH,)),
    ],
    "coordinator/resolve.py": [
        ("forget the tail", "self.request_tokens - self.tail_tokens", "self.request_tokens", (CASES,)),
        ("leave one token more", "- self.tail_tokens)", "- self.tail_tokens - 1)", (CASES,)),
        (
            "the smaller of the deepest points",
            "resume = deepest(candidates, by_all)",
            MIN_OF_MAXIMA,
            (CASES,),
        ),
        ("no second look at the windows", "by_all = by_chains &", UNCHECKED_BY_CHAINS, (TRIED,)),
        (
            "states have no say",
            "by_chains & joint(table, known, candidates=candidates, rows=states)",
            "by_chains.copy()",
            (CASES,),
        ),
        (
            "followers do not clamp",
            "at_load.get(row.name, ABSENT)",
            "Presence(np.ones(2**16, np.bool_))",
            (CASES,),
        ),
        (
            "believe the lookup about a follower",
            "at_load.get(row.name, ABSENT)",
            "presence.get(row.name, ABSENT)",
            (CASES,),
        ),
        ("a rewind past the hit", "by_all &= candidates <= cap.resume_tokens", "pass", (NOT_DEEPER,)),
        ("forget what failed", "units=gone", "units=[]", (CASES,)),
        (
            "a rewind forgets what followers lack",
            "{**promised, **presence}",
            "{**presence, **promised}",
            (REWIND,),
        ),
        (
            "a block that is local in part",
            "local // row.block_tokens",
            "-(-local // row.block_tokens)",
            (CASES,),
        ),
        ("count local tokens as gained", "max(0, resume - ask.local_tokens)", "resume", (CASES,)),
    ],
    "coordinator/coordinator.py": [
        ("believe the directory", "if not self._confirmed(chain, hit):", "if False:", (FAILURES,)),
        ("a load does not ask the followers", ASK_FOLLOWERS_AT_LOAD, ASK_VOTERS_AT_LOAD, (TO_LOAD,)),
    ],
    "coordinator/leases.py": [
        (
            "a late end takes the next lease",
            "held is None or lease not in {None, held}",
            "held is None",
            (LEASES,),
        ),
        ("leases without a bound", "part[:room]", "part", (LEASES,)),
        ("leases for ever", ".until <= now", ".until < 0", (LEASES,)),
        ("a replaced lease stays", 'self._strike(old, "replaced", afterwards)', "pass", (LEASES,)),
        (
            "release before the new one is pinned",
            "afterwards.callback(_let_go, pins)",
            "_let_go(pins)",
            (LEASES,),
        ),
        ("pin after close", "{} if self._closed else keys", "keys", (LEASES,)),
    ],
    "coordinator/completions.py": [
        ("report before the last job", "if attempt not in self._jobs)", "if True)", (COMPLETIONS,)),
        ("report twice", "del self._promised[attempt]", "pass", (COMPLETIONS,)),
    ],
    "coordinator/lookups.py": [
        ("a late failure overrules a save", "self._saved.get(name, 0) > moment", "False", (LATE,)),
        (
            "a failure is overruled by an old save",
            "self._saved.get(name, 0) > moment",
            "name in self._saved",
            (LATE,),
        ),
    ],
    "coordinator/shelf.py": [
        ("trust what failed to load", "self.suspects.add(keys, moment=moment)", "pass", (FAILURES,))
    ],
    "coordinator/retention.py": [
        ("states off the joint boundaries", "position // step * step", "position", (RETENTION,)),
    ],
    "spec/keys.py": [
        (
            "forget the salt",
            "_part(self.extra_key) + _part(self.cache_salt)",
            "_part(self.extra_key)",
            (KEYS,),
        ),
        (
            "forget what is in an adapter",
            "[seed, self.lora.name, self.lora.digest]",
            "[seed, self.lora.name]",
            (KEYS,),
        ),
        (
            "forget where an image begins",
            'item.digest + struct.pack("<Q", offset)',
            "item.digest",
            (ALL_KEYS,),
        ),
        ("forget the namespace", "[namespace_digest, row_name]", "[row_name]", (ALL_KEYS,)),
        ("forget the row", "[namespace_digest, row_name]", "[namespace_digest]", (ALL_KEYS,)),
    ],
    "spec/identity.py": [
        ("unknown equals unknown", "self.known and other.known and self.digest", "self.digest", (IDENTITY,)),
    ],
    "flow/layers.py": [
        (
            "wait for what a tensor's first layer awaits only",
            "dict.fromkeys((*own, *_shards(units.await_before(layer), first, layer)))",
            "_shards(units.await_before(layer), first, layer)",
            (SHARED,),
        ),
    ],
    "flow/lookahead.py": [
        ("drop what a full queue has no room for", "and room > 0", "", (QUEUES, DUE)),
        ("the first layer waits for others", "return together if begin else 1", "return together", (JOINED,)),
        ("join what is waited for with what is not", "if urgent <= begin and", "if", (JOINED,)),
        ("an even depth for all", "max(LEAST_DEPTH, math.ceil(load_s / compute_s))", "LEAST_DEPTH", (DEPTH,)),
    ],
    "flow/step.py": [
        (
            "believe a load that nobody waited for",
            "            self._broken = True\n        if not self.done",
            "            pass\n        if not self.done",
            (HOOKLESS,),
        ),
        (
            "believe what landed too late",
            "        self._note(row, codes[:, number : number + 1])\n",
            "",
            (LOADS,),
        ),
        ("small in one row", "self.small &= handle.small", "self.small |= handle.small", (MEMORY,)),
        ("suit one row only", "min(self.together, handle.together)", "handle.together", (MEMORY,)),
        (
            "wait for a slow request in each layer",
            "0.0 if self._given_up else left_s()",
            "left_s()",
            (LOADS,),
        ),
        ("keep the first bytes of a shared tensor", "(*layer.finishes, *again)", "layer.finishes", (SHARED,)),
        (
            "forget what no hook saved",
            "late = self._submit(runs(self._missing | self._stale), ready)",
            "late = 0",
            (SAVES,),
        ),
        ("copy before the layer's event", "run.slice, ready=ready)", "run.slice, ready=None)", (SAVES,)),
    ],
    "flow/pipeline.py": [
        (
            "never wait earlier for a skipped layer",
            "while end in self._hookless:",
            "while False:",
            (HOOKLESS,),
        ),
        (
            "keep what was computed on a failed load",
            "            if save.request in given_up:\n",
            "            if False:\n",
            (SAVES,),
        ),
        ("at once for each of many", "if len(step.loads) == 1 and", "if", (MEMORY,)),
        (
            "always ready",
            "return all(load.landed(self._plan[position]) for load in mine)",
            "return True",
            ("flow/test_pipeline_times.py::test_one_slow_request_does_not_delay_what_another_is_ready_for",),
        ),
        (
            "wait before the next is submitted",
            "self._backlog(load, load.urgent + step.depth)",
            "self._backlog(load, load.urgent)",
            (LOADS,),
        ),
    ],
    **GIVEN_UP,
}
MUTANTS = tuple(
    Mutant(name, module, old, new, tests)
    for module, edits in MUTATIONS.items()
    for name, old, new, tests in edits
)


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one copy."""

    name: str
    status: int
    """Exit status of pytest."""
    noticed_by: str
    """The first test that failed."""
    seconds: float

    def line(self) -> str:
        known = {PASSED: "SURVIVED", FAILED: f"caught by {self.noticed_by}"}
        what = known.get(self.status, f"NOT TRIED, pytest ended with {self.status}")
        return f"{self.name:40} {self.seconds:5.1f} s  {what}"


def tried(name: str, tests: tuple[str, ...], mutant: Mutant | None = None) -> Trial:
    """Run ``tests`` on a copy of the package, which ``mutant`` has changed."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "ucm_core"
        shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant:
            mutant.apply(copy)
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "mutants"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        run = subprocess.run(
            command, cwd=TESTS, env=environment(folder), capture_output=True, text=True, timeout=600
        )
    failed = re.search(r"^(?:FAILED|ERROR) (?:.*/)?(\S+)", run.stdout, re.MULTILINE)
    return Trial(name, run.returncode, failed[1] if failed else "", time.monotonic() - begin)


def environment(folder: str) -> dict[str, str]:
    """The copy comes first on the path, and nothing is left behind in the tree."""
    path = os.pathsep.join([folder, str(TESTS), os.environ.get("PYTHONPATH", "")])
    made = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": folder}
    return {**os.environ, **made, "MUTATED": folder}


def pytest_configure() -> None:
    """Refuse, as a plugin of the run on a copy, to test anything but the copy."""
    assert PACKAGE.is_relative_to(os.environ["MUTATED"]), f"the tests would import {PACKAGE}"


def main(wanted: list[str]) -> int:
    """Try the unchanged sources and every mutation; two at a time, the machine has as many cores."""
    chosen = [mutant for mutant in MUTANTS if not wanted or mutant.name in wanted]
    if not chosen:
        sys.stdout.write("no mutation has such a name; nothing was tried\n")
        return 1
    every = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        without = pool.submit(tried, "unchanged", every)
        trials = pool.map(lambda mutant: tried(mutant.name, mutant.tests, mutant), chosen)
        unchanged = without.result()
        if unchanged.status != PASSED:
            pool.shutdown(wait=False, cancel_futures=True)
            sys.stdout.write(f"unchanged sources: {unchanged.line()}; nothing was shown\n")
            return 1
        for trial in trials:
            survivors += trial.status != FAILED
            sys.stdout.write(trial.line() + "\n")
            sys.stdout.flush()
    sys.stdout.write(f"{len(chosen)} mutations, {survivors} not caught\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

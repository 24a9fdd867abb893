"""Shows that the stress binary would notice wrong memory orders and moves of slots: `tox -e native-mutants`.

Each mutation is applied to a copy of the sources, alone; the stress binary, compiled under a sanitizer, must
fail on it, and pass without. Names of mutations as arguments run only those. Exit status 1: one survived, or
could not be tried.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

NATIVE = Path(__file__).parent
SECONDS = 15
"""How long a run may take to notice; most need one."""
PATIENCE_S = 45.0
"""What takes longer hangs, and is noticed by that."""
COMPILE = [os.environ.get("CXX", "c++"), "-std=c++17", "-O1", "-fno-omit-frame-pointer", "-pthread"]


@dataclass(frozen=True, slots=True)
class Run:
    """One way to run the stress binary."""

    sanitizer: str
    mode: str

    def command(self, binary: Path, seconds: int) -> list[str]:
        """TSan cannot map its shadow where the kernel spreads addresses widely: without randomisation."""
        prefix = ["setarch", "-R"] if self.sanitizer == "thread" else []
        return [*prefix, str(binary), self.mode, str(seconds)]


RACES = Run("thread", "threads")
DEATHS = Run("address", "processes")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong edit, and the run that must notice it."""

    name: str
    run: Run
    old: str
    """Text that all headers together have exactly once."""
    new: str = ""

    def apply(self, folder: Path) -> None:
        """Edit the copy."""
        (path,) = self.places(folder)
        path.write_text(path.read_text(encoding="utf-8").replace(self.old, self.new), encoding="utf-8")

    def places(self, folder: Path) -> list[Path]:
        """The headers that have the text, each as often as it has it."""
        headers = sorted(folder.glob("*.hpp"))
        return [path for path in headers for _ in range(path.read_text(encoding="utf-8").count(self.old))]


SETTLE = "target.word.compare_exchange_weak(seen.bits, seen.moved(to).bits"
SET_SHARD = "compare_exchange_weak(seen, seen | mask(i, begin, end)"
RELEASE = "held - 1, std::memory_order_release"
WAIT = "Word seen{word.load(std::memory_order_acquire)};"
REOPEN = 'UCM_STEP("ring.repair.begun");'
LET_GO = "ring_.release(claim.slot, now_s_);"
ANY_SLOT = "whole_ = claim.slot >= 0;"
TOO_EARLY = "ring.publish(claims[i].slot, nullptr);"
MUTANTS = (
    # memory orders
    Mutant("publish relaxed", RACES, SETTLE, SETTLE + ", std::memory_order_relaxed"),
    Mutant("a waiter does not acquire", RACES, WAIT, WAIT.replace("acquire", "relaxed")),
    Mutant("a shard relaxed", RACES, SET_SHARD, SET_SHARD + ", std::memory_order_relaxed"),
    Mutant("release relaxed", RACES, RELEASE, "held - 1, std::memory_order_relaxed"),
    # moves of slots
    Mutant(
        "a pin is not checked again", RACES, "if (now.version() != found.word.version() ||", "if (false &&"
    ),
    Mutant(
        "an evictor looks once", RACES, "if (is_pinned(slot)) {  // somebody", "if (false) {  // somebody"
    ),
    Mutant("the version is not raised", RACES, "(version() + 1)", "(version())"),
    Mutant("a late writer is let in", RACES, "(version == nullptr || *version == seen.version())", "true"),
    Mutant("nobody is woken", RACES, "if (seen.waiting()) futex_wake_all(target.word);"),
    Mutant("nobody is told of a shard", RACES, "if (seen & kSleeper) futex_wake_all(progress_[slot]);"),
    Mutant("what failed stays", RACES, "/* Failed  */ {kExcl,", "/* Failed  */ {kNone,"),
    Mutant("restored to no chain", RACES, "if (slot_[slot].parent != kNoSlot) chains_.list(slot);"),
    Mutant("no room, but references", RACES, "if (batch.claims[i].slot >= 0) release(batch.claims[i].slot);"),
    # copies of whole batches
    Mutant("a copy keeps no references", RACES, "slots_.push_back(claim.slot);", LET_GO),
    Mutant("what is being filled is copied", RACES, "whole_ = claim.outcome == Outcome::kReady;", ANY_SLOT),
    Mutant("published before it is full", RACES, "owned.push_back(addresses[i]);", TOO_EARLY),
    # deaths
    Mutant("the living are expelled", DEATHS, "if (k == self_ || byte_is_held(fd(), k))", "if (k == self_)"),
    Mutant("references of the dead stay", DEATHS, "pins(slot, k).store(0, std::memory_order_seq_cst);"),
    Mutant("a repair forgets Closing", DEATHS, REOPEN, "if (false)"),
    Mutant("a death inside goes unnoticed", DEATHS, "(1, std::memory_order_acq_rel) != 0", "(1) > 1"),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """What became of one copy."""

    name: str
    status: int | None
    """Exit status of the binary; None = it could not be compiled."""
    message: str
    """The first thing that it said."""
    seconds: float

    def line(self) -> str:
        """What happened, for people."""
        what = "SURVIVED" if self.status == 0 else f"caught: {self.message}"
        if self.status is None:
            what = f"NOT TRIED: {self.message}"
        return f"{self.name:32} {self.seconds:5.1f} s  {what}"


def tried(name: str, run: Run, mutant: Mutant | None = None, seconds: int = SECONDS) -> Trial:
    """Compile a copy of the sources, which ``mutant`` has changed, and run it."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "native"
        shutil.copytree(NATIVE, folder)
        if mutant:
            mutant.apply(folder)
        status, message = outcome(folder, run, seconds)
    return Trial(name, status, message, time.monotonic() - begin)


def outcome(folder: Path, run: Run, seconds: int) -> tuple[int | None, str]:
    """Exit status and first words of the stress binary of the sources in ``folder``."""
    binary = folder / "stress"
    compile_ = [*COMPILE, f"-fsanitize={run.sanitizer}", str(folder / "stress.cc"), "-o", str(binary)]
    compiled = subprocess.run(compile_, capture_output=True, text=True, check=False)
    if compiled.returncode != 0:
        return None, compiled.stderr
    status, errors = ended_within(PATIENCE_S, run.command(binary, seconds))
    said = [line for line in errors.splitlines() if line.strip("= ")]
    return status, said[0] if said else ""


def ended_within(seconds: float, command: list[str]) -> tuple[int, str]:
    """Exit status and errors of a command; one that hangs is killed with its children, which fails it."""
    settings = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}
    with subprocess.Popen(
        command,
        env=settings,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            errors = process.communicate(timeout=seconds)[1]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return -signal.SIGKILL, f"nothing moved for {seconds:.0f} s"
        return process.returncode, errors


def main(wanted: list[str]) -> int:
    """Try the unchanged sources, then every mutation; two at a time, the machine has as many cores."""
    chosen = [mutant for mutant in MUTANTS if not wanted or mutant.name in wanted]
    survivors = len(chosen) == 0
    with ThreadPoolExecutor(2) as pool:
        unchanged = pool.map(lambda run: tried(f"unchanged, {run.mode}", run, seconds=5), (RACES, DEATHS))
        for trial in unchanged:
            sys.stdout.write(trial.line().replace("SURVIVED", "passes") + "\n")
            survivors += trial.status != 0
        for trial in pool.map(lambda mutant: tried(mutant.name, mutant.run, mutant), chosen):
            sys.stdout.write(trial.line() + "\n")
            sys.stdout.flush()
            survivors += trial.status in {0, None}
    sys.stdout.write(f"{len(chosen)} mutations, {survivors} that are not as they should be\n")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Several real processes on one root: exits, kills in the middle of saves, two at the same time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from models import GRAIN, HYBRID, RING_BYTES, identity_of, payloads_of

from ucm_core.cache import Cache
from ucm_core.ops.config import CacheConfig

HERE = Path(__file__).parent
BLOCKS = 6


def open_cache(root: Path) -> Cache:
    config = CacheConfig(root=root, ring_bytes=RING_BYTES, disk_bytes=1 << 30)
    return Cache.open(config, HYBRID, identity=identity_of(HYBRID))


def tokens_of(seed: int) -> list[int]:
    return [seed, *range(BLOCKS * GRAIN)]


def save(cache: Cache, seed: int, *, durable: bool) -> None:
    tickets = cache.save(cache.chain(tokens_of(seed)), payloads_of(HYBRID, BLOCKS, seed=seed))
    if durable:
        assert tickets.wait_durable(60)


def check(cache: Cache, seed: int) -> int:
    """Whatever is found has the right bytes; returns the tokens found."""
    chain = cache.chain(tokens_of(seed))
    loaded = cache.load(chain, cache.resolve(chain))
    right = payloads_of(HYBRID, BLOCKS, seed=seed)
    for row, blocks in loaded.verdict.blocks.items():
        assert np.array_equal(loaded.payloads[row], right[row][blocks.start : blocks.stop])
    return loaded.resume_tokens


def save_forever(root: Path) -> None:
    cache = open_cache(root)
    for seed in range(100_000):
        save(cache, seed, durable=seed % 2 == 0)
        say(seed)


def save_and_check(root: Path, first: int, last: int) -> None:
    """Save the seeds in one order, check all of them; the other process has another order."""
    with open_cache(root) as cache:
        say("ready")
        sys.stdin.readline()
        for seed in range(first, last, 1 if first < last else -1):
            save(cache, seed, durable=False)
            check(cache, seed)
        say("found", *(check(cache, seed) for seed in range(20)))


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


@contextmanager
def child(work: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, work, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for(process: subprocess.Popen[str], word: str) -> list[str]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.split()[0] == word:
            return line.split()[1:]
    raise AssertionError(f"the child ended without saying {word}")


@pytest.mark.parametrize("after", [3, 8, 15])
def test_a_kill_in_the_middle_of_saves_leaves_nothing_wrong(tmp_path: Path, after: int) -> None:
    with child("save_forever", tmp_path) as writer:
        wait_for(writer, str(after))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
    with open_cache(tmp_path) as cache:
        assert list(tmp_path.rglob("*.tmp")) == []
        found = [check(cache, seed) for seed in range(after + 3)]
        assert all(found[seed] == BLOCKS * GRAIN for seed in range(0, after + 1, 2))
        save(cache, 1, durable=True)
        assert check(cache, 1) == BLOCKS * GRAIN
        cache.check_integrity()


def test_a_killed_process_leaves_the_living_one_alone(tmp_path: Path) -> None:
    with open_cache(tmp_path) as cache, child("save_forever", tmp_path) as writer:
        wait_for(writer, "6")
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        for seed in range(10):
            save(cache, seed, durable=True)
            assert check(cache, seed) == BLOCKS * GRAIN
        cache.check_integrity()


def test_two_processes_at_once_both_profit(tmp_path: Path) -> None:
    with child("save_and_check", tmp_path, 0, 20) as one, child("save_and_check", tmp_path, 19, -1) as two:
        for process in (one, two):
            wait_for(process, "ready")
        for process in (one, two):
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in (one, two):
            assert wait_for(process, "found") == [str(BLOCKS * GRAIN)] * 20
            assert process.wait() == 0


if __name__ == "__main__":
    work = {"save_forever": save_forever, "save_and_check": save_and_check}[sys.argv[1]]
    work(Path(sys.argv[2]), *map(int, sys.argv[3:]))


def test_closing_in_a_forked_child_waits_for_nobody_and_takes_nothing(tmp_path: Path) -> None:
    with open_cache(tmp_path / "cache") as cache:
        save(cache, 1, durable=True)
        with cache._spaces._lock, cache._spaces.current.leases._lock:  # as other threads may hold them
            child = multiprocessing.get_context("fork").Process(target=cache.close)
            child.start()
        child.join(60)
        assert child.exitcode == 0
        assert check(cache, 1) > 0
        cache.check_integrity()

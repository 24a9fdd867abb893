"""The collector keeps the bound, oldest use first, and touches nothing that is not its business."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_errors import failing

from ucm_core.ops import metrics
from ucm_core.store import locks
from ucm_core.store.gc import Collection, Collector
from ucm_core.store.ledger import Residents
from ucm_core.store.pool import IoPool
from ucm_core.store.root import CacheRoot

OBJECT_BYTES = 1000
NAMESPACES = ("ab" * 16, "cd" * 16)


@pytest.fixture
def root(tmp_path: Path) -> Iterator[CacheRoot]:
    with CacheRoot(tmp_path / "cache", capacity_bytes=10 * OBJECT_BYTES) as root:
        yield root


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(1)
    yield pool
    pool.close(60)


def place(root: CacheRoot, number: int, *, age_s: int, segment: str = "hx", namespace: int = 0) -> Path:
    """An object of `OBJECT_BYTES`, last used ``age_s`` ago."""
    name = f"{number:032x}"
    path = root.path / NAMESPACES[namespace] / "row" / name[:3] / f"{name}.{segment}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(OBJECT_BYTES))
    os.utime(path, (0, 1_700_000_000 - age_s))
    root.usage.recount()
    return path


def left(paths: list[Path]) -> list[int]:
    return [number for number, path in enumerate(paths) if path.exists()]


def test_below_the_start_nothing_is_removed(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n) for n in range(9)]
    assert Collector(root, pool).collect().objects == 0
    assert left(paths) == list(range(9))


def test_above_the_start_the_oldest_go_until_the_end_mark(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n, namespace=n % 2) for n in range(10)]
    collection = Collector(root, pool).collect()
    assert left(paths) == list(range(8))
    assert (collection.objects, collection.freed_bytes) == (2, 2 * OBJECT_BYTES)
    assert root.usage.used_bytes == 8 * OBJECT_BYTES


def test_a_family_goes_as_a_whole_and_counts_as_its_latest_use(root: CacheRoot, pool: IoPool) -> None:
    old = [place(root, 1, age_s=900, segment="a"), place(root, 1, age_s=10, segment="b")]
    older = [place(root, 2, age_s=800, segment="a"), place(root, 2, age_s=700, segment="b")]
    young = [place(root, n, age_s=n) for n in range(3, 9)]
    Collector(root, pool).collect()
    assert left(older) == []
    assert left(old) == [0, 1]
    assert left(young) == list(range(6))


def test_only_objects_are_touched(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n) for n in range(12)]
    folder = paths[0].parent
    others = [folder / os.fsdecode(root.temporary_name()), folder / "foreign.tmp", folder / "README"]
    for other in others:
        other.write_bytes(bytes(5))
        os.utime(other, (0, 0))
    link = folder / f"{77:032x}.hx"
    link.symlink_to(others[2])
    Collector(root, pool).collect()
    assert all(other.exists() for other in others)
    assert link.is_symlink()


@dataclass
class Ring:
    """A double of what a process knows: these numbers are in its ring, and in use."""

    numbers: range

    def residents(self) -> Residents:
        names = b"".join(number.to_bytes(16, "big") for number in self.numbers)
        return Residents(
            np.frombuffer(names, np.uint8).reshape(-1, 16), np.ones(len(self.numbers), dtype=np.bool_)
        )

    def covers(self) -> tuple[()]:
        return ()


def test_what_is_in_use_stays(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n) for n in range(10)]
    Collector(root, pool, view=Ring(range(9, 10))).collect()
    assert left(paths) == [0, 1, 2, 3, 4, 5, 6, 9]


def test_when_all_is_in_use_there_is_no_room(root: CacheRoot, pool: IoPool) -> None:  # case C-59
    paths = [place(root, n, age_s=n) for n in range(10)]
    assert not Collector(root, pool, view=Ring(range(10))).make_room()
    assert len(left(paths)) == 10


def test_a_refused_write_makes_room_before_the_start_mark(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n) for n in range(9)]
    collector = Collector(root, pool)
    assert collector.make_room()
    assert left(paths) == list(range(8))


def test_one_collector_per_root(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n) for n in range(10)]
    collector = Collector(root, pool)
    with locks.exclusive(root.path / ".collector"):
        assert collector.collect().objects == 0
        assert not collector.make_room()
    assert len(left(paths)) == 10
    assert collector.collect().objects == 2


def test_writes_start_a_pass_in_the_background(root: CacheRoot, pool: IoPool) -> None:
    collector = Collector(root, pool)
    paths = [place(root, n, age_s=n) for n in range(9)]
    collector.note_written()
    paths.append(place(root, 9, age_s=9))
    for _ in range(3):
        collector.note_written()
    assert collector._queued.acquire(timeout=60)  # closing the pool would end the pass between two slices
    assert left(paths) == list(range(8))


def test_nothing_is_removed_for_bytes_that_are_not_there(root: CacheRoot, pool: IoPool) -> None:
    """The counter can be too high, after a crash for example; a pass counts before it removes."""
    paths = [place(root, n, age_s=n) for n in range(3)]
    collector = Collector(root, pool)
    for call in (collector.collect, collector.make_room):
        (root.path / ".usage").write_bytes(struct.pack("<QQQ", 10 * OBJECT_BYTES, 0, 0))
        assert call() in (True, Collection())
        assert left(paths) == [0, 1, 2]
        assert root.usage.used_bytes == 3 * OBJECT_BYTES


def test_removals_are_counted(root: CacheRoot, pool: IoPool) -> None:
    counter = metrics.OBJECTS_DROPPED.labels(reason="capacity")
    before = counter._value.get()
    for n in range(10):
        place(root, n, age_s=n)
    Collector(root, pool).collect()
    assert counter._value.get() == before + 2


def test_a_root_that_went_away_is_no_exception(root: CacheRoot, pool: IoPool, tmp_path: Path) -> None:
    collector = Collector(root, pool)
    root.path.rename(tmp_path / "elsewhere")
    assert not collector.make_room()
    collector.note_written()
    (tmp_path / "elsewhere").rename(root.path)


@settings(max_examples=25, deadline=None)
@given(ages=st.lists(st.integers(0, 50), min_size=1, max_size=16))
def test_the_survivors_are_the_most_recent(tmp_path_factory: pytest.TempPathFactory, ages: list[int]) -> None:
    pool = IoPool(1)
    with CacheRoot(tmp_path_factory.mktemp("cache"), capacity_bytes=10 * OBJECT_BYTES) as root:
        paths = [place(root, n, age_s=age) for n, age in enumerate(ages)]
        Collector(root, pool).collect()
        kept = left(paths)
        assert len(kept) == (len(ages) if len(ages) * 10 <= 95 else 8)
        removed = [ages[n] for n in set(range(len(ages))) - set(kept)]
        assert max([ages[n] for n in kept]) <= min(removed, default=np.inf)
    pool.close()


def failures() -> float:
    value: float = metrics.ERRORS.labels(where="collector")._value.get()
    return value


def test_a_pass_that_cannot_begin_is_counted(root: CacheRoot, pool: IoPool) -> None:
    for n in range(10):
        place(root, n, age_s=n)
    before = failures()
    (root.path / ".collector").mkdir()
    assert Collector(root, pool).collect().objects == 0
    assert failures() > before


def test_room_that_cannot_be_made_is_counted(root: CacheRoot, pool: IoPool) -> None:
    collector, before = Collector(root, pool), failures()
    (root.path / ".usage").unlink(missing_ok=True)
    (root.path / ".usage").mkdir()
    assert not collector.make_room()
    assert failures() > before


def test_an_object_that_cannot_be_removed_is_counted(root: CacheRoot, pool: IoPool) -> None:
    paths = [place(root, n, age_s=n) for n in range(10)]
    before = failures()
    failing("unlinkat", errno.EROFS, Collector(root, pool).collect)
    assert left(paths) == list(range(10))
    assert failures() > before

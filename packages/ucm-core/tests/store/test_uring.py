"""io_uring beside threads: equal results object for object, and threads wherever the kernel refuses it."""

from __future__ import annotations

import errno
import logging
import multiprocessing
import os
import resource
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_errors import failing, file_size_limit
from objects import GEOMETRY, Payloads, Shelf, make_keys, open_files, open_shelf

from ucm_core import _native
from ucm_core.flow.ticket import ResultCode
from ucm_core.ops.config import CacheConfig
from ucm_core.store.root import CacheRoot

pytestmark = pytest.mark.skipif(not _native.probe_uring(), reason="this kernel refuses io_uring")

Answer = TypeVar("Answer")
OK, UNAVAILABLE = ResultCode.OK, ResultCode.UNAVAILABLE
COUNT = 40
"""More than are under way at once."""


@pytest.fixture
def shelf(tmp_path):
    shelf = open_shelf(tmp_path, uring=True)
    yield shelf
    shelf.root.close()


def test_more_objects_than_are_under_way_at_once_come_back(shelf):
    keys, into = make_keys(COUNT), Payloads(COUNT, seed=None)
    assert shelf.root.uring
    assert shelf.write(keys) == [OK] * COUNT
    assert not shelf.tier.read(keys, into.addresses).any()
    np.testing.assert_array_equal(into.bytes, Payloads(COUNT).bytes)
    assert shelf.temporaries() == []


# -- equal results


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position % len(data)] ^= 1
    path.write_bytes(data)


def replace_by(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "link":
        path.symlink_to("elsewhere")
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)


def damage(path: Path, how: tuple[str, int]) -> None:
    kind, number = how
    if kind == "flip":
        flip(path, number)
    elif kind == "cut":
        os.truncate(path, number)
    elif kind != "none":
        replace_by(kind, path)


DAMAGES = st.tuples(
    st.sampled_from(["none", "none", "flip", "cut", "gone", "link", "directory", "pipe"]),
    st.integers(0, GEOMETRY.object_bytes + 5000),
)


def read_codes(shelf: Shelf, keys, *, uring: bool) -> tuple[list[list[int]], list[bytes]]:
    """Of the native files alone, which remove nothing."""
    shape = (GEOMETRY.digest, GEOMETRY.shards, GEOMETRY.stride)
    path = os.fsencode(shelf.tier.directory)
    files = _native.ObjectFiles(path, b"hx", shelf.tier._row_digest, shape, uring=uring)
    into = Payloads(len(keys), seed=None)
    codes = files.read(keys, into.addresses, direct=True)
    return codes.tolist(), [into.bytes[n].tobytes() for n in range(len(keys)) if not codes[n].any()]


@settings(max_examples=40, deadline=None)
@given(damages=st.lists(DAMAGES, min_size=2, max_size=COUNT))
def test_whatever_was_damaged_both_engines_say_the_same(damages, tmp_path_factory):
    shelf = open_shelf(tmp_path_factory.mktemp("root"))
    keys = make_keys(len(damages))
    shelf.write(keys)
    for key, how in zip(keys, damages, strict=True):
        damage(shelf.file(key), how)
    assert read_codes(shelf, keys, uring=True) == read_codes(shelf, keys, uring=False)
    shelf.root.close()


def obstruct(shelf: Shelf, key, kind: str) -> None:
    """Put something in the way of one object's write."""
    path = shelf.file(key)
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    if kind == "file as folder" and not path.parent.exists():
        path.parent.touch()
    elif kind == "link as folder" and not path.parent.exists():
        path.parent.symlink_to("elsewhere")
    elif kind == "full directory" and not path.parent.is_file():
        path.mkdir(parents=True)
        (path / "mine").touch()


OBSTACLES = st.sampled_from(["none", "none", "file as folder", "link as folder", "full directory"])


@settings(max_examples=25, deadline=None)
@given(obstacles=st.lists(OBSTACLES, min_size=2, max_size=COUNT), sync=st.booleans())
def test_whatever_is_in_the_way_both_engines_write_the_same(obstacles, sync, tmp_path_factory):
    keys, told = make_keys(len(obstacles)), []
    for uring in (False, True):
        shelf = open_shelf(tmp_path_factory.mktemp("root"), uring=uring)
        for key, kind in zip(keys, obstacles, strict=True):
            obstruct(shelf, key, kind)
        codes = shelf.write(keys, sync=sync)
        files = [shelf.file(key).read_bytes() for key, code in zip(keys, codes, strict=True) if code == OK]
        told.append((codes, files, shelf.temporaries(), shelf.root.usage.used_bytes))
        shelf.root.close()
    assert told[0] == told[1]


def test_a_write_that_stops_halfway_leaves_nothing(shelf):
    """A real limit on the size of files: the kernel takes two pages, then refuses."""
    keys = make_keys(3)
    with file_size_limit(8192):
        assert shelf.write(keys) == [UNAVAILABLE] * 3
    assert shelf.temporaries() == []
    assert shelf.write(keys) == [OK] * 3


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_file_that_cannot_be_opened_now_stays(error, shelf):
    keys = make_keys(COUNT)
    shelf.write(keys)
    assert failing("openat", error, lambda: shelf.read(keys)) == [UNAVAILABLE] * COUNT
    assert shelf.read(keys) == [OK] * COUNT


@pytest.mark.parametrize("shift", [8, 512])
def test_memory_that_is_not_aligned_is_moved_buffered(shift, shelf):
    keys, payloads, into = make_keys(2), Payloads(3), Payloads(3, seed=None)
    assert shelf.tier.write(keys, payloads.addresses[:2] + shift).tolist() == [OK, OK]
    assert not shelf.tier.read(keys, into.addresses[:2] + shift).any()
    both = [each.bytes.reshape(-1)[shift:][: 2 * GEOMETRY.payload_bytes] for each in (payloads, into)]
    np.testing.assert_array_equal(*both)


# -- where the kernel refuses


def test_threads_are_the_default(tmp_path):
    assert CacheConfig(root=tmp_path).io_engine == "threads"
    with CacheRoot(tmp_path) as root:
        assert not root.uring


def test_a_kernel_that_refuses_a_ring_is_said_once_and_threads_do_the_work(tmp_path, caplog):
    def work() -> list[int]:
        with CacheRoot(tmp_path, uring=True) as root:
            assert not root.uring
        shelf = open_shelf(tmp_path)
        return shelf.write(make_keys(3)) + shelf.read(make_keys(3))

    with caplog.at_level(logging.WARNING, logger="ucm_core.store"):
        assert failing("io_uring_setup", errno.EPERM, work) == [OK] * 6
    assert [record.message.count("io_uring") for record in caplog.records] == [1]


@pytest.mark.parametrize("error", [errno.EPERM, errno.EAGAIN, errno.ENOSYS])
def test_a_thread_that_gets_no_ring_or_may_not_use_it_moves_files_itself(error, shelf):
    """The probe went through, then the kernel refuses: in a new thread, and in one that has its ring."""
    keys = make_keys(COUNT)
    assert failing("io_uring_setup", error, lambda: shelf.write(keys[:20])) == [OK] * 20
    assert failing("io_uring_enter", error, lambda: shelf.write(keys)) == [OK] * COUNT
    assert failing("io_uring_enter", error, lambda: shelf.read(keys)) == [OK] * COUNT
    assert shelf.temporaries() == []


def test_every_thread_has_a_ring_of_its_own_and_takes_it_along(shelf):
    keys, codes = make_keys(COUNT), []
    shelf.write(keys)
    before = open_files()
    for _ in range(20):
        thread = threading.Thread(target=lambda: codes.append(shelf.read(keys)))
        thread.start()
        thread.join()
    assert codes == [[OK] * COUNT] * 20
    deadline = time.monotonic() + 60
    while open_files() > before:  # the system ends a thread a little after Python lets go of it
        assert time.monotonic() < deadline


def test_a_forked_child_makes_its_own_ring(shelf):
    keys = make_keys(COUNT)
    shelf.write(keys)
    child = os.fork()
    if not child:
        os._exit(0 if shelf.read(keys) == [OK] * COUNT else 1)
    assert shelf.read(keys) == [OK] * COUNT
    assert os.waitpid(child, 0)[1] == 0


# -- few files


def with_few_files(path: Path, free: int, work: Callable[[Shelf], Answer]) -> Answer:
    """What a process answers that can open so many more files."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        return child.submit(_with_few_files, path, free, work).result()


def _with_few_files(path: Path, free: int, work: Callable[[Shelf], Answer]) -> Answer:
    shelf, used = open_shelf(path, uring=True), open_files()
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + free, used + free))
    return work(shelf)


def read_twice(shelf: Shelf) -> list[list[int]]:
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(shelf.read, [make_keys(COUNT)] * 2))


def write(shelf: Shelf) -> list[int]:
    return shelf.write(make_keys(COUNT))


@pytest.mark.parametrize("free", [10, 24])
def test_where_few_files_may_be_open_fewer_are_at_once_and_none_fails(shelf, free, tmp_path):
    shelf.write(make_keys(COUNT))
    assert with_few_files(tmp_path, free, read_twice) == [[OK] * COUNT] * 2


def test_where_few_files_may_be_open_writes_go_on_too(shelf, tmp_path):
    assert with_few_files(tmp_path, 10, write) == [OK] * COUNT
    assert shelf.read(make_keys(COUNT)) == [OK] * COUNT
    assert shelf.temporaries() == []


def test_where_no_file_can_be_opened_any_more_a_read_ends_with_an_error_that_passes(shelf, tmp_path):
    shelf.write(make_keys(COUNT))
    assert with_few_files(tmp_path, 0, read_twice) == [[UNAVAILABLE] * COUNT] * 2
    assert shelf.read(make_keys(COUNT)) == [OK] * COUNT

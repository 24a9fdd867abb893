"""Errors of the system, made by the kernel itself: typed, counted, nothing lost, nothing left behind."""

from __future__ import annotations

import errno
import logging
import os

import numpy as np
import pytest
from kernel_errors import failing, file_size_limit
from objects import GEOMETRY, Payloads, Shelf, make_keys, make_tier, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.ops import metrics
from ucm_core.store.geometry import Geometry
from ucm_core.store.root import CacheRoot

OK, UNAVAILABLE, NO_SPACE = ResultCode.OK, ResultCode.UNAVAILABLE, ResultCode.NO_SPACE


@pytest.fixture
def shelf(tmp_path):
    shelf = open_shelf(tmp_path)
    yield shelf
    shelf.root.close()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["preadv", "openat"])
def test_a_read_that_may_work_later_deletes_nothing(call, error, shelf):  # case C-56
    keys = make_keys(2)
    shelf.write(keys)
    assert failing(call, error, lambda: shelf.read(keys)) == [UNAVAILABLE] * 2
    assert shelf.tier.exist(keys).all()
    assert shelf.read(keys) == [OK, OK]
    assert shelf.tier.statistics().failed == 2


@pytest.mark.parametrize(
    ("call", "flags"),
    [("openat", os.O_EXCL), ("pwritev", 0), ("fdatasync", 0), ("renameat", 0)],
)
@pytest.mark.parametrize(("error", "code"), [(errno.EIO, UNAVAILABLE), (errno.ENOSPC, NO_SPACE)])
def test_each_step_of_a_write_can_fail_and_leaves_nothing(call, flags, error, code, shelf):  # case C-55
    keys = make_keys(2)
    assert failing(call, error, lambda: shelf.write(keys, sync=True), flags=flags) == [code] * 2
    assert not shelf.tier.exist(keys).any()
    assert shelf.temporaries() == []
    assert shelf.root.usage.used_bytes == 0
    assert shelf.write(keys) == [OK, OK]


def test_a_folder_that_cannot_be_synced_is_not_called_durable(shelf):
    keys = make_keys(2)
    assert failing("fsync", errno.EIO, lambda: shelf.write(keys, sync=True)) == [UNAVAILABLE] * 2
    assert shelf.read(keys) == [OK, OK]


def test_a_write_without_sync_asks_for_none(shelf):
    keys = make_keys(2)
    assert failing("fdatasync", errno.EIO, lambda: shelf.write(keys)) == [OK, OK]


def test_a_write_that_stops_halfway_leaves_nothing(shelf):
    """A real limit on the size of files: the kernel takes two pages, then refuses."""
    keys = make_keys(1)
    with file_size_limit(8192):
        assert shelf.write(keys) == [UNAVAILABLE]
    assert shelf.temporaries() == []
    assert shelf.write(keys) == [OK]


def test_a_failure_is_logged_once_per_kind(shelf, caplog):
    keys = make_keys(2)
    shelf.write(keys)
    with caplog.at_level(logging.WARNING, logger="ucm_core.store"):
        for _ in range(3):
            failing("preadv", errno.EIO, lambda: shelf.read(keys))
        failing("preadv", errno.ESTALE, lambda: shelf.read(keys))
    assert [os.strerror(errno.EIO) in record.message for record in caplog.records] == [True, False]


# -- direct access


def test_a_file_system_that_refuses_direct_access_is_used_buffered(tmp_path, caplog):  # case C-60
    with caplog.at_level(logging.INFO, logger="ucm_core.store"):
        root = failing("openat", errno.EINVAL, lambda: CacheRoot(tmp_path).open(), flags=os.O_DIRECT)
    assert not root.direct
    assert sum("buffered" in record.message for record in caplog.records) == 1
    tier, keys, payloads = make_tier(root), make_keys(2), Payloads(2)
    assert failing(
        "openat", errno.EINVAL, lambda: tier.write(keys, payloads.addresses).tolist(), flags=os.O_DIRECT
    ) == [OK, OK]
    assert not tier.read(keys, payloads.addresses).any()
    assert list(tmp_path.rglob("*.tmp")) == []
    root.close()


def test_direct_access_that_open_takes_and_the_first_write_refuses_is_not_used(tmp_path, caplog):
    """C-60. The probe writes a page (third argument 4096); counters of 8 bytes are written all the same."""
    with caplog.at_level(logging.INFO, logger="ucm_core.store"):
        root = failing("pwrite64", errno.EINVAL, lambda: CacheRoot(tmp_path).open(), flags=4096)
    assert (root.available, root.direct) == (True, False)
    assert sum("buffered" in record.message for record in caplog.records) == 1
    shelf = Shelf(root, make_tier(root))
    assert shelf.write(make_keys(2)) + shelf.read(make_keys(2)) == [OK] * 4
    assert list(tmp_path.rglob("*.tmp")) == []
    root.close()


def test_units_that_are_no_multiple_of_a_page_go_past_the_page_cache_too(tmp_path):
    """C-60: 3,098,112 bytes are 6,051 sectors of 512 and no whole number of pages; padded, they are 757."""
    geometry = Geometry(2, 3_098_112)
    shelf, keys = open_shelf(tmp_path, geometry=geometry), make_keys(1)
    payloads, into = (Payloads(1, geometry=geometry, seed=seed) for seed in (0, None))
    assert shelf.root.direct
    assert shelf.tier.write(keys, payloads.addresses).tolist() == [OK]
    assert shelf.file(keys[0]).stat().st_size == 4096 + 2 * 757 * 4096
    assert shelf.tier.read(keys, into.addresses).tolist() == [[OK, OK]]
    np.testing.assert_array_equal(into.bytes, payloads.bytes)
    shelf.root.close()


def test_direct_access_that_is_refused_later_falls_back(shelf):  # case C-60
    """The probe went through, then open refuses: each call still works."""
    assert shelf.root.direct
    keys = make_keys(2)
    assert failing("openat", errno.EINVAL, lambda: shelf.write(keys), flags=os.O_DIRECT) == [OK, OK]
    assert failing("openat", errno.EINVAL, lambda: shelf.read(keys), flags=os.O_DIRECT) == [OK, OK]
    assert shelf.temporaries() == []


@pytest.mark.parametrize("shift", [1, 8, 512])
def test_memory_that_is_not_aligned_is_moved_buffered(shift, shelf):  # case C-60
    """The kernel answers EINVAL to such a transfer with O_DIRECT; nobody notices."""
    payloads, keys = Payloads(2), make_keys(1)
    assert shelf.tier.write(keys, payloads.addresses[:1] + shift).tolist() == [OK]
    expected = payloads.bytes.reshape(-1)[shift:][: GEOMETRY.payload_bytes].tobytes()
    into = Payloads(2, seed=None)
    assert not shelf.tier.read(keys, into.addresses[:1] + shift).any()
    assert into.bytes.reshape(-1)[shift:][: GEOMETRY.payload_bytes].tobytes() == expected


# -- tried again


class FailingFirst:
    """A double of the native files whose first writes fail with chosen errors, then it does what they do."""

    def __init__(self, objects: object, errors: list[int]) -> None:
        self._objects, self._errors = objects, errors
        self.attempts = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def write(self, keys, payloads, temporary_names, **options):
        self.attempts += 1
        if not self._errors:
            return self._objects.write(keys, payloads, temporary_names, **options)
        return np.full(len(keys), -self._errors.pop(0), dtype=np.int32)


def retries() -> float:
    return metrics.WRITE_RETRIES._value.get()


def interrupted(shelf, errors: list[int]) -> FailingFirst:
    shelf.tier._objects = double = FailingFirst(shelf.tier._objects, errors)
    return double


PASSING = [errno.EIO, errno.EINTR, errno.EAGAIN, errno.ESTALE, errno.ENOBUFS, errno.EMFILE, errno.ETIMEDOUT]


@pytest.mark.parametrize("error", PASSING)
@pytest.mark.parametrize("times", [1, 2])
def test_a_write_whose_error_passes_is_stored_and_counted(times, error, shelf):
    keys, before = make_keys(2), retries()
    double = interrupted(shelf, [error] * times)
    assert shelf.write(keys) == [OK, OK]
    assert (double.attempts, retries() - before) == (times + 1, 2 * times)
    assert shelf.read(keys) == [OK, OK]
    assert shelf.root.usage.used_bytes == 2 * GEOMETRY.object_bytes


@pytest.mark.parametrize("error", PASSING)
def test_a_write_is_tried_three_times_and_no_more(error, shelf):
    keys, before = make_keys(2), retries()
    double = interrupted(shelf, [error] * 9)
    assert shelf.write(keys) == [UNAVAILABLE] * 2
    assert (double.attempts, retries() - before) == (3, 4)
    assert shelf.tier.statistics().failed == 2
    assert shelf.root.usage.used_bytes == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errno.ENOSPC, NO_SPACE),
        (errno.EDQUOT, NO_SPACE),
        (errno.EACCES, UNAVAILABLE),
        (errno.EROFS, UNAVAILABLE),
    ],
)
def test_what_does_not_pass_by_itself_is_not_tried_again(error, code, shelf):
    double = interrupted(shelf, [error])
    assert shelf.write(make_keys(2)) == [code] * 2
    assert double.attempts == 1


def test_each_attempt_has_a_temporary_of_its_own(shelf):
    """The first one's may still be there when the disk refuses to remove it."""
    keys = make_keys(1)
    assert failing("renameat", errno.EIO, lambda: shelf.write(keys)) == [UNAVAILABLE]
    assert int(shelf.root.temporary_name().decode().split("-")[1].split(".")[0]) == 4


# -- files that stay unreadable


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_write_replaces_what_could_not_be_read(error, shelf):
    keys = make_keys(2)
    shelf.write(keys)
    before = [shelf.file(key).stat().st_ino for key in keys]
    failing("preadv", error, lambda: shelf.read(keys[:1]))
    assert shelf.tier.exist(keys).tolist() == [True, True]
    assert shelf.tier.stored(keys).tolist() == [False, True]
    assert shelf.write(keys) == [OK, OK]
    after = [shelf.file(key).stat().st_ino for key in keys]
    assert [old != new for old, new in zip(before, after, strict=True)] == [True, False]
    assert shelf.tier.stored(keys).all()


def test_what_could_be_read_again_needs_no_write(shelf):
    keys = make_keys(2)
    shelf.write(keys)
    failing("preadv", errno.EIO, lambda: shelf.read(keys))
    assert shelf.read(keys) == [OK, OK]
    assert shelf.tier.stored(keys).all()

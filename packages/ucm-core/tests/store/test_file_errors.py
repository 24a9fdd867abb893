"""Errors of the system, made by the kernel itself: typed, counted, nothing lost, nothing left behind."""

from __future__ import annotations

import errno
import logging
import os
import resource
import signal

import pytest
from kernel_errors import failing
from objects import GEOMETRY, Payloads, make_keys, make_tier, open_shelf

from ucm_core.flow.ticket import ResultCode
from ucm_core.store.root import CacheRoot

OK, UNAVAILABLE, NO_SPACE = ResultCode.OK, ResultCode.UNAVAILABLE, ResultCode.NO_SPACE


@pytest.fixture
def shelf(tmp_path):
    shelf = open_shelf(tmp_path)
    yield shelf
    shelf.root.close()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("call", ["preadv", "openat"])
def test_a_read_that_may_work_later_deletes_nothing(call, error, shelf):
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
def test_each_step_of_a_write_can_fail_and_leaves_nothing(call, flags, error, code, shelf):
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
    previous, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    keys = make_keys(1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, previous[1]))
        codes = shelf.write(keys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)
    assert codes == [UNAVAILABLE]
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


def test_a_file_system_that_refuses_direct_access_is_used_buffered(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="ucm_core.store"):
        root = failing("openat", errno.EINVAL, lambda: CacheRoot(tmp_path).open(), flags=os.O_DIRECT)
    assert not root.direct
    assert sum("buffered" in record.message for record in caplog.records) == 1
    tier, keys, payloads = make_tier(root), make_keys(2), Payloads(2)
    assert failing(
        "openat", errno.EINVAL, lambda: tier.write(keys, payloads.addresses).tolist(), flags=os.O_DIRECT
    ) == [OK, OK]
    assert tier.read(keys, payloads.addresses).tolist() == [OK, OK]
    assert list(tmp_path.rglob("*.tmp")) == []
    root.close()


def test_direct_access_that_is_refused_later_falls_back(shelf):
    """The probe went through, then open refuses: each call still works."""
    assert shelf.root.direct
    keys = make_keys(2)
    assert failing("openat", errno.EINVAL, lambda: shelf.write(keys), flags=os.O_DIRECT) == [OK, OK]
    assert failing("openat", errno.EINVAL, lambda: shelf.read(keys), flags=os.O_DIRECT) == [OK, OK]
    assert shelf.temporaries() == []


@pytest.mark.parametrize("shift", [1, 8, 512])
def test_memory_that_is_not_aligned_is_moved_buffered(shift, shelf):
    """The kernel answers EINVAL to such a transfer with O_DIRECT; nobody notices."""
    payloads, keys = Payloads(2), make_keys(1)
    assert shelf.tier.write(keys, payloads.addresses[:1] + shift).tolist() == [OK]
    expected = payloads.bytes.reshape(-1)[shift:][: GEOMETRY.payload_bytes].tobytes()
    into = Payloads(2, seed=None)
    assert shelf.tier.read(keys, into.addresses[:1] + shift).tolist() == [OK]
    assert into.bytes.reshape(-1)[shift:][: GEOMETRY.payload_bytes].tobytes() == expected

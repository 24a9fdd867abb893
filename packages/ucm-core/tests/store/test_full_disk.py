"""A real file system of one mebibyte, mounted for one child process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from objects import GEOMETRY

from ucm_core.flow.ticket import ResultCode

OK, MISS, NO_SPACE, UNAVAILABLE = (
    int(code) for code in (ResultCode.OK, ResultCode.MISS, ResultCode.NO_SPACE, ResultCode.UNAVAILABLE)
)
CHILDREN = Path(__file__).with_name("children.py")
UNBOUNDED = 1 << 60


def run_mounted(path: Path, options: str, *arguments: str | int) -> dict[str, list[str]]:
    """Run ``children.py`` with a tmpfs at ``path``; return its lines by their first word."""
    mount = f'mount -t tmpfs -o {options} ucm-test "$0" && exec "$@"'
    command = ["unshare", "-m", "sh", "-c", mount, path, sys.executable, CHILDREN, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}


@pytest.fixture(autouse=True)
def may_mount(tmp_path):
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "ucm-test", tmp_path]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")


def test_a_full_disk_is_a_refusal_and_what_is_stored_goes_on(tmp_path):  # case C-59
    told = run_mounted(tmp_path, "size=1m", "fill", tmp_path, UNBOUNDED, 50)
    written = [int(code) for code in told["written"]]
    fits = written.count(OK)
    assert 30 <= fits < 37
    assert written[fits:] == [NO_SPACE] * (50 - fits)
    assert [int(code) for code in told["read"]] == [OK] * fits + [MISS] * (50 - fits)
    assert told["temporaries"] == ["0"]
    assert told["again"] == [str(OK), str(OK)]


def test_a_bound_below_the_disk_is_reached_first(tmp_path):  # case C-59
    told = run_mounted(tmp_path, "size=1m", "fill", tmp_path, 10 * GEOMETRY.object_bytes, 15)
    assert [int(code) for code in told["written"]] == [OK] * 10 + [NO_SPACE] * 5
    assert told["again"] == [str(OK), str(OK)]


def test_below_the_disk_the_collector_makes_room_for_ever(tmp_path):  # case C-59
    told = run_mounted(tmp_path, "size=1m", "fill_and_collect", tmp_path, 20 * GEOMETRY.object_bytes, 60)
    assert [int(code) for code in told["written"]] == [OK] * 60
    assert 17 <= int(told["kept"][0]) <= 20
    assert int(told["used"][0]) == int(told["kept"][0]) * GEOMETRY.object_bytes
    assert told["temporaries"] == ["0"]


def test_a_bound_above_the_disk_is_no_licence_to_remove(tmp_path):  # case C-59
    """What others fill a disk with is not made good by removing from the cache: the write is refused."""
    told = run_mounted(tmp_path, "size=1m", "fill_and_collect", tmp_path, UNBOUNDED, 40)
    written = [int(code) for code in told["written"]]
    assert written[written.index(NO_SPACE) :] == [NO_SPACE] * written.count(NO_SPACE)
    assert int(told["kept"][0]) == written.count(OK)


def test_a_disk_without_inodes_is_full_too(tmp_path):
    told = run_mounted(tmp_path, "size=1m,nr_inodes=20", "fill", tmp_path, UNBOUNDED, 20)
    written = [int(code) for code in told["written"]]
    assert set(written) == {OK, NO_SPACE}
    assert told["temporaries"] == ["0"]


def test_a_read_only_disk_is_not_available(tmp_path):
    told = run_mounted(tmp_path, "ro,size=1m", "fill", tmp_path, UNBOUNDED, 3)
    assert told["available"] == ["False"]
    assert [int(code) for code in told["written"]] == [UNAVAILABLE] * 3
    assert [int(code) for code in told["read"]] == [MISS] * 3

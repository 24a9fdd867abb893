"""The test helper itself: the error is real, and ends with its thread."""

from __future__ import annotations

import errno
import os

import pytest
from kernel_errors import failing


def test_the_chosen_call_fails_on_that_thread_only(tmp_path):
    with (tmp_path / "file").open("wb") as file:
        with pytest.raises(OSError, match="Stale file handle"):
            failing("fsync", errno.ESTALE, lambda: os.fsync(file.fileno()))
        os.fsync(file.fileno())


def test_other_flags_pass(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.close(failing("openat", errno.EINVAL, lambda: os.open(path, os.O_RDONLY), flags=os.O_DIRECT))
    with pytest.raises(OSError, match="Invalid argument"):
        failing("openat", errno.EINVAL, lambda: os.open(path, os.O_DIRECT), flags=os.O_DIRECT)

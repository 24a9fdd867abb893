"""Real errors from the kernel, for tests: one system call of one thread fails with a chosen errno.

A seccomp filter holds for the thread that installs it and can never be removed, so the work runs on a thread
of its own that ends afterwards. The code under test is not touched and not doubled.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Answer = TypeVar("Answer")

NUMBERS = {
    "openat": 257,
    "fallocate": 285,
    "renameat": 264,
    "unlinkat": 263,
    "fsync": 74,
    "fdatasync": 75,
    "preadv": 295,
    "pwritev": 296,
    "pwrite64": 18,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
}
LOAD, JUMP_EQUAL, JUMP_SET, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL, KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, MODE_FILTER = 22, 38, 2


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def _statement(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)


def die_at(call: str) -> None:
    """From now on this process is killed when this thread makes ``call``."""
    _install(call, KILL_PROCESS, 0)


def _install(call: str, answer: int, flags: int) -> None:
    """Let ``call`` end with ``answer``; with ``flags``, only where its third argument has one of them."""
    code = _statement(LOAD, 0) + _statement(JUMP_EQUAL, NUMBERS[call], otherwise=3 if flags else 1)
    if flags:
        code += _statement(LOAD, 32) + _statement(JUMP_SET, flags, otherwise=1)
    code += _statement(RETURN, answer) + _statement(RETURN, ALLOW)
    memory = ctypes.create_string_buffer(code)
    program = _Program(len(code) // 8, ctypes.cast(memory, ctypes.c_void_p))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program)),
    ):
        if libc.prctl(*arguments):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """The kernel lets no file of this process grow past ``size_bytes``: writes stop short, then fail."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, previous[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, handler)


def failing(call: str, error: int, work: Callable[[], Answer], *, flags: int = 0) -> Answer:
    """Return ``work()``, run while the kernel answers ``error`` to every ``call``."""
    if platform.machine() != "x86_64":
        pytest.skip("the numbers of system calls here are those of x86-64")
    answers: list[Answer] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            _install(call, FAIL | error, flags)
            answers.append(work())
        except BaseException as problem:  # noqa: BLE001 - raised again on the caller's thread
            problems.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return answers[0]

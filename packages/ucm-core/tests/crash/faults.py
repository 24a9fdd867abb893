"""What can go wrong with each call of the C library that a store makes."""

from __future__ import annotations

import errno

from shim import Action
from strikes import Fault

_OPEN = (
    errno.EIO,
    errno.ENOSPC,
    errno.ESTALE,
    errno.EACCES,
    errno.EINTR,
    errno.EMFILE,
    errno.EDQUOT,
    errno.EROFS,
)
_WRITE = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EINTR, errno.EDQUOT, errno.EROFS)
_READ = (errno.EIO, errno.ESTALE, errno.EACCES, errno.EINTR)
_CHANGE = (errno.EIO, errno.ENOSPC, errno.ESTALE, errno.EACCES, errno.EDQUOT, errno.EROFS)

ERRORS: dict[str, tuple[int, ...]] = {
    "call.open": _OPEN,
    "call.open_direct": (*_OPEN, errno.EINVAL),
    "call.read": _READ,
    "call.read_direct": (*_READ, errno.EINVAL),
    "call.write": _WRITE,
    "call.write_direct": (*_WRITE, errno.EINVAL),
    "call.fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR),
    "call.rename": _CHANGE,
    "call.unlink": (errno.EIO, errno.ESTALE, errno.EACCES, errno.EROFS),
    "call.mkdir": _CHANGE,
    "call.close": (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EINTR),
    "call.truncate": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "call.allocate": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "call.lock": (errno.ENOLCK, errno.EIO, errno.EINTR),
    "call.stat": (errno.EIO, errno.ESTALE, errno.EACCES),
    "call.list": (errno.EIO, errno.ESTALE, errno.EACCES),
    "call.utime": (errno.EIO, errno.ESTALE, errno.EACCES, errno.EROFS),
}
"""Errors that a file system answers with, by call."""

TRANSFERS = ("call.read", "call.read_direct", "call.write", "call.write_direct")
SLOW_MS = 20

_ANSWERS = (
    errno.EIO,
    errno.EAGAIN,
    errno.EINTR,
    errno.ECANCELED,
    errno.ESTALE,
    errno.EINVAL,
    errno.ENOSPC,
)
URING = (
    *(Fault("files.uring.answer", Action.FAIL, error) for error in _ANSWERS),
    Fault("files.uring.answer", Action.SHORT),
)
"""What the kernel can say of a transfer that was handed to io_uring."""

FAULTS = (
    *(Fault(step, Action.FAIL, error) for step, errors in ERRORS.items() for error in errors),
    *(Fault(step, Action.SHORT) for step in TRANSFERS),
    *(
        Fault(step, Action.DELAY, SLOW_MS)
        for step in ("call.open", "call.read_direct", "call.write", "call.rename")
    ),
)

"""UCM for SGLang: `UCMHiCache`, a storage backend of its host cache, HiCache.

Importing this package imports no engine, starts no thread and opens no file; only the class that SGLang loads
needs SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm_sglang.connector import UCMHiCache

__all__ = ["UCMHiCache", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "UCMHiCache":
        from ucm_sglang.connector import UCMHiCache  # noqa: PLC0415 (needs SGLang, which installing this does not)

        return UCMHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""UCM for SGLang: `UCMHiCache` behind its host cache, or `UCMLinker`, which needs none.

Importing this package imports no engine, starts no thread and opens no file; only the classes that SGLang
loads need SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm_sglang.connector import UCMHiCache
    from ucm_sglang.linker import UCMLinker

__all__ = ["UCMHiCache", "UCMLinker", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "UCMHiCache":
        from ucm_sglang.connector import UCMHiCache  # noqa: PLC0415 (needs SGLang, which installing this does not)

        return UCMHiCache
    if name == "UCMLinker":
        from ucm_sglang.linker import UCMLinker  # noqa: PLC0415 (as above)

        return UCMLinker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""UCM for SGLang: a storage backend of its host cache, HiCache.

Importing this package imports no engine, starts no thread and opens no file; only the class that SGLang loads
needs SGLang.
"""

from __future__ import annotations

__all__ = ["__version__"]
__version__ = "0.1.0"

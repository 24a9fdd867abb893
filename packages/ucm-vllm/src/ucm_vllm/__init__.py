"""UCM for vLLM: `UCMConnector`, which vLLM loads with ``kv_connector_module_path="ucm_vllm"``.

Importing this package imports no engine, starts no thread and opens no file; only the connector needs vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ucm_vllm.connector import UCMConnector

__all__ = ["UCMConnector", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name == "UCMConnector":
        from ucm_vllm.connector import UCMConnector  # noqa: PLC0415 (needs vLLM, which installing this does not)

        return UCMConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

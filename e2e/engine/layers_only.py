"""A linker that takes none of the nodes that SGLang offers: what it stores came layer by layer.

SGLang's scheduler loads it by its name.
"""

from typing import Any

from ucm_sglang import UCMLinker


class LayersOnly(UCMLinker):
    """`UCMLinker` without its offloads."""

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        """Nothing is kept."""
        del transfers, session_id
        return False

"""The position-key bridge: nodes of an engine's radix tree by position, UCM's objects by key, and back.

Pure: no I/O, no engine, no thread. Positions count what an engine's keys count: tokens, or pairs of tokens
under `KeyView.BIGRAM`, which has a namespace of its own.
"""

from ucm_position_key.nodes import NodeId, NodeIndex, NodeIndexStatistics, NodeSpan
from ucm_position_key.paths import KeyView, PositionPath, digests_of
from ucm_position_key.pools import Component, ObjectKey, Pool, PoolTable, UnitKey
from ucm_position_key.radix_blocks import RadixBlock, path_of_blocks, radix_blocks, targets
from ucm_position_key.saves import SaveJob, SaveLedger, SaveStatistics
from ucm_position_key.spans import Piece, Span, blocks_ending_in, page_warning, pieces, tail_of, whole_blocks

__all__ = [
    "Component",
    "KeyView",
    "NodeId",
    "NodeIndex",
    "NodeIndexStatistics",
    "NodeSpan",
    "ObjectKey",
    "Piece",
    "Pool",
    "PoolTable",
    "PositionPath",
    "RadixBlock",
    "SaveJob",
    "SaveLedger",
    "SaveStatistics",
    "Span",
    "UnitKey",
    "__version__",
    "blocks_ending_in",
    "digests_of",
    "page_warning",
    "path_of_blocks",
    "pieces",
    "radix_blocks",
    "tail_of",
    "targets",
    "whole_blocks",
]
__version__ = "0.1.0"

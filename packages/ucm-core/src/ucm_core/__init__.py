"""UCM keeps the KV cache of a language model outside the inference engine.

A cache is opened for a root directory, a table (what the model's layers hold) and an identity (what must be
equal before one computation's bytes may serve another). Save, resolve, load:

>>> import tempfile
>>> import numpy as np
>>> from ucm_core import Cache, CacheConfig, ModelIdentity, SpecTable
>>> table = SpecTable.from_yaml('''
... grain_tokens: 64
... rows:
...   - name: full
...     kind: chain
...     block_tokens: 64
...     units: [0, 1]          # two layers
...     parts: [{name: k, shape: [2, 16], dtype: bfloat16}, {name: v, shape: [2, 16], dtype: bfloat16}]
... ''')
>>> identity = ModelIdentity(
...     config='{"model_type": "example"}', weights="00" * 32, revision=None,
...     compute_dtype="bfloat16", kv_dtype="bfloat16", table=table.digest.hex(),
... )
>>> root = tempfile.TemporaryDirectory()
>>> config = CacheConfig(root=root.name, ring_bytes="1MB", disk_bytes="1GB")
>>> prompt = list(range(200))                                     # token ids
>>> blocks = np.full((3, 2, table.row("full").unit_bytes), 7, dtype=np.uint8)  # three blocks
>>> with Cache.open(config, table, identity=identity) as cache:
...     cache.save(cache.chain(prompt), {"full": blocks}).wait_durable()
True

Another process, another engine, another day:

>>> with Cache.open(config, table, identity=identity) as cache:
...     chain = cache.chain(prompt + [1, 2, 3])                   # a longer prompt with the same prefix
...     loaded = cache.load(chain, cache.resolve(chain))
>>> loaded.resume_tokens                                          # tokens that need not be computed again
192
>>> bool((loaded.payloads["full"] == blocks).all())
True
>>> root.cleanup()
"""

from __future__ import annotations

from ucm_core.cache import Cache, CacheStatistics, Loaded
from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.boundaries import boundaries
from ucm_core.coordinator.completions import Completions
from ucm_core.coordinator.coordinator import Coordinator, CoordinatorLimits, CoordinatorStatistics, Verdict
from ucm_core.coordinator.coverage import coverage
from ucm_core.coordinator.explain import Explanation, RowExplanation, explain
from ucm_core.coordinator.leases import Lease, Leases, LeaseStatistics
from ucm_core.coordinator.origins import Origin
from ucm_core.coordinator.presence import Presence
from ucm_core.coordinator.resolve import Ask, Hit, resolve_hit
from ucm_core.errors import (
    ClosedError,
    ConfigError,
    IdentityError,
    LayoutError,
    NoSpace,
    SpecError,
    StoreError,
    UcmError,
)
from ucm_core.events import CacheEvent, EventKind, EventStream
from ucm_core.flow.copy import BlockSource, BlockTarget, BufferBlocks, EngineBlocks
from ucm_core.flow.handles import ComputeEvent, UnitLoad, UnitSave
from ucm_core.flow.pipeline import LayerPipeline
from ucm_core.flow.step import StepLoad, StepReport, StepSave
from ucm_core.flow.ticket import Level, ResultCode, Ticket, TicketGroup
from ucm_core.flow.trace import Trace
from ucm_core.ops.config import CacheConfig
from ucm_core.spec.checkpoint import WeightDigester, adapter_digest, read_config
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import LoraIdentity, MediaItem, PrefixChain, RequestIdentity, object_keys, row_seed
from ucm_core.spec.layout import EngineLayout, PartLayout
from ucm_core.spec.model import Model, Resolved, read_model
from ucm_core.spec.presets import canonical_table, draft_table, shared_layers
from ucm_core.spec.segments import (
    Parallelism,
    Rank,
    Segment,
    Share,
    Slice,
    segments_of,
    slice_of,
    slices_of,
    writers,
)
from ucm_core.spec.table import Part, RankRule, RowKind, SpecRow, SpecTable
from ucm_core.spec.units import UnitMap
from ucm_core.store.block import BlockStore, BlockStoreStatistics
from ucm_core.store.close_report import CloseReport
from ucm_core.store.root import RootStatistics
from ucm_core.store.snapshot import SnapshotStore

__version__ = "0.1.0"
__all__ = [
    "Ask",
    "Attempt",
    "BlockSource",
    "BlockStore",
    "BlockStoreStatistics",
    "BlockTarget",
    "BufferBlocks",
    "Cache",
    "CacheConfig",
    "CacheEvent",
    "CacheStatistics",
    "CloseReport",
    "ClosedError",
    "Completions",
    "ComputeEvent",
    "ConfigError",
    "Coordinator",
    "CoordinatorLimits",
    "CoordinatorStatistics",
    "EngineBlocks",
    "EngineLayout",
    "EventKind",
    "EventStream",
    "Explanation",
    "Hit",
    "IdentityError",
    "LayerPipeline",
    "LayoutError",
    "Lease",
    "LeaseStatistics",
    "Leases",
    "Level",
    "Loaded",
    "LoraIdentity",
    "MediaItem",
    "Model",
    "ModelIdentity",
    "NoSpace",
    "Origin",
    "Parallelism",
    "Part",
    "PartLayout",
    "PrefixChain",
    "Presence",
    "Rank",
    "RankRule",
    "RequestIdentity",
    "Resolved",
    "ResultCode",
    "RootStatistics",
    "RowExplanation",
    "RowKind",
    "Segment",
    "Share",
    "Slice",
    "SnapshotStore",
    "SpecError",
    "SpecRow",
    "SpecTable",
    "StepLoad",
    "StepReport",
    "StepSave",
    "StoreError",
    "Ticket",
    "TicketGroup",
    "Trace",
    "UcmError",
    "UnitLoad",
    "UnitMap",
    "UnitSave",
    "Verdict",
    "WeightDigester",
    "adapter_digest",
    "boundaries",
    "canonical_table",
    "coverage",
    "draft_table",
    "explain",
    "object_keys",
    "read_config",
    "read_model",
    "resolve_hit",
    "row_seed",
    "segments_of",
    "shared_layers",
    "slice_of",
    "slices_of",
    "writers",
]

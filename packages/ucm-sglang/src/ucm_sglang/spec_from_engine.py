"""From SGLang's registered pools to the rows of the canonical table.

The table is made by the core from the checkpoint, so nothing here knows a model family. A pool says how many
layers it holds, not which: SGLang keeps them in the model's order, so they follow from the table. Snapshot
rows lie in ``mamba``; window rows in ``swa``, or in ``kv`` where no ``swa`` is registered (an engine that
keeps more than a row needs); all other chain rows in ``kv``. A pool's ``end_layer`` is not read: SGLang
counts it inclusive where it makes it up itself and exclusive where it is given one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from ucm_core.errors import SpecError
from ucm_core.spec.rows import RowKind, SpecRow, refuse_repeats
from ucm_core.spec.segments import Share
from ucm_core.spec.table import SpecTable
from ucm_position_key import Component, Pool
from ucm_sglang.refusals import refuse

COMPONENTS = {"kv": Component.FULL, "swa": Component.SWA, "mamba": Component.MAMBA}
"""SGLang's names of the pools that are understood, and what a node of its tree has of them."""


@dataclass(frozen=True, slots=True)
class PoolLayers:
    """One pool, and what it holds on this rank."""

    pool: Pool
    """With the names of all its rows, also of those that have no layer on this pipeline stage."""
    rows: tuple[SpecRow, ...]
    """Its rows as this rank holds them: its layers, its heads."""

    @property
    def layers(self) -> tuple[int, ...]:
        """The model's layers in the pool's order: layer ``i`` of the pool is ``layers[i]``."""
        return tuple(sorted(unit for row in self.rows for unit in row.units))


def map_pools(pools: Mapping[str, Any], table: SpecTable, *, share: Share) -> tuple[PoolLayers, ...]:
    """What each registered pool holds; every cached row is in exactly one.

    ``share`` names the rank that they are of. SpecError names the pool or row and both numbers: an unknown or
    draft pool, a row in no pool, a pool without rows, two windows in one pool, and a pool that is not cut as
    its rows are: pages of a block, all their layers and no others.
    """
    refuse(share.rank is None, SpecError("pools are one rank's: share must say which"))
    names: dict[str, list[SpecRow]] = {_known(name): [] for name in pools}
    for row in (*table.chain_rows, *table.snapshot_rows, *table.follower_rows):
        names[_pool_of(row, names)].append(row)
    alone = len(names) == 1
    return tuple(
        _checked(_pool_layers(name, rows, share), pools[name], alone=alone) for name, rows in names.items()
    )


def _known(name: str) -> str:
    refuse(
        name.startswith("draft"),
        SpecError(
            f"pool {name!r} is a draft model's: its rows need a namespace of their own, which ucm-sglang does"
            f" not support yet; start SGLang without speculative decoding"
        ),
    )
    refuse(
        name not in COMPONENTS,
        SpecError(f"pool {name!r} is not known; ucm-sglang knows {', '.join(COMPONENTS)}"),
    )
    return name


def _pool_of(row: SpecRow, names: Collection[str]) -> str:
    refuse(
        row.kind is RowKind.FOLLOWER,
        SpecError(
            f"row {row.name!r} follows {row.follows!r}: side-car pools are not supported by ucm-sglang yet"
        ),
    )
    window = "swa" if row.window is not None and "swa" in names else "kv"
    found = {RowKind.SNAPSHOT: "mamba"}.get(row.kind, window)
    registered = ", ".join(names) or "none"
    refuse(
        found not in names,
        SpecError(
            f"row {row.name!r} is in no pool: it belongs into {found!r}, SGLang registered {registered}"
        ),
    )
    return found


def _pool_layers(name: str, rows: list[SpecRow], share: Share) -> PoolLayers:
    refuse(
        not rows,
        SpecError(f"pool {name!r} is registered, but no row of the model's table belongs into it"),
    )
    windows, called = {row.window: str(row.window) for row in rows}, tuple(row.name for row in rows)
    refuse(
        name == "swa" and len(windows) > 1,
        SpecError(
            f"pool {name!r} keeps one window, its rows {', '.join(called)} have windows of"
            f" {' and '.join(windows.values())} tokens"
        ),
    )
    held = tuple(one.row for row in rows for one in share.slices(row))
    return PoolLayers(Pool(name, COMPONENTS[name], called), held)


def _checked(held: PoolLayers, pool: Any, *, alone: bool) -> PoolLayers:
    """``held``, if the pool is cut so; only one that is ``alone`` numbers its layers as the model does."""
    name, layers, rows = held.pool.name, held.layers, ", ".join(held.pool.rows)
    refuse_repeats(f"pool {name!r} has layer", layers)
    _refuse_cuts(name, pool)
    count = _layer_count(pool)
    refuse(
        count != len(layers),
        SpecError(
            f"pool {name!r} has {count} layers, the rows {rows} have {len(layers)} of them on this rank:"
            f" {layers}"
        ),
    )
    first = int(getattr(pool, "start_layer", 0))
    refuse(
        alone and layers[:1] != (first,),
        SpecError(
            f"pool {name!r} begins at layer {first}, the table at layer {layers[:1]}; is this the rank that"
            f" the cache was opened for?"
        ),
    )
    for row in held.rows:
        _check_page(name, row, int(pool.page_size))
    return held


def _check_page(name: str, row: SpecRow, page_tokens: int) -> None:
    expected = {RowKind.SNAPSHOT: 1}.get(row.kind, row.block_tokens)
    refuse(
        page_tokens != expected,
        SpecError(
            f"pool {name!r} has pages of {page_tokens} tokens, its row {row.name!r} blocks of {expected};"
            f" start SGLang with --page-size {expected}, or set grain_tokens to {page_tokens}"
        ),
    )


def _refuse_cuts(name: str, pool: Any) -> None:
    """Refuse what makes a pool hold something else than this rank's layers of every token."""
    for what, many in (
        ("draft layers packed behind the model's", _draft_layers(pool)),
        ("side states beside conv and ssm", len(getattr(pool, "slot_state_buffers", ()))),
        ("layers dealt out to other ranks", int(getattr(pool, "_layer_shard_enabled", False))),
        ("tokens dealt out to context ranks", int(getattr(pool, "dcp_size", 1)) - 1),
    ):
        refuse(many, SpecError(f"pool {name!r} has {what} ({many}): not supported by ucm-sglang yet"))


def _draft_layers(pool: Any) -> int:
    packed, layers = len(getattr(pool, "mtp_draft_buffer_infos", ())), _layer_count(pool)
    return packed + layers - int(getattr(pool, "target_layer_num", layers))


def _layer_count(pool: Any) -> int:
    """A pool of states has another word for it."""
    return int(getattr(pool, "num_mamba_layers", getattr(pool, "layer_num", 0)))

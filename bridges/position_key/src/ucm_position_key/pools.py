"""Which pool of an engine holds which rows, and the keys of a row's objects.

A pool's component says what kind of row it can hold: FULL chain rows (a window row too, where the engine
keeps more than the window), SWA window rows, MAMBA snapshot rows, and a side-car followers of the rows of
the pool whose indices it uses. An object's key is ``row seed XOR digest``, so keys give digests back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from ucm_core.errors import IdentityError, SpecError
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import DIGEST_BYTES, NAME_BYTES, RequestIdentity, row_seed
from ucm_core.spec.rows import RowKind, SpecRow, refuse_repeats
from ucm_core.spec.table import SpecTable
from ucm_position_key.paths import Digests, KeyView, PositionPath

__all__ = ["Component", "ObjectKey", "Pool", "PoolTable", "UnitKey"]

_DRAFT = "draft"


class Component(Enum):
    """What a tree's node has of a pool."""

    FULL = "full"
    """Something for every position."""
    SWA = "swa"
    """Something for the positions that a sliding window still sees."""
    MAMBA = "mamba"
    """One state, after the node's last position."""
    SIDE_CAR = "side-car"
    """Something for every position that another pool has, under that pool's indices."""


_KINDS = {
    Component.FULL: RowKind.CHAIN,
    Component.SWA: RowKind.CHAIN,
    Component.MAMBA: RowKind.SNAPSHOT,
    Component.SIDE_CAR: RowKind.FOLLOWER,
}


@dataclass(frozen=True, slots=True)
class Pool:
    """One of an engine's pools."""

    name: str
    """As the engine calls it."""
    component: Component
    """What nodes have of it."""
    rows: tuple[str, ...]
    """The rows whose layers it holds, several where an engine keeps windows in its full pool."""
    source: str | None = None
    """Side-cars: the pool whose indices it uses."""


@dataclass(frozen=True, slots=True)
class ObjectKey:
    """A block or a state, whichever node holds it now."""

    row: str
    """Name of the row."""
    key: bytes
    """32 bytes; the first 16 name the object."""

    @property
    def name(self) -> bytes:
        """The block id or snapshot id, 16 bytes."""
        return self.key[:NAME_BYTES]


@dataclass(frozen=True, slots=True)
class UnitKey:
    """One shard of an object in one segment: what a save is acknowledged by."""

    object: ObjectKey
    """The block or state."""
    segment: str
    """Name of the segment, see `ucm_core.Segment`."""
    shard: int
    """Number of the unit in the row."""


class PoolTable:
    """The pools of an engine over the rows of a table, in one namespace; read-only.

    Every row that is cached is in exactly one pool. A generation is a namespace: a reset wants a new table.
    """

    def __init__(
        self,
        table: SpecTable,
        pools: Iterable[Pool],
        *,
        model: ModelIdentity,
        view: KeyView = KeyView.PLAIN,
    ) -> None:
        """Build the map; SpecError names the pool, the row and what does not fit.

        ``model`` is the identity without a view. IdentityError when it is unknown or that of another table.
        """
        self.table = table
        self.view = view
        self.identity = view.identity_of(model)
        """What the cache is opened with: the view has its own namespace."""
        self._check_identity()
        self.pools = tuple(pools)
        refuse_repeats("the engine has the pool", (pool.name for pool in self.pools))
        self._by_name = {pool.name: pool for pool in self.pools}
        for pool in self.pools:
            self._check_pool(pool)
        self._check_cover()
        namespace = self.identity.digest
        rows = (row for row in table.rows if row.kind is not RowKind.NONE)
        self._seeds = {row.name: row_seed(namespace, row.follows or row.name) for row in rows}
        self._pool_of = {name: pool for pool in self.pools for name in pool.rows}

    def pool(self, name: str) -> Pool:
        """Return the pool called ``name``; SpecError lists those that exist."""
        if name not in self._by_name:
            raise SpecError(f"no pool {name!r} here; the pools are {', '.join(self._by_name)}")
        return self._by_name[name]

    def pool_of(self, row_name: str) -> Pool:
        """Return the pool that says which positions of a row are there; of a follower, its source's.

        SpecError for a row that is never cached, or is not there.
        """
        pool = self._pool_of[self._cached(row_name)]
        return pool if pool.source is None else self._by_name[pool.source]

    def path(self, identity: RequestIdentity | None = None) -> PositionPath:
        """Return a path that is at the root, of this namespace's grain and view."""
        return PositionPath(identity, grain_tokens=self.table.grain_tokens, view=self.view)

    def keys(self, row_name: str, digests: Digests) -> Digests:
        """Return the keys of a row's objects that end where ``uint8[n, 32]`` digests stand, same shape."""
        return self._xor(row_name, digests)

    def digests(self, row_name: str, keys: Digests) -> Digests:
        """Return the digests that ``uint8[n, 32]`` keys, or ``uint8[n, 16]`` names, were made of."""
        return self._xor(row_name, keys)

    def units(self, key: ObjectKey, segment: str, *, layers: Iterable[int]) -> tuple[UnitKey, ...]:
        """Return the units of an object that hold global ``layers``; SpecError for one of another row."""
        row = self.table.row(key.row)
        shards = {layer: shard for shard, layer in enumerate(row.units)}
        try:
            return tuple(UnitKey(key, segment, shards[layer]) for layer in layers)
        except KeyError as error:
            raise SpecError(f"row {row.name!r} has no layer {error.args[0]}; it has {row.units}") from None

    def check_page(self, page_tokens: int) -> None:
        """SpecError unless an engine whose keys are all one sees can share this table: P == g == blocks."""
        sizes = {row.block_tokens for row in self.table.chain_rows} | {self.table.grain_tokens}
        if sizes != {page_tokens}:
            raise SpecError(
                f"page size {page_tokens} against a grain of {self.table.grain_tokens} and blocks of "
                f"{', '.join(map(str, sorted(sizes)))} tokens: an engine that hands out page hashes needs "
                f"them equal; start it with --page-size {self.table.grain_tokens}"
            )

    def _xor(self, row_name: str, values: Digests) -> Digests:
        seed = np.frombuffer(self._seeds[self._cached(row_name)], np.uint8)
        if values.dtype != np.uint8 or values.ndim != 2 or values.shape[1] not in (NAME_BYTES, DIGEST_BYTES):
            raise SpecError(
                f"digests and keys are uint8[n, {DIGEST_BYTES}], names uint8[n, {NAME_BYTES}]; got "
                f"{values.dtype} {values.shape}"
            )
        return values ^ seed[: values.shape[1]]

    def _cached(self, row_name: str) -> str:
        if self.table.row(row_name).kind is RowKind.NONE:
            raise SpecError(f"row {row_name!r} is never cached: it has no keys and no pool")
        return row_name

    def _check_identity(self) -> None:
        if not self.identity.known:
            raise IdentityError("the weights are unknown, so there is no namespace and there are no keys")
        for field, value in (("table", self.table.digest.hex()), ("grain_tokens", self.table.grain_tokens)):
            if getattr(self.identity, field) != value:
                raise IdentityError(
                    f"the identity's {field} is {getattr(self.identity, field)}, the table's {value}"
                )

    def _check_pool(self, pool: Pool) -> None:
        if pool.name.startswith(_DRAFT):
            raise SpecError(
                f"pool {pool.name!r} is a draft model's: it needs a table and namespace of its own"
            )
        if not pool.rows:
            raise SpecError(f"pool {pool.name!r} holds no row")
        if (pool.component is Component.SIDE_CAR) != (pool.source is not None):
            raise SpecError(f"pool {pool.name!r} is {pool.component.value} with source={pool.source!r}")
        for row in map(self.table.row, pool.rows):
            self._check_row(pool, row)

    def _check_row(self, pool: Pool, row: SpecRow) -> None:
        if row.kind is not _KINDS[pool.component]:
            raise SpecError(
                f"pool {pool.name!r} is {pool.component.value} and cannot hold the {row.kind.value} row "
                f"{row.name!r}"
            )
        if pool.component is Component.SWA and row.window is None:
            raise SpecError(f"pool {pool.name!r} is swa and row {row.name!r} has no window")
        if pool.source is not None and row.follows not in self.pool(pool.source).rows:
            raise SpecError(
                f"pool {pool.name!r} uses the indices of {pool.source!r}, whose rows are "
                f"{', '.join(self.pool(pool.source).rows)}, but row {row.name!r} follows {row.follows!r}"
            )

    def _check_cover(self) -> None:
        claimed = [name for pool in self.pools for name in pool.rows]
        refuse_repeats("the pools hold the row", claimed)
        missing = [
            row.name for row in self.table.rows if row.kind is not RowKind.NONE and row.name not in claimed
        ]
        if missing:
            raise SpecError(
                f"no pool holds row {missing[0]!r}; the pools hold {', '.join(claimed) or 'no row'}"
            )

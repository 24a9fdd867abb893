"""All stores of one namespace: for every cached row a ring over files, sized together."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ucm_core.errors import ConfigError
from ucm_core.ops import metrics
from ucm_core.spec.keys import row_seed
from ucm_core.spec.segments import Segment, Share, Slice, segments_of
from ucm_core.spec.table import RowKind, SpecRow, SpecTable
from ucm_core.store.absent import AbsentStore, ObjectStore
from ucm_core.store.absent_tiers import NoFiles, NoRing
from ucm_core.store.block import BlockStore
from ucm_core.store.close_report import CloseReport
from ucm_core.store.family import family
from ucm_core.store.files import FileTier
from ucm_core.store.geometry import Geometry
from ucm_core.store.pool import IoPool
from ucm_core.store.ring import Ring, RingOptions
from ucm_core.store.root import CacheRoot, Namespace
from ucm_core.store.sizing import RingDemand, check_ring_bytes, ring_slots
from ucm_core.store.tiers import Room, StoreLimits, Tiers

CLOSE_WAIT_S = 30.0
"""How long what is under way may take when a cache is closed."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One segment of one row as this process stores it."""

    row: SpecRow
    """With the units, heads and entries that the segment has."""
    geometry: Geometry
    segment: str
    slots: int
    """Slots of its ring, should it not live already; 0 = there is no room for one."""
    joins: bool = True
    """Whether it uses a ring that lives although there would be no room for one of its own."""
    replica: int = 0
    """Which of the `replicas` processes this is that load the same lists: each begins elsewhere in them."""
    replicas: int = 1


@dataclass(frozen=True, slots=True)
class StoreParts:
    """What all stores of one process share."""

    root: CacheRoot
    pool: IoPool
    limits: StoreLimits
    room: Room | None
    durable: bool = True
    """False: nothing is kept on the medium, rings are all there is."""
    ring: RingOptions = field(default_factory=RingOptions)


Plans = Mapping[str, Sequence[RowPlan]]
"""Per cached row the segments that this process has of it; none where its rank has no layer of the row."""


def plan_rows(
    table: SpecTable, ring_bytes: int | None, *, disk_bytes: int | None = None, share: Share | None = None
) -> dict[str, tuple[RowPlan, ...]]:
    """One plan for every segment of ``share`` of every row that is cached; touches nothing.

    The bounds are those of all ranks of the engine together, so each of them comes to the same sizes.
    Raises `ucm_core.ConfigError` when ``ring_bytes`` is too small or more than all memory, or ``disk_bytes``
    has no room for one object of every segment (0 = no files), `ucm_core.SpecError` when an object is too
    large or would have more shards than a header has room for, or a row cannot be cut like that.
    """
    share = share or Share()
    if ring_bytes is not None:
        check_ring_bytes(ring_bytes)
    rows = [row for row in table.rows if row.kind is not RowKind.NONE]
    every = {
        _place(row, segment): (row, Geometry.of_row(held))
        for row in rows
        for segment, held in segments_of(row, share.parallel).items()
    }
    _check_disk_bytes((shape for _, shape in every.values()), disk_bytes)
    demands = {place: RingDemand(shape.payload_bytes, _tokens(row)) for place, (row, shape) in every.items()}
    slots = ring_slots(demands, ring_bytes) if rows else {}

    def plan(row: SpecRow, held: Slice) -> RowPlan:
        place = _place(row, held.segment)
        turn = {"replica": held.replica, "replicas": held.replicas}
        _, shape = every[place]
        joins = ring_bytes != 0
        return RowPlan(held.row, shape, held.segment.name, slots[place], joins=joins, **turn)

    return {row.name: tuple(plan(row, held) for held in share.slices(row)) for row in rows}


def _place(row: SpecRow, segment: Segment) -> str:
    return f"{row.name}/{segment.name}"


def _check_disk_bytes(shapes: Iterable[Geometry], disk_bytes: int | None) -> None:
    least_bytes = sum(shape.object_bytes for shape in shapes)
    if disk_bytes and disk_bytes < least_bytes:
        raise ConfigError(
            f"disk_bytes = {disk_bytes} is too small: one object of each row needs {least_bytes};"
            " raise it, leave it out, or give 0 for no files"
        )


def key_seeds(table: SpecTable, namespace_digest: bytes) -> dict[str, bytes]:
    """The 32-byte seed of every row's keys; a follower rides on its source's block ids, so has its seed."""
    rows = (row for row in table.rows if row.kind is not RowKind.NONE)
    return {row.name: row_seed(namespace_digest, row.follows or row.name) for row in rows}


def open_stores(
    plans: Plans, digest: bytes, *, namespace: Namespace, parts: StoreParts
) -> dict[str, ObjectStore]:
    """Open the stores of every row of the namespace ``digest``; on an error none stays open.

    They share `StoreLimits.private_bytes`. A row without a plan, of which this rank has nothing, is left out.
    """
    share = parts.limits.private_bytes // max(1, sum(map(len, plans.values())))
    parts = replace(parts, limits=replace(parts.limits, private_bytes=share))
    opened: dict[str, list[ObjectStore]] = {name: [] for name, segments in plans.items() if segments}
    try:
        for name, stores in opened.items():
            for plan in plans[name]:
                stores.append(_open_store(plan, row_seed(digest, name), namespace, parts))
    except BaseException:
        for stores in opened.values():
            close_stores(dict(enumerate(stores)))
        raise
    return {name: family(stores) for name, stores in opened.items()}


def absent_stores(plans: Plans) -> dict[str, ObjectStore]:
    """For every row a store that keeps nothing."""
    return {name: AbsentStore(segments[0].geometry) for name, segments in plans.items() if segments}


def close_stores(
    stores: Mapping[Any, ObjectStore], timeout_s: float = CLOSE_WAIT_S
) -> tuple[CloseReport, ...]:
    """Close them all, within ``timeout_s`` together; what each of them kept."""
    deadline = time.monotonic() + timeout_s
    return tuple(store.close(max(0.0, deadline - time.monotonic())) for store in stores.values())


def ring_name(root: str | os.PathLike[str], namespace: str, *, row: str, segment: str) -> str:
    """Name of a ring: 16 hex digits that all processes of one root, namespace, row and segment share."""
    words = [os.path.realpath(root), namespace, row, segment]
    framed = b"".join(len(word).to_bytes(8, "little") + word for word in map(os.fsencode, words))
    return hashlib.blake2b(framed, digest_size=8).hexdigest()


def _open_store(plan: RowPlan, seed: bytes, namespace: Namespace, parts: StoreParts) -> BlockStore:
    files = _files(plan, seed, namespace, parts) if parts.durable else NoFiles(plan.geometry)
    name = ring_name(parts.root.path, namespace.path.name, row=plan.row.name, segment=plan.segment)
    ring = _open_ring(name, plan, parts.ring) if plan.slots else _join_ring(name, plan, parts.ring)
    turn = {"rank": plan.replica, "ranks": plan.replicas}
    tiers = Tiers(ring, files, parts.pool, plan.row.name, parts.limits, **turn)
    return BlockStore(tiers, room=parts.room)


def _files(plan: RowPlan, seed: bytes, namespace: Namespace, parts: StoreParts) -> FileTier:
    directory = namespace.row_directory(plan.row.name)
    return FileTier(directory, plan.geometry, row_seed=seed, segment=plan.segment, root=parts.root)


def _join_ring(name: str, plan: RowPlan, options: RingOptions) -> Ring | NoRing:
    """The ring that others have, or none: who came first took what there was for one."""
    if plan.joins:
        with suppress(RuntimeError, OSError):
            return _opener(plan, options)(name)
    level, why = (logging.WARNING, "has no room for it") if plan.joins else (logging.INFO, "is 0")
    _log.log(
        level,
        "row %s has no ring: ring_bytes %s, and files are read and written directly",
        plan.row.name,
        why,
    )
    return NoRing()


def _open_ring(name: str, plan: RowPlan, options: RingOptions) -> Ring:
    """The ring of all processes, or a private one where shared memory is refused; OSError: neither."""
    open_ring = _opener(plan, options)
    try:
        return open_ring(name)
    except (RuntimeError, OSError) as error:  # a RuntimeError also where memory cannot be mapped
        metrics.ERRORS.labels(where="ring").inc()
        _log.warning("row %s: no shared ring, this process uses a private one: %s", plan.row.name, error)
    try:
        return open_ring(None)
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, f"row {plan.row.name}: no private ring either: {error}") from error


def _opener(plan: RowPlan, options: RingOptions) -> Callable[[str | None], Ring]:
    return partial(
        Ring.open,
        slots=plan.slots,
        payload_bytes=plan.geometry.payload_bytes,
        geometry_digest=plan.geometry.digest,
        options=replace(options, shards=plan.geometry.shards),
    )


def _tokens(row: SpecRow) -> int:
    return row.interval or row.block_tokens if row.kind is RowKind.SNAPSHOT else row.block_tokens

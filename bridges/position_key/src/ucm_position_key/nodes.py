"""Nodes of a radix tree, and the digests that end in them: from nodes to keys, and from keys to nodes.

A node has the positions ``[begin, end)`` under its parent, which ends at ``begin``. A grain, a block or a
state belongs to the node in which it *ends* (see `ucm_position_key.spans`), so a split hands each of them to
exactly one of the two halves and changes no key. Where an engine's page has several grains, siblings that
differ in a page may share its first grains: then the grain ends in each of them. Nodes own copies of their
digests: 32 bytes a grain and an entry of the index, all of which goes with the node.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ucm_core.errors import SpecError
from ucm_core.spec.keys import DIGEST_BYTES, NAME_BYTES
from ucm_core.spec.rows import RowKind, SpecRow
from ucm_position_key.paths import Digests
from ucm_position_key.pools import Component, ObjectKey, PoolTable
from ucm_position_key.spans import Span, blocks_ending_in

__all__ = ["NodeId", "NodeIndex", "NodeIndexStatistics", "NodeSpan"]

NodeId = Hashable
"""What an engine calls a node; never used again while the node is there."""


@dataclass(frozen=True, slots=True)
class NodeSpan:
    """Positions ``[begin, end)`` of a path that one node holds."""

    node: NodeId
    """The node."""
    begin: int
    """First position, counted from the root."""
    end: int
    """One past the last."""


@dataclass(frozen=True, slots=True)
class NodeIndexStatistics:
    """What an index holds now."""

    nodes: int
    """Nodes of all trees."""
    grains: int
    """Different grains that end in them."""


@dataclass(frozen=True, slots=True)
class _Node:
    parent: NodeId | None
    span: Span
    digests: bytes
    held: Mapping[str, Span]
    children: int = 0

    def digest(self, grain: int, grain_tokens: int) -> bytes:
        begin = (grain - self.span.begin // grain_tokens) * DIGEST_BYTES
        return self.digests[begin : begin + DIGEST_BYTES]

    def holds(self, pool: str, span: Span) -> bool:
        held = self.held.get(pool)
        return held is not None and held.begin <= span.begin and span.end <= held.end


class NodeIndex:
    """The nodes of an engine's trees, all salts and extra keys together; every call leaves it consistent.

    A call that is refused (SpecError) has changed nothing. Not thread-safe.
    """

    def __init__(self, pools: PoolTable) -> None:
        """Start without a node."""
        self.pools = pools
        self._grain_tokens = pools.table.grain_tokens
        self._nodes: dict[NodeId, _Node] = {}
        # First 16 bytes of a digest -> number of the grain, nodes in which it ends.
        self._grains: dict[bytes, tuple[int, tuple[NodeId, ...]]] = {}

    def insert(
        self,
        node: NodeId,
        digests: Digests,
        *,
        end: int,
        parent: NodeId | None = None,
        held: Mapping[str, Span] | None = None,
    ) -> None:
        """Add a leaf that ends at position ``end``, under ``parent`` or at a root.

        ``digests`` are those of the grains that end in it, ``uint8[grains, 32]``; they are copied. ``held``
        says which positions are there of each pool (of a state: the node's whole span); None: all of FULL.
        """
        span = Span(0 if parent is None else self._node(parent).span.end, end)
        self._check_new(node, digests, span)
        full = (pool.name for pool in self.pools.pools if pool.component is Component.FULL)
        given = dict.fromkeys(full, span) if held is None else held
        for pool, there in given.items():
            self._check_held(pool, there, span)
        kept = {pool: there for pool, there in given.items() if there.count}
        self._nodes[node] = _Node(parent, span, digests.tobytes(), kept)
        for grain, digest in self._grains_of(digests, span):
            _, others = self._grains.get(digest[:NAME_BYTES], (grain, ()))
            self._grains[digest[:NAME_BYTES]] = grain, (*others, node)
        self._count_child(parent, +1)

    def hold(self, node: NodeId, pool: str, *, span: Span) -> None:
        """Say which positions of a pool a node has now; an empty span: none any more (a tombstone)."""
        old = self._node(node)
        self._check_held(pool, span, old.span)
        held = {name: there for name, there in old.held.items() if name != pool}
        self._nodes[node] = replace(old, held=held | ({pool: span} if span.count else {}))

    def split(self, node: NodeId, position: int, *, upper: NodeId) -> None:
        """Give what is before ``position`` to the new node ``upper``, which becomes the parent of ``node``.

        A state stays with the lower half, at whose end it is. Nothing is renamed.
        """
        old = self._node(node)
        if upper is None or upper in self._nodes or not old.span.begin < position < old.span.end:
            raise SpecError(
                f"cannot split node {node!r} of positions [{old.span.begin}, {old.span.end}) at {position} "
                f"into {upper!r}: the position must be inside and the name new, not None"
            )
        above, below = Span(old.span.begin, position), Span(position, old.span.end)
        grains = blocks_ending_in(above, self._grain_tokens)
        cut = len(grains) * DIGEST_BYTES
        held_above = {
            pool: there
            for pool, there in self._held_in(old, above).items()
            if self.pools.pool(pool).component is not Component.MAMBA
        }
        self._nodes[upper] = _Node(old.parent, above, old.digests[:cut], held_above, children=1)
        for grain in grains:
            self._hand_over(old.digest(grain, self._grain_tokens), node, upper)
        self._nodes[node] = _Node(
            upper, below, old.digests[cut:], self._held_in(old, below), children=old.children
        )

    def remove(self, node: NodeId) -> None:
        """Forget a leaf; SpecError for one that is not there (any more) or has children."""
        old = self._node(node)
        if old.children:
            raise SpecError(f"node {node!r} has {old.children} children; remove them first")
        for grain in blocks_ending_in(old.span, self._grain_tokens):
            self._hand_over(old.digest(grain, self._grain_tokens), node)
        del self._nodes[node]
        self._count_child(old.parent, -1)

    def __contains__(self, node: NodeId) -> bool:
        """Return whether a node is there."""
        return node in self._nodes

    def span(self, node: NodeId) -> NodeSpan:
        """Return the positions of a node; SpecError for one that is not there."""
        span = self._node(node).span
        return NodeSpan(node, span.begin, span.end)

    def path(self, node: NodeId) -> tuple[NodeSpan, ...]:
        """Return the nodes from the root down to ``node``."""
        return tuple(self._cut(node, Span(0, self._node(node).span.end)))

    def objects(self, node: NodeId, row_name: str) -> tuple[ObjectKey, ...]:
        """Return what can be saved of a row because ``node`` is there, in order.

        Of chain rows and followers the whole blocks that end in the node and lie in positions that it and the
        nodes above it hold; of a snapshot row the state at its end, where that is on the row's grid.
        """
        row = self.pools.table.row(row_name)
        ends = self._ends(row, self._node(node).span)
        return self._keys(node, row, [end for end in ends if self._holds(node, row, end)])

    def endings(self, node: NodeId, row_name: str) -> tuple[ObjectKey, ...]:
        """Return what of a row ends in ``node``, there or lost meanwhile: what goes with the node."""
        row = self.pools.table.row(row_name)
        return self._keys(node, row, self._ends(row, self._node(node).span))

    def locate(self, row_name: str, keys: Digests) -> tuple[tuple[NodeSpan, ...], ...]:
        """Return for each key, ``uint8[n, 32]`` (or name, ``uint8[n, 16]``), where its positions are.

        Of a block the spans of one or more nodes, from the root down, that together are the block; of a state
        the positions of its node up to it; nothing for a key that no node has. Of several places one of those
        where it is held, if there is one.
        """
        row = self.pools.table.row(row_name)
        return tuple(self._located(row, digest.tobytes()) for digest in self.pools.digests(row_name, keys))

    def statistics(self) -> NodeIndexStatistics:
        """Return what is held now; all zero once every node was removed."""
        return NodeIndexStatistics(len(self._nodes), len(self._grains))

    def check_integrity(self) -> None:
        """AssertionError unless nodes, parents and the index agree."""
        places = [(name, grain, node) for name, (grain, nodes) in self._grains.items() for node in nodes]
        assert sum(len(entry.digests) for entry in self._nodes.values()) == DIGEST_BYTES * len(places)
        assert len({*places}) == len(places)
        for name, grain, node in places:
            assert self._nodes[node].digest(grain, self._grain_tokens)[:NAME_BYTES] == name
        for node, entry in self._nodes.items():
            above = 0 if entry.parent is None else self._nodes[entry.parent].span.end
            assert above == entry.span.begin
            assert entry.children == sum(other.parent == node for other in self._nodes.values())

    def _keys(self, node: NodeId, row: SpecRow, ends: list[int]) -> tuple[ObjectKey, ...]:
        """Keys of what ends at ``ends``, in ``node``."""
        if not ends:
            return ()
        grains = (end // self._grain_tokens - 1 for end in ends)
        digests = b"".join(self._nodes[node].digest(grain, self._grain_tokens) for grain in grains)
        keys = self.pools.keys(row.name, np.frombuffer(digests, np.uint8).reshape(-1, DIGEST_BYTES))
        return tuple(ObjectKey(row.name, key.tobytes()) for key in keys)

    def _grains_of(self, digests: Digests, span: Span) -> Iterator[tuple[int, bytes]]:
        """Number and digest of each grain that ends in ``span``."""
        return zip(blocks_ending_in(span, self._grain_tokens), map(bytes, digests), strict=True)

    def _hand_over(self, digest: bytes, node: NodeId, *to: NodeId) -> None:
        """Put ``to``, or nobody, in the place of ``node`` among those in which a grain ends."""
        grain, nodes = self._grains.pop(digest[:NAME_BYTES])
        if left := (*(other for other in nodes if other != node), *to):
            self._grains[digest[:NAME_BYTES]] = grain, left

    def _ends(self, row: SpecRow, span: Span) -> list[int]:
        """Positions in ``(span.begin, span.end]`` at which something of the row ends."""
        if row.kind is RowKind.SNAPSHOT:
            # A state off the grain's ends has no digest, one off the row's grid no partner.
            return [] if span.end % math.lcm(row.block_tokens, self._grain_tokens) else [span.end]
        if row.kind is RowKind.NONE:
            return []
        return [(block + 1) * row.block_tokens for block in blocks_ending_in(span, row.block_tokens)]

    def _located(self, row: SpecRow, digest: bytes) -> tuple[NodeSpan, ...]:
        grain, nodes = self._grains.get(digest[:NAME_BYTES], (-1, ()))
        end = (grain + 1) * self._grain_tokens
        if not nodes or end % row.block_tokens:
            return ()
        if not self._nodes[nodes[0]].digest(grain, self._grain_tokens).startswith(digest):
            return ()
        node = next((node for node in nodes if self._holds(node, row, end)), nodes[0])
        if row.kind is RowKind.SNAPSHOT:
            return (NodeSpan(node, self._nodes[node].span.begin, end),)
        return tuple(self._cut(node, Span(end - row.block_tokens, end)))

    def _cut(self, node: NodeId, span: Span) -> Iterator[NodeSpan]:
        """Yield the parts of a span that ends in ``node``, from the root down."""
        parts: list[NodeSpan] = []
        at: NodeId | None = node
        while at is not None and (entry := self._nodes[at]).span.end > span.begin:
            parts.append(NodeSpan(at, max(entry.span.begin, span.begin), min(entry.span.end, span.end)))
            at = entry.parent
        return reversed(parts)

    def _holds(self, node: NodeId, row: SpecRow, end: int) -> bool:
        """Whether what ends at ``end``, in ``node``, is there of the row's pool."""
        pool = self.pools.pool_of(row.name).name
        if row.kind is RowKind.SNAPSHOT:
            return pool in self._nodes[node].held and end == self._nodes[node].span.end
        return all(
            self._nodes[part.node].holds(pool, Span(part.begin, part.end))
            for part in self._cut(node, Span(end - row.block_tokens, end))
        )

    def _held_in(self, entry: _Node, span: Span) -> dict[str, Span]:
        """What a node holds of each pool inside ``span``."""
        edges = {
            pool: (max(there.begin, span.begin), min(there.end, span.end))
            for pool, there in entry.held.items()
        }
        return {pool: Span(begin, end) for pool, (begin, end) in edges.items() if begin < end}

    def _check_new(self, node: NodeId, digests: Digests, span: Span) -> None:
        """SpecError unless a node may be inserted."""
        if node is None or node in self._nodes or not span.count:
            raise SpecError(f"node {node!r} of {span.count} positions is none, empty or there already")
        grains = len(blocks_ending_in(span, self._grain_tokens))
        if digests.dtype != np.uint8 or digests.shape != (grains, DIGEST_BYTES):
            raise SpecError(
                f"node {node!r} of positions [{span.begin}, {span.end}) ends {grains} grains of "
                f"{self._grain_tokens}, got digests {digests.dtype} {digests.shape}"
            )
        for grain, digest in self._grains_of(digests, span):
            self._check_digest(node, grain, digest)
        if len({digest.tobytes() for digest in digests[:, :NAME_BYTES]}) < grains:
            raise SpecError(f"node {node!r} has two grains of one digest, which a chain never has")

    def _check_digest(self, node: NodeId, grain: int, digest: bytes) -> None:
        """A digest says how deep it is: equal ones, and equal names, are of one grain."""
        number, others = self._grains.get(digest[:NAME_BYTES], (grain, ()))
        known = {self._nodes[other].digest(number, self._grain_tokens) for other in others[:1]}
        if number != grain or not known <= {digest}:
            raise SpecError(
                f"node {node!r} names its grain {grain} {digest[:NAME_BYTES].hex()}, as node {others[0]!r} "
                f"names another, its grain {number}"
            )

    def _check_held(self, pool: str, there: Span, span: Span) -> None:
        known = self.pools.pool(pool)
        if known.component is Component.SIDE_CAR:
            raise SpecError(f"pool {pool!r} uses the indices of {known.source!r}: hold positions of that")
        inside = span.begin <= there.begin and there.end <= span.end
        whole = known.component is not Component.MAMBA or there == span
        if there.count and not (inside and whole):
            raise SpecError(
                f"pool {pool!r} ({known.component.value}) cannot hold [{there.begin}, {there.end}) of a node "
                f"of positions [{span.begin}, {span.end})"
            )

    def _count_child(self, parent: NodeId | None, change: int) -> None:
        if parent is not None:
            entry = self._nodes[parent]
            self._nodes[parent] = replace(entry, children=entry.children + change)

    def _node(self, node: NodeId) -> _Node:
        if node not in self._nodes:
            raise SpecError(f"no node {node!r} among {len(self._nodes)}: never inserted, or removed before")
        return self._nodes[node]

"""The facade: a cache of one model's KV blocks and states, without any engine.

It composes what the floors below offer: the namespace of the identity, a store per row of the table, the
coordinator that resolves hits. Engine adapters use its parts; everybody else its five verbs: `Cache.chain`,
`Cache.save`, `Cache.resolve`, `Cache.load`, `Cache.close`.
"""

from __future__ import annotations

import atexit
import os
import secrets
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from ucm_core.coordinator.accounts import TokenAccount
from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.coordinator import Coordinator, CoordinatorStatistics, Verdict, needs_parents
from ucm_core.coordinator.explain import Explanation
from ucm_core.coordinator.leases import LeaseStatistics
from ucm_core.coordinator.origins import Origins
from ucm_core.errors import LayoutError, SpecError
from ucm_core.events import EventStream
from ucm_core.flow.copy import BlockSource, BlockTarget, BufferBlocks
from ucm_core.flow.handles import UnitLoad, UnitSave
from ucm_core.flow.ticket import Ticket, TicketGroup
from ucm_core.opening import check_grain, retention_policies, settings_of
from ucm_core.ops.config import CacheConfig
from ucm_core.spaces import Space, Spaces
from ucm_core.spec.identity import ModelIdentity
from ucm_core.spec.keys import Keys, MediaItem, PrefixChain, RequestIdentity, Tokens, following, object_keys
from ucm_core.spec.segments import Share
from ucm_core.spec.table import RowKind, SpecTable
from ucm_core.store.absent import ObjectStore
from ucm_core.store.block import BlockStoreStatistics
from ucm_core.store.close_report import CloseReport
from ucm_core.store.journal import MAX_EVENT_NAMES
from ucm_core.store.root import RootStatistics
from ucm_core.store.stack import CLOSE_WAIT_S, Plans, plan_rows

Payloads = npt.NDArray[np.uint8]
"""Blocks of one row, ``uint8[blocks, units, unit_bytes]``."""


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """A moment of a cache."""

    namespace: str | None
    """None while the identity is unknown."""
    root: RootStatistics
    rows: Mapping[str, BlockStoreStatistics]
    coordinator: CoordinatorStatistics
    leases: LeaseStatistics


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What a load brought."""

    verdict: Verdict
    """The last verdict: shorter than the one asked for when something could not be loaded."""
    payloads: Mapping[str, Payloads]
    """Per row the blocks ``verdict.blocks[row]``, all of them whole, as `Cache.save` takes them."""

    @property
    def resume_tokens(self) -> int:
        """Tokens of the prefix that need not be computed."""
        return self.verdict.hit.resume_tokens


class Cache:
    """A cache of one model. Thread-safe, except that verdicts are for one thread.

    Nothing is kept and nothing found while the identity is unknown or the root cannot be used; that is no
    error. Made by `Cache.open`; a context manager.
    """

    def __init__(
        self, config: CacheConfig, table: SpecTable, *, identity: ModelIdentity, plans: Plans
    ) -> None:
        self.config = config
        """The settings."""
        self.table = table
        """The rows."""
        self._plans = {row: held for row, held in plans.items() if held}
        self._origins: Origins | None = None
        self._spaces = Spaces(config, table, identity=identity, plans=plans)
        atexit.register(self.close)

    @classmethod
    def open(
        cls,
        config: CacheConfig | str | os.PathLike[str] | None,
        table: SpecTable,
        *,
        identity: ModelIdentity,
        share: Share | None = None,
    ) -> Self:
        """Open the cache of ``identity``; ``config`` may be the root's directory, None = all defaults.

        Settings in a file or a mapping: ``CacheConfig.load``.
        ``share`` says how an engine of several ranks cuts the model: the cache of one rank loads and saves
        its segments, rows of which it has none left out; the cache of all resolves, and keeps, marks and
        reads ahead what every rank needs, but moves no bytes.
        Where ``identity`` names no generation, the root's counter does. Raises, before any file is touched,
        `ucm_core.ConfigError` for settings that contradict the table, the identity or each other, and
        `ucm_core.StoreError` for a root that is a file.
        """
        settings = config if isinstance(config, CacheConfig) else settings_of(config)
        check_grain(settings, table, identity=identity)
        retention_policies(settings, table)
        plans = plan_rows(table, settings.ring_bytes, disk_bytes=settings.disk_bytes, share=share)
        return cls(settings, table, identity=identity, plans=plans)

    @property
    def identity(self) -> ModelIdentity:
        """The identity, with its generation."""
        return self._spaces.current.identity

    @property
    def namespace(self) -> str | None:
        """Name of the directory that holds this identity's objects; None while the identity is unknown."""
        return self.identity.namespace if self.identity.known else None

    @property
    def space(self) -> Space:
        """Stores, keys and books of one moment, for calls that need all of them of one generation.

        The weights may change meanwhile: what is loaded from it then fails, and what is saved to it nobody
        finds. ClosedError after `close`.
        """
        return self._spaces.opened()

    @property
    def stores(self) -> Mapping[str, ObjectStore]:
        """The store of each cached row, valid until `weights_changed`."""
        return self._spaces.current.stores

    @property
    def coordinator(self) -> Coordinator:
        """Resolves hits, valid until `weights_changed`."""
        return self._spaces.current.coordinator

    def keys(self, row_name: str, digests: Keys) -> Keys:
        """Object keys of a row for digests of its blocks' ends, both ``uint8[n, 32]``."""
        seed = self._spaces.current.seeds.get(row_name)
        if seed is None:
            raise SpecError(f"no cached row {row_name!r} in the table; it has {', '.join(self._plans)}")
        return object_keys(seed, digests)

    def chain(
        self, tokens: Tokens, identity: RequestIdentity | None = None, *, media: Iterable[MediaItem] = ()
    ) -> PrefixChain:
        """The prefix chain of a request; raises `ucm_core.IdentityError` when it must not be cached."""
        chain = PrefixChain(identity, grain_tokens=self.table.grain_tokens, media=media)
        chain.extend(tokens)
        return chain

    def save(
        self,
        chain: PrefixChain,
        payloads: Mapping[str, Payloads],
        *,
        first_block: int | Mapping[str, int] = 0,
    ) -> TicketGroup:
        """Keep blocks of ``chain``: per row an array that begins at block ``first_block`` (of that row).

        An array is ``uint8[blocks, layers, unit_bytes]``, the layers being the row's ``units``. A row that a
        mapping ``first_block`` does not name begins at 0.
        Block ``i`` of a chain row holds the tokens ``[i, i + 1) x block_tokens``; of a snapshot row it is the
        state after ``(i + 1) x block_tokens`` tokens. The arrays may be changed when this returns. Raises
        `ucm_core.LayoutError` for an array of another shape, `ucm_core.SpecError` for an unknown row (also in
        ``first_block``) or a chain that is shorter than the blocks.
        """
        space = self._spaces.opened()
        sources = {row: self._buffer(row, blocks) for row, blocks in payloads.items()}
        keys, parents = {}, {}
        begins = _begin_blocks(first_block, payloads, known=self._plans)
        for row, blocks in payloads.items():
            begin, end = begins[row], begins[row] + len(blocks)
            keys[row] = space.coordinator.keys(chain, row, begin_block=begin, end_block=end)
            parents[row] = space.coordinator.parents(chain, row, begin_block=begin, end_block=end)
            self._remember(chain, row, keys=keys[row], begin_block=begin)
        tickets = {
            row: space.stores[row].save(keys[row], sources[row], parents=parents[row]) for row in payloads
        }
        for row, ticket in tickets.items():
            ticket.add_done_callback(partial(_note_saved, space.coordinator, row, keys[row]))
        return TicketGroup(tickets)

    def begin_save(
        self,
        chain: PrefixChain,
        sources: Mapping[str, BlockSource],
        *,
        first_block: int | Mapping[str, int] = 0,
    ) -> dict[str, UnitSave]:
        """`save` of blocks whose units come one by one: per row its handle, whose unit 0 is the row's first.

        Object ``i`` of a source is block ``first_block + i`` of its row, up to the last block of which the
        chain has all tokens. Raises as `save` does.
        """
        space = self._spaces.opened()
        begins = _begin_blocks(first_block, sources, known=self._plans)
        keys, parents = {}, {}
        for row in sources:
            span = {"begin_block": begins[row], "end_block": self._whole_blocks(chain, row)}
            keys[row] = space.coordinator.keys(chain, row, **span)
            parents[row] = space.coordinator.parents(chain, row, **span)
            self._remember(chain, row, keys=keys[row], begin_block=begins[row])
        saves = {
            row: space.stores[row].begin_save(keys[row], source, parents=parents[row])
            for row, source in sources.items()
        }
        for row, save in saves.items():
            save.ticket.add_done_callback(partial(_note_saved, space.coordinator, row, keys[row]))
        return saves

    def resolve(
        self,
        chain: PrefixChain,
        *,
        request_tokens: int | None = None,
        local_tokens: int = 0,
        tail_tokens: int = 1,
        align_tokens: int = 1,
    ) -> Verdict:
        """Where the request of ``chain`` can resume, and what to load for it; marks all of that as used.

        ``request_tokens`` is the chain's length unless given; the last ``tail_tokens`` are left to compute.
        With ``prefetch_on_lookup`` what only files hold begins to come into the ring, until the verdict is
        loaded, or its lease ends.
        """
        space = self._spaces.opened()
        verdict = space.coordinator.verdict(
            chain,
            request_tokens=chain.token_count if request_tokens is None else request_tokens,
            local_tokens=local_tokens,
            tail_tokens=tail_tokens,
            align_tokens=align_tokens,
        )
        self.touch(verdict)
        return self.prefetch(verdict) if self.config.prefetch_on_lookup else verdict

    def prefetch(self, verdict: Verdict) -> Verdict:
        """Begin to read what only files hold of ``verdict`` into the ring; returns it with the reads.

        They give way to loads, and end when that verdict is loaded, or its lease ends.
        """
        stores = self._spaces.opened().stores
        reads = {
            row: stores[row].prefetch(keys, parents=self._parents(row, keys))
            for row, keys in self._held(verdict)
            if len(keys)
        }
        return replace(verdict, prefetch=TicketGroup(reads))

    def explain(
        self,
        chain: PrefixChain,
        *,
        request_tokens: int | None = None,
        local_tokens: int = 0,
        tail_tokens: int = 1,
        align_tokens: int = 1,
    ) -> Explanation:
        """Why the request of ``chain`` would resume where it does; ``print`` it. It changes nothing.

        It is no request and no verdict to any counter but ``ucm_lookups_total``, as the stores are asked for
        everything that could be stored of the prefix: for people, not for every request.
        """
        return self._spaces.opened().coordinator.explain(
            chain,
            request_tokens=chain.token_count if request_tokens is None else request_tokens,
            local_tokens=local_tokens,
            tail_tokens=tail_tokens,
            align_tokens=align_tokens,
        )

    def lease(self, verdict: Verdict, attempt: Attempt) -> Verdict:
        """Keep in the ring what ``verdict`` promises and the ring holds; returns the verdict with its lease.

        The lease ends with the load of that verdict, the next lease of ``attempt``, with `release`, or by
        itself after a minute. All leases of a cache keep at most three quarters of each ring.
        """
        at_end = None if verdict.prefetch is None else verdict.prefetch.cancel
        lease = self._spaces.opened().leases.take(attempt, verdict.keys, at_end=at_end)
        return replace(verdict, lease=lease)

    def release(self, attempt: Attempt) -> None:
        """End the lease of ``attempt``: nothing is loaded for it. A no-op where it has none (any more)."""
        self._spaces.current.leases.release(attempt)

    def soon_tokens(self, chain: PrefixChain, verdict: Verdict) -> int:
        """Where the request could resume a moment later, when what others are storing or reading is there.

        ``verdict.hit.resume_tokens`` when nothing that limits the verdict is on its way. Ask again a limited
        number of times: who stores it may fail.
        """
        space = self._spaces.opened()
        in_flight = {row: store.in_flight for row, store in space.stores.items()}
        return space.coordinator.soon_tokens(chain, verdict, in_flight=in_flight)

    def touch(self, verdict: Verdict) -> None:
        """Mark everything that ``verdict`` would load as used, in the ring and on the medium."""
        for row, keys in self._held(verdict):
            self._spaces.current.stores[row].touch(keys)

    def load(self, chain: PrefixChain, verdict: Verdict) -> Loaded:
        """Load what ``verdict`` promises, or the deepest prefix of it that can still be loaded. Waits.

        Only bytes of ``chain`` come back, also for the verdict of another chain or of weights that changed
        since. What is gone or damaged is told to the coordinator, so that the next verdict promises less. The
        verdict's lease has ended when this returns. Counts one request, with what the verdict promised and
        what came; `resolve` counts none.
        """
        account = _account(verdict)
        if verdict.prefetch is not None:
            verdict.prefetch.cancel()  # the load brings the same, and does not wait behind it
        with ExitStack() as afterwards:
            if verdict.lease is not None:
                afterwards.callback(verdict.lease.release)
            loaded = self._load(chain, verdict)
        account.delivered(loaded.verdict.hit.new_tokens).count()
        return loaded

    def load_into(self, verdict: Verdict, targets: Mapping[str, BlockTarget]) -> TicketGroup:
        """Begin to load the blocks ``verdict.blocks[row]`` of every row to its target; does not wait.

        The verdict's lease ends when all of them have come or failed.
        """
        self._begin(verdict, targets)
        stores = self._spaces.opened().stores
        tickets = TicketGroup(
            {
                row: stores[row].load(keys, targets[row], parents=self._parents(row, keys))
                for row, keys in self._held(verdict)
            }
        )
        if verdict.lease is not None:
            tickets.add_done_callback(verdict.lease.release)
        return tickets

    def begin_load(self, verdict: Verdict, targets: Mapping[str, BlockTarget]) -> dict[str, UnitLoad]:
        """`load_into` of which only submitted units are brought: per row its handle.

        The verdict's lease ends when every unit of every row has come or failed, or was cancelled.
        """
        self._begin(verdict, targets)
        stores = self._spaces.opened().stores
        loads = {
            row: stores[row].begin_load(keys, targets[row], parents=self._parents(row, keys))
            for row, keys in self._held(verdict)
        }
        if verdict.lease is not None:
            TicketGroup({row: load.ticket for row, load in loads.items()}).add_done_callback(
                verdict.lease.release
            )
        return loads

    def rebuild(self) -> int:
        """Learn which states the medium holds by enumerating it; the number of states known then.

        Nothing depends on it: a state that is not known is asked of the store, one that is known is confirmed
        before it is promised. It saves a fresh process the questions. May run beside everything else.
        """
        space = self._spaces.opened()
        rows = (row.name for row in self.table.snapshot_rows)
        return sum(space.coordinator.rebuild(row, space.stores[row].names()) for row in rows)

    def reset(self) -> None:
        """Find nothing of what was stored so far, here and wherever this model's cache is opened from now on.

        The root's counter is raised; saves under way end in the namespace in which they began. Raises
        `ucm_core.StoreError`, naming the tier, when that counter cannot be kept: nothing of before is found
        here all the same, but other processes and later ones still may. Where no new stores can be opened
        nothing is kept or found from now on.
        """
        self._spaces.move_on(self.identity.private_token)

    def weights_changed(self) -> None:
        """`reset`, and let nobody else find what is stored from now on.

        For that this cache gets a private token, because nobody can name weights that exist only in memory.
        Raises as `reset` does.
        """
        self._spaces.move_on(secrets.token_hex(16))

    def events(self, capacity: int = MAX_EVENT_NAMES) -> EventStream:
        """What is stored and removed from now on, to be taken before it exceeds ``capacity`` objects.

        Parents and tokens are known of what this cache saves from now on. Costs nothing before it is called.
        """
        self._spaces.opened()
        self._origins = self._origins or Origins()
        return EventStream(self._spaces.root.journal.listen(capacity), self._origins, self._spaces.followed)

    def statistics(self) -> CacheStatistics:
        """A moment of this cache."""
        space = self._spaces.current
        rows = {row: store.statistics() for row, store in space.stores.items()}
        return CacheStatistics(
            self.namespace,
            self._spaces.root.statistics(),
            rows,
            coordinator=space.coordinator.statistics(),
            leases=space.leases.statistics(),
        )

    def check_integrity(self) -> None:
        """Raise `ucm_core.StoreError` or `ucm_core.SpecError` when books do not balance."""
        self._spaces.current.leases.check_integrity()
        self._spaces.current.coordinator.check_integrity()
        for store in self._spaces.current.stores.values():
            store.check_integrity()

    def close(self, timeout_s: float = CLOSE_WAIT_S) -> tuple[CloseReport, ...]:
        """Let saves under way reach the medium, then let go of everything. Idempotent.

        Takes at most about ``timeout_s``; says, row by row, what was kept of what was under way.
        """
        atexit.unregister(self.close)
        return self._spaces.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -- private

    def _load(self, chain: PrefixChain, verdict: Verdict) -> Loaded:
        space: Space | None = None
        while True:
            if space is not self._spaces.current:  # also when the weights changed on the way
                space = self._spaces.opened()
                verdict = space.coordinator.clamp(chain, verdict)  # named by this chain, in this space
            payloads = {row: self._blank(row, len(keys)) for row, keys in verdict.keys.items()}
            tickets = self.load_into(
                verdict, {row: self._buffer(row, part) for row, part in payloads.items()}
            )
            tickets.wait()
            failed = self._failed_units(verdict, tickets)
            if space is not self._spaces.current:
                continue
            if not failed:
                return Loaded(verdict, payloads)
            verdict = space.coordinator.rewind(chain, verdict, failed=failed)

    def _begin(self, verdict: Verdict, targets: Mapping[str, BlockTarget]) -> None:
        """Check that everything has a target; what is loaded now need not be read ahead."""
        self._spaces.opened()
        if lacking := [row for row, _ in self._held(verdict) if row not in targets]:
            raise LayoutError(f"rows without a target: {', '.join(lacking)}; nothing was loaded")
        if verdict.prefetch is not None:
            verdict.prefetch.cancel()

    def _held(self, verdict: Verdict) -> list[tuple[str, Keys]]:
        """What ``verdict`` would load of the rows that this process has a segment of."""
        return [(row, keys) for row, keys in verdict.keys.items() if row in self._plans]

    def _whole_blocks(self, chain: PrefixChain, row: str) -> int:
        return chain.token_count // self.table.row(row).block_tokens

    def _remember(self, chain: PrefixChain, row: str, *, keys: Keys, begin_block: int) -> None:
        """Note, for events, of which tokens these keys are."""
        if self._origins is not None:
            self._origins.remember(chain, self.table.row(row), keys=keys, begin_block=begin_block)

    def _parents(self, row: str, keys: Keys) -> Keys | None:
        """Of the blocks of a verdict, which follow each other, the one before each."""
        return following(keys) if needs_parents(self.table.row(row)) else None

    def _buffer(self, row: str, blocks: Payloads) -> BufferBlocks:
        if row not in self._plans:
            raise SpecError(f"no cached row {row!r} in the table; it has {', '.join(self._plans)}")
        geometry = self.stores[row].geometry
        if not isinstance(blocks, np.ndarray):
            raise LayoutError(f"row {row!r}: blocks are a {type(blocks).__name__}, not a numpy array")
        need = (geometry.shards, geometry.shard_bytes)
        if blocks.dtype != np.uint8 or blocks.ndim != 3 or blocks.shape[1:] != need:
            raise LayoutError(
                f"row {row!r}: blocks are {blocks.dtype}{list(blocks.shape)};"
                f" need uint8[blocks, {geometry.shards}, {geometry.shard_bytes}]"
            )
        return BufferBlocks(blocks)

    def _failed_units(self, verdict: Verdict, tickets: TicketGroup) -> dict[str, list[int]]:
        """What did not load: indices of blocks, and positions of states."""
        failed = {}
        for row, ticket in tickets.rows.items():
            blocks = [verdict.blocks[row][place] for place in np.flatnonzero(ticket.object_results)]
            spec = self.table.row(row)
            is_state = spec.kind is RowKind.SNAPSHOT
            failed[row] = [(block + 1) * spec.block_tokens if is_state else block for block in blocks]
        return {row: units for row, units in failed.items() if units}

    def _blank(self, row: str, count: int) -> Payloads:
        geometry = self.stores[row].geometry
        return np.zeros((count, geometry.shards, geometry.shard_bytes), dtype=np.uint8)


def _note_saved(coordinator: Coordinator, row: str, keys: Keys, ticket: Ticket) -> None:
    coordinator.saved(row, keys[ticket.stored])


def _account(verdict: Verdict) -> TokenAccount:
    prompt = verdict.hit.ask.request_tokens
    local = min(verdict.hit.ask.local_tokens, prompt)
    return TokenAccount(prompt, local).promised(verdict.hit.new_tokens)


def _begin_blocks(
    first_block: int | Mapping[str, int], rows: Iterable[str], *, known: Collection[str]
) -> dict[str, int]:
    """Per row of ``rows`` its first block; SpecError for a name that is no row, which would be a typo."""
    named = first_block if isinstance(first_block, Mapping) else dict.fromkeys(rows, first_block)
    unknown = next((name for name in named if name not in known), None)
    if unknown is not None:
        raise SpecError(f"first_block names {unknown!r}, which is no cached row; rows are {', '.join(known)}")
    return {row: _block(row, named.get(row, 0)) for row in rows}


def _block(row: str, block: object) -> int:
    if not isinstance(block, Integral):
        raise SpecError(f"row {row!r}: first_block is {block!r}, which is no int")
    return int(block)

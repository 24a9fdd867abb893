"""Everything at once: a coordinator and its leases over stores that evict, lose, damage, fail and delay.

What is stood in for: the stores (`RingDouble`) and the engine that computes (`data_of`). Real are the
coordinator, the leases, the keys and the order of calls of `Cache.load`.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from doubles import Clock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ring_double import RingDouble
from spec_rows import chain, follower, snapshot, table

from ucm_core.coordinator.attempts import Attempt
from ucm_core.coordinator.coordinator import Coordinator, CoordinatorLimits, Verdict
from ucm_core.coordinator.leases import LeasedRow, Leases
from ucm_core.spec.keys import PrefixChain, RequestIdentity, row_seed
from ucm_core.spec.table import RowKind, SpecRow

FULL, WINDOW, STATE = chain("full", 2), chain("window", 4, 5), snapshot("state", 4)
SPEC = table(FULL, WINDOW, STATE, follower("side", FULL), grain=2)
ROWS = [row.name for row in SPEC.rows]
BOUNDS = CoordinatorLimits(suspect_s=60.0, suspects=5, checkpoints=3)
SLOTS, LEASED = 8, 6
TOKENS = 24
PROMPTS = [
    ([7] * shared + [number] * (TOKENS - shared), salt)
    for number, shared, salt in [(1, 0, None), (2, 8, None), (3, 14, None), (3, 14, "tenant")]
]

prompts = st.integers(0, len(PROMPTS) - 1)
requests = st.integers(0, 2)
rows = st.sampled_from(ROWS)


def data_of(prompt: int, row: str, end_tokens: int, weights: int) -> bytes:
    """What the engine computes: a function of the whole prefix, the row, the block and the weights."""
    tokens, salt = PROMPTS[prompt]
    return hashlib.sha256(repr((tokens[:end_tokens], salt, row, end_tokens, weights)).encode()).digest()


def chain_of(prompt: int) -> PrefixChain:
    tokens, salt = PROMPTS[prompt]
    made = PrefixChain(RequestIdentity(cache_salt=salt), grain_tokens=SPEC.grain_tokens)
    made.extend(tokens)
    return made


class Machine(RuleBasedStateMachine):
    """One scheduler process after the other over the same stores."""

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.weights = Clock(), 0
        self.stores = {name: RingDouble(SLOTS) for name in ROWS}
        self.saving: list[tuple[str, np.ndarray]] = []
        self.asked: dict[int, tuple[int, Verdict]] = {}
        self.uses = [0, 0, 0]
        self.start()

    def start(self) -> None:
        namespace = hashlib.sha256(b"%d" % self.weights).digest()
        seeds = {name: row_seed(namespace, name) for name in ROWS if name != "side"}
        lookups = {name: store.lookup for name, store in self.stores.items()}
        self.coordinator = Coordinator(SPEC, lookups, seeds, limits=BOUNDS, clock=self.clock)
        leased = {name: LeasedRow(store.pin, LEASED) for name, store in self.stores.items()}
        self.leases = Leases(leased, limit_s=60.0, clock=self.clock)

    def attempt(self, request: int) -> Attempt:
        return Attempt(f"r{request}", self.uses[request])

    # -- saves

    @initialize(prompt=prompts)
    def begin_with_a_prompt(self, prompt: int) -> None:
        self.write(prompt, TOKENS, without=None, at_once=True)

    @rule(prompt=prompts, tokens=st.integers(1, TOKENS), without=st.none() | rows, at_once=st.booleans())
    def write(self, prompt: int, tokens: int, without: str | None, at_once: bool) -> None:
        """Compute a prefix and store what the stores lack of it, but for one row; or only begin to."""
        request = chain_of(prompt)
        for row in SPEC.rows:
            if row.name != without:
                span = {"begin_block": 0, "end_block": tokens // row.block_tokens}
                lacking = np.flatnonzero(self.coordinator.missing(request, row.name, **span))
                for block in lacking:
                    self.begin_save(
                        prompt, row, int(block), self.coordinator.keys(request, row.name, **span)[block]
                    )
        if at_once:
            self.finish_saves(count=len(self.saving), to_medium=True, told=True)

    def begin_save(self, prompt: int, row: SpecRow, block: int, key: np.ndarray) -> None:
        end_tokens = (block + 1) * row.block_tokens
        self.stores[row.name].begin_save(key, data_of(prompt, row.name, end_tokens, self.weights))
        self.saving.append((row.name, key))

    @rule(count=st.integers(0, 99), to_medium=st.booleans(), told=st.booleans())
    def finish_saves(self, count: int, to_medium: bool, told: bool) -> None:
        """The oldest of those under way end well; only some end on the medium, only some are told."""
        ended, self.saving = self.saving[:count], self.saving[count:]
        for row, key in ended:
            if key.tobytes() in self.stores[row].loading:
                self.stores[row].end_save(key.tobytes(), to_medium=to_medium)
                if told:
                    self.coordinator.saved(row, key[None])

    # -- requests

    @rule(request=requests, prompt=prompts, local=st.just(0) | st.integers(0, 9), leased=st.booleans())
    def ask(self, request: int, prompt: int, local: int, leased: bool) -> None:
        verdict = self.coordinator.verdict(chain_of(prompt), request_tokens=TOKENS, local_tokens=local)
        in_flight = {name: store.in_flight for name, store in self.stores.items() if name != "side"}
        soon = self.coordinator.soon_tokens(chain_of(prompt), verdict, in_flight=in_flight)
        assert 0 <= verdict.hit.resume_tokens <= soon < TOKENS
        if leased:
            lease = self.leases.take(self.attempt(request), verdict.keys)
            verdict = Verdict(verdict.hit, verdict.blocks, verdict.keys, lease=lease)
        self.asked[request] = (prompt, verdict)

    @rule(request=requests, prompt=prompts, leased=st.booleans(), astray=st.booleans())
    def load(self, request: int, prompt: int, leased: bool, astray: bool) -> None:
        """As `Cache.load`, for the last verdict if there is one; astray: for another prompt's."""
        if request not in self.asked:
            self.ask(request, prompt, 0, leased)
        asked, verdict = self.asked.pop(request)
        prompt = prompt if astray else asked
        lease, verdict = verdict.lease, self.coordinator.clamp(chain_of(prompt), verdict)
        for _ in range(TOKENS):
            failed = self.transfer(prompt, verdict)
            if not failed:
                break
            verdict = self.coordinator.rewind(chain_of(prompt), verdict, failed=failed)
        else:
            raise AssertionError("a load must come to an end")
        if lease is not None:
            lease.release()
            assert self.leases._held.get(lease.attempt) is not lease

    def transfer(self, prompt: int, verdict: Verdict) -> dict[str, list[int]]:
        """Load all that a verdict names, compare every byte; what failed."""
        failed: dict[str, list[int]] = {}
        for name, blocks in verdict.blocks.items():
            row, held = SPEC.row(name), self.held(name)
            for block, key in zip(blocks, verdict.keys[name], strict=True):
                end_tokens = (block + 1) * row.block_tokens
                data = self.stores[name].load(key)
                if data is None:
                    assert key.tobytes() not in held
                    failed.setdefault(name, []).append(end_tokens if row.kind is RowKind.SNAPSHOT else block)
                else:
                    assert data == data_of(prompt, name, end_tokens, self.weights)
        return failed

    def held(self, row: str) -> list[bytes]:
        """Keys of a row that leases hold, once per lease."""
        leases = [lease for lease in self.leases._held.values() if row in lease.pins]
        return [key.tobytes() for lease in leases for key in lease.pins[row].keys]

    @rule(request=requests, how=st.sampled_from(["released", "released twice", "aborted", "forgotten"]))
    def end(self, request: int, how: str) -> None:
        """Without a load; an aborted or forgotten request's id is used anew, its load may still come."""
        for _ in range(["forgotten", "released", "released twice"].index(how) if how != "aborted" else 1):
            self.leases.release(self.attempt(request))
        self.uses[request] += how in {"aborted", "forgotten"}
        self.leases.release(Attempt("never seen"))

    # -- the world

    @rule(row=rows, count=st.integers(0, 20))
    def press(self, row: str, count: int) -> None:
        """Foreign objects go through the ring; very many of them break the store."""
        self.stores[row].press(count)
        self.stores[row].broken = count > 17

    @rule(row=rows, which=st.integers(0, 30), how=st.sampled_from(["vanish", "rot"]))
    def harm(self, row: str, which: int, how: str) -> None:
        medium = self.stores[row].medium
        name = list(medium)[which % len(medium)] if medium else b""
        if how == "vanish":
            medium.pop(name, None)
        elif name:
            self.stores[row].damaged.add(name)

    @rule(seconds=st.sampled_from([1.0, 30.0, 61.0]))
    def wait(self, seconds: float) -> None:
        """Time passes; what was broken works again."""
        self.clock.now += seconds
        for store in self.stores.values():
            store.broken = False

    @rule(how=st.sampled_from(["restart", "change weights", "go on"]), request=requests, prompt=prompts)
    def begin_anew(self, how: str, request: int, prompt: int) -> None:
        """A process dies with its references, its saves and its memory; or lives, with other weights."""
        self.ask(request, prompt, 0, leased=True)
        if how == "restart":
            for store in self.stores.values():
                store.die()
            self.saving.clear()
            self.asked.clear()
        elif how == "change weights":
            self.leases.close()  # verdicts and saves of before are still on their way
            self.weights += 1
        if how != "go on":
            self.start()
            self.write(prompt, TOKENS, None, at_once=True)

    # -- what always holds

    @invariant()
    def books_balance(self) -> None:
        self.leases.statistics()
        self.leases.check_integrity()
        self.coordinator.check_integrity()
        for name, store in self.stores.items():
            held = self.held(name)
            assert sorted(store.references.elements()) == sorted(held)
            assert store.ring.keys() >= set(held)

    @invariant()
    def memory_is_bounded(self) -> None:
        now = self.coordinator.statistics()
        assert max(now.suspects.values()) <= BOUNDS.suspects
        assert now.checkpoints["state"].states <= BOUNDS.checkpoints
        assert self.leases.statistics().objects <= LEASED * len(ROWS)

    def teardown(self) -> None:
        for request in range(3):
            for use in range(self.uses[request] + 1):
                self.leases.release(Attempt(f"r{request}", use))
        assert self.leases.statistics().held == 0
        assert not any(store.references for store in self.stores.values())


TestEverythingAtOnce: Any = Machine.TestCase
TestEverythingAtOnce.settings = settings(
    max_examples=60, stateful_step_count=60, deadline=None, suppress_health_check=list(HealthCheck)
)

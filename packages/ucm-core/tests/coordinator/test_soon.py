"""Not yet: what is on its way counts for later, never for now."""

from __future__ import annotations

from typing import Any

from coordinator_strategies import REQUEST_TOKENS, asks, presences, tables
from doubles import Node, chain_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from spec_rows import blocks, chain, snapshot, states, table, whole

from ucm_core.coordinator.coordinator import Verdict
from ucm_core.coordinator.coverage import alignment, voters
from ucm_core.coordinator.presence import Presence, unite
from ucm_core.coordinator.resolve import resolve_hit
from ucm_core.coordinator.soon import MAX_STATES
from ucm_core.errors import StoreError
from ucm_core.spec.keys import PrefixChain

FULL, STATE = chain("full", 64), snapshot("state", 64)
HYBRID = table(FULL, STATE)


class Flying:
    """A node, and another one whose stores hold what the first one's rings are being filled with."""

    def __init__(self, node: Node, request: PrefixChain, **presence: Presence) -> None:
        self.node, self.request, coming = node, request, Node(node.spec)
        coming.store(request, presence)
        self.rows = coming.stores

    def soon(self, verdict: Verdict) -> int:
        in_flight = {row.name: self.rows[row.name].lookup for row in voters(self.node.spec)}
        return self.node.coordinator.soon_tokens(self.request, verdict, in_flight=in_flight)


def hybrid(now: dict[str, Presence], flying: dict[str, Presence]) -> tuple[Verdict, Flying]:
    """A request of 1000 tokens."""
    node, request = Node(HYBRID), chain_of(HYBRID, 1000)
    node.store(request, now)
    return node.coordinator.verdict(request, request_tokens=1000), Flying(node, request, **flying)


def test_blocks_that_are_being_stored_are_not_there_yet() -> None:
    verdict, flying = hybrid({"full": whole(4), "state": states(256, 512)}, {"full": blocks((4, 8))})
    assert (verdict.hit.resume_tokens, flying.soon(verdict)) == (256, 512)


def test_a_state_that_is_being_stored_is_not_there_yet() -> None:
    verdict, flying = hybrid({"full": whole(8), "state": states(256)}, {"state": states(448)})
    assert (verdict.hit.resume_tokens, flying.soon(verdict)) == (256, 448)


def test_what_does_not_help_is_not_waited_for() -> None:
    """Block 5 is coming, block 4 is not."""
    verdict, flying = hybrid({"full": whole(4), "state": states(256)}, {"full": blocks((5, 8))})
    assert flying.soon(verdict) == 256
    assert flying.rows["full"].asked == [1]


def test_nothing_is_asked_when_all_is_there() -> None:
    verdict, flying = hybrid({"full": whole(15), "state": states(960)}, {})
    assert (flying.soon(verdict), flying.rows["full"].asked) == (960, [])


def test_a_store_that_fails_has_nothing_in_flight() -> None:
    verdict, flying = hybrid({"full": whole(4), "state": states(256, 512)}, {"full": blocks((4, 8))})
    flying.rows["full"].broken = StoreError("broken on purpose")
    assert flying.soon(verdict) == 256


def test_what_failed_and_is_stored_again_is_expected() -> None:
    verdict, flying = hybrid({"full": whole(4), "state": states(256, 512)}, {"full": blocks((4, 8))})
    flying.node.coordinator.failed("full", flying.node.keys(flying.request, "full", [320]))
    assert flying.soon(verdict) == 512


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(spec=tables(), ask=asks(), data=st.data())
def test_soon_is_between_now_and_what_will_be(spec: Any, ask: dict[str, Any], data: st.DataObject) -> None:
    """And just what will be, where no row has a window and few states are to be asked about."""
    now = {row.name: data.draw(presences(row)) for row in spec.rows}
    coming = {row.name: data.draw(presences(row)) for row in voters(spec)}
    node, request = Node(spec), chain_of(spec, REQUEST_TOKENS)
    node.store(request, now)
    verdict = node.coordinator.verdict(request, **ask)
    soon = Flying(node, request, **coming).soon(verdict)
    will_be = resolve_hit(spec, unite(now, coming), **ask).resume_tokens
    assert verdict.hit.resume_tokens <= soon <= will_be
    step = alignment(spec, ask["align_tokens"])
    all_are_asked = (verdict.hit.hit_tokens - verdict.hit.resume_tokens) // step < MAX_STATES
    assert soon == will_be or any(row.window for row in spec.rows) or not all_are_asked


def test_keys_past_the_chain_are_not_asked() -> None:
    node, request = Node(HYBRID), chain_of(HYBRID, 200)
    node.store(request, {"full": whole(3), "state": states(192)})
    verdict = node.coordinator.verdict(request, request_tokens=10_000)
    assert (verdict.hit.resume_tokens, Flying(node, request).soon(verdict)) == (192, 192)

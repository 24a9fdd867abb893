"""Calls of a store that a signal's handler ends: nothing stays counted or held, and no byte is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rings import DIGEST, keys
from stores import open_store

from ucm_core.errors import StoreError
from ucm_core.flow.copy import BufferBlocks
from ucm_core.store.block import BlockStore
from ucm_core.store.geometry import Geometry
from ucm_core.store.ring import Claims, Outcome, Ring
from ucm_core.testing.objects import blank, keys_of

SCRIPT = Path(__file__).with_name("interrupted.py")
TURNS = 1400
GEOMETRY = Geometry(2, 4096)


def test_whatever_part_of_a_call_a_signal_ends_the_store_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(TURNS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = done.stdout.split()
    assert int(words[0]) > TURNS / 10
    assert int(words[-2]) <= 5, "a thread whose start was ended before it was noted ends"


class Interruption(BaseException):
    """What a signal's handler raises."""


@pytest.mark.parametrize("begin", [BlockStore.begin_load, BlockStore.begin_save])
def test_a_signal_right_after_a_claim_by_units_leaves_nothing_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begin: Callable[..., object]
) -> None:
    def claim_and_end(ring: Ring, *arguments: Any, **more: Any) -> Claims:
        real(ring, *arguments, **more)
        raise Interruption

    real = Ring.claim
    store = open_store(tmp_path, GEOMETRY)
    monkeypatch.setattr(Ring, "claim", claim_and_end)
    with pytest.raises(Interruption):
        begin(store, keys_of(1, 2), BufferBlocks(blank(GEOMETRY, 2)))
    monkeypatch.undo()
    assert store.statistics().working == 0
    assert references(store._tiers.ring) == (0, 0)
    store.close()


@pytest.fixture
def ring() -> Ring:
    return Ring.open(None, slots=4, payload_bytes=4096, geometry_digest=DIGEST)


def references(ring: Ring) -> tuple[int, int]:
    found = ring.statistics()
    ring.check_integrity()
    return found.own_references, found.loading


def test_what_a_claim_took_goes_back_with_the_last_who_has_it(ring: Ring) -> None:
    hold = ring.hold()
    ring.claim(keys(0, 1), hold=hold)
    assert references(ring) == (2, 2)
    part = hold.part(np.array([1]))
    del hold
    assert references(ring) == (1, 1)
    del part
    assert references(ring) == (0, 0)


def test_what_is_full_stays_and_what_is_not_goes(ring: Ring) -> None:
    hold = ring.hold()
    ring.claim(keys(0, 1), hold=hold)
    hold.publish(np.array([0]))
    hold.let_go()
    hold.let_go()
    assert references(ring) == (0, 0)
    assert ring.lookup(keys(0, 1)).tolist() == [1, 0]
    with pytest.raises(StoreError):
        ring.release(ring.pin(keys(0)).slots.repeat(2))


def test_some_can_be_given_up_before_the_rest(ring: Ring) -> None:
    hold = ring.hold()
    ring.claim(keys(0, 1, 2), hold=hold)
    hold.abort(np.array([2, 0]))
    assert references(ring) == (1, 1)
    assert ring.claim(keys(0)).outcome.tolist() == [Outcome.OWNER]


def test_a_closed_ring_wants_nothing_back(ring: Ring) -> None:
    hold = ring.hold()
    ring.pin(keys(0), hold=hold)
    ring.claim(keys(0), hold=hold)
    ring.close()
    hold.let_go()


@pytest.mark.parametrize("place", [-1, 2])
def test_a_place_that_is_none_is_an_error_and_changes_nothing(ring: Ring, place: int) -> None:
    hold = ring.hold()
    ring.claim(keys(0, 1), hold=hold)
    for call in (hold.publish, hold.abort, hold.part):
        with pytest.raises(IndexError, match=f"place {place} of 2"):
            call(np.array([place]))
    assert references(ring) == (2, 2)

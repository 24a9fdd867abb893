"""Which objects move and where they lie, on a hand-made table: two groups of one row, a window, a state."""

from __future__ import annotations

import numpy as np
import pytest

from ucm_core.coordinator.coordinator import Coordinator, Verdict
from ucm_core.spec.keys import PrefixChain, following
from ucm_core.spec.table import Part, RowKind, SpecRow, SpecTable
from ucm_vllm.metadata import RowTransfer
from ucm_vllm.spec_from_engine import EngineSpec, RowGroup
from ucm_vllm.transfer_plans import TransferPlanner, offers_by_position

KV = (Part("k", (2, 32), "bfloat16"), Part("v", (2, 32), "bfloat16"))
FULL = SpecRow("full", RowKind.CHAIN, 64, (0, 1), KV)
WINDOW = SpecRow("window", RowKind.CHAIN, 64, (2,), KV, window=65)
STATE = SpecRow("state", RowKind.SNAPSHOT, 64, (3, 4), (Part("ssm", (4, 8), "float32"),))
TABLE = SpecTable((FULL, WINDOW, STATE), 64)
ROWS = {
    "full": (RowGroup(0, 128, (("l0", 0),)), RowGroup(1, 32, (("l1", 1),))),
    "window": (RowGroup(2, 128, (("l2", 0),)),),
    "state": (RowGroup(3, 128, (("l3", 0),)), RowGroup(4, 128, (("l4", 1),))),
}
PLANNER = TransferPlanner(EngineSpec(TABLE, ROWS, 128))
PAGES = {0: [1, 2, 3], 1: list(range(10, 22)), 2: [0, 31, 32], 3: [0, 41, 42], 4: [0, 51, 52]}
TABLES = [PAGES[group] for group in range(5)]


def verdict(resume: int, local: int = 0) -> Verdict:
    """Where everything is stored, resuming at ``resume``."""
    everything = {row.name: lambda keys: np.ones(len(keys), dtype=bool) for row in TABLE.rows}
    coordinator = Coordinator(TABLE, everything, {row.name: bytes(32) for row in TABLE.rows})
    chain = PrefixChain(grain_tokens=64)
    chain.extend(list(range(400)))
    found = coordinator.verdict(chain, request_tokens=resume + 1, local_tokens=local, align_tokens=128)
    assert found.hit.resume_tokens == resume
    return found


def load(resume: int, local: int = 0) -> dict[str, RowTransfer]:
    transfers = PLANNER.load(verdict(resume, local), TABLES, parents={})
    assert transfers is not None
    return {transfer.row: transfer for transfer in transfers}


def pages(transfer: RowTransfer) -> set[int]:
    return transfer.pages(np.ones(len(transfer.keys), dtype=bool))


def test_every_group_of_a_row_has_its_own_blocks() -> None:
    found = load(256)["full"]
    assert [group for group, _ in found.pieces] == [0, 1]
    assert pages(found) == {1, 2, *range(10, 18)}


def test_a_window_needs_only_its_blocks() -> None:
    found = load(256)["window"]
    assert (len(found.keys), pages(found)) == (1, {31})


def test_a_state_needs_the_block_that_ends_at_the_boundary() -> None:
    assert pages(load(256)["state"]) == {41, 51}
    assert pages(load(384)["state"]) == {42, 52}


def test_what_the_engine_holds_is_left_alone() -> None:
    found = load(256, local=128)["full"]
    assert (len(found.keys), pages(found)) == (2, {2, *range(14, 18)})


@pytest.mark.parametrize(("group", "kept"), [(0, [1]), (0, [0, 2, 3]), (1, list(range(10, 17))), (2, [0, 0])])
def test_a_token_without_a_block_cannot_be_loaded(group: int, kept: list[int]) -> None:
    """The engine would take it for loaded."""
    tables = [kept if index == group else table for index, table in enumerate(TABLES)]
    assert PLANNER.load(verdict(256), tables, parents={}) is None


def test_a_window_may_begin_inside_its_first_block() -> None:
    rows = {"window": (RowGroup(0, 16, (("l2", 0),)),)}
    planner = TransferPlanner(EngineSpec(SpecTable((WINDOW,), 64), rows, 64))
    half = [0] * 10 + list(range(40, 46))
    found = Verdict(verdict(256).hit, {"window": range(2, 4)}, {"window": np.zeros((2, 32), dtype=np.uint8)})
    (transfer,) = planner.load(found, [half], parents={}) or ()
    assert pages(transfer) == set(range(40, 46))


def test_a_state_without_a_block_cannot_be_loaded() -> None:
    assert PLANNER.load(verdict(128), TABLES, parents={}) is None


def test_what_to_report_when_nothing_can_be_loaded() -> None:
    found = {each.row: each for each in PLANNER.range_of(begin_tokens=128, end_tokens=256, tables=TABLES)}
    assert (pages(found["full"]), pages(found["window"])) == ({2, *range(14, 18)}, {31})


def test_a_block_is_saved_only_when_every_group_keeps_it() -> None:
    tables = [[1, 2, 3], [10, 0, *range(12, 22)], [], [], []]
    keys = np.arange(128, dtype=np.uint8).reshape(4, 32)
    found = PLANNER.save_blocks(FULL, np.arange(4), keys=keys, parents=following(keys), tables=tables)
    assert found is not None
    assert (found.keys == keys[1:]).all()
    assert found.parents is not None
    assert (found.parents == keys[:3]).all()
    assert set(found.pieces[0][1][:, 0].tolist()) == {0, 1, 2}


def test_nothing_kept_is_nothing_saved() -> None:
    keys = np.zeros((1, 32), dtype=np.uint8)
    assert PLANNER.save_blocks(WINDOW, np.arange(1), keys=keys, parents=None, tables=TABLES) is None


def test_offers_are_sorted_by_position() -> None:
    offers = [(3, 7, 128), (4, 8, 128), (3, 9, 256)]
    assert offers_by_position(offers) == {128: {3: 7, 4: 8}, 256: {3: 9}}

"""The parts of the reference engine: what is right, where it lies, which pages are whose."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openings import SMALL

from ucm_core.errors import StoreError
from ucm_core.spec.keys import PrefixChain
from ucm_core.spec.segments import Parallelism, Rank, slice_of
from ucm_core.store.geometry import Geometry
from ucm_core.testing.engine.memory import PagedMemory
from ucm_core.testing.engine.model import Origin, PrefixModel, content
from ucm_core.testing.engine.pages import PagePool
from ucm_core.testing.engine.request import Request
from ucm_core.testing.engine.tables import BlockTables
from ucm_core.testing.engine.work import Copy

MODEL = PrefixModel()
ORIGIN = Origin("full", 3, (0, 2))


class TestModel:
    def test_a_digest_is_of_the_whole_prefix(self) -> None:
        one, other = MODEL.digests([1, 2, 3]), MODEL.digests([4, 2, 3])
        assert not (one == other).any()
        assert MODEL.digests([1, 2, 9])[:2].tolist() == one[:2].tolist()

    def test_digests_go_on_from_a_prefix(self) -> None:
        whole = MODEL.digests([1, 2, 3, 4])
        assert MODEL.digests([3, 4], after=int(whole[1])).tolist() == whole[2:].tolist()

    @pytest.mark.parametrize(
        "other",
        [
            Origin("full", 4, (0, 2)),
            Origin("latent", 3, (0, 2)),
            Origin("full", 3),
            Origin("full", 3, (2, 4)),
        ],
    )
    def test_bytes_of_another_place_differ(self, other: Origin) -> None:
        digests = MODEL.digests(range(50))
        assert (content(digests, ORIGIN, 8) != content(digests, other, 8)).any(axis=1).all()

    def test_bytes_of_another_model_differ(self) -> None:
        assert (PrefixModel(seed=b"x").digests([1]) != MODEL.digests([1])).all()


class TestPages:
    def test_the_null_page_is_never_given(self) -> None:
        pool = PagePool(5)
        assert pool.take(4) == [1, 2, 3, 4]
        assert pool.take(1) is None
        pool.give_back([0, 3])
        assert (pool.take(1), pool.held_count) == ([3], 4)

    def test_a_page_is_freed_once(self) -> None:
        pool = PagePool(3)
        pool.take(1)
        pool.give_back([1])
        with pytest.raises(StoreError, match="page 1 was given back and nobody holds it"):
            pool.give_back([1])


def memory_of(row: str, parallel: Parallelism, rank: Rank, *, page_tokens: int) -> PagedMemory:
    held = slice_of(SMALL.row(row), parallel, rank=rank)
    assert held is not None
    return PagedMemory(held, pages=9, page_tokens=page_tokens)


@given(begin=st.integers(0, 64), length=st.integers(0, 40), size=st.sampled_from([1, 2, 4]), data=st.data())
def test_entries_of_context_ranks_are_each_token_once(
    begin: int, length: int, size: int, data: st.DataObject
) -> None:
    row = data.draw(st.sampled_from(["full", "key"]))
    parallel, end = Parallelism(prefill_context=size), min(begin + length, 64)
    digests = np.arange(64, dtype=np.uint64)  # the digest of a position is its number
    found = []
    for context in range(size):
        memory = memory_of(row, parallel, Rank(prefill_context=context), page_tokens=16)
        cells = memory.cells([1, 2, 3, 4], digests, begin=begin, end=end)
        assert (cells.pages == 1 + cells.digests // 16).all()
        found += cells.digests.tolist()
    step = memory.entry_tokens
    assert sorted(found) == [at for at in range(begin, end) if at % step == step - 1]


@pytest.mark.parametrize("row", ["full", "latent", "key"])
@pytest.mark.parametrize("context", [1, 2])
def test_payloads_are_the_same_whatever_the_pages_are(row: str, context: int) -> None:
    """Two engines with other page sizes hand over equal canonical bytes."""
    parallel, digests, seen = Parallelism(prefill_context=context), MODEL.digests(range(32)), []
    for page_tokens, table in ((16, [5, 2]), (8, [1, 7, 3, 4])):
        memory = memory_of(row, parallel, Rank(), page_tokens=page_tokens)
        layer = memory.row.units[0]
        for each in memory.row.units:
            memory.write(each, memory.cells(table, digests, begin=0, end=32))
        assert memory.wrong(layer, memory.cells(table, digests, begin=0, end=32)) == 0
        payloads = np.zeros((2, Geometry.of_row(memory.row).payload_bytes), dtype=np.uint8)
        blocks = memory.blocks(Copy("r", {}, {}, {row: range(2)}, {row: table}), row)
        blocks.gather(np.arange(2), payloads.ctypes.data + np.arange(2) * payloads.shape[1])
        seen.append(payloads)
    assert seen[0].any()
    assert np.array_equal(*seen)


def test_a_read_of_a_freed_page_is_wrong() -> None:
    memory, digests = memory_of("full", Parallelism(), Rank(), page_tokens=16), MODEL.digests(range(16))
    cells = memory.cells([4], digests, begin=0, end=16)
    memory.write(0, cells)
    assert memory.wrong(0, cells) == 0
    memory.spoil([4])
    assert memory.wrong(0, cells) == 16


def test_a_read_of_the_null_page_is_wrong() -> None:
    memory, digests = memory_of("full", Parallelism(), Rank(), page_tokens=16), MODEL.digests(range(16))
    cells = memory.cells([0], digests, begin=0, end=16)
    memory.write(0, cells)
    assert memory.wrong(0, cells) == 16


def request_of(tokens: list[int], *, output_tokens: int = 9) -> Request:
    chain = PrefixChain(grain_tokens=16)
    chain.extend(tokens)
    return Request("r", tokens, len(tokens), output_tokens, chain, MODEL)


class TestDrafts:
    def test_right_drafts_are_accepted_and_one_more(self) -> None:
        request = request_of([1, 2, 3])
        drafts = request.draft(4, luck=Random(0), right=1.0)
        assert request.accept(drafts) == 4
        assert request.tokens[3:7] == drafts
        assert len(request.tokens) == 3 + 5

    def test_nothing_after_a_wrong_draft_is_accepted(self) -> None:
        request, other = request_of([1, 2, 3]), request_of([1, 2, 3])
        drafts = other.draft(4, luck=Random(0), right=1.0)
        drafts[1] += 1
        assert request.accept(drafts) == 1
        assert len(request.tokens) == 3 + 2
        assert request.tokens[4] != drafts[1]

    def test_the_output_is_the_same_with_and_without(self) -> None:
        luck, one, other = Random(7), request_of([5, 6]), request_of([5, 6])
        while not one.done:
            one.accept(one.draft(3, luck=luck, right=0.5))
        while not other.done:
            other.accept([])
        assert one.tokens == other.tokens
        assert one.chain.token_count == len(one.tokens)


class TestTables:
    @pytest.fixture
    def tables(self) -> BlockTables:
        sizes = {row.name: 8 for row in (*SMALL.chain_rows, *SMALL.follower_rows)}
        return BlockTables(SMALL, pages=20, page_tokens=sizes)

    def test_a_window_resumes_behind_null_pages(self, tables: BlockTables) -> None:
        """At 64 the window of 20 sees tokens [45, 64): the blocks [2, 4), so the pages [4, 8)."""
        request = request_of(list(range(70)))
        assert tables.resume(request, 64)
        assert [page > 0 for page in request.tables["window-20"]] == [False] * 4 + [True] * 4
        assert all(request.tables["full"])
        assert len(request.tables["full"]) == 8
        assert set(request.state_pages) == {"state"}
        assert tables.of_rows(request)["key"] == tables.of_rows(request)["latent"]

    def test_all_groups_or_none(self, tables: BlockTables) -> None:
        request = request_of(list(range(300)))
        assert not tables.resume(request, 160)
        assert tables.held_count == 0
        assert tables.resume(request, 64)
        assert tables.grow(request, 64 + 8 * 12, states=1) is None
        assert len(request.tables["full"]) == 8

    def test_only_saved_pages_of_a_window_are_left_behind(self, tables: BlockTables) -> None:
        request = request_of(list(range(70)))
        tables.resume(request, 0)
        tables.grow(request, 70, states=1)
        request.computed, request.saved = 70, {"window-20": 1}
        assert len(tables.leave_behind(request)["window-20"]) == 2
        request.saved = {"window-20": 4}
        assert [page for page in tables.leave_behind(request)["window-20"] if page] == request.tables["full"][
            2:6
        ]

    def test_everything_comes_back(self, tables: BlockTables) -> None:
        request = request_of(list(range(70)))
        tables.resume(request, 64)
        tables.give_back(tables.all_of(request))
        assert tables.held_count == 0

"""Which blocks a step would read as garbage after a load that failed, and when they are right again."""

from __future__ import annotations

import pytest

from ucm_vllm.broken_pages import BrokenPages, PageUse


def use(name: str, table: list[int], begin: int, end: int) -> PageUse:
    return PageUse(name, (table,), begin, end)


@pytest.fixture
def broken() -> BrokenPages:
    """Of 32 tokens a block; block 8 failed in a step of two requests that share it and one that does not."""
    pages = BrokenPages(page_tokens=32)
    pages.begin_step(
        [use("loads", [7, 8, 9], 64, 96), use("shares", [7, 8, 11], 64, 96), use("other", [1, 2], 32, 64)]
    )
    pages.fail({8})
    return pages


def test_what_was_computed_on_it_is_garbage_too(broken: BrokenPages) -> None:
    assert broken.pages == {8, 9, 11}


def test_who_reads_it_is_named(broken: BrokenPages) -> None:
    step = [use("shares", [7, 8, 11], 64, 96), use("other", [1, 2], 64, 65)]
    assert broken.begin_step(step) == {"shares": {8}}


def test_it_may_be_read_in_the_step_that_writes_it(broken: BrokenPages) -> None:
    step = [use("shares", [7, 8, 11], 64, 96), use("loads", [7, 8, 9], 32, 96)]
    assert broken.begin_step(step) == {}
    assert not broken


def test_not_before_all_that_is_read_is_written(broken: BrokenPages) -> None:
    step = [use("shares", [7, 8, 11], 64, 96), use("loads", [7, 8, 9], 32, 63)]
    assert broken.begin_step(step) == {"shares": {8}}


def test_who_writes_it_in_pieces_reads_its_own(broken: BrokenPages) -> None:
    for begin, end in ((32, 40), (40, 64), (64, 96)):
        assert broken.begin_step([use("loads", [7, 8, 9], begin, end)]) == {}
    assert broken.pages == {11}


def test_drafts_that_stay_are_right_and_those_that_do_not_are_written_again(broken: BrokenPages) -> None:
    for begin, end in ((32, 40), (40, 44), (43, 47), (44, 48), (48, 52)):
        assert broken.begin_step([use("loads", [7, 8, 9], begin, end)]) == {}


def test_who_writes_a_part_again_takes_nothing_of_what_is_right(broken: BrokenPages) -> None:
    broken.begin_step([use("loads", [7, 8, 9], 32, 52)])
    broken.begin_step([use("shares", [7, 8, 11], 42, 47)])
    assert broken.begin_step([use("loads", [7, 8, 9], 52, 60)]) == {}


def test_who_begins_it_anew_makes_the_rest_of_it_garbage(broken: BrokenPages) -> None:
    broken.begin_step([use("loads", [7, 8, 9], 32, 50)])
    broken.begin_step([use("shares", [7, 8, 11], 32, 40)])
    assert broken.begin_step([use("loads", [7, 8, 9], 50, 60)]) == {"loads": {8}}


def test_what_is_written_after_reading_garbage_is_garbage(broken: BrokenPages) -> None:
    broken.begin_step([use("shares", [7, 8, 11, 12], 64, 100)])
    assert broken.pages == {8, 9, 11, 12}
    guest = use("guest", [7, 13, 11, 14], 96, 100)
    assert broken.begin_step([use("shares", [7, 8, 11, 12], 64, 100), guest])["guest"] == {11}


def test_the_part_of_a_block_from_before_stays_right(broken: BrokenPages) -> None:
    broken.begin_step([use("loads", [7, 8, 9], 32, 40)])
    broken.begin_step([use("shares", [7, 8, 11], 64, 96), use("loads", [7, 8, 9], 40, 41)])
    assert broken.begin_step([use("loads", [7, 8, 9], 41, 64)]) == {}


def test_blocks_that_are_given_anew_are_not_broken(broken: BrokenPages) -> None:
    broken.renew([7, 8, 20], local_tokens=64)
    assert broken.pages == {8, 9, 11}
    broken.renew([30, 9, 8], local_tokens=64)
    assert broken.pages == {9, 11}


def test_what_is_computed_from_a_load_is_exposed_to_who_reads_it() -> None:
    pages = BrokenPages(page_tokens=32)
    guests = [use("second", [21, 22, 9, 10, 11], 128, 160), use("first", [21, 22, 9, 10], 96, 128)]
    pages.begin_step([*guests, use("loads", [7, 8, 9], 64, 96), use("other", [1, 2], 0, 64)])
    assert pages.exposed({7, 8}) == {9, 10}
    assert pages.exposed(()) == frozenset()


def test_what_only_its_own_request_computes_is_exposed_to_nobody() -> None:
    pages = BrokenPages(page_tokens=32)
    pages.begin_step([use("loads", [7, 8, 9], 64, 96)])
    assert pages.exposed({7, 8}) == frozenset()


def test_the_placeholder_is_never_broken() -> None:
    pages = BrokenPages(page_tokens=32)
    pages.begin_step([use("loads", [8, 0, 9], 32, 96)])
    pages.fail({8})
    assert pages.pages == {8, 9}

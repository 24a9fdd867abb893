"""After a failed synchronous load nothing computed on its garbage is stored; nothing else is held back."""

from __future__ import annotations

from types import SimpleNamespace

from ucm_vllm.broken_pages import BrokenPages
from ucm_vllm.request_records import RequestRecord


def record(local_tokens: int) -> RequestRecord:
    made = RequestRecord(SimpleNamespace(request_id="r", num_tokens=1000), None)
    made.begin_anew(local_tokens)
    return made


def test_the_owner_heals_what_it_writes_again() -> None:
    broken, owner = BrokenPages(page_tokens=32), record(local_tokens=0)
    broken.add(frozenset({8}), [[7, 8, 9]])
    broken.review(owner, [7, 8, 9], end_tokens=96)
    assert owner.trusted
    assert len(broken) == 0


def test_blocks_after_the_failed_one_are_garbage_too() -> None:
    broken = BrokenPages(page_tokens=32)
    broken.add(frozenset({8}), [[7, 8, 9], [1, 2]])
    assert len(broken) == 2


def test_a_borrower_is_not_trusted_any_more() -> None:
    broken, borrower = BrokenPages(page_tokens=32), record(local_tokens=64)
    broken.add(frozenset({8}), [[7, 8]])
    broken.review(borrower, [7, 8, 11], end_tokens=96)
    assert not borrower.trusted


def test_a_block_that_is_not_written_to_its_end_stays_broken() -> None:
    broken, owner = BrokenPages(page_tokens=32), record(local_tokens=0)
    broken.add(frozenset({8}), [[7, 8]])
    broken.review(owner, [7, 8], end_tokens=63)
    assert len(broken) == 1


def test_who_shares_nothing_is_not_touched() -> None:
    broken, other = BrokenPages(page_tokens=32), record(local_tokens=64)
    broken.add(frozenset({8}), [[7, 8]])
    broken.review(other, [3, 4], end_tokens=64)
    assert other.trusted


def test_what_a_borrower_writes_is_garbage_too_until_somebody_else_writes_it() -> None:
    broken, borrower = BrokenPages(page_tokens=32), record(local_tokens=64)
    broken.add(frozenset({8}), [[7, 8], [7, 8, 11]])
    broken.review(borrower, [7, 8, 11], end_tokens=96)
    broken.review(borrower, [7, 8, 11, 12], end_tokens=128)
    broken.review(record(local_tokens=0), [7, 8], end_tokens=64)
    guest = record(local_tokens=128)
    broken.review(guest, [7, 8, 11, 12, 13], end_tokens=160)
    assert not guest.trusted
    broken.review(record(local_tokens=0), [11, 12, 13], end_tokens=96)
    assert len(broken) == 0


def test_the_placeholder_is_never_broken() -> None:
    broken = BrokenPages(page_tokens=32)
    broken.add(frozenset({8}), [[8, 0, 9]])
    assert len(broken) == 2


def test_a_request_that_begins_anew_is_trusted_again() -> None:
    borrower = record(local_tokens=64)
    borrower.trusted = False
    borrower.begin_anew(0)
    assert borrower.trusted

"""Bad input: one clear error that names what was wrong and the numbers, never an answer."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from spec_rows import chain, follower, snapshot, states, table, whole

from ucm_core.coordinator.boundaries import boundaries
from ucm_core.coordinator.presence import Presence
from ucm_core.coordinator.resolve import resolve_hit, rewind
from ucm_core.errors import SpecError

FULL = chain("full", 16)
SPEC = table(FULL, snapshot("s", 16))
SENSELESS = [-1, 2**31, 2**40, 2**70, -(2**70), 1.5, 16.0, float("nan"), "16", None, True, np.bool_(1), b"1"]


@pytest.mark.parametrize("number", SENSELESS, ids=repr)
@pytest.mark.parametrize("name", ["request_tokens", "tail_tokens", "align_tokens", "local_tokens"])
def test_a_number_of_a_question_that_is_no_tokens_is_refused(name: str, number: Any) -> None:
    with pytest.raises(SpecError, match=re.escape(f"{name} is {number!r}; tokens are ints")) as caught:
        resolve_hit(SPEC, {"full": whole(9)}, **{"request_tokens": 100, name: number})
    assert "at most 2147483647" in str(caught.value)


@pytest.mark.parametrize("number", SENSELESS, ids=repr)
@pytest.mark.parametrize("name", ["limit_tokens", "align_tokens"])
def test_a_number_of_a_set_that_is_no_tokens_is_refused(name: str, number: Any) -> None:
    with pytest.raises(SpecError, match=re.escape(f"{name} is {number!r}")):
        boundaries(SPEC, {}, **{"limit_tokens": 100, name: number})


@pytest.mark.parametrize("number", SENSELESS, ids=repr)
def test_a_failed_unit_that_is_no_index_is_refused(number: Any) -> None:
    hit = resolve_hit(table(FULL), {"full": whole(9)}, request_tokens=100)
    with pytest.raises(SpecError, match=re.escape(f"failed unit of row 'full' is {number!r}")):
        rewind(table(FULL), {"full": whole(9)}, hit=hit, failed={"full": [2, number]})


def test_an_alignment_of_nothing_is_refused() -> None:
    with pytest.raises(SpecError, match="align_tokens is 0; tokens are ints, at least 1"):
        resolve_hit(SPEC, {}, request_tokens=100, align_tokens=0)


def test_an_alignment_that_meets_the_rows_too_rarely_is_refused() -> None:
    """C-31: the adapter's alignment counts towards the limit, too."""
    with pytest.raises(
        SpecError, match="16, 1048575 meet only every 16777200 tokens, above the limit of 1048576"
    ):
        resolve_hit(SPEC, {}, request_tokens=100, align_tokens=2**20 - 1)


def test_a_failure_of_an_unknown_row_is_refused() -> None:
    hit = resolve_hit(table(FULL), {}, request_tokens=100)
    with pytest.raises(SpecError, match="no row 'fulll'"):
        rewind(table(FULL), {}, hit=hit, failed={"fulll": [0]})


@pytest.mark.parametrize("blocks", [[[True, True]], [0.5], ["yes"], [None], True, np.array([np.nan, 1])])
def test_what_is_no_mask_is_refused(blocks: Any) -> None:
    with pytest.raises(SpecError, match=r"need bool\[blocks\]"):
        Presence(blocks)


@pytest.mark.parametrize("blocks", [[True, False], np.array([1, 0], np.uint8), (1, 0)])
def test_a_mask_of_another_type_says_the_same(blocks: Any) -> None:
    assert Presence(blocks).mask.tolist() == [True, False]


@pytest.mark.parametrize("position", [1.5, 16.0, "16", None, True])
def test_a_position_that_is_no_int_is_refused(position: Any) -> None:
    with pytest.raises(SpecError, match=f"there is a {type(position).__name__} among them"):
        states(48, position)


@pytest.mark.parametrize("position", [-16, 2**40, 2**70])
def test_a_position_out_of_range_is_refused(position: int) -> None:
    with pytest.raises(SpecError, match=re.escape(str(position))):
        states(48, position)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.uint64])
def test_narrow_numbers_do_not_wrap_around(kind: Any) -> None:
    known = {"full": whole(9), "s": Presence(positions=frozenset([kind(48), kind(96)]))}
    hit = resolve_hit(SPEC, known, request_tokens=kind(100), tail_tokens=kind(9))
    assert (hit.hit_tokens, hit.resume_tokens) == (80, 48)
    assert resolve_hit(SPEC, known, request_tokens=kind(3), tail_tokens=kind(9)).hit_tokens == 0
    assert resolve_hit(SPEC, known, request_tokens=kind(100), local_tokens=kind(200)).new_tokens == 0


def test_the_longest_request_costs_no_more_than_what_is_there() -> None:
    """2**31 - 1 tokens at A = 1 would be sixteen gigabytes of candidates."""
    spec = table(chain("full", 1), follower("f", chain("full", 1)), snapshot("s", 1))
    known = {"full": whole(40), "s": states(7, 2**31 - 1)}
    hit = resolve_hit(spec, known, request_tokens=2**31 - 1)
    assert (hit.hit_tokens, hit.resume_tokens) == (40, 7)
    assert boundaries(spec, known, limit_tokens=2**31 - 1) == {7}


@pytest.mark.parametrize("name", ["request_tokens", "tail_tokens", "align_tokens", "local_tokens"])
def test_a_number_of_more_digits_than_can_be_spelled(name: str) -> None:
    with pytest.raises(SpecError, match=f"{name} is <int with a number of too many digits>"):
        resolve_hit(SPEC, {}, **{"request_tokens": 100, name: 10**5000})

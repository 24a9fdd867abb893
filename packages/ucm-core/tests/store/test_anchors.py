"""Where prefixes left the ring."""

from __future__ import annotations

import numpy as np
from rings import keys, parent_keys

from ucm_core.store.anchors import Anchors


def refuse(anchors: Anchors, names: str, *, refused: str) -> None:
    """Claim ``names`` in a row after each other; what is in ``refused`` found no room."""
    before = parent_keys(names, dict(zip(names[1:], names, strict=False)))
    anchors.note(keys(*names), before, refused=np.array([name in refused for name in names]))


def test_what_found_room_is_its_own_anchor() -> None:
    anchors = Anchors()
    refuse(anchors, "abc", refused="")
    assert (anchors.of(keys("a", "b", "x")) == keys("a", "b", "x")).all()


def test_what_found_none_has_the_last_that_did() -> None:
    anchors = Anchors()
    refuse(anchors, "abcd", refused="cd")
    refuse(anchors, "def", refused="def")
    assert (anchors.of(keys("b", "c", "d", "e", "f")) == keys("b", "b", "b", "b", "b")).all()


def test_what_finds_room_later_is_an_anchor_again() -> None:
    anchors = Anchors()
    refuse(anchors, "abcd", refused="cd")
    refuse(anchors, "abcd", refused="d")
    assert (anchors.of(keys("c", "d")) == keys("c", "c")).all()


def test_a_first_block_has_none() -> None:
    anchors = Anchors()
    refuse(anchors, "ab", refused="ab")
    assert (anchors.of(keys("a", "b")) == keys("a", "a")).all()


def test_the_oldest_are_forgotten() -> None:
    anchors = Anchors(capacity=2)
    refuse(anchors, "abcd", refused="bcd")
    assert len(anchors) == 2
    assert (anchors.of(keys("b", "c", "d")) == keys("b", "a", "a")).all()

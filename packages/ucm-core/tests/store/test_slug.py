"""Names of files: different, bounded, confined, also where upper and lower case are one."""

from __future__ import annotations

import itertools
import unicodedata

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.store import names
from ucm_core.store.names import slug

AWKWARD = [
    "org/a-SEP-b", "org/a/b", "org-a-b", "..", ".", ".hidden", "@", "a@b", "nul\0", "nul",
    "n" * 300, "n" * 301,
    "caf\u00e9", "cafe\u0301", "trailing ", "trailing", "Upper", "upper", "UPPER", "../../x", "\udc2f", "",
    "manifest.json", "window-128", "a~b", "a-b",
]  # fmt: skip


def folded(name: str) -> str:
    """The name as a file system sees it that knows neither case nor composition."""
    return unicodedata.normalize("NFD", name.casefold())


@pytest.mark.parametrize("name", AWKWARD)
def test_a_slug_is_one_plain_component(name):
    made = slug(name)
    assert 0 < len(made.encode()) <= 255
    assert "/" not in made
    assert "\0" not in made
    assert not made.startswith(".")
    assert made != names.MANIFEST


def test_awkward_names_all_differ():
    made = [folded(slug(name)) for name in AWKWARD]
    assert len(set(made)) == len(AWKWARD)


@given(st.text(), st.text())
def test_any_two_names_differ(one, other):
    assert (folded(slug(one)) == folded(slug(other))) == (one == other)


@pytest.mark.parametrize("name", ["full", "window-128", "mla-576", "mamba2-0a1b2c3d", "full.2"])
def test_names_of_rows_stay_readable(name):
    assert slug(name) == name


def test_a_key_names_its_folder_and_file():
    keys = np.array([range(32), range(0xF0, 0xF0 - 32, -1)], dtype=np.uint8)
    assert names.object_names(keys, "h0-2") == [
        b"000/000102030405060708090a0b0c0d0e0f.h0-2",
        b"f0e/f0efeeedecebeae9e8e7e6e5e4e3e2e1.h0-2",
    ]


def test_every_byte_of_a_key_is_safe_in_a_name():
    keys = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    made = names.object_names(keys, "hx")
    assert len(set(made)) == 256
    assert all(name.count(b"/") == 1 for name in made)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "A", "a" * 65, "-a", "a\n", "a\0"])
def test_segments_that_could_leave_the_folder_are_refused(name):
    assert not names.is_segment(name)


def test_kinds_of_files_exclude_each_other():
    found = [
        "0" * 32 + ".hx",
        "." + "0" * 32 + ".1-2.tmp",
        "foreign.tmp",
        "0" * 32,
        "." + "0" * 31 + ".1.tmp",
    ]
    kinds = [
        (names.parse_object(name) is not None, names.parse_temporary(name) is not None) for name in found
    ]
    assert kinds == [(True, False), (False, True), (False, False), (False, False), (False, False)]
    assert not any(all(kind) for kind in itertools.chain(kinds))

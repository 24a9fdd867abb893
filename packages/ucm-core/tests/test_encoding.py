"""Canonical spellings: equal for equal values, different for different ones."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import IdentityError
from ucm_core.spec.encoding import canonical_bytes, canonical_json, digest_of

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
DATA = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=12)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (2, 2.0),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1.0}),
        ([1, [2, 3]], (1, (2.0, 3))),
        (0.0, -0.0),
    ],
)
def test_spelling_does_not_matter(left, right):
    assert canonical_bytes(left) == canonical_bytes(right)
    assert canonical_json(left) == canonical_json(right)


DIFFERENT = [
    None,
    True,
    False,
    0,
    1,
    2,
    2.5,
    "",
    "1",
    "None",
    [],
    {},
    [1, 2],
    [2, 1],
    [[1], 2],
    [1, [2]],
    {"a": 1},
]
DIFFERENT += [
    {"a": "1"},
    ["a", 1],
    ["a", "bsc"],
    ["asb", "c"],
    "ab",
    ["a", "b"],
    ["ab", ""],
    math.inf,
    -math.inf,
    "\ud800",
    "\u00e9",
    "e\u0301",
]


def test_different_values_never_share_a_spelling():
    assert len({canonical_bytes(value) for value in DIFFERENT}) == len(DIFFERENT)
    assert len({canonical_json(value) for value in DIFFERENT}) == len(DIFFERENT)


def test_bytes_are_no_text():
    assert canonical_bytes(b"a") != canonical_bytes("a")
    with pytest.raises(IdentityError, match="hexadecimal"):
        canonical_json(b"a")


@st.composite
def respelled(draw, value):
    """The same value with its keys in another order and its whole numbers as floats here and there."""
    if isinstance(value, dict):
        return {key: draw(respelled(value[key])) for key in draw(st.permutations(list(value)))}
    if isinstance(value, list):
        return draw(st.sampled_from([list, tuple]))(draw(respelled(item)) for item in value)
    exact = isinstance(value, int) and not isinstance(value, bool) and abs(value) <= 2**53
    return float(value) if exact and draw(st.booleans()) else value


@given(st.data(), DATA)
def test_no_spelling_of_a_value_matters(data, value):
    other = data.draw(respelled(value))
    assert canonical_bytes(other) == canonical_bytes(value)
    assert canonical_json(other) == canonical_json(value)


def places(value, path=()):
    """Paths to everything inside ``value``, itself included."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


def with_other(value, path):
    """``value`` with a list of its own put around what stands at ``path``."""
    if not path:
        return [value]
    copy = value.copy()
    copy[path[0]] = with_other(value[path[0]], path[1:])
    return copy


@given(st.data(), DATA)
def test_every_change_anywhere_matters(data, value):
    other = with_other(value, data.draw(st.sampled_from(list(places(value)))))
    assert canonical_bytes(other) != canonical_bytes(value)
    assert canonical_json(other) != canonical_json(value)


@given(DATA, DATA)
def test_the_two_spellings_agree_on_what_is_equal(left, right):
    assert (canonical_bytes(left) == canonical_bytes(right)) == (
        canonical_json(left) == canonical_json(right)
    )


@given(DATA)
def test_json_text_reads_back_to_the_same_value(value):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text


@pytest.mark.parametrize("value", [{"a": {"b": len}}, {"a": {"b": {1, 2}}}])
def test_what_is_not_plain_data_is_named_by_its_path(value):
    with pytest.raises(IdentityError, match=r"value\.a\.b is a .* identity is unknown"):
        canonical_json(value)


def test_what_is_nested_without_end_is_no_plain_data():
    value: list[object] = []
    value.append(value)
    with pytest.raises(IdentityError, match="nested deeper than 100"):
        canonical_json(value)


def test_a_number_without_end_is_no_plain_data():
    assert canonical_json(-1.7e308) == canonical_json(int(-1.7e308))
    for spell in (canonical_json, canonical_bytes):
        with pytest.raises(IdentityError, match=r"value\.a is a number of 16610 bits, more than 8192"):
            spell({"a": 10**5000})


def test_keys_are_text():
    with pytest.raises(IdentityError, match="key 1"):
        canonical_bytes({"labels": {1: "x"}})


def test_digests_of_different_tags_never_meet():
    assert digest_of("a", [1]) != digest_of("b", [1])
    assert digest_of("a", ["b", 1]) != digest_of("b", ["a", 1])
    assert len(digest_of("a", None)) == 32

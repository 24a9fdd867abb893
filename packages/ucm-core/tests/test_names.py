"""File-name components: injective, bounded, confined."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core.errors import IdentityError
from ucm_core.spec.names import MAX_COMPONENT_BYTES, path_component

PUBLIC_CASES = [
    "org/a-SEP-b",
    "org/a/b",
    "..",
    "../../x",
    ".hidden",
    "a@b",
    "a\0b",
    "n" * 300,
    "n" * 301,
    "caf\u00e9",
    "cafe\u0301",
    "name",
    "name ",
    "Model",
    "model",
    "a/b",
    "a%2fb",
]


def test_different_names_differ_also_on_a_case_blind_file_system():
    assert len({path_component(name).lower() for name in PUBLIC_CASES}) == len(PUBLIC_CASES)


@pytest.mark.parametrize("name", PUBLIC_CASES)
def test_a_component_stays_in_its_folder_and_can_be_created(name, tmp_path):
    component = path_component(name)
    assert len(component.encode()) <= MAX_COMPONENT_BYTES <= 255
    (tmp_path / component).write_bytes(b"")
    assert [path.name for path in tmp_path.iterdir()] == [component]


@pytest.mark.parametrize("name", ["full", "window-128", "mla-576", "full.2", "mamba2-0a1b2c3d", "a_b"])
def test_the_names_we_make_ourselves_stand_for_themselves(name):
    assert path_component(name) == name


@given(st.text(min_size=1), st.text(min_size=1))
def test_components_are_injective_and_safe(left, right):
    first, second = path_component(left), path_component(right)
    assert (first == second) == (left == right)
    assert path_component(first) != first or first == left
    assert not set(first) & set("/\\\0:")
    assert not first.startswith(".")
    assert first.isascii()
    assert first == first.lower()


def test_an_empty_name_is_refused():
    with pytest.raises(IdentityError, match="empty name"):
        path_component("")

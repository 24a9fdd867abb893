"""The error tree is what its docstring draws."""

import inspect

import pytest

from ucm_core import errors


def test_the_tree_holds_at_most_eight_classes_and_all_are_exported():
    classes = [name for name, item in vars(errors).items() if inspect.isclass(item)]
    assert sorted(classes) == sorted(errors.__all__)
    assert len(classes) <= 8


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_a_ucm_error_drawn_in_the_module_docstring(name):
    assert issubclass(getattr(errors, name), errors.UcmError)
    assert name in errors.__doc__


@pytest.mark.parametrize("name", ["ConfigError", "SpecError", "IdentityError", "LayoutError"])
def test_wrong_input_is_also_a_value_error(name):
    assert issubclass(getattr(errors, name), ValueError)


@pytest.mark.parametrize("name", ["StoreError", "NoSpace", "ClosedError"])
def test_store_errors_are_runtime_errors_and_never_os_errors(name):
    assert issubclass(getattr(errors, name), errors.StoreError)
    assert issubclass(errors.StoreError, RuntimeError)
    assert not issubclass(errors.StoreError, OSError)


@pytest.mark.parametrize("value", [10**5000, [1, -(10**5000)], {"a": (10**5000,)}], ids=type)
def test_a_number_that_python_does_not_spell_is_still_shown(value):
    assert errors.shown(value) == f"<{type(value).__name__} with a number of too many digits>"

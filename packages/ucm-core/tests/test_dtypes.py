"""Element types: sizes, and refusal of everything that is not resolved."""

import pytest

from ucm_core.errors import SpecError
from ucm_core.spec.dtypes import DTYPES, itemsize


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("bfloat16", 2), ("float16", 2), ("float32", 4), ("int32", 4), ("int8", 1), ("uint8", 1)],
)
def test_plain_types_have_their_size(dtype, size):
    assert itemsize(dtype) == size


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_all_four_float8_types_are_known_and_one_byte_wide(dtype):
    assert itemsize(dtype) == 1


@pytest.mark.parametrize("dtype", ["auto", "", "fp8", "BFLOAT16", None, 2])
def test_everything_else_is_refused(dtype):
    with pytest.raises(SpecError, match="not a resolved type"):
        itemsize(dtype)


def test_a_spelling_of_torch_is_answered_with_the_canonical_name():
    with pytest.raises(SpecError, match="did you mean bfloat16"):
        itemsize("torch.bfloat16")


def test_every_listed_type_has_a_size():
    assert all(itemsize(dtype) in (1, 2, 4) for dtype in DTYPES)

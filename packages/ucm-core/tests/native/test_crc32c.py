"""CRC-32C against the published check values and a bitwise twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ucm_core import _native

POLYNOMIAL = 0x82F63B78


def twin(data: bytes, seed: int = 0) -> int:
    """The definition, one bit at a time."""
    crc = ~seed & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (POLYNOMIAL if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        # RFC 3720, appendix B.4
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
    ],
)
def test_published_values(data, expected):
    assert _native.crc32c(data) == expected == twin(data) == _native.crc32c(data, hardware=False)


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1))
def test_short_buffers_equal_the_twin(data, seed):
    assert _native.crc32c(data, seed) == twin(data, seed) == _native.crc32c(data, seed, hardware=False)


@pytest.mark.parametrize("size", [2047, 6143, 6144, 6145, 12288, 12295, 20001])
def test_buffers_of_several_rounds_equal_the_twin(size):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes()
    assert _native.crc32c(data) == twin(data) == _native.crc32c(data, hardware=False)


@given(st.integers(0, 40_000), st.integers(0, 40_000))
def test_the_seed_continues_a_sum(cut, size):
    data = np.random.default_rng(7).integers(0, 256, max(cut, size), dtype=np.uint8).tobytes()
    assert _native.crc32c(data[cut:], _native.crc32c(data[:cut])) == _native.crc32c(data)


def test_any_alignment_gives_the_same_sum():
    data = np.arange(20_000, dtype=np.uint32).view(np.uint8)
    shifted = np.empty(data.size + 8, dtype=np.uint8)
    for offset in range(8):
        shifted[offset : offset + data.size] = data
        assert _native.crc32c(shifted[offset : offset + data.size]) == _native.crc32c(data)


def test_a_buffer_with_gaps_is_refused():
    with pytest.raises((BufferError, ValueError)):
        _native.crc32c(np.zeros(10, dtype=np.uint8)[::2])

"""Payloads of gdrkit.pattern: each byte depends only on the seed and on its position, not on the requested part."""

from __future__ import annotations

import pytest

from gdrkit import pattern
from gdrkit.errors import DataMismatch, UsageError
from gdrkit.units import KIB, MIB


def test_part_of_a_payload_has_the_bytes_of_the_whole() -> None:
    payload = pattern.payload(2 * MIB + 17, seed=7)
    for offset_bytes, length_bytes in (
        (0, 1),
        (1, 4 * KIB - 1),
        (MIB - 3, 7),
        (MIB, 1),
        (MIB + 5, MIB),
        (2 * MIB + 16, 1),
    ):
        assert (
            pattern.payload(length_bytes, seed=7, offset_bytes=offset_bytes)
            == payload[offset_bytes : offset_bytes + length_bytes]
        )


def test_shift_or_other_seed_changes_the_bytes() -> None:
    payload = pattern.payload(4 * KIB, seed=1)
    assert payload != pattern.payload(4 * KIB, seed=2)
    assert all(
        payload != pattern.payload(4 * KIB, seed=1, offset_bytes=shift_bytes) for shift_bytes in (1, 64, 4 * KIB, MIB)
    )


def test_payload_has_no_period_within_blocks() -> None:
    payload = pattern.payload(3 * MIB, seed=3)
    pages = [payload[start : start + 4 * KIB] for start in range(0, len(payload), 4 * KIB)]
    assert len(set(pages)) == len(pages)


def test_payload_of_length_0_is_empty() -> None:
    assert pattern.payload(0, seed=0) == b""
    pattern.check(b"", seed=0)


@pytest.mark.parametrize(
    ("length_bytes", "seed", "offset_bytes"), [(-1, 0, 0), (1, -1, 0), (1, 1 << 64, 0), (1, 0, -1)]
)
def test_invalid_payload_arguments_are_refused(length_bytes: int, seed: int, offset_bytes: int) -> None:
    with pytest.raises(UsageError):
        pattern.payload(length_bytes, seed=seed, offset_bytes=offset_bytes)


@pytest.mark.parametrize("wrong_index", [0, 1, 4095, 4096, MIB - 1, MIB, MIB + 2])
def test_check_reports_the_first_wrong_byte(wrong_index: int) -> None:
    data = bytearray(pattern.payload(MIB + 3, seed=11, offset_bytes=5))
    pattern.check(data, seed=11, offset_bytes=5)
    data[wrong_index] ^= 0x80
    data[-1] ^= 0x01
    with pytest.raises(DataMismatch) as error_info:
        pattern.check(data, seed=11, offset_bytes=5)
    error = error_info.value
    assert error.first_offset_bytes == wrong_index
    assert error.length_bytes == len(data)
    assert error.actual == bytes(data[wrong_index : wrong_index + 16])
    assert error.expected == pattern.payload(len(data), seed=11, offset_bytes=5)[wrong_index : wrong_index + 16]


def test_find_mismatch_reports_a_missing_end() -> None:
    assert pattern.find_mismatch(b"abc", b"abc") is None
    assert pattern.find_mismatch(b"abc", b"ab") == 2
    assert pattern.find_mismatch(b"ab", b"abc") == 2
    assert pattern.find_mismatch(b"abc", b"xbc") == 0
    assert pattern.find_mismatch(b"", b"") is None

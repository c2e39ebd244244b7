"""A CufileJob counts the arrived bytes of each range, whatever the sizes and the order of its parts."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from gdrkit.errors import Api, ApiError
from gdrkit.gds.cufile_job import CufileJob

if TYPE_CHECKING:
    from gdrkit.gds.cufile_job import CufilePart

# Address of the first range. The cases do not access this memory.
ADDRESS = 1 << 40
PART_BYTES = 8


def make_random_extents(generator: random.Random) -> list[int]:
    """Return random extents: for each range the file index 0, the offset in the file, the address and the length.

    Some ranges follow the previous range both in the file and in memory.
    """
    extents: list[int] = []
    offset_bytes, address = 0, ADDRESS
    for _ in range(generator.randrange(1, 12)):
        length_bytes = generator.choice([0, 1, 4, 8, 20])
        extents += (0, offset_bytes, address, length_bytes)
        offset_bytes += length_bytes + generator.choice([0, 0, 4])
        address += length_bytes + generator.choice([0, 0, 4])
    return extents


def take_all(job: CufileJob) -> list[CufilePart]:
    """Return all parts of a job."""
    parts = []
    while (part := job.take(PART_BYTES)) is not None:
        parts.append(part)
    return parts


def compute_arrived_bytes(extents: list[int], moved_addresses: set[int]) -> list[int]:
    """Return for each range the number of its bytes before the first byte that is not in `moved_addresses`."""
    return [
        next((index for index in range(length_bytes) if address + index not in moved_addresses), length_bytes)
        for address, length_bytes in zip(extents[2::4], extents[3::4], strict=True)
    ]


@pytest.mark.parametrize("case_seed", range(200))
def test_arrived_bytes_end_at_the_first_gap(case_seed: int) -> None:
    generator = random.Random(case_seed)
    extents = make_random_extents(generator)
    job = CufileJob(write=False, extents=extents)
    parts = take_all(job)
    file_offset_by_address = {part.address: part.file_offset_bytes for part in parts}
    for file_offset_bytes, address, length_bytes in zip(extents[1::4], extents[2::4], extents[3::4], strict=True):
        # Each byte of each range is in exactly one part, at the right offset of the file.
        for byte_index in range(length_bytes):
            (part,) = (
                part for part in parts if part.address <= address + byte_index < part.address + part.length_bytes
            )
            assert file_offset_by_address[part.address] - part.address == file_offset_bytes - address
    generator.shuffle(parts)
    moved_addresses: set[int] = set()
    for part in parts:
        moved_bytes = generator.choice([0, part.length_bytes, part.length_bytes, part.length_bytes // 2])
        job.complete(part, moved_bytes)
        moved_addresses |= set(range(part.address, part.address + moved_bytes))
        if 0 < moved_bytes < part.length_bytes and generator.random() < 0.5:
            remaining_part = part.without_first(moved_bytes)
            job.complete(remaining_part, remaining_part.length_bytes)
            moved_addresses |= set(range(remaining_part.address, remaining_part.address + remaining_part.length_bytes))
    assert list(job.arrived()) == compute_arrived_bytes(extents, moved_addresses)
    assert job.moved_bytes == len(moved_addresses)


@pytest.mark.parametrize("case_seed", range(20))
def test_failed_part_is_in_the_named_range(case_seed: int) -> None:
    generator = random.Random(case_seed)
    extents = [0, 0, ADDRESS, 4, *make_random_extents(generator)]
    job = CufileJob(write=False, extents=extents)
    part = generator.choice(take_all(job))
    job.fail(ApiError(api=Api.CUFILE, operation="cuFileRead", status=5, status_name="EIO", errno=5), part)
    failed_part = job.progress()["failed_part"]
    failed_index = failed_part["failed_range_index"]
    file_offset_bytes, length_bytes = extents[4 * failed_index + 1], extents[4 * failed_index + 3]
    assert file_offset_bytes <= part.file_offset_bytes < file_offset_bytes + length_bytes
    assert (failed_part["failed_offset_bytes"], failed_part["failed_length_bytes"]) == (
        part.file_offset_bytes,
        part.length_bytes,
    )


def test_cancelled_job_gives_no_more_parts() -> None:
    job = CufileJob(write=False, extents=[0, 0, ADDRESS, 3 * PART_BYTES])
    assert job.take(PART_BYTES) is not None
    job.cancel()
    assert job.take(PART_BYTES) is None
    assert job.progress()["cancelled"]


def test_job_whose_parts_were_all_taken_is_not_cancelled() -> None:
    job = CufileJob(write=False, extents=[0, 0, ADDRESS, PART_BYTES])
    assert job.take(PART_BYTES) is not None
    job.cancel()
    assert not job.progress()["cancelled"]


def test_end_of_the_file_ends_its_range_only() -> None:
    job = CufileJob(write=False, extents=[0, 0, ADDRESS, 4 * PART_BYTES, 0, 4096, ADDRESS + 4096, PART_BYTES])
    first_part = job.take(PART_BYTES)
    assert first_part is not None
    job.complete(first_part, 0)  # A read of 0 bytes means the end of the file.
    second_part = job.take(PART_BYTES)
    assert second_part is not None
    assert second_part.file_offset_bytes == 4096
    assert job.take(PART_BYTES) is None

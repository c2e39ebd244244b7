"""Rules of the kernel driver for exports of mapped memory (memory.c of habanalabs). Each case checks one rule."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple

import pytest
from gaudi.raw_hlthunk import EXPORT_FLAGS, get_errno

from gdrkit.errors import ApiError
from gdrkit.gaudi import Device, list_devices
from gdrkit.harness.needs import gaudi, needs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gaudi.raw_hlthunk import RawDevice

pytestmark = needs(gaudi.device(), gaudi.mapped_memory)

PAGE_BYTES = 4 * KIB
ALLOCATION_BYTES = 64 * KIB
# With this offset, offset + size exceeds 64 bits.
OVERFLOWING_OFFSET = (1 << 64) - PAGE_BYTES


class MappedAllocation(NamedTuple):
    """The handle and the device address of an allocation."""

    handle: int
    address: int


@pytest.fixture
def allocation(raw_device: RawDevice) -> Iterator[MappedAllocation]:
    """Yield a mapped allocation of `ALLOCATION_BYTES` bytes."""
    handle, address = raw_device.allocate_mapped(ALLOCATION_BYTES)
    yield MappedAllocation(handle, address)
    assert raw_device.unmap(address) == 0
    assert raw_device.free(handle) == 0


def test_mapped_address_is_exported(raw_device: RawDevice, allocation: MappedAllocation) -> None:
    fd = raw_device.export(allocation.address, ALLOCATION_BYTES)
    assert fd >= 0
    assert os.lseek(fd, 0, os.SEEK_END) == ALLOCATION_BYTES
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Errno"):
        mmap.mmap(fd, PAGE_BYTES, prot=mmap.PROT_READ)
    os.close(fd)


@pytest.mark.parametrize("flags", [0, os.O_RDWR, os.O_CLOEXEC, EXPORT_FLAGS | os.O_NONBLOCK])
def test_other_flags_are_refused_by_the_library(
    raw_device: RawDevice, allocation: MappedAllocation, flags: int
) -> None:
    assert get_errno(raw_device.export(allocation.address, ALLOCATION_BYTES, flags=flags)) == errno.EINVAL
    # The library checks the flags first, so an invalid descriptor is not reported.
    assert get_errno(raw_device.export(allocation.address, ALLOCATION_BYTES, flags=flags, fd=1 << 20)) == errno.EINVAL
    assert get_errno(raw_device.export(allocation.address, ALLOCATION_BYTES, fd=1 << 20)) == errno.EBADF


@pytest.mark.parametrize("displacement_bytes", [PAGE_BYTES, 1, -PAGE_BYTES])
def test_export_needs_the_exact_mapped_address(
    raw_device: RawDevice, allocation: MappedAllocation, displacement_bytes: int
) -> None:
    assert get_errno(raw_device.export(allocation.address + displacement_bytes, PAGE_BYTES)) == errno.EINVAL


@pytest.mark.parametrize(
    ("size_bytes", "offset_bytes"),
    [(0, 0), (1, 0), (PAGE_BYTES + 1, 0), (PAGE_BYTES, 1), (PAGE_BYTES, PAGE_BYTES // 2)],
)
def test_export_size_and_offset_must_be_whole_pages(
    raw_device: RawDevice, allocation: MappedAllocation, size_bytes: int, offset_bytes: int
) -> None:
    assert get_errno(raw_device.export(allocation.address, size_bytes, offset_bytes=offset_bytes)) == errno.EINVAL


def test_export_range_must_end_inside_the_mapping(raw_device: RawDevice, allocation: MappedAllocation) -> None:
    mapping_bytes = list_devices()[0].page_bytes  # The driver rounds an allocation up to this size.
    fd = raw_device.export(allocation.address, PAGE_BYTES, offset_bytes=mapping_bytes - PAGE_BYTES)
    assert fd >= 0
    os.close(fd)
    assert get_errno(raw_device.export(allocation.address, mapping_bytes + PAGE_BYTES)) == errno.EINVAL
    assert (
        get_errno(raw_device.export(allocation.address, 2 * PAGE_BYTES, offset_bytes=mapping_bytes - PAGE_BYTES))
        == errno.EINVAL
    )
    assert (
        get_errno(raw_device.export(allocation.address, 2 * PAGE_BYTES, offset_bytes=OVERFLOWING_OFFSET))
        == errno.EINVAL
    )


def test_unmap_of_exported_memory_is_refused(raw_device: RawDevice, allocation: MappedAllocation) -> None:
    fd = raw_device.export(allocation.address, PAGE_BYTES)
    duplicate_fd = os.dup(fd)
    os.close(fd)
    assert get_errno(raw_device.unmap(allocation.address)) == errno.EINVAL
    os.close(duplicate_fd)


def test_free_of_mapped_memory_is_refused(raw_device: RawDevice, allocation: MappedAllocation) -> None:
    assert get_errno(raw_device.free(allocation.handle)) == errno.EINVAL


def test_export_of_unmapped_memory_is_refused(raw_device: RawDevice) -> None:
    handle, address = raw_device.allocate_mapped(ALLOCATION_BYTES)
    assert raw_device.unmap(address) == 0
    assert get_errno(raw_device.export(address, ALLOCATION_BYTES)) == errno.EINVAL
    assert get_errno(raw_device.unmap(address)) == errno.EINVAL
    assert raw_device.free(handle) == 0


def test_free_of_freed_memory_is_refused(raw_device: RawDevice) -> None:
    handle = raw_device.allocate(ALLOCATION_BYTES)
    assert raw_device.free(handle) == 0
    assert get_errno(raw_device.free(handle)) == errno.EINVAL
    assert get_errno(raw_device.map(handle)) == errno.EINVAL
    assert get_errno(raw_device.free(4711)) == errno.EINVAL


@pytest.mark.parametrize(
    ("length_bytes", "page_bytes", "expected_errno"),
    [(0, 0, errno.EINVAL), (ALLOCATION_BYTES, 3 << 20, errno.EINVAL), (1 << 60, 0, errno.ENOMEM)],
    ids=["nothing", "no power of two", "too much"],
)
def test_invalid_allocation_size_or_page_is_refused(
    raw_device: RawDevice, length_bytes: int, page_bytes: int, expected_errno: int
) -> None:
    assert get_errno(raw_device.allocate(length_bytes, page_bytes=page_bytes)) == expected_errno


def test_mapped_host_memory_is_never_exported(raw_device: RawDevice) -> None:
    buffer = bytearray(2 * PAGE_BYTES)
    address = raw_device.map_host(buffer)
    assert address
    assert get_errno(raw_device.export(address, PAGE_BYTES)) == errno.EINVAL
    assert get_errno(raw_device.export(address & ~(PAGE_BYTES - 1), PAGE_BYTES)) == errno.EINVAL
    assert raw_device.unmap(address) == 0


def test_second_open_of_a_device_is_busy(raw_device: RawDevice) -> None:
    assert raw_device.fd >= 0
    with pytest.raises(ApiError) as error_info:
        Device(0)
    assert error_info.value.errno == errno.EBUSY

"""Gaudi 1: its allocations have no handles and no mappings, and its memory is exported by the physical address."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import get_errno
from gaudi.twin_calls import read_calls

from gdrkit.errors import ApiError, Reason
from gdrkit.gaudi import list_devices
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, software
from gdrkit.units import GIB, KIB

if TYPE_CHECKING:
    from gaudi.raw_hlthunk import RawDevice

    from gdrkit.gaudi import Device

pytestmark = needs(gaudi_needs.device(), gaudi_needs.physical_memory)

PAGE_BYTES = 4 * KIB


def test_gaudi1_allocation_has_no_handle(raw_device: RawDevice) -> None:
    assert raw_device.allocate(64 * KIB) == 0
    assert get_errno(raw_device.map(0)) == errno.EINVAL
    assert raw_device.free(0) == 0


def test_export_takes_the_physical_address(raw_device: RawDevice, user_memory_base: int) -> None:
    fd = raw_device.export_physical(user_memory_base, 64 * KIB)
    assert fd >= 0
    assert os.lseek(fd, 0, os.SEEK_END) == 64 * KIB
    os.close(fd)


@pytest.mark.parametrize(
    ("displacement_bytes", "size_bytes"),
    [(-PAGE_BYTES, PAGE_BYTES), (1, PAGE_BYTES), (0, 0), (0, PAGE_BYTES + 1), (32 * GIB, PAGE_BYTES), (0, 64 * GIB)],
    ids=["below", "odd address", "nothing", "odd size", "above", "too long"],
)
def test_export_needs_whole_pages_of_user_memory(
    raw_device: RawDevice, user_memory_base: int, displacement_bytes: int, size_bytes: int
) -> None:
    assert get_errno(raw_device.export_physical(user_memory_base + displacement_bytes, size_bytes)) == errno.EINVAL


def test_export_with_offset_is_refused_on_gaudi1(raw_device: RawDevice, user_memory_base: int) -> None:
    assert get_errno(raw_device.export(user_memory_base, PAGE_BYTES, offset_bytes=PAGE_BYTES)) == errno.EINVAL
    fd = raw_device.export(user_memory_base, PAGE_BYTES)
    assert fd >= 0
    os.close(fd)


def test_gaudi1_memory_is_allocated_by_gdrkit(gaudi: Device) -> None:
    # 5000 bytes take two pages.
    with gaudi.allocate(5000) as first_memory, gaudi.allocate(100) as second_memory:
        assert first_memory.address + 2 * PAGE_BYTES == second_memory.address
        first_memory.write(b"one" * 1000)
        second_memory.write(b"other" * 20)
        assert first_memory.read(length_bytes=3000) == b"one" * 1000
    with gaudi.allocate(5000) as reallocated_memory:
        assert reallocated_memory.address == first_memory.address
    with pytest.raises(ApiError) as error_info:
        gaudi.allocate(64 * GIB)
    assert (error_info.value.errno, error_info.value.reason) == (errno.ENOMEM, Reason.OUT_OF_MEMORY)


@needs(software("hlthunk"))
def test_gaudi1_memory_is_exported_by_physical_address(gaudi: Device) -> None:
    with gaudi.allocate(9000) as memory, memory.export_dmabuf(offset_bytes=4097, length_bytes=10) as dmabuf:
        assert (dmabuf.offset_bytes, dmabuf.length_bytes, dmabuf.address) == (1, 10, memory.address + 4097)
    (call,) = read_calls("hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd")[-1:]
    assert call.name == "hlthunk_device_memory_export_dmabuf_fd"
    assert (int(call.arguments["addr"], 0), call.arguments["size"]) == (memory.address + 4096, "4096")


@pytest.fixture
def user_memory_base() -> int:
    """Return the lowest physical address of the memory that programs may use."""
    # A Gaudi 1 has 32 GiB of memory from this physical address on. Programs may use the upper part, and list_devices()
    # reports its length.
    memory_base = 0x20000000
    return memory_base + 32 * GIB - list_devices()[0].memory_bytes

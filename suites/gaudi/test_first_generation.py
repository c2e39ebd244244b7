"""The first Gaudi: allocations have no handles and no mappings, and memory is exported by its physical address."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import errno_of
from gaudi.twin_calls import calls_of

from gdrkit.errors import ApiError, Reason
from gdrkit.gaudi import list_devices
from gdrkit.harness.needs import gaudi as a_gaudi
from gdrkit.harness.needs import needs, software
from gdrkit.units import GIB, KIB

if TYPE_CHECKING:
    from gaudi.raw_hlthunk import RawDevice

    from gdrkit.gaudi import Device

pytestmark = needs(a_gaudi.device(), a_gaudi.physical_memory)

PAGE = 4 * KIB


def test_gaudi1_allocation_has_no_handle(raw: RawDevice) -> None:
    assert raw.allocate(64 * KIB) == 0
    assert errno_of(raw.map(0)) == errno.EINVAL
    assert raw.free(0) == 0


def test_export_takes_the_physical_address(raw: RawDevice, gaudi_base: int) -> None:
    fd = raw.export_physical(gaudi_base, 64 * KIB)
    assert fd >= 0
    assert os.lseek(fd, 0, os.SEEK_END) == 64 * KIB
    os.close(fd)


@pytest.mark.parametrize(
    ("away_bytes", "size"),
    [(-PAGE, PAGE), (1, PAGE), (0, 0), (0, PAGE + 1), (32 * GIB, PAGE), (0, 64 * GIB)],
    ids=["below", "odd address", "nothing", "odd size", "behind", "too long"],
)
def test_export_needs_whole_pages_of_user_memory(raw: RawDevice, gaudi_base: int, away_bytes: int, size: int) -> None:
    assert errno_of(raw.export_physical(gaudi_base + away_bytes, size)) == errno.EINVAL


def test_export_with_offset_is_refused_on_gaudi1(raw: RawDevice, gaudi_base: int) -> None:
    assert errno_of(raw.export(gaudi_base, PAGE, offset=PAGE)) == errno.EINVAL
    fd = raw.export(gaudi_base, PAGE)
    assert fd >= 0
    os.close(fd)


def test_gaudi1_memory_is_allocated_by_gdrkit(gaudi: Device) -> None:
    with gaudi.allocate(5000) as one, gaudi.allocate(100) as other:
        assert one.address + 8192 == other.address
        one.write(b"one" * 1000)
        other.write(b"other" * 20)
        assert one.read(length_bytes=3000) == b"one" * 1000
    with gaudi.allocate(5000) as again:
        assert again.address == one.address
    with pytest.raises(ApiError) as caught:
        gaudi.allocate(64 * GIB)
    assert (caught.value.errno, caught.value.reason) == (errno.ENOMEM, Reason.OUT_OF_MEMORY)


@needs(software("hlthunk"))
def test_gaudi1_memory_is_exported_by_physical_address(gaudi: Device) -> None:
    with gaudi.allocate(9000) as memory, memory.export_dmabuf(offset_bytes=4097, length_bytes=10) as exported:
        assert (exported.offset_bytes, exported.length_bytes, exported.address) == (1, 10, memory.address + 4097)
    (call,) = calls_of("hlthunk_device_memory_export_dmabuf_fd", "hlthunk_device_mapped_memory_export_dmabuf_fd")[-1:]
    assert call.name == "hlthunk_device_memory_export_dmabuf_fd"
    assert (int(call.arguments["addr"], 0), call.arguments["size"]) == (memory.address + 4096, "4096")


@pytest.fixture
def gaudi_base() -> int:
    """Return the first physical address of user memory."""
    first = list_devices()[0]
    return 0x20000000 + 32 * GIB - first.memory_bytes

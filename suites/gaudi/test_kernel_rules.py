"""Rules of the kernel driver for exports of mapped memory, one per case (memory.c of habanalabs)."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import FLAGS, errno_of

from gdrkit.errors import ApiError
from gdrkit.gaudi import Device, list_devices
from gdrkit.harness.needs import gaudi, needs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gaudi.raw_hlthunk import RawDevice

pytestmark = needs(gaudi.device(), gaudi.mapped_memory)

PAGE = 4 * KIB
SIZE = 64 * KIB
OVERFLOWING = (1 << 64) - PAGE


@pytest.fixture
def mapped(raw: RawDevice) -> Iterator[tuple[int, int]]:
    """Yield the handle and the address of an allocation."""
    handle, address = raw.allocate_mapped(SIZE)
    yield handle, address
    assert raw.unmap(address) == 0
    assert raw.free(handle) == 0


def test_mapped_address_is_exported(raw: RawDevice, mapped: tuple[int, int]) -> None:
    fd = raw.export(mapped[1], SIZE)
    assert fd >= 0
    assert os.lseek(fd, 0, os.SEEK_END) == SIZE
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Errno"):
        mmap.mmap(fd, PAGE, prot=mmap.PROT_READ)
    os.close(fd)


@pytest.mark.parametrize("flags", [0, os.O_RDWR, os.O_CLOEXEC, FLAGS | os.O_NONBLOCK])
def test_other_flags_are_refused_by_the_library(raw: RawDevice, mapped: tuple[int, int], flags: int) -> None:
    assert errno_of(raw.export(mapped[1], SIZE, flags=flags)) == errno.EINVAL
    # The library checks the flags first, so even the descriptor does not matter.
    assert errno_of(raw.export(mapped[1], SIZE, flags=flags, fd=1 << 20)) == errno.EINVAL
    assert errno_of(raw.export(mapped[1], SIZE, fd=1 << 20)) == errno.EBADF


@pytest.mark.parametrize("away_bytes", [PAGE, 1, -PAGE])
def test_export_needs_the_exact_mapped_address(raw: RawDevice, mapped: tuple[int, int], away_bytes: int) -> None:
    assert errno_of(raw.export(mapped[1] + away_bytes, PAGE)) == errno.EINVAL


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (1, 0), (PAGE + 1, 0), (PAGE, 1), (PAGE, PAGE // 2)])
def test_export_size_and_offset_must_be_whole_pages(
    raw: RawDevice, mapped: tuple[int, int], size: int, offset: int
) -> None:
    assert errno_of(raw.export(mapped[1], size, offset=offset)) == errno.EINVAL


def test_export_range_must_end_inside_the_mapping(raw: RawDevice, mapped: tuple[int, int]) -> None:
    with_page = list_devices()[0].page_bytes  # The driver rounds an allocation up to this size.
    fd = raw.export(mapped[1], PAGE, offset=with_page - PAGE)
    assert fd >= 0
    os.close(fd)
    assert errno_of(raw.export(mapped[1], with_page + PAGE)) == errno.EINVAL
    assert errno_of(raw.export(mapped[1], 2 * PAGE, offset=with_page - PAGE)) == errno.EINVAL
    assert errno_of(raw.export(mapped[1], 2 * PAGE, offset=OVERFLOWING)) == errno.EINVAL


def test_unmap_of_exported_memory_is_refused(raw: RawDevice, mapped: tuple[int, int]) -> None:
    fd = raw.export(mapped[1], PAGE)
    copy = os.dup(fd)
    os.close(fd)
    assert errno_of(raw.unmap(mapped[1])) == errno.EINVAL
    os.close(copy)


def test_free_of_mapped_memory_is_refused(raw: RawDevice, mapped: tuple[int, int]) -> None:
    assert errno_of(raw.free(mapped[0])) == errno.EINVAL


def test_export_of_unmapped_memory_is_refused(raw: RawDevice) -> None:
    handle, address = raw.allocate_mapped(SIZE)
    assert raw.unmap(address) == 0
    assert errno_of(raw.export(address, SIZE)) == errno.EINVAL
    assert errno_of(raw.unmap(address)) == errno.EINVAL
    assert raw.free(handle) == 0


def test_free_of_freed_memory_is_refused(raw: RawDevice) -> None:
    handle = raw.allocate(SIZE)
    assert raw.free(handle) == 0
    assert errno_of(raw.free(handle)) == errno.EINVAL
    assert errno_of(raw.map(handle)) == errno.EINVAL
    assert errno_of(raw.free(4711)) == errno.EINVAL


@pytest.mark.parametrize(
    ("length_bytes", "page_bytes", "number"),
    [(0, 0, errno.EINVAL), (SIZE, 3 << 20, errno.EINVAL), (1 << 60, 0, errno.ENOMEM)],
    ids=["nothing", "no power of two", "too much"],
)
def test_invalid_allocation_size_or_page_is_refused(
    raw: RawDevice, length_bytes: int, page_bytes: int, number: int
) -> None:
    assert errno_of(raw.allocate(length_bytes, page_bytes=page_bytes)) == number


def test_mapped_host_memory_is_never_exported(raw: RawDevice) -> None:
    buffer = bytearray(2 * PAGE)
    address = raw.map_host(buffer)
    assert address
    assert errno_of(raw.export(address, PAGE)) == errno.EINVAL
    assert errno_of(raw.export(address & ~(PAGE - 1), PAGE)) == errno.EINVAL
    assert raw.unmap(address) == 0


def test_second_open_of_a_device_is_busy(raw: RawDevice) -> None:
    assert raw.fd >= 0
    with pytest.raises(ApiError) as caught:
        Device(0)
    assert caught.value.errno == errno.EBUSY

"""What the kernel driver exports and refuses, one rule at a time (memory.c of habanalabs), where it maps memory."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from typing import TYPE_CHECKING

import pytest
from support.raw_hlthunk import FLAGS, errno_of

from gdrkit.errors import ApiError
from gdrkit.gaudi import Device, list_devices
from gdrkit.harness.needs import gaudi, needs
from gdrkit.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.raw_hlthunk import RawDevice

pytestmark = needs(gaudi.device(), gaudi.mapped_memory)

PAGE = 4 * KIB
SIZE = 64 * KIB
OVERFLOWING = (1 << 64) - PAGE


@pytest.fixture
def mapped(raw: RawDevice) -> Iterator[tuple[int, int]]:
    """Handle and address of an allocation."""
    handle, address = raw.mapped(SIZE)
    yield handle, address
    assert raw.unmap(address) == 0
    assert raw.free(handle) == 0


def test_the_address_of_a_mapping_is_exported(raw: RawDevice, mapped: tuple[int, int]) -> None:
    fd = raw.export(mapped[1], SIZE)
    assert fd >= 0
    assert os.lseek(fd, 0, os.SEEK_END) == SIZE
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    with pytest.raises(OSError, match="Errno"):
        mmap.mmap(fd, PAGE, prot=mmap.PROT_READ)
    os.close(fd)


@pytest.mark.parametrize("flags", [0, os.O_RDWR, os.O_CLOEXEC, FLAGS | os.O_NONBLOCK])
def test_other_flags_are_refused_before_the_kernel_is_asked(
    raw: RawDevice, mapped: tuple[int, int], flags: int
) -> None:
    assert errno_of(raw.export(mapped[1], SIZE, flags=flags)) == errno.EINVAL
    # The flags are looked at first, so that not even the descriptor matters.
    assert errno_of(raw.export(mapped[1], SIZE, flags=flags, fd=1 << 20)) == errno.EINVAL
    assert errno_of(raw.export(mapped[1], SIZE, fd=1 << 20)) == errno.EBADF


@pytest.mark.parametrize("away_bytes", [PAGE, 1, -PAGE])
def test_only_exactly_the_mapped_address_is_known(raw: RawDevice, mapped: tuple[int, int], away_bytes: int) -> None:
    assert errno_of(raw.export(mapped[1] + away_bytes, PAGE)) == errno.EINVAL


@pytest.mark.parametrize(("size", "offset"), [(0, 0), (1, 0), (PAGE + 1, 0), (PAGE, 1), (PAGE, PAGE // 2)])
def test_size_and_offset_are_whole_pages(raw: RawDevice, mapped: tuple[int, int], size: int, offset: int) -> None:
    assert errno_of(raw.export(mapped[1], size, offset=offset)) == errno.EINVAL


def test_a_range_ends_inside_the_mapping(raw: RawDevice, mapped: tuple[int, int]) -> None:
    with_page = list_devices()[0].page_bytes  # What the driver rounds an allocation up to.
    fd = raw.export(mapped[1], PAGE, offset=with_page - PAGE)
    assert fd >= 0
    os.close(fd)
    assert errno_of(raw.export(mapped[1], with_page + PAGE)) == errno.EINVAL
    assert errno_of(raw.export(mapped[1], 2 * PAGE, offset=with_page - PAGE)) == errno.EINVAL
    assert errno_of(raw.export(mapped[1], 2 * PAGE, offset=OVERFLOWING)) == errno.EINVAL


def test_what_is_exported_cannot_be_unmapped(raw: RawDevice, mapped: tuple[int, int]) -> None:
    fd = raw.export(mapped[1], PAGE)
    copy = os.dup(fd)
    os.close(fd)
    assert errno_of(raw.unmap(mapped[1])) == errno.EINVAL
    os.close(copy)


def test_what_is_mapped_cannot_be_freed(raw: RawDevice, mapped: tuple[int, int]) -> None:
    assert errno_of(raw.free(mapped[0])) == errno.EINVAL


def test_what_was_unmapped_is_not_exported(raw: RawDevice) -> None:
    handle, address = raw.mapped(SIZE)
    assert raw.unmap(address) == 0
    assert errno_of(raw.export(address, SIZE)) == errno.EINVAL
    assert errno_of(raw.unmap(address)) == errno.EINVAL
    assert raw.free(handle) == 0


def test_memory_is_freed_once(raw: RawDevice) -> None:
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
def test_an_allocation_has_a_size_and_a_page(raw: RawDevice, length_bytes: int, page_bytes: int, number: int) -> None:
    assert errno_of(raw.allocate(length_bytes, page_bytes=page_bytes)) == number


def test_host_memory_is_mapped_and_never_exported(raw: RawDevice) -> None:
    buffer = bytearray(2 * PAGE)
    address = raw.map_host(buffer)
    assert address
    assert errno_of(raw.export(address, PAGE)) == errno.EINVAL
    assert errno_of(raw.export(address & ~(PAGE - 1), PAGE)) == errno.EINVAL
    assert raw.unmap(address) == 0


def test_a_device_belongs_to_one_program(raw: RawDevice) -> None:
    assert raw.fd >= 0
    with pytest.raises(ApiError) as caught:
        Device(0)
    assert caught.value.errno == errno.EBUSY

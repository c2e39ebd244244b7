"""DmabufRange owns its descriptor: it is closed once, taken once, duplicated independently, and reported if dropped.

The cases use descriptors of any file, because the range never uses the descriptor itself.
"""

from __future__ import annotations

import fcntl
import gc
import os

import pytest

from gdrkit import handles
from gdrkit.buffers import DmabufRange, check_range
from gdrkit.errors import ClosedResource, GdrkitWarning, Reason, UsageError


def _descriptor() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")  # noqa: PTH110 - a plain question to the kernel.


def _range(fd: int) -> DmabufRange:
    return DmabufRange(fd, offset_bytes=512, length_bytes=4096, address=0x7F0000000200)


def test_with_block_closes_the_descriptor() -> None:
    fd = _descriptor()
    with _range(fd) as owned:
        assert owned.fd == fd
        assert not owned.closed
    assert owned.closed
    assert not _is_open(fd)


def test_second_close_does_not_close_a_reused_descriptor() -> None:
    fd = _descriptor()
    owned = _range(fd)
    owned.close()
    again = _descriptor()
    try:
        assert again == fd  # The kernel reuses the lowest free number, so a second close would close another file.
        owned.close()
        assert _is_open(again)
    finally:
        os.close(again)


def test_take_passes_the_descriptor_to_the_caller() -> None:
    owned = _range(_descriptor())
    fd = owned.take()
    try:
        assert owned.closed
        owned.close()
        assert _is_open(fd)
    finally:
        os.close(fd)
    with pytest.raises(ClosedResource):
        owned.take()


def test_use_after_close_is_refused() -> None:
    owned = _range(_descriptor())
    owned.close()
    with pytest.raises(ClosedResource):
        _ = owned.fd
    with pytest.raises(ClosedResource):
        owned.dup()


def test_dup_is_independent_and_closed_on_exec() -> None:
    with _range(_descriptor()) as first:
        second = first.dup()
        assert second.fd != first.fd
        assert fcntl.fcntl(second.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert (second.offset_bytes, second.length_bytes, second.address) == (512, 4096, 0x7F0000000200)
        second.close()
        assert _is_open(first.fd)


@pytest.mark.parametrize("wrong", [{"offset_bytes": -1}, {"length_bytes": 0}, {"length_bytes": -5}, {"address": -1}])
def test_invalid_range_closes_its_descriptor(wrong: dict[str, int]) -> None:
    fd = _descriptor()
    before = handles.live()
    arguments = {"offset_bytes": 0, "length_bytes": 1, "address": 0} | wrong
    with pytest.raises(UsageError):
        DmabufRange(fd, **arguments)
    assert not _is_open(fd)
    assert handles.live() == before


def test_negative_descriptor_is_refused() -> None:
    with pytest.raises(UsageError):
        DmabufRange(-1, offset_bytes=0, length_bytes=1, address=0)


def test_dropped_range_is_closed_with_a_warning() -> None:
    fd = _descriptor()
    with pytest.warns(GdrkitWarning, match="never closed"):
        _forget(fd)
    assert not _is_open(fd)


def test_range_is_counted_while_it_is_open() -> None:
    before = handles.live().get("dmabuf_range", 0)
    with _range(_descriptor()):
        assert handles.live()["dmabuf_range"] == before + 1
    assert handles.live().get("dmabuf_range", 0) == before


def _forget(fd: int) -> None:
    _range(fd)
    gc.collect()


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (0, 10), (10, 0), (3, 7)])
def test_check_range_accepts_ranges_inside(offset: int, length: int) -> None:
    check_range(offset_bytes=offset, length_bytes=length, size_bytes=10)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 11), (11, 0), (5, -1), (1 << 64, 1)])
def test_check_range_refuses_ranges_outside(offset: int, length: int) -> None:
    with pytest.raises(UsageError) as caught:
        check_range(offset_bytes=offset, length_bytes=length, size_bytes=10)
    assert caught.value.reason is Reason.BAD_ARGUMENT

"""DmabufRange owns a dma-buf descriptor, which the caller can close, take over or duplicate.

A range that is garbage-collected closes its descriptor and causes a warning. The last cases check check_range().

The cases use descriptors of /dev/null, because a DmabufRange makes no call that needs a real dma-buf.
"""

from __future__ import annotations

import fcntl
import gc
import os

import pytest

from gdrkit import handles
from gdrkit.buffers import DmabufRange, check_range
from gdrkit.errors import ClosedResource, GdrkitWarning, Reason, UsageError


def _open_descriptor() -> int:
    return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)


def _is_open(fd: int) -> bool:
    return os.path.exists(f"/proc/self/fd/{fd}")  # noqa: PTH110


def _make_range(fd: int) -> DmabufRange:
    return DmabufRange(fd, offset_bytes=512, length_bytes=4096, address=0x7F0000000200)


def test_with_block_closes_the_descriptor() -> None:
    fd = _open_descriptor()
    with _make_range(fd) as dmabuf:
        assert dmabuf.fd == fd
        assert not dmabuf.closed
    assert dmabuf.closed
    assert not _is_open(fd)


def test_second_close_does_not_close_a_reused_descriptor() -> None:
    fd = _open_descriptor()
    dmabuf = _make_range(fd)
    dmabuf.close()
    reused_fd = _open_descriptor()
    try:
        # The kernel reuses the lowest free number. A second close of this number would close another file.
        assert reused_fd == fd
        dmabuf.close()
        assert _is_open(reused_fd)
    finally:
        os.close(reused_fd)


def test_take_passes_the_descriptor_to_the_caller() -> None:
    dmabuf = _make_range(_open_descriptor())
    fd = dmabuf.take()
    try:
        assert dmabuf.closed
        dmabuf.close()
        assert _is_open(fd)
    finally:
        os.close(fd)
    with pytest.raises(ClosedResource):
        dmabuf.take()


def test_use_after_close_is_refused() -> None:
    dmabuf = _make_range(_open_descriptor())
    dmabuf.close()
    with pytest.raises(ClosedResource):
        _ = dmabuf.fd
    with pytest.raises(ClosedResource):
        dmabuf.dup()


def test_dup_is_independent_and_closed_on_exec() -> None:
    with _make_range(_open_descriptor()) as dmabuf:
        duplicate = dmabuf.dup()
        assert duplicate.fd != dmabuf.fd
        assert fcntl.fcntl(duplicate.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        assert (duplicate.offset_bytes, duplicate.length_bytes, duplicate.address) == (512, 4096, 0x7F0000000200)
        duplicate.close()
        assert _is_open(dmabuf.fd)


@pytest.mark.parametrize(
    "invalid_arguments", [{"offset_bytes": -1}, {"length_bytes": 0}, {"length_bytes": -5}, {"address": -1}]
)
def test_invalid_range_closes_its_descriptor(invalid_arguments: dict[str, int]) -> None:
    fd = _open_descriptor()
    handles_before = handles.live()
    arguments = {"offset_bytes": 0, "length_bytes": 1, "address": 0} | invalid_arguments
    with pytest.raises(UsageError):
        DmabufRange(fd, **arguments)
    assert not _is_open(fd)
    assert handles.live() == handles_before


def test_negative_descriptor_is_refused() -> None:
    with pytest.raises(UsageError):
        DmabufRange(-1, offset_bytes=0, length_bytes=1, address=0)


def test_dropped_range_is_closed_with_a_warning() -> None:
    fd = _open_descriptor()
    with pytest.warns(GdrkitWarning, match="never closed"):
        _create_and_drop(fd)
    assert not _is_open(fd)


def test_range_is_counted_while_it_is_open() -> None:
    handles_before = handles.live().get("dmabuf_range", 0)
    with _make_range(_open_descriptor()):
        assert handles.live()["dmabuf_range"] == handles_before + 1
    assert handles.live().get("dmabuf_range", 0) == handles_before


def _create_and_drop(fd: int) -> None:
    _make_range(fd)
    gc.collect()


@pytest.mark.parametrize(("offset_bytes", "length_bytes"), [(0, 0), (0, 10), (10, 0), (3, 7)])
def test_check_range_accepts_ranges_inside(offset_bytes: int, length_bytes: int) -> None:
    check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=10)


@pytest.mark.parametrize(("offset_bytes", "length_bytes"), [(-1, 1), (0, 11), (11, 0), (5, -1), (1 << 64, 1)])
def test_check_range_refuses_ranges_outside(offset_bytes: int, length_bytes: int) -> None:
    with pytest.raises(UsageError) as error_info:
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=10)
    assert error_info.value.reason is Reason.BAD_ARGUMENT

"""Exporters of dma-bufs in the kernel: udmabuf, the dma-heaps, and vgem, a graphics device without hardware."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DMA_HEAP", "UDMABUF", "VGEM", "export_dmabuf"]

UDMABUF = "/dev/udmabuf"
DMA_HEAP = "/dev/dma_heap/system"
VGEM = "/dev/vgem"  # hardware/lab/guest.sh creates this link to the DRM device.
# UDMABUF_CREATE is _IOW('u', 0x42, struct udmabuf_create): u32 memfd, u32 flags, u64 offset, u64 size
# (linux/udmabuf.h).
_UDMABUF_CREATE, _UDMABUF_STRUCT = 0x40187542, struct.Struct("=IIQQ")
_UDMABUF_FLAGS_CLOEXEC = 1
# DMA_HEAP_IOCTL_ALLOC is _IOWR('H', 0, struct dma_heap_allocation_data): u64 len, u32 fd, u32 fd_flags, u64 heap_flags
# (linux/dma-heap.h).
_DMA_HEAP_ALLOC, _DMA_HEAP_STRUCT = 0xC0184800, struct.Struct("=QIIQ")
# DRM_IOCTL_MODE_CREATE_DUMB is _IOWR('d', 0xb2, struct drm_mode_create_dumb): u32 height, width, bpp, flags, handle,
# pitch, u64 size. DRM_IOCTL_PRIME_HANDLE_TO_FD is _IOWR('d', 0x2d, struct drm_prime_handle): u32 handle, u32 flags,
# s32 fd (drm/drm.h, drm/drm_mode.h).
_CREATE_DUMB, _DUMB_STRUCT = 0xC02064B2, struct.Struct("=IIIIIIQ")
_HANDLE_TO_FD, _PRIME_STRUCT = 0xC00C642D, struct.Struct("=IIi")
# The memory of vgem is a dumb buffer, an image. A row takes one page, so the number of rows sets the length.
_PIXEL_BITS, _ROW_BYTES = 32, 4096


@contextmanager
def export_dmabuf(device_file: str, length_bytes: int) -> Iterator[int]:
    """Yield the descriptor of a new dma-buf of an exporter. `length_bytes` must be a multiple of 4096."""
    device_fd = os.open(device_file, os.O_RDWR | os.O_CLOEXEC)
    try:
        dmabuf_fd = _EXPORTERS[device_file](device_fd, length_bytes)
    finally:
        os.close(device_fd)
    try:
        yield dmabuf_fd
    finally:
        os.close(dmabuf_fd)


def _export_udmabuf(device_fd: int, length_bytes: int) -> int:
    memory_fd = os.memfd_create("exported", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory_fd, length_bytes)
        fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # udmabuf requires this seal.
        request = bytearray(_UDMABUF_STRUCT.pack(memory_fd, _UDMABUF_FLAGS_CLOEXEC, 0, length_bytes))
        # With a mutable buffer, ioctl() returns the result of the system call, which is the new descriptor.
        return int(fcntl.ioctl(device_fd, _UDMABUF_CREATE, request))
    finally:
        os.close(memory_fd)


def _export_heap(device_fd: int, length_bytes: int) -> int:
    request = _DMA_HEAP_STRUCT.pack(length_bytes, 0, os.O_RDWR | os.O_CLOEXEC, 0)
    return int(_DMA_HEAP_STRUCT.unpack(fcntl.ioctl(device_fd, _DMA_HEAP_ALLOC, request))[1])


def _export_vgem(device_fd: int, length_bytes: int) -> int:
    row_pixel_count = _ROW_BYTES * 8 // _PIXEL_BITS
    create_request = _DUMB_STRUCT.pack(length_bytes // _ROW_BYTES, row_pixel_count, _PIXEL_BITS, 0, 0, 0, 0)
    # In struct drm_mode_create_dumb, the fields with the indices 4 and 6 are the handle and the size.
    handle, size_bytes = _DUMB_STRUCT.unpack(fcntl.ioctl(device_fd, _CREATE_DUMB, create_request))[4::2]
    assert size_bytes == length_bytes
    export_request = _PRIME_STRUCT.pack(handle, os.O_RDWR | os.O_CLOEXEC, -1)
    # The dma-buf keeps the memory alive after the device is closed.
    return int(_PRIME_STRUCT.unpack(fcntl.ioctl(device_fd, _HANDLE_TO_FD, export_request))[2])


_EXPORTERS = {UDMABUF: _export_udmabuf, DMA_HEAP: _export_heap, VGEM: _export_vgem}

"""Exporters of dma-bufs that are in the kernel: udmabuf and the dma-heaps."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DMA_HEAP", "UDMABUF", "exported"]

UDMABUF = "/dev/udmabuf"
DMA_HEAP = "/dev/dma_heap/system"
# UDMABUF_CREATE is _IOW('u', 0x42, struct udmabuf_create): u32 memfd, u32 flags, u64 offset, u64 size
# (linux/udmabuf.h).
_UDMABUF_CREATE, _UDMABUF = 0x40187542, struct.Struct("=IIQQ")
_UDMABUF_FLAGS_CLOEXEC = 1
# DMA_HEAP_IOCTL_ALLOC is _IOWR('H', 0, struct dma_heap_allocation_data): u64 len, u32 fd, u32 fd_flags, u64 heap_flags
# (linux/dma-heap.h).
_DMA_HEAP_ALLOC, _DMA_HEAP = 0xC0184800, struct.Struct("=QIIQ")


@contextmanager
def exported(device_file: str, length_bytes: int) -> Iterator[int]:
    """Yield the descriptor of a new dma-buf of this exporter. The length is a multiple of 4096."""
    device = os.open(device_file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fd = _udmabuf(device, length_bytes) if device_file == UDMABUF else _heap(device, length_bytes)
    finally:
        os.close(device)
    try:
        yield fd
    finally:
        os.close(fd)


def _udmabuf(device: int, length_bytes: int) -> int:
    memory = os.memfd_create("exported", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(memory, length_bytes)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # udmabuf requires it.
        request = bytearray(_UDMABUF.pack(memory, _UDMABUF_FLAGS_CLOEXEC, 0, length_bytes))
        # With a mutable buffer, ioctl() returns the result of the system call, which is the new descriptor.
        return int(fcntl.ioctl(device, _UDMABUF_CREATE, request))
    finally:
        os.close(memory)


def _heap(device: int, length_bytes: int) -> int:
    request = _DMA_HEAP.pack(length_bytes, 0, os.O_RDWR | os.O_CLOEXEC, 0)
    return int(_DMA_HEAP.unpack(fcntl.ioctl(device, _DMA_HEAP_ALLOC, request))[1])

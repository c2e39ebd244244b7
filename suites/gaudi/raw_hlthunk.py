"""hl-thunk as a C program calls it: what the kernel driver answers, without anything of gdrkit between."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["FLAGS", "RawDevice", "errno_of"]

FLAGS = os.O_RDWR | os.O_CLOEXEC
_DONT_CARE = 4
_NUMBERS = ("hlthunk_device_memory_alloc", "hlthunk_device_memory_map", "hlthunk_host_memory_map")


def _library() -> ctypes.CDLL:
    for name in ("libhl-thunk.so", "libhlthunk.so"):
        try:
            return ctypes.CDLL(name, use_errno=True)
        except OSError:
            continue
    message = "no hl-thunk"
    raise OSError(message)


def errno_of(answer: int) -> int:
    """The errno of an answer: of -errno, or of a 0 where an address or a handle was asked for; 0 when it worked."""
    return -answer if answer < 0 else ctypes.get_errno() if answer == 0 else 0


class RawDevice:
    """The first free device. Numbers are taken as they are; the caller undoes what it did."""

    def __init__(self) -> None:
        self._library = _library()
        self.fd = self.call("hlthunk_open", _DONT_CARE, None)
        assert self.fd >= 0

    def call(self, name: str, *arguments: object) -> int:
        """One call: integers as 64-bit values, except descriptors, which the callee takes the lower half of."""
        function = getattr(self._library, name)
        function.restype = ctypes.c_uint64 if name in _NUMBERS else ctypes.c_int
        ctypes.set_errno(0)
        given = [ctypes.c_uint64(part) if isinstance(part, int) and part >= 0 else part for part in arguments]
        return int(function(*given))

    def allocate(self, length_bytes: int, *, page_bytes: int = 0) -> int:
        """The handle, or 0."""
        return self.call("hlthunk_device_memory_alloc", self.fd, length_bytes, page_bytes, 1, 0)

    def mapped(self, length_bytes: int) -> tuple[int, int]:
        """A new allocation: handle and address."""
        handle = self.allocate(length_bytes)
        address = self.map(handle)
        assert handle
        assert address
        return handle, address

    def map(self, handle: int) -> int:
        """The address, or 0."""
        return self.call("hlthunk_device_memory_map", self.fd, handle, 0)

    def unmap(self, address: int) -> int:
        """0 or -errno."""
        return self.call("hlthunk_memory_unmap", self.fd, address)

    def free(self, handle: int) -> int:
        """0 or -errno."""
        return self.call("hlthunk_device_memory_free", self.fd, handle)

    def export(self, address: int, size: int, *, offset: int = 0, flags: int = FLAGS, fd: int | None = None) -> int:
        """The call for devices whose driver maps memory: a descriptor or -errno."""
        name, device = "hlthunk_device_mapped_memory_export_dmabuf_fd", self.fd if fd is None else fd
        return self.call(name, device, address, size, offset, flags)

    def export_physical(self, address: int, size: int) -> int:
        """The call for the first Gaudi: a descriptor or -errno."""
        return self.call("hlthunk_device_memory_export_dmabuf_fd", self.fd, address, size, FLAGS)

    def map_host(self, buffer: bytearray) -> int:
        """The device address of a host buffer, or 0; it must not be resized until it is unmapped."""
        place = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return self.call("hlthunk_host_memory_map", self.fd, place, 0, len(buffer))

    def close(self) -> None:
        """hlthunk_close."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            assert self.call("hlthunk_close", fd) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""hl-thunk by ctypes, for the results of the kernel driver without gdrkit in between."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["FLAGS", "RawDevice", "errno_of"]

FLAGS = os.O_RDWR | os.O_CLOEXEC
_ANY_DEVICE = 4
# These functions return a 64-bit handle or address.
_RETURN_64_BITS = ("hlthunk_device_memory_alloc", "hlthunk_device_memory_map", "hlthunk_host_memory_map")


def _library() -> ctypes.CDLL:
    for name in ("libhl-thunk.so", "libhlthunk.so"):
        try:
            return ctypes.CDLL(name, use_errno=True)
        except OSError:
            continue
    message = "dlopen(libhl-thunk.so) and dlopen(libhlthunk.so) failed: install hl-thunk"
    raise OSError(message)


def errno_of(result: int) -> int:
    """Return the errno of a result that is a negative errno, or that is 0 instead of a handle or an address.

    The errno of a successful call is 0.
    """
    return -result if result < 0 else ctypes.get_errno() if result == 0 else 0


class RawDevice:
    """The first free device. Arguments are not checked, and the caller releases what it allocates."""

    def __init__(self) -> None:
        self._library = _library()
        self.fd = self.call("hlthunk_open", _ANY_DEVICE, None)
        assert self.fd >= 0

    def call(self, name: str, *arguments: object) -> int:
        """Call a function. Integers are passed as 64-bit values; the callee uses the lower half of a descriptor."""
        function = getattr(self._library, name)
        function.restype = ctypes.c_uint64 if name in _RETURN_64_BITS else ctypes.c_int
        ctypes.set_errno(0)
        values = [ctypes.c_uint64(each) if isinstance(each, int) and each >= 0 else each for each in arguments]
        return int(function(*values))

    def allocate(self, length_bytes: int, *, page_bytes: int = 0) -> int:
        """Allocate memory; return its handle, or 0."""
        return self.call("hlthunk_device_memory_alloc", self.fd, length_bytes, page_bytes, 1, 0)

    def allocate_mapped(self, length_bytes: int) -> tuple[int, int]:
        """Allocate and map memory; return its handle and its address."""
        handle = self.allocate(length_bytes)
        address = self.map(handle)
        assert handle
        assert address
        return handle, address

    def map(self, handle: int) -> int:
        """Map memory; return its address, or 0."""
        return self.call("hlthunk_device_memory_map", self.fd, handle, 0)

    def unmap(self, address: int) -> int:
        """Unmap memory; return 0 or a negative errno."""
        return self.call("hlthunk_memory_unmap", self.fd, address)

    def free(self, handle: int) -> int:
        """Free memory; return 0 or a negative errno."""
        return self.call("hlthunk_device_memory_free", self.fd, handle)

    def export(self, address: int, size: int, *, offset: int = 0, flags: int = FLAGS, fd: int | None = None) -> int:
        """Export mapped memory; return a descriptor or a negative errno."""
        name, device = "hlthunk_device_mapped_memory_export_dmabuf_fd", self.fd if fd is None else fd
        return self.call(name, device, address, size, offset, flags)

    def export_physical(self, address: int, size: int) -> int:
        """Export memory of the first Gaudi by its physical address; return a descriptor or a negative errno."""
        return self.call("hlthunk_device_memory_export_dmabuf_fd", self.fd, address, size, FLAGS)

    def map_host(self, buffer: bytearray) -> int:
        """Map a host buffer, which must keep its size; return its address on the device, or 0."""
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return self.call("hlthunk_host_memory_map", self.fd, address, 0, len(buffer))

    def close(self) -> None:
        """Close the device."""
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            assert self.call("hlthunk_close", fd) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

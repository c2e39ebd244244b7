"""Calls of hl-thunk by ctypes, without gdrkit, for cases that check the results of the kernel driver."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["EXPORT_FLAGS", "RawDevice", "get_errno"]

# The export functions accept only these flags.
EXPORT_FLAGS = os.O_RDWR | os.O_CLOEXEC
_ANY_DEVICE = 4  # HLTHUNK_DEVICE_DONT_CARE
# These functions return a 64-bit handle or address. All other functions return an int.
_FUNCTIONS_WITH_64_BIT_RESULT = ("hlthunk_device_memory_alloc", "hlthunk_device_memory_map", "hlthunk_host_memory_map")


def _load_library() -> ctypes.CDLL:
    for soname in ("libhl-thunk.so", "libhlthunk.so"):
        try:
            return ctypes.CDLL(soname, use_errno=True)
        except OSError:
            continue
    message = "dlopen(libhl-thunk.so) and dlopen(libhlthunk.so) failed: install hl-thunk"
    raise OSError(message)


def get_errno(result: int) -> int:
    """Return the errno of a failed call, or 0 if the call succeeded.

    Most functions return a negative errno if they fail. A function that returns a handle or an address returns 0
    instead, and sets the errno variable.
    """
    return -result if result < 0 else ctypes.get_errno() if result == 0 else 0


class RawDevice:
    """A device of hl-thunk: the device of the open descriptor `fd`, or the first free device if `fd` is None.

    Its methods do not check arguments. The caller frees the memory that it allocates.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._library = _load_library()
        self._closes_fd = fd is None
        self.fd = self.call("hlthunk_open", _ANY_DEVICE, None) if fd is None else fd
        assert self.fd >= 0

    def call(self, function_name: str, *arguments: object) -> int:
        """Call a function and return its result.

        Integers are passed as 64 bits. An int parameter of the function uses the lower half.
        """
        function = getattr(self._library, function_name)
        function.restype = ctypes.c_uint64 if function_name in _FUNCTIONS_WITH_64_BIT_RESULT else ctypes.c_int
        ctypes.set_errno(0)
        c_arguments = [
            ctypes.c_uint64(argument) if isinstance(argument, int) and argument >= 0 else argument
            for argument in arguments
        ]
        return int(function(*c_arguments))

    def allocate(self, length_bytes: int, *, page_bytes: int = 0) -> int:
        """Allocate contiguous memory; return its handle, or 0 after a failure."""
        contiguous, shared = 1, 0
        return self.call("hlthunk_device_memory_alloc", self.fd, length_bytes, page_bytes, contiguous, shared)

    def allocate_mapped(self, length_bytes: int) -> tuple[int, int]:
        """Allocate and map memory; return its handle and its address."""
        handle = self.allocate(length_bytes)
        address = self.map(handle)
        assert handle
        assert address
        return handle, address

    def map(self, handle: int) -> int:
        """Map memory at any address; return its address, or 0 after a failure."""
        hint_address = 0
        return self.call("hlthunk_device_memory_map", self.fd, handle, hint_address)

    def unmap(self, address: int) -> int:
        """Unmap memory; return 0 or a negative errno."""
        return self.call("hlthunk_memory_unmap", self.fd, address)

    def free(self, handle: int) -> int:
        """Free memory; return 0 or a negative errno."""
        return self.call("hlthunk_device_memory_free", self.fd, handle)

    def export(
        self, address: int, size_bytes: int, *, offset_bytes: int = 0, flags: int = EXPORT_FLAGS, fd: int | None = None
    ) -> int:
        """Export mapped memory; return a descriptor or a negative errno."""
        device_fd = self.fd if fd is None else fd
        return self.call(
            "hlthunk_device_mapped_memory_export_dmabuf_fd", device_fd, address, size_bytes, offset_bytes, flags
        )

    def export_physical(self, address: int, size_bytes: int) -> int:
        """Export memory of a Gaudi 1 by its physical address; return a descriptor or a negative errno."""
        return self.call("hlthunk_device_memory_export_dmabuf_fd", self.fd, address, size_bytes, EXPORT_FLAGS)

    def map_host(self, buffer: bytearray) -> int:
        """Map a host buffer, which must keep its size; return its address on the device, or 0 after a failure."""
        hint_address = 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        return self.call("hlthunk_host_memory_map", self.fd, address, hint_address, len(buffer))

    def close(self) -> None:
        """Close the device."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and self._closes_fd:
            assert self.call("hlthunk_close", fd) == 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

"""Host memory that is registered, cached and pooled like device memory.

The region cache of :mod:`gdrkit.registration` must distinguish an old mapping from a new mapping at the same address. A
GPU driver numbers its allocations (buffer IDs), but the kernel does not number mappings. This module therefore numbers
the mappings that it makes. Memory that gdrkit did not map cannot be cached.
"""

from __future__ import annotations

import itertools
import mmap
from typing import TYPE_CHECKING

from gdrkit.buffers import DmabufRange, MemoryKind, MemoryResource
from gdrkit.errors import Api, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.host._libc import address_of
from gdrkit.units import HOST_PAGE_BYTES, align_up

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BorrowedHostMemory", "HostAllocator", "HostBuffer", "HostMemory", "MappedFile"]

# The lock protects _live_mappings and the borrower counts. It is reentrant, because a signal handler or a finalizer may
# allocate or free memory while its thread has it.
_lock = ForkSafeLock(reentrant=True)
_mapping_numbers = itertools.count(1)
# Address and length of every mapping that still exists, by its number. A process never uses a number twice.
_live_mappings: dict[int, tuple[int, int]] = {}


def _make_existence_check(key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
    """Return a function that checks whether every mapping in `key` still exists."""
    return lambda: all(
        _live_mappings.get(mapping_number) == (address, length_bytes) for address, length_bytes, mapping_number in key
    )


class HostBuffer(MemoryResource):
    """A range of host memory with the interface of :class:`gdrkit.buffers.DeviceBuffer`.

    This is the base of :class:`HostMemory`, :class:`BorrowedHostMemory` and :class:`MappedFile`.
    """

    def __init__(self, mapping: _Mapping, *, length_bytes: int) -> None:
        self._mapping = mapping
        super().__init__(MemoryKind.HOST, address=mapping.address, length_bytes=length_bytes)

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return ((address, length_bytes, number),) of the mapping. Every mapping has a number of its own."""
        self._check_open()
        return self._mapping.allocation_key

    # This function takes the result of an earlier allocation_key(), and returns a function that checks whether that
    # mapping still exists.
    make_existence_check = staticmethod(_make_existence_check)

    def allocation(self) -> BorrowedHostMemory:
        """Borrow the whole mapping that holds this memory. It stays mapped until the result is closed."""
        self._check_open()
        return BorrowedHostMemory(self._mapping)

    def export_dmabuf(self) -> DmabufRange:
        """Raise Unsupported: the kernel has no dma-buf exporter for the pages of a process.

        Raises
        ------
        Unsupported
            DMABUF_EXPORT_UNSUPPORTED, always.
        """
        self._check_open()
        raise Unsupported(
            api=Api.KERNEL,
            operation="dma-buf export",
            status=None,
            status_name="no exporter",
            arguments={"address": self.address, "length_bytes": self.length_bytes},
            reason=Reason.DMABUF_EXPORT_UNSUPPORTED,
            what_to_do="register the memory by its address (ibv_reg_mr)",
            detail="the kernel has no dma-buf exporter for the pages of a process",
        )

    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set every byte of the range to `byte` (0 to 255). Without `length_bytes`, fill to the end of the memory."""
        length_bytes = self._resolve_length(offset_bytes, length_bytes)
        if not 0 <= byte <= 0xFF:  # noqa: PLR2004 - the largest byte.
            message = f"byte must be 0 to 255, not {byte}"
            raise UsageError(message)
        self.write(bytes([byte]) * length_bytes, offset_bytes=offset_bytes)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then release the memory. A second close does nothing.

        Raises
        ------
        Exception
            The error of the first action that failed, with the errors of other actions as notes. The memory is then
            *not* freed, because a NIC may still have access to it. Another call of close() tries again.
        UsageError
            BUSY: the memory is still borrowed.
        """
        super().close()

    def _copy_to_host(self, address: int, view: memoryview) -> None:
        begin_offset = address - self._mapping.address
        view[:] = self._mapping.pages[begin_offset : begin_offset + view.nbytes]

    def _copy_from_host(self, address: int, view: memoryview) -> None:
        begin_offset = address - self._mapping.address
        self._mapping.pages[begin_offset : begin_offset + view.nbytes] = view


class HostMemory(HostBuffer):
    """New zeroed anonymous pages of this process. :meth:`close` unmaps them.

    The mapping consists of whole pages, so that the pages that a NIC pins hold no other data. A forked child does not
    inherit the pages (MADV_DONTFORK). If it did, copy-on-write would give the parent new pages at its next write, and
    the NIC would still use the old pages.

    Parameters
    ----------
    length_bytes : int
        Usable length in bytes, above 0.

    Raises
    ------
    UsageError
        BAD_ARGUMENT: `length_bytes` is not positive. OUT_OF_MEMORY: mmap(2) failed.
    """

    def __init__(self, length_bytes: int) -> None:
        _check_length(length_bytes)
        super().__init__(_Mapping(align_up(length_bytes, alignment_bytes=HOST_PAGE_BYTES)), length_bytes=length_bytes)

    def _release(self) -> None:
        self._mapping.close()


class BorrowedHostMemory(HostBuffer):
    """The whole mapping of another :class:`HostBuffer`. The mapping cannot be unmapped until this object is closed."""

    def __init__(self, mapping: _Mapping) -> None:
        mapping.borrow()
        super().__init__(mapping, length_bytes=mapping.length_bytes)

    @property
    def owned(self) -> bool:
        """Always False: the :class:`HostMemory` or :class:`MappedFile` that made the mapping unmaps it."""
        return False

    def _release(self) -> None:
        self._mapping.end_borrow()


class MappedFile(HostBuffer):
    """The pages of a shared file, such as the POSIX shared memory of another process. :meth:`close` unmaps them.

    Parameters
    ----------
    fd : int
        A descriptor that is open for reading and writing. The caller still owns it.
    length_bytes : int
        Length of the mapping in bytes, above 0 and at most the size of the file.

    Raises
    ------
    UsageError
        BAD_ARGUMENT: `length_bytes` is not positive, or the file is shorter. OUT_OF_MEMORY: mmap(2) failed.
    """

    def __init__(self, fd: int, *, length_bytes: int) -> None:
        _check_length(length_bytes)
        super().__init__(_Mapping(length_bytes, fd=fd), length_bytes=length_bytes)

    def _release(self) -> None:
        self._mapping.close()


class HostAllocator:
    """An allocator of host memory. A :class:`~gdrkit.registration.BufferPool` accepts it in place of a device."""

    def allocate(self, length_bytes: int) -> HostMemory:
        """Allocate and return :class:`HostMemory`."""
        return HostMemory(length_bytes)


def _check_length(length_bytes: int) -> None:
    if length_bytes <= 0:
        message = f"length_bytes must be positive, not {length_bytes}"
        raise UsageError(message)


class _Mapping:
    """A mapping of anonymous pages or of a shared file, its number, and the count of its borrowers."""

    def __init__(self, length_bytes: int, *, fd: int = -1) -> None:
        self.length_bytes = length_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if fd < 0 else mmap.MAP_SHARED
        try:
            self.pages = mmap.mmap(fd, length_bytes, flags=flags)
        except (OSError, OverflowError, ValueError) as error:
            # If the file is shorter than the mapping, Python raises ValueError and does not call mmap(2).
            reason = Reason.BAD_ARGUMENT if isinstance(error, ValueError) else Reason.OUT_OF_MEMORY
            message = f"mmap of {length_bytes} bytes failed: {error}"
            raise UsageError(message, reason=reason) from error
        self.pages.madvise(mmap.MADV_DONTFORK)
        self.address = address_of(self.pages)
        self._mapping_number = next(_mapping_numbers)
        self.allocation_key = ((self.address, self.length_bytes, self._mapping_number),)
        self._borrower_count = 0
        with _lock:
            _live_mappings[self._mapping_number] = (self.address, self.length_bytes)

    def borrow(self) -> None:
        with _lock:
            if self._mapping_number not in _live_mappings:
                resource = f"host memory at {self.address:#x}"
                raise ClosedResource(resource)
            self._borrower_count += 1

    def end_borrow(self) -> None:
        with _lock:
            self._borrower_count -= 1

    def close(self) -> None:
        with _lock:
            if self._borrower_count:
                message = f"host memory at {self.address:#x} has {self._borrower_count} open borrowers"
                raise UsageError(message, reason=Reason.BUSY, what_to_do="close the borrowed memory first")
            # From here on, a signal handler cannot borrow the mapping.
            _live_mappings.pop(self._mapping_number, None)
            self.pages.close()

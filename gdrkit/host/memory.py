"""Host memory that is registered, cached and pooled like device memory.

The region cache must distinguish an old mapping from a new one at the same address. A GPU's driver numbers its
allocations (buffer IDs); the kernel does not number mappings. :class:`HostMemory` therefore numbers its own mappings,
and memory that gdrkit did not map cannot be cached.
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

_lock = ForkSafeLock()
_numbers = itertools.count(1)
# Base and length of every live mapping, by its number. A process never uses a number twice.
_live: dict[int, tuple[int, int]] = {}


def _presence(key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
    """Return a function that returns whether every mapping of `key` still exists."""
    return lambda: all(_live.get(number) == (base, length_bytes) for base, length_bytes, number in key)


class HostBuffer(MemoryResource):
    """A range of host memory with the interface of :class:`gdrkit.buffers.DeviceBuffer`.

    This is the base of :class:`HostMemory` and :class:`BorrowedHostMemory`.
    """

    def __init__(self, mapping: _Mapping, *, length_bytes: int) -> None:
        self._mapping = mapping
        super().__init__(MemoryKind.HOST, address=mapping.address, length_bytes=length_bytes)

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return ((base, length_bytes, number),) of the mapping. A new mapping at the same address has a new number."""
        self._check_open()
        return self._mapping.key

    # Returns a function that returns whether the mapping of an earlier :meth:`allocation_key` still exists.
    presence = staticmethod(_presence)

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
            what_to_do="register it by its address (ibv_reg_mr)",
            detail="the kernel has no dma-buf exporter for the pages of a process",
        )

    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set every byte of the range to `byte` (0 to 255); without `length_bytes`, up to the end of the memory."""
        length_bytes = self._checked_length(offset_bytes, length_bytes)
        if not 0 <= byte <= 0xFF:  # noqa: PLR2004 - the largest byte.
            message = f"byte must be 0 to 255, not {byte}"
            raise UsageError(message)
        self.write(bytes([byte]) * length_bytes, offset_bytes=offset_bytes)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then release the memory. A second close does nothing.

        Raises
        ------
        Exception
            The error of the first action that failed, with the others as notes. The memory is then *not* freed, because
            a NIC may still have access to it. Another close tries again.
        UsageError
            BUSY: the memory is still borrowed.
        """
        super().close()

    def _copy_to_host(self, address: int, view: memoryview) -> None:
        begin = address - self._mapping.address
        view[:] = self._mapping.pages[begin : begin + view.nbytes]

    def _copy_from_host(self, address: int, view: memoryview) -> None:
        begin = address - self._mapping.address
        self._mapping.pages[begin : begin + view.nbytes] = view


class HostMemory(HostBuffer):
    """New zeroed anonymous pages of this process. :meth:`close` unmaps them.

    The mapping consists of whole pages, so that the pages that a NIC pins hold no other data. A forked child does not
    inherit them (MADV_DONTFORK): with copy-on-write, a write by the parent would move the parent to new pages, while
    the NIC kept the old ones.

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
    """The whole mapping of a :class:`HostMemory`, which cannot be unmapped until this object is closed."""

    def __init__(self, mapping: _Mapping) -> None:
        mapping.borrow()
        super().__init__(mapping, length_bytes=mapping.length_bytes)

    @property
    def owned(self) -> bool:
        """Always False: the :class:`HostMemory` unmaps the memory."""
        return False

    def _release(self) -> None:
        self._mapping.release()


class MappedFile(HostBuffer):
    """The pages of a shared file, such as POSIX shared memory of another process. :meth:`close` unmaps them.

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
    """Allocator of host memory with the interface of a device that allocates its own memory."""

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
            # Python raises ValueError without calling mmap(2) if the file is shorter.
            reason = Reason.BAD_ARGUMENT if isinstance(error, ValueError) else Reason.OUT_OF_MEMORY
            message = f"mmap of {length_bytes} bytes failed: {error}"
            raise UsageError(message, reason=reason) from error
        self.pages.madvise(mmap.MADV_DONTFORK)
        self.address = address_of(self.pages)
        number = next(_numbers)
        self.key = ((self.address, self.length_bytes, number),)
        self._borrowers = 0
        with _lock:
            _live[number] = (self.address, self.length_bytes)

    def borrow(self) -> None:
        with _lock:
            if self.key[0][2] not in _live:
                resource = f"host memory at {self.address:#x}"
                raise ClosedResource(resource)
            self._borrowers += 1

    def release(self) -> None:
        with _lock:
            self._borrowers -= 1

    def close(self) -> None:
        with _lock:
            if self._borrowers:
                message = f"host memory at {self.address:#x} has {self._borrowers} open borrowers"
                raise UsageError(message, reason=Reason.BUSY, what_to_do="close the borrowed memory first")
            self.pages.close()
            del _live[self.key[0][2]]

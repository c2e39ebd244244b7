"""Device memory of Gaudi: its allocation, its copies to and from the host, and its export as a dma-buf.

:class:`GaudiMemory` is the base class. :class:`DeviceMemory` owns its allocation. :class:`BorrowedMemory` is a view of
a whole allocation that another object owns. This module numbers the allocations, so that an allocation can be
distinguished from a later one at the same address. The driver does not number them.
"""

from __future__ import annotations

import errno
import itertools
import os
from typing import TYPE_CHECKING

from gdrkit.buffers import DmabufRange, MemoryKind, MemoryResource
from gdrkit.errors import ClosedResource, UsageError
from gdrkit.forks import ForkSafeLock
from gdrkit.gaudi import _hlthunk
from gdrkit.gaudi._errors import error_of
from gdrkit.gaudi.context import MappedRange
from gdrkit.handles import ReleaseStack
from gdrkit.units import HOST_PAGE_BYTES, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.gaudi.context import GaudiContext

__all__ = ["Allocation", "BorrowedMemory", "DeviceMemory", "GaudiMemory"]

_EXPORT_FLAGS = os.O_RDWR | os.O_CLOEXEC  # The library accepts only these flags.

_lock = ForkSafeLock()
_allocation_numbers = itertools.count(1)
_live_allocations: dict[int, Allocation] = {}  # The allocations that exist, by their number.


def _make_existence_check(key: tuple[tuple[int, int, int], ...]) -> Callable[[], bool]:
    """Return a function that checks whether all allocations of `key`, a result of :meth:`allocation_key`, exist."""
    return lambda: all(
        allocation_number in _live_allocations
        and _live_allocations[allocation_number].allocation_key == ((base_address, length_bytes, allocation_number),)
        for base_address, length_bytes, allocation_number in key
    )


class Allocation:
    """A contiguous allocation of device memory, which is mapped to a device address.

    On Gaudi 1 the driver neither allocates nor maps memory. There, an allocation is a range of physical memory that
    gdrkit has reserved.

    Parameters
    ----------
    device : GaudiContext
        The device to allocate on.
    length_bytes : int
        Size in bytes, rounded up to whole pages.

    Raises
    ------
    ApiError
        ENOMEM: there is not enough memory. Other errors: ``hlthunk_device_memory_alloc`` or
        ``hlthunk_device_memory_map`` failed.
    """

    def __init__(self, device: GaudiContext, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"length_bytes must be at least 1, not {length_bytes}"
            raise UsageError(message)
        self.device = device
        self.length_bytes = align_up(length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        _ = device.fd  # This raises an error if the device is closed. On Gaudi 1 no other call checks that.
        self._release_steps = ReleaseStack()
        self.address = self._allocate_and_map() if device.generation.maps_memory else self._allocate_physical()
        self._number = next(_allocation_numbers)
        self.allocation_key = ((self.address, self.length_bytes, self._number),)  # See GaudiMemory.allocation_key.
        with _lock:
            _live_allocations[self._number] = self

    @property
    def is_allocated(self) -> bool:
        """Whether the memory is still allocated."""
        return self._number in _live_allocations

    def export(self, *, offset_bytes: int, length_bytes: int) -> int:
        """Export whole pages of the allocation as a new dma-buf. Return the descriptor. The caller closes it."""
        if self.device.generation.maps_memory:
            return _hlthunk.call(
                "hlthunk_device_mapped_memory_export_dmabuf_fd",
                fd=self.device.fd,
                addr=self.address,
                size=length_bytes,
                offset=offset_bytes,
                flags=_EXPORT_FLAGS,
            )
        return _hlthunk.call(
            "hlthunk_device_memory_export_dmabuf_fd",
            fd=self.device.fd,
            addr=self.address + offset_bytes,
            size=length_bytes,
            flags=_EXPORT_FLAGS,
        )

    def close(self) -> None:
        """Unmap the memory, then free it. A second close does nothing.

        Raises
        ------
        ApiError
            EINVAL with the reason BUSY: a dma-buf of the memory, or a region made from one, still exists. ETIMEDOUT: a
            copy is not complete. The memory stays mapped, and close can be called again.
        """
        self.device.copies.wait_for_pending_copy()
        self._release_steps.run()
        with _lock:
            _live_allocations.pop(self._number, None)

    def _allocate_and_map(self) -> int:
        _hlthunk.require_page_size_parameter()
        fd = self.device.fd
        handle = _hlthunk.call(
            "hlthunk_device_memory_alloc",
            fd=fd,
            size=self.length_bytes,
            page_size=0,  # The driver then uses its default.
            contiguous=True,
            shared=False,
        )
        unmap_and_free = _UnmapAndFree(self.device, handle)
        try:
            unmap_and_free.address = _hlthunk.call("hlthunk_device_memory_map", fd=fd, handle=handle, hint_addr=0)
        except BaseException as error:
            unmap_and_free.run_after(error)
            raise
        self._release_steps.push(unmap_and_free)
        return unmap_and_free.address

    def _allocate_physical(self) -> int:
        allocator, length_bytes = self.device.physical_allocator, self.length_bytes
        address = allocator.allocate(length_bytes)
        if address is None:
            raise error_of(
                operation="physical memory",
                error_number=errno.ENOMEM,
                arguments={"size": length_bytes},
                detail=f"the largest free part has {allocator.largest_free_bytes} bytes",
            )
        self._release_steps.push(lambda: allocator.free(address, length_bytes))
        return address


class _UnmapAndFree:
    """A callable that unmaps and frees memory. After a failure, the next call continues at the step that failed."""

    def __init__(self, device: GaudiContext, handle: int) -> None:
        self._device = device
        self._handle = handle
        self.address = 0  # Device address of the mapping; 0 if the memory is not mapped.

    def __call__(self) -> None:
        if self._device.lost:
            return  # The driver frees the memory in the reset.
        fd = self._device.fd
        if self.address:
            _hlthunk.call("hlthunk_memory_unmap", fd=fd, device_virt_addr=self.address)
            self.address = 0
        _hlthunk.call("hlthunk_device_memory_free", fd=fd, handle=self._handle)

    def run_after(self, error: BaseException) -> None:
        release_stack = ReleaseStack()
        release_stack.push(self)
        release_stack.run_after(error)


class GaudiMemory(MemoryResource):
    """A range of device memory; see :class:`gdrkit.buffers.DeviceBuffer`.

    It is created by :meth:`Device.allocate` and :meth:`DmabufPool.allocate`.
    """

    def __init__(self, allocation: Allocation, *, offset_bytes: int, length_bytes: int) -> None:
        self.device = allocation.device
        self._allocation = allocation
        self._offset_bytes = offset_bytes
        super().__init__(
            MemoryKind.GAUDI,
            address=allocation.address + offset_bytes,
            length_bytes=length_bytes,
            on_close=self.device.on_close,
        )

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return (base, length_bytes, number) of the one allocation that contains the memory.

        A later allocation at the same address has another number.
        """
        self._check_open()
        return self._allocation.allocation_key

    make_existence_check = staticmethod(_make_existence_check)

    def allocation(self) -> BorrowedMemory:
        """Return a view of the whole allocation that contains this memory. Closing the view frees nothing."""
        self._check_open()
        return BorrowedMemory(self._allocation, export=self._export)

    def export_dmabuf(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> DmabufRange:
        """Export this memory, or a part of it, as a new dma-buf. The caller closes it.

        The driver exports whole host pages, so the dma-buf may contain more than the part. ``offset_bytes`` of the
        result is the offset of the requested bytes in the dma-buf.

        Parameters
        ----------
        offset_bytes : int
            Offset of the part in this memory.
        length_bytes : int or None
            Size of the part, above 0. None means up to the end.

        Raises
        ------
        ApiError
            EINVAL: the driver does not export this memory (it may be outside of the PCI BAR).
        Unsupported
            The driver does not support dma-buf export at all.
        UsageError
            The part is empty or not inside the memory.
        """
        self._check_open()
        length_bytes = self._resolve_length(offset_bytes, length_bytes)
        if length_bytes == 0:
            message = "length_bytes must be at least 1, not 0"
            raise UsageError(message)
        begin_offset = self._offset_bytes + offset_bytes
        return self._export(begin_offset, length_bytes)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then free the memory if this object owns it.

        A second close does nothing.

        Raises
        ------
        Exception
            An action failed. The error of the first failed action is raised, with the other errors as notes. The memory
            is *not* freed, and close can be called again.
        ApiError
            EINVAL with the reason BUSY: a dma-buf of the memory still exists. The memory stays allocated, and close
            can be called again.
        """
        super().close()

    def _copy_to_host(self, address: int, view: memoryview) -> None:
        self.device.copies.read_into(address, view)

    def _copy_from_host(self, address: int, view: memoryview) -> None:
        self.device.copies.write(address, view)

    def _export(self, begin_offset: int, length_bytes: int) -> DmabufRange:
        """Export the pages of a part of the allocation as a new dma-buf. The part begins at `begin_offset`."""
        first_page_offset = align_down(begin_offset, alignment_bytes=HOST_PAGE_BYTES)
        end_offset = align_up(begin_offset + length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        fd = self._allocation.export(offset_bytes=first_page_offset, length_bytes=end_offset - first_page_offset)
        address = self._allocation.address + begin_offset
        return DmabufRange(
            fd, offset_bytes=begin_offset - first_page_offset, length_bytes=length_bytes, address=address
        )

    def _check_open(self) -> None:
        super()._check_open()
        if not self._allocation.is_allocated:
            raise ClosedResource(self._name)


class DeviceMemory(GaudiMemory):
    """Device memory that owns its allocation. :meth:`close` unmaps and frees the memory.

    Parameters
    ----------
    device : GaudiContext
        The device to allocate on.
    length_bytes : int
        Size in bytes, above 0.

    Raises
    ------
    ApiError
        ENOMEM: there is not enough memory. Other errors: a call of hl-thunk failed.
    SetupMissing
        ELIBBAD: the signature of ``hlthunk_device_memory_alloc`` in this hl-thunk is unknown.
    """

    def __init__(self, device: GaudiContext, length_bytes: int) -> None:
        allocation = Allocation(device, length_bytes)
        super().__init__(allocation, offset_bytes=0, length_bytes=length_bytes)
        mapped_range = MappedRange(
            self.kind, allocation.address, allocation.length_bytes, self._export_whole_allocation
        )
        self._remove_mapped_range = device.add_mapped_range(mapped_range)

    def _release(self) -> None:
        self._allocation.close()
        self._remove_mapped_range()

    def _export_whole_allocation(self, begin_offset: int, length_bytes: int) -> DmabufRange:
        """Export the whole allocation as a new dma-buf, and return the part of it that begins at `begin_offset`."""
        fd = self._allocation.export(offset_bytes=0, length_bytes=self._allocation.length_bytes)
        return DmabufRange(
            fd, offset_bytes=begin_offset, length_bytes=length_bytes, address=self.address + begin_offset
        )


class BorrowedMemory(GaudiMemory):
    """A view of a whole allocation that another object owns. :meth:`close` does not free the memory."""

    def __init__(self, allocation: Allocation, *, export: Callable[[int, int], DmabufRange]) -> None:
        super().__init__(allocation, offset_bytes=0, length_bytes=allocation.length_bytes)
        self._export_by_owner = export

    @property
    def owned(self) -> bool:
        """Always False: another object frees the memory."""
        return False

    def _release(self) -> None:
        return

    def _export(self, begin_offset: int, length_bytes: int) -> DmabufRange:
        return self._export_by_owner(begin_offset, length_bytes)

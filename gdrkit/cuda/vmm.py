"""Device memory of CUDA virtual memory management: an address range with chunks of memory mapped into it.

Each chunk is a separate allocation with its own buffer id, and can be shared with another process as a file descriptor.
Source: "Virtual Memory Management" of the CUDA driver API reference.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import MemoryKind
from gdrkit.cuda import _driver, pointer
from gdrkit.cuda.memory import CudaMemory
from gdrkit.errors import UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.units import align_up

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdrkit.cuda.context import PrimaryContext

__all__ = ["VmmMemory", "granularity_bytes"]

_ALLOCATION_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_LOCATION_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_HANDLE_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_GRANULARITY_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_ACCESS_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def granularity_bytes(device: PrimaryContext) -> int:
    """Return the allocation granularity in bytes (2 MiB on an H200). Chunk sizes must be multiples of it."""
    option = _driver.enum_member("CUmemAllocationGranularity_flags", _GRANULARITY_MINIMUM)
    with device.current():
        return _driver.call_int("cuMemGetAllocationGranularity", prop=_make_properties(device), option=option)


class VmmMemory(CudaMemory):
    """Chunks of device memory, mapped without gaps into one address range.

    The chunks are created so that NICs can access them (gpuDirectRDMACapable) and other processes can import them.
    :meth:`close` unmaps the chunks, releases their handles and frees the address range, in this order.
    """

    def __init__(
        self, device: PrimaryContext, *, chunk_bytes: int, chunk_creators: Sequence[Callable[[], int]]
    ) -> None:
        """Map one chunk for each of `chunk_creators`: functions that create or import a chunk and return its handle.

        Callers use :meth:`create` and :meth:`import_shareable` instead.
        """
        self.chunk_bytes = chunk_bytes
        self._chunk_handles: list[int] = []
        self._undo_actions = ReleaseStack()
        length_bytes = chunk_bytes * len(chunk_creators)
        with device.current():
            try:
                address = self._map_chunks(device, chunk_creators, length_bytes)
            except BaseException as error:
                self._undo_actions.run_after(error)
                raise
        super().__init__(device, kind=MemoryKind.CUDA_VMM, address=address, length_bytes=length_bytes)

    @classmethod
    def create(cls, device: PrimaryContext, length_bytes: int, *, chunk_bytes: int | None = None) -> Self:
        """Allocate device memory in one or more chunks, and map them.

        Parameters
        ----------
        device : PrimaryContext
            The device to allocate on.
        length_bytes : int
            Requested size in bytes, above 0. It is rounded up to whole chunks.
        chunk_bytes : int or None
            Requested size of a chunk in bytes. It is rounded up to the granularity of the device. With None, there is
            one chunk.

        Raises
        ------
        Unsupported
            The device does not support virtual memory management, or does not support it for memory that NICs can
            access.
        ApiError
            cuMemCreate, cuMemAddressReserve, cuMemMap or cuMemSetAccess failed. Nothing stays allocated.
        """
        if length_bytes <= 0 or (chunk_bytes is not None and chunk_bytes <= 0):
            message = f"length_bytes and chunk_bytes must be above 0, not {length_bytes} and {chunk_bytes}"
            raise UsageError(message)
        rounded_chunk_bytes = align_up(chunk_bytes or length_bytes, alignment_bytes=granularity_bytes(device))
        create_chunk = functools.partial(
            _driver.call_int, "cuMemCreate", size=rounded_chunk_bytes, prop=_make_properties(device), flags=0
        )
        chunk_count = -(-length_bytes // rounded_chunk_bytes)  # The quotient is rounded up.
        return cls(device, chunk_bytes=rounded_chunk_bytes, chunk_creators=[create_chunk] * chunk_count)

    @classmethod
    def import_shareable(cls, device: PrimaryContext, fds: Sequence[int], *, chunk_bytes: int) -> Self:
        """Map chunks that another process shared.

        Parameters
        ----------
        device : PrimaryContext
            The device that has the chunks.
        fds : sequence of int
            The descriptors that :meth:`export_shareable` returned in that process, in order. The caller can close
            them after this call.
        chunk_bytes : int
            Size of each chunk in bytes, as the owner states it. The driver does not report it.
        """
        if not fds:
            message = "fds must contain at least one descriptor"
            raise UsageError(message)
        handle_type = _driver.enum_member("CUmemAllocationHandleType", _HANDLE_POSIX_FD)
        chunk_importers = [
            functools.partial(_driver.call_int, "cuMemImportFromShareableHandle", osHandle=fd, shHandleType=handle_type)
            for fd in fds
        ]
        return cls(device, chunk_bytes=chunk_bytes, chunk_creators=chunk_importers)

    @property
    def chunk_count(self) -> int:
        """The number of chunks."""
        return self.length_bytes // self.chunk_bytes

    def export_shareable(self, chunk_index: int = 0) -> int:
        """Return a new file descriptor of one chunk for another process (by SCM_RIGHTS). The caller closes it.

        The descriptor is not a dma-buf.
        """
        self._check_open()
        if not 0 <= chunk_index < self.chunk_count:
            message = f"chunk_index must be from 0 to {self.chunk_count - 1}, not {chunk_index}"
            raise UsageError(message)
        handle_type = _driver.enum_member("CUmemAllocationHandleType", _HANDLE_POSIX_FD)
        with self.device.current():
            return _driver.call_int(
                "cuMemExportToShareableHandle", handle=self._chunk_handles[chunk_index], handleType=handle_type, flags=0
            )

    def _map_chunks(
        self, device: PrimaryContext, chunk_creators: Sequence[Callable[[], int]], length_bytes: int
    ) -> int:
        """Reserve the address range, map the chunks into it and return its first address.

        After each step, the method pushes the action that undoes the step to `_undo_actions`.
        """
        base_address = _driver.call_int("cuMemAddressReserve", size=length_bytes, alignment=0, addr=0, flags=0)
        self._undo_actions.push(
            functools.partial(_driver.call, "cuMemAddressFree", ptr=base_address, size=length_bytes)
        )
        for chunk_index, create_chunk in enumerate(chunk_creators):
            chunk_address = base_address + chunk_index * self.chunk_bytes
            chunk_handle = create_chunk()
            self._chunk_handles.append(chunk_handle)
            self._undo_actions.push(functools.partial(_driver.call, "cuMemRelease", handle=chunk_handle))
            _driver.call("cuMemMap", ptr=chunk_address, size=self.chunk_bytes, offset=0, handle=chunk_handle, flags=0)
            self._undo_actions.push(
                functools.partial(_driver.call, "cuMemUnmap", ptr=chunk_address, size=self.chunk_bytes)
            )
        access_flags = _driver.enum_member("CUmemAccess_flags", _ACCESS_READ_WRITE)
        location_type = _driver.enum_member("CUmemLocationType", _LOCATION_DEVICE)
        access_descriptor = _driver.new_structure(
            "CUmemAccessDesc", location__type=location_type, location__id=device.index, flags=access_flags
        )
        _driver.call("cuMemSetAccess", ptr=base_address, size=length_bytes, desc=[access_descriptor], count=1)
        pointer.set_sync_memops(base_address)
        return base_address

    def _release(self) -> None:
        self._undo_actions.run()


def _make_properties(device: PrimaryContext) -> object:
    return _driver.new_structure(
        "CUmemAllocationProp",
        type=_driver.enum_member("CUmemAllocationType", _ALLOCATION_PINNED),
        requestedHandleTypes=_driver.enum_member("CUmemAllocationHandleType", _HANDLE_POSIX_FD),
        location__type=_driver.enum_member("CUmemLocationType", _LOCATION_DEVICE),
        location__id=device.index,
        allocFlags__gpuDirectRDMACapable=1,
    )

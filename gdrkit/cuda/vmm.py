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

_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


def granularity_bytes(device: PrimaryContext) -> int:
    """Return the granularity in bytes. The size of a chunk must be a multiple of it (2 MiB on an H200)."""
    option = _driver.constant("CUmemAllocationGranularity_flags", _MINIMUM)
    with device.current():
        return _driver.integer("cuMemGetAllocationGranularity", prop=_properties(device), option=option)


class VmmMemory(CudaMemory):
    """Chunks of device memory, mapped without gaps into one address range.

    The chunks are created so that NICs can access them (gpuDirectRDMACapable) and other processes can import them.
    :meth:`close` unmaps the chunks, releases their handles and frees the address range, in this order.
    """

    def __init__(self, device: PrimaryContext, *, chunk_bytes: int, chunks: Sequence[Callable[[], int]]) -> None:
        """Map the chunks; each function in `chunks` makes one handle.

        Callers use :meth:`create` and :meth:`import_shareable` instead.
        """
        self.chunk_bytes = chunk_bytes
        self._chunk_handles: list[int] = []
        self._undo = ReleaseStack()
        length_bytes = chunk_bytes * len(chunks)
        with device.current():
            try:
                address = self._build(device, chunks, length_bytes)
            except BaseException as error:
                self._undo.run_after(error)
                raise
        super().__init__(device, kind=MemoryKind.CUDA_VMM, address=address, length_bytes=length_bytes)

    @classmethod
    def create(cls, device: PrimaryContext, length_bytes: int, *, chunk_bytes: int | None = None) -> Self:
        """Allocate memory.

        Parameters
        ----------
        device : PrimaryContext
            The device to allocate on.
        length_bytes : int
            Smallest size in bytes, above 0. It is rounded up to whole chunks.
        chunk_bytes : int or None
            Size of a chunk in bytes, rounded up to the granularity of the device. With None, there is one chunk.

        Raises
        ------
        Unsupported
            The device does not support virtual memory management, or not for memory that NICs can access.
        ApiError
            cuMemCreate, cuMemAddressReserve, cuMemMap or cuMemSetAccess failed. Nothing stays allocated.
        """
        if length_bytes <= 0 or (chunk_bytes is not None and chunk_bytes <= 0):
            message = f"cannot make {length_bytes} bytes in chunks of {chunk_bytes}"
            raise UsageError(message)
        step_bytes = granularity_bytes(device)
        whole_bytes = align_up(chunk_bytes or length_bytes, alignment_bytes=step_bytes)
        make = functools.partial(_driver.integer, "cuMemCreate", size=whole_bytes, prop=_properties(device), flags=0)
        return cls(device, chunk_bytes=whole_bytes, chunks=[make] * -(-length_bytes // whole_bytes))

    @classmethod
    def import_shareable(cls, device: PrimaryContext, fds: Sequence[int], *, chunk_bytes: int) -> Self:
        """Map chunks that another process shared.

        Parameters
        ----------
        device : PrimaryContext
            The device that has the chunks.
        fds : sequence of int
            The descriptors of :meth:`export_shareable` in that process, in order. They are borrowed, and can be closed
            afterwards.
        chunk_bytes : int
            Size of each chunk in bytes, as the owner states it. The driver does not report it.
        """
        if not fds:
            message = "no chunk to import"
            raise UsageError(message)
        kind = _driver.constant("CUmemAllocationHandleType", _POSIX_FD)
        importers = [
            functools.partial(_driver.integer, "cuMemImportFromShareableHandle", osHandle=fd, shHandleType=kind)
            for fd in fds
        ]
        return cls(device, chunk_bytes=chunk_bytes, chunks=importers)

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
            message = f"there is no chunk {chunk_index} of {self.chunk_count}"
            raise UsageError(message)
        kind = _driver.constant("CUmemAllocationHandleType", _POSIX_FD)
        with self.device.current():
            return _driver.integer(
                "cuMemExportToShareableHandle", handle=self._chunk_handles[chunk_index], handleType=kind, flags=0
            )

    def _build(self, device: PrimaryContext, chunks: Sequence[Callable[[], int]], length_bytes: int) -> int:
        base = _driver.integer("cuMemAddressReserve", size=length_bytes, alignment=0, addr=0, flags=0)
        self._undo.push(functools.partial(_driver.call, "cuMemAddressFree", ptr=base, size=length_bytes))
        for index, make in enumerate(chunks):
            where = base + index * self.chunk_bytes
            handle = make()
            self._chunk_handles.append(handle)
            self._undo.push(functools.partial(_driver.call, "cuMemRelease", handle=handle))
            _driver.call("cuMemMap", ptr=where, size=self.chunk_bytes, offset=0, handle=handle, flags=0)
            self._undo.push(functools.partial(_driver.call, "cuMemUnmap", ptr=where, size=self.chunk_bytes))
        flags = _driver.constant("CUmemAccess_flags", _READ_WRITE)
        kind = _driver.constant("CUmemLocationType", _DEVICE)
        access = _driver.structure("CUmemAccessDesc", location__type=kind, location__id=device.index, flags=flags)
        _driver.call("cuMemSetAccess", ptr=base, size=length_bytes, desc=[access], count=1)
        pointer.synchronize_copies(base)
        return base

    def _release(self) -> None:
        self._undo.run()


def _properties(device: PrimaryContext) -> object:
    return _driver.structure(
        "CUmemAllocationProp",
        type=_driver.constant("CUmemAllocationType", _PINNED),
        requestedHandleTypes=_driver.constant("CUmemAllocationHandleType", _POSIX_FD),
        location__type=_driver.constant("CUmemLocationType", _DEVICE),
        location__id=device.index,
        allocFlags__gpuDirectRDMACapable=1,
    )

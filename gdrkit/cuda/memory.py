"""Device memory of CUDA.

:class:`CudaMemory` is the base of all kinds: it copies, exports a dma-buf and reports its allocation keys.
:class:`DeviceMemory` is memory of cuMemAlloc, and :class:`BorrowedMemory` is memory of another owner.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.buffers import DmabufRange, MemoryKind, MemoryResource
from gdrkit.cuda import _dlpack, _driver, _results, pointer
from gdrkit.errors import Api, ApiError, Reason, Unsupported, UsageError
from gdrkit.handles import ReleaseStack
from gdrkit.units import GPU_RDMA_PAGE_BYTES, HOST_PAGE_BYTES, align_down, align_up

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from gdrkit.cuda.context import PrimaryContext

__all__ = ["BorrowedMemory", "CudaMemory", "DeviceMemory", "borrow"]

_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

# The kinds of memory that the driver can export as a dma-buf. For every other kind, the driver returns INVALID_VALUE,
# although the arguments are valid (observed on an H200 with driver 580).
_EXPORTABLE_KINDS = frozenset({MemoryKind.CUDA, MemoryKind.CUDA_VMM, MemoryKind.CUDA_POOL})


class CudaMemory(MemoryResource):
    """A range of device memory; see :class:`gdrkit.buffers.DeviceBuffer`.

    It is created by :meth:`Device.allocate`, :class:`~gdrkit.cuda.VmmMemory`, :func:`~gdrkit.cuda.open_handle` and
    :func:`borrow`.
    """

    def __init__(self, device: PrimaryContext, *, kind: MemoryKind, address: int, length_bytes: int) -> None:
        self.device = device
        super().__init__(kind, address=address, length_bytes=length_bytes, on_close=device.on_close)

    def current(self) -> AbstractContextManager[None]:
        """Make the context of the device current on this thread; see :meth:`PrimaryContext.current`."""
        return self.device.current()

    def buffer_id(self) -> int:
        """Return the driver's buffer id of the allocation at the first byte.

        A later allocation at the same address has another id.
        """
        self._check_open()
        with self.device.current():
            return pointer.buffer_id(self.address)

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """Return (base, length_bytes, buffer id) of every chunk that contains a part of the memory, in order.

        VMM memory has several chunks. Other memory normally has one: its allocation.
        """
        self._check_open()
        with self.device.current():
            return pointer.allocation_key(self.address, self.length_bytes)

    # This function takes the result of an earlier allocation_key(), and returns a function that checks whether all its
    # chunks still exist. It needs no instance, because the key contains the addresses.
    make_existence_check = staticmethod(pointer.make_existence_check)

    def allocation(self) -> BorrowedMemory:
        """Return a memory object that covers all chunks of :meth:`allocation_key`.

        Registering the returned memory registers every byte of these chunks. Closing it frees nothing.
        """
        chunks = self.allocation_key()
        base_address = chunks[0][0]
        last_address, last_length_bytes, _last_buffer_id = chunks[-1]
        length_bytes = last_address + last_length_bytes - base_address
        return BorrowedMemory(self.device, kind=self.kind, address=base_address, length_bytes=length_bytes)

    def export_dmabuf(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> DmabufRange:
        """Export this memory, or a part of it, as a new dma-buf. The caller must close the result.

        The driver exports whole host pages, so the range is widened to pages. ``offset_bytes`` of the result is the
        offset of the requested bytes in the dma-buf.

        Parameters
        ----------
        offset_bytes : int
            Offset of the part in this memory.
        length_bytes : int or None
            Size of the part, above 0. None means up to the end.

        Raises
        ------
        Unsupported
            The driver, the device or this kind of memory does not support dma-buf export.
        ApiError
            The driver failed for another reason.
        UsageError
            The part is not inside the memory.
        """
        self._check_open()
        length_bytes = self._resolve_length(offset_bytes, length_bytes)
        if length_bytes == 0:
            message = "an empty range has no dma-buf"
            raise UsageError(message)
        address = self.address + offset_bytes
        exported_begin = align_down(address, alignment_bytes=HOST_PAGE_BYTES)
        exported_end = align_up(address + length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        handle_type = _driver.enum_member("CUmemRangeHandleType", _DMA_BUF_FD)
        with self.device.current():
            try:
                fd = _driver.call_int(
                    "cuMemGetHandleForAddressRange",
                    dptr=exported_begin,
                    size=exported_end - exported_begin,
                    handleType=handle_type,
                    flags=0,
                )
            except ApiError as error:
                explained_error = self._explain_export_error(error)
                if explained_error is error:
                    raise  # `raise error from error` would make the error its own cause.
                raise explained_error from error
        return DmabufRange(fd, offset_bytes=address - exported_begin, length_bytes=length_bytes, address=address)

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Copy bytes to the host and return them. A length of None means up to the end."""
        data = _driver.uninitialized_bytes(self._resolve_length(offset_bytes, length_bytes))
        self.read_into(data, offset_bytes=offset_bytes)
        return data

    def _copy_to_host(self, address: int, view: memoryview) -> None:
        with self.device.current():
            _driver.call("cuMemcpyDtoH", dstHost=view, srcDevice=address, ByteCount=view.nbytes)

    def _copy_from_host(self, address: int, view: memoryview) -> None:
        with self.device.current():
            _driver.call("cuMemcpyHtoD", dstDevice=address, srcHost=view, ByteCount=view.nbytes)

    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set every byte of the range to `byte` (0 to 255), and wait until this is done.

        A length of None means up to the end.
        """
        self._check_open()
        length_bytes = self._resolve_length(offset_bytes, length_bytes)
        if not 0 <= byte <= 0xFF:  # noqa: PLR2004 - the largest byte.
            message = f"byte must be from 0 to 255, not {byte}"
            raise UsageError(message)
        if length_bytes:
            with self.device.current():
                _driver.call("cuMemsetD8", dstDevice=self.address + offset_bytes, uc=byte, N=length_bytes)
                # cuMemsetD8 of device memory may return before it is complete ("API synchronization behavior" of the
                # reference).
                _driver.call("cuCtxSynchronize")

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """The memory as an array of bytes for torch, cupy, numba, ... (version 3).

        The consumer must stop using the array before :meth:`close`.
        """
        self._check_open()
        return {
            "shape": (self.length_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,  # The methods of this class are complete when they return.
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type and index of the device."""
        return _dlpack.CUDA, self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,  # It is ignored: the methods of this class leave no work on any stream.
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Return the memory as a DLPack capsule. :meth:`close` fails until the consumer has released it.

        Raises
        ------
        BufferError
            A copy or another device was requested.
        """
        self._check_open()
        if copy or dl_device not in {None, self.__dlpack_device__()}:
            # DLPack requires a BufferError here.
            message = "device memory is exported in place: it cannot be copied or exported to another device"
            raise BufferError(message)
        return _dlpack.export(
            self.address,
            shape=(self.length_bytes,),
            device=self.__dlpack_device__(),
            is_versioned=max_version is not None and max_version[0] >= 1,
            on_release=self._release_actions.push(self._refuse_while_exported),
        )

    def _refuse_while_exported(self) -> None:
        # close() runs this release action, and so fails, until the consumer releases the tensor and thus removes the
        # action.
        message = "a consumer of DLPack still uses the memory"
        raise UsageError(message, reason=Reason.BUSY, what_to_do="delete the tensors that were made from it")

    def _explain_export_error(self, error: ApiError) -> ApiError:
        """Return an error that names the kind of memory as the cause. If that is not the cause, return `error`."""
        if error.status != _results.INVALID_VALUE or self.kind in _EXPORTABLE_KINDS:
            return error
        advice = (
            "let the process that allocated it export the dma-buf and pass the descriptor"
            if self.kind is MemoryKind.CUDA_IMPORTED
            else "use memory of cuMemAlloc, cuMemAllocAsync or cuMemCreate"
        )
        return Unsupported(
            api=error.api,
            operation=error.operation,
            status=error.status,
            status_name=error.status_name,
            arguments=error.arguments,
            reason=Reason.DMABUF_EXPORT_UNSUPPORTED,
            what_to_do=advice,
            detail=f"{self.kind.value} memory cannot be exported",
        )


class DeviceMemory(CudaMemory):
    """Memory of cuMemAlloc, with SYNC_MEMOPS set. :meth:`close` frees it.

    The allocation is rounded up to whole RDMA pages of 64 KiB, so that the last page that a NIC pins belongs to this
    memory only.

    Parameters
    ----------
    device : PrimaryContext
        The device to allocate on.
    length_bytes : int
        Size in bytes, above 0.

    Raises
    ------
    ApiError
        cuMemAlloc failed, for example with CUDA_ERROR_OUT_OF_MEMORY.
    """

    def __init__(self, device: PrimaryContext, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"length_bytes must be above 0, not {length_bytes}"
            raise UsageError(message)
        allocated_bytes = align_up(length_bytes, alignment_bytes=GPU_RDMA_PAGE_BYTES)
        with device.current():
            address = _driver.call_int("cuMemAlloc", bytesize=allocated_bytes)
            cleanup_stack = ReleaseStack()
            cleanup_stack.push(lambda: _driver.call("cuMemFree", dptr=address))
            try:
                pointer.set_sync_memops(address)
            except ApiError as error:
                cleanup_stack.run_after(error)
                raise
        super().__init__(device, kind=MemoryKind.CUDA, address=address, length_bytes=length_bytes)

    def _release(self) -> None:
        _driver.call("cuMemFree", dptr=self.address)


class BorrowedMemory(CudaMemory):
    """Memory that another owner allocated, such as a tensor. :meth:`close` does not free it.

    :meth:`close` runs the actions of `before_release`. Until then the owner must keep the memory allocated: gdrkit
    cannot detect when other code frees it.
    """

    @property
    def owned(self) -> bool:
        """Always False: the owner frees the memory."""
        return False

    def _release(self) -> None:
        return


def borrow(device: PrimaryContext, address: int, *, length_bytes: int) -> BorrowedMemory:
    """Wrap memory that other code allocated, and set SYNC_MEMOPS on it, as on memory that gdrkit allocates.

    Parameters
    ----------
    device : PrimaryContext
        The device that has the memory.
    address : int
        Device address of the first byte.
    length_bytes : int
        Size in bytes, above 0.

    Raises
    ------
    Unsupported
        The memory is managed. Its pages move between host and device, so no NIC may pin them.
    UsageError
        NOT_DEVICE_MEMORY: the address is in host memory or on another device, or `length_bytes` is 0, negative or
        larger than the memory.
    """
    with device.current():
        kind = pointer.memory_kind(address)
        if kind is MemoryKind.CUDA_MANAGED:
            raise Unsupported(
                api=Api.CUDA,
                operation="cuPointerGetAttribute",
                status=None,
                status_name="CU_POINTER_ATTRIBUTE_IS_MANAGED",
                arguments={"ptr": address},
                reason=Reason.NOT_SUPPORTED,
                what_to_do="copy it to memory of cuMemAlloc",
                detail="managed memory moves between host and device",
            )
        if kind is MemoryKind.HOST or length_bytes <= 0 or pointer.device_index(address) != device.index:
            message = f"{length_bytes} bytes at {address:#x} are not memory of CUDA device {device.index}"
            raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY)
        pointer.allocation_key(address, length_bytes)  # This raises UsageError if the memory is too short.
        pointer.set_sync_memops(address)
    return BorrowedMemory(device, kind=kind, address=address, length_bytes=length_bytes)

"""Device memory of CUDA.

Level 2. :class:`CudaMemory` is what every kind can do: copy, export a dma-buf, name its allocations, and have actions
run before it is freed. :class:`DeviceMemory` is what cuMemAlloc gives, :class:`BorrowedMemory` what somebody else
owns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Self

from gdrkit.buffers import DmabufRange, MemoryKind, check_range
from gdrkit.cuda import _dlpack, _driver, _results, pointer
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.handles import Handle, ReleaseStack
from gdrkit.units import GPU_RDMA_PAGE_BYTES, HOST_PAGE_BYTES, align_down, align_up

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

    from gdrkit.cuda.device import Device

__all__ = ["BorrowedMemory", "CudaMemory", "DeviceMemory", "borrow"]

_DMA_BUF_FD = 1  # CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD

# The driver answers INVALID_VALUE for memory that it cannot export; for these that is an answer about the memory and
# not about the arguments (seen on an H200 with driver 580).
_EXPORTABLE = frozenset({MemoryKind.CUDA, MemoryKind.CUDA_VMM, MemoryKind.CUDA_POOL})


class CudaMemory(ABC):
    """A piece of device memory; see :class:`gdrkit.buffers.DeviceBuffer`.

    Not for direct use: :meth:`Device.allocate`, :class:`~gdrkit.cuda.VmmMemory`, :func:`~gdrkit.cuda.open_handle` and
    :func:`borrow` make one.
    """

    def __init__(self, device: Device, *, kind: MemoryKind, address: int, length_bytes: int) -> None:
        self.device = device
        self.kind = kind
        self.address = address
        self.length_bytes = length_bytes
        self._before = ReleaseStack()
        self._handle = Handle(f"memory.{kind.value}")
        self._leave = device.adopt(self.close)
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether it was released."""
        return self._closed

    def current(self) -> AbstractContextManager[None]:
        """Make the context of its device current on this thread; see :meth:`Device.current`."""
        return self.device.current()

    def buffer_id(self) -> int:
        """The driver's number of the allocation at the first byte."""
        self._check_open()
        with self.device.current():
            return pointer.buffer_id(self.address)

    def allocation_key(self) -> tuple[tuple[int, int, int], ...]:
        """(base, length_bytes, buffer id) of every chunk under it, in order."""
        self._check_open()
        with self.device.current():
            return pointer.allocation_key(self.address, self.length_bytes)

    # What says whether every chunk of an earlier answer of :meth:`allocation_key` is still there; the address is in the
    # key.
    presence = staticmethod(pointer.presence)

    def allocation(self) -> BorrowedMemory:
        """The whole of the chunks under this memory, from the first byte of the first to the last byte of the last.

        What is registered whole serves every part of it. Closing the result frees nothing.
        """
        key = self.allocation_key()
        base = key[0][0]
        length_bytes = key[-1][0] + key[-1][1] - base
        return BorrowedMemory(self.device, kind=self.kind, address=base, length_bytes=length_bytes)

    @property
    def owned(self) -> bool:
        """Whether :meth:`close` gives the memory back to the driver."""
        return True

    def export_dmabuf(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> DmabufRange:
        """A new dma-buf over this memory or a part of it; the caller closes it.

        The driver exports whole host pages, so the range is widened to them; ``offset_bytes`` of the result says
        where in the dma-buf the asked-for bytes begin.

        Parameters
        ----------
        offset_bytes : int
            Where the part begins.
        length_bytes : int or None
            Its size, above 0; None: up to the end.

        Raises
        ------
        Unsupported
            The driver, the device or this kind of memory has no dma-buf export.
        ApiError
            It refused for another reason.
        UsageError
            The part is not inside the memory.
        """
        self._check_open()
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        if length_bytes == 0:
            message = "an empty range has no dma-buf"
            raise UsageError(message)
        address = self.address + offset_bytes
        base = align_down(address, alignment_bytes=HOST_PAGE_BYTES)
        end = align_up(address + length_bytes, alignment_bytes=HOST_PAGE_BYTES)
        kind = _driver.constant("CUmemRangeHandleType", _DMA_BUF_FD)
        with self.device.current():
            try:
                fd = _driver.integer(
                    "cuMemGetHandleForAddressRange", dptr=base, size=end - base, handleType=kind, flags=0
                )
            except ApiError as error:
                better = self._explained(error)
                if better is error:
                    raise  # From itself, it would be its own cause.
                raise better from error
        return DmabufRange(fd, offset_bytes=address - base, length_bytes=length_bytes, address=address)

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Copy bytes to the host by cuMemcpyDtoH, and wait for them; None: up to the end."""
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        data = _driver.empty_bytes(length_bytes)
        self.read_into(data, offset_bytes=offset_bytes)
        return data

    def read_into(self, buffer: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Fill a host buffer from here by cuMemcpyDtoH, and wait for it."""
        view = self._checked(buffer, offset_bytes=offset_bytes)
        if view.nbytes:
            with self.device.current():
                _driver.call("cuMemcpyDtoH", dstHost=view, srcDevice=self.address + offset_bytes, ByteCount=view.nbytes)

    def write(self, data: bytes | bytearray | memoryview, *, offset_bytes: int = 0) -> None:
        """Copy bytes from the host by cuMemcpyHtoD, and wait until they are there."""
        view = self._checked(data, offset_bytes=offset_bytes)
        if view.nbytes:
            with self.device.current():
                _driver.call("cuMemcpyHtoD", dstDevice=self.address + offset_bytes, srcHost=view, ByteCount=view.nbytes)

    def fill(self, byte: int, *, offset_bytes: int = 0, length_bytes: int | None = None) -> None:
        """Set every byte of the range to `byte` (0 to 255) and wait until that is done; None: up to the end."""
        self._check_open()
        length_bytes = self.length_bytes - offset_bytes if length_bytes is None else length_bytes
        check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=self.length_bytes)
        if not 0 <= byte <= 0xFF:  # noqa: PLR2004 - the largest byte.
            message = f"{byte} is not a byte"
            raise UsageError(message)
        if length_bytes:
            with self.device.current():
                _driver.call("cuMemsetD8", dstDevice=self.address + offset_bytes, uc=byte, N=length_bytes)
                # A memset of device memory may return before it is done (API synchronization behaviour of the
                # reference).
                _driver.call("cuCtxSynchronize")

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        """Its bytes for torch, cupy, numba ... (version 3). Who uses it must have let it go before :meth:`close`."""
        self._check_open()
        return {
            "shape": (self.length_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "strides": None,
            "stream": None,  # What gdrkit does is done when its method returns.
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        """Type and index of its device in DLPack."""
        return _dlpack.CUDA, self.device.index

    def __dlpack__(
        self,
        *,
        stream: int | None = None,  # nothing is under way on any stream.
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """Its bytes as a capsule of DLPack. :meth:`close` is refused until the consumer has let it go.

        Raises
        ------
        BufferError
            A copy, or another device, is asked for.
        """
        self._check_open()
        if copy or dl_device not in {None, self.__dlpack_device__()}:
            # The exception that the protocol wants.
            message = "device memory is shown where it is, and is not copied"
            raise BufferError(message)
        return _dlpack.export(
            self.address,
            length_bytes=self.length_bytes,
            device_index=self.device.index,
            is_versioned=max_version is not None and max_version[0] >= 1,
            done=self._before.push(self._refuse_while_shown),
        )

    def _refuse_while_shown(self) -> None:
        message = "a consumer of DLPack still uses the memory"
        raise UsageError(message, reason=Reason.BUSY, what_to_do="delete the tensors that were made from it")

    def before_release(self, action: Callable[[], None]) -> Callable[[], None]:
        """Have `action` run before the memory is freed, last added first; returns what takes the action back."""
        self._check_open()
        return self._before.push(action)

    def close(self) -> None:
        """Run the actions of :meth:`before_release`, then give the memory back; a second close does nothing.

        Raises
        ------
        Exception
            Of the first action that failed, with the others as notes. The memory is *not* freed then, since somebody
            may still reach it; another close tries again.
        """
        if self._closed:
            return
        self._before.run()
        with self.device.current():
            self._release()
        self._closed = True
        self._leave()
        self._handle.release()

    @abstractmethod
    def _release(self) -> None:
        """Give the memory back; its context is current."""

    def _check_open(self) -> None:
        if self._closed:
            what = f"{self.kind.value} memory at {self.address:#x}"
            raise ClosedResource(what)

    def _checked(self, data: bytes | bytearray | memoryview, *, offset_bytes: int) -> memoryview:
        self._check_open()
        view = memoryview(data)
        if not view.c_contiguous:
            message = "the host buffer is not contiguous"
            raise UsageError(message)
        check_range(offset_bytes=offset_bytes, length_bytes=view.nbytes, size_bytes=self.length_bytes)
        return view

    def _explained(self, error: ApiError) -> ApiError:
        if error.status != _results.INVALID_VALUE or self.kind in _EXPORTABLE:
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.address:#x}"
        return f"{type(self).__name__}({state}, length_bytes={self.length_bytes}, kind={self.kind.value})"


class DeviceMemory(CudaMemory):
    """Memory of cuMemAlloc, with SYNC_MEMOPS set; :meth:`close` frees it.

    The allocation is rounded up to whole RDMA pages of 64 KiB, so that the pages that a NIC pins end in memory of its
    own.

    Parameters
    ----------
    device : Device
        Where.
    length_bytes : int
        How much may be used, above 0.

    Raises
    ------
    ApiError
        CUDA_ERROR_OUT_OF_MEMORY and others of cuMemAlloc.
    """

    def __init__(self, device: Device, length_bytes: int) -> None:
        if length_bytes <= 0:
            message = f"cannot allocate {length_bytes} bytes"
            raise UsageError(message)
        held_bytes = align_up(length_bytes, alignment_bytes=GPU_RDMA_PAGE_BYTES)
        with device.current():
            address = _driver.integer("cuMemAlloc", bytesize=held_bytes)
            undo = ReleaseStack()
            undo.push(lambda: _driver.call("cuMemFree", dptr=address))
            try:
                pointer.synchronize_copies(address)
            except ApiError as error:
                undo.run_after(error)
                raise
        super().__init__(device, kind=MemoryKind.CUDA, address=address, length_bytes=length_bytes)

    def _release(self) -> None:
        _driver.call("cuMemFree", dptr=self.address)


class BorrowedMemory(CudaMemory):
    """Memory that another owner allocated (a tensor, say); :meth:`close` runs the actions and frees nothing.

    The owner must keep it alive until then: gdrkit cannot see a free that it did not make.
    """

    @property
    def owned(self) -> bool:
        """False: somebody else frees it."""
        return False

    def _release(self) -> None:
        return


def borrow(device: Device, address: int, *, length_bytes: int) -> BorrowedMemory:
    """Take memory that somebody else allocated as a buffer; its synchronous copies are made to wait, as those of our
    own.

    Parameters
    ----------
    device : Device
        Where it lies.
    address : int
        Device address of the first byte.
    length_bytes : int
        Its size, above 0.

    Raises
    ------
    Unsupported
        Managed memory: its pages move between host and device, so that no NIC may pin them.
    UsageError
        NOT_DEVICE_MEMORY: host memory, memory of another device, or less memory than that.
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
        pointer.allocation_key(address, length_bytes)
        pointer.synchronize_copies(address)
    return BorrowedMemory(device, kind=kind, address=address, length_bytes=length_bytes)

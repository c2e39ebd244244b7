"""Device memory in another process: export, import, and who may do which.

Level 3. Three ways: CUDA IPC (the allocation's base and an offset, so that memory inside an allocation arrives at the
right byte), VMM chunks as descriptors, and a dma-buf, which its owner exports and an agent registers with its NICs
without ever having an address of it. :mod:`gdrkit.registration.handle` is the format, :mod:`gdrkit.registration.parcel`
the way through a socket, :mod:`gdrkit.registration.exports` what was measured.

Without a CUDA driver everything here raises ``Unsupported`` with ENOTSUP: there is never a handle that means nothing.
"""

from __future__ import annotations

import errno
import os
import uuid
from typing import TYPE_CHECKING

from gdrkit import cuda
from gdrkit.buffers import DmabufRange, check_range
from gdrkit.cuda import CudaMemory, VmmMemory
from gdrkit.errors import (
    Api,
    ApiError,
    BrokenResource,
    ClosedResource,
    GdrkitError,
    Reason,
    SetupMissing,
    Unsupported,
    UsageError,
    errno_name,
)
from gdrkit.host import is_running, this_process
from gdrkit.registration.exports import advice, explained
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.parcel import Parcel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.buffers import DeviceBuffer

__all__ = [
    "SharedMemory",
    "device_at",
    "device_of",
    "export_address",
    "export_memory",
    "import_dmabuf",
    "import_memory",
]


class SharedMemory(CudaMemory):
    """The shared part of memory of another process; :meth:`close` gives the whole back."""

    def __init__(self, whole: CudaMemory, *, offset_bytes: int, length_bytes: int) -> None:
        """Not for direct use; see :func:`import_memory`. Owns `whole`."""
        super().__init__(whole.device, kind=whole.kind, address=whole.address + offset_bytes, length_bytes=length_bytes)
        self._whole = whole

    def _release(self) -> None:
        self._whole.close()


def export_memory(
    memory: DeviceBuffer, *, kind: ShareKind, offset_bytes: int = 0, length_bytes: int | None = None
) -> Parcel:
    """What another process needs to have a part of this memory; the caller sends and closes it.

    The importer has the memory until it closes it; when it is freed here meanwhile, the importer has whatever the
    driver leaves it (an H200 keeps the pages of a dma-buf and refuses IPC handles from then on).

    Parameters
    ----------
    memory : DeviceBuffer
        Memory of CUDA, also what begins inside an allocation.
    kind : ShareKind
        By which way; :func:`~gdrkit.registration.exports.ways_of` says which ways a kind of memory has.
    offset_bytes, length_bytes : int
        Which part; None: up to the end.

    Raises
    ------
    Unsupported
        ENOTSUP: it is no memory of CUDA. Else the driver's answer: this kind of memory does not go out by this way.
    ApiError
        The driver refused for another reason.
    UsageError
        The part is empty or not inside the memory; MALFORMED: more chunks than one message carries.
    """
    length_bytes = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if memory.closed:
        what = "the memory to share"
        raise ClosedResource(what)
    check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
    if length_bytes == 0:
        message = "there is nothing to share in 0 bytes"
        raise UsageError(message)
    if not isinstance(memory, CudaMemory):
        raise _not_supported("export_memory", f"{memory.kind.value} memory is not of CUDA", "share memory of CUDA")
    return _EXPORTERS[kind](memory, offset_bytes, length_bytes)


def export_address(address: int, *, length_bytes: int, device_index: int, kind: ShareKind) -> Parcel:
    """As :func:`export_memory`, for memory that somebody else allocated and keeps.

    Raises
    ------
    Unsupported
        ENOTSUP: this process has no CUDA. NOT_SUPPORTED: managed memory. Else as :func:`export_memory`.
    UsageError
        NOT_DEVICE_MEMORY: null, host memory, memory of another device, or less than that. NO_DEVICE: no such device.
    """
    with (
        device_at(device_index) as device,
        cuda.borrow(device, address, length_bytes=length_bytes) as memory,
    ):
        return export_memory(memory, kind=kind)


def device_at(index: int) -> cuda.Device:
    """The CUDA device of this number; the caller closes it.

    Raises
    ------
    Unsupported
        ENOTSUP: this process has no CUDA, or no device.
    UsageError
        NO_DEVICE: there are fewer devices.
    """
    count = _device_count("device_at")
    if not 0 <= index < count:
        message = f"there is no CUDA device {index}, only {count}"
        raise UsageError(message, reason=Reason.NO_DEVICE)
    return cuda.Device(index)


def device_of(handle: ShareHandle) -> cuda.Device:
    """The CUDA device that holds the memory of a handle, found by its UUID; the caller closes it.

    Raises
    ------
    Unsupported
        ENOTSUP: this process has no CUDA, or no device.
    UsageError
        NO_DEVICE: no device of this process has that UUID.
    """
    for index in range(_device_count("device_of")):
        device = cuda.Device(index)
        if _uuid_of(device) == handle.device_uuid:
            return device
        device.close()
    raise _elsewhere(handle)


def import_memory(device: cuda.Device, parcel: Parcel) -> SharedMemory:
    """Have memory of another process here.

    Parameters
    ----------
    device : Device
        Where it lies; see :func:`device_of`.
    parcel : Parcel
        Of the IPC or the VMM kind; borrowed, and not needed afterwards.

    Raises
    ------
    BrokenResource
        PEER_GONE: its owner has ended.
    ApiError
        The driver refused: the owner is this very process, or has freed the memory; a descriptor is no chunk.
    UsageError
        NO_DEVICE: the memory is on another device. MALFORMED: the handle says another size than the driver.
    """
    handle = parcel.handle
    if handle.kind is ShareKind.DMABUF:
        message = "a dma-buf has no address in this process"
        raise UsageError(message, what_to_do="import_dmabuf() gives what a NIC can register")
    _require_device(device, handle)
    _require_owner(handle)
    try:
        whole = _OPENERS[handle.kind](device, handle, parcel.descriptors)
    except ApiError as error:
        # It may have ended after it was looked for; then its end is the reason.
        if is_running(handle.owner) is False:
            raise _gone(handle) from error
        raise
    try:
        if whole.length_bytes != handle.allocation_bytes:
            message = f"the handle says {handle.allocation_bytes} bytes, and there are {whole.length_bytes}"
            raise UsageError(message, reason=Reason.MALFORMED)  # noqa: TRY301 - what was opened is closed below.
        return SharedMemory(whole, offset_bytes=handle.offset_bytes, length_bytes=handle.length_bytes)
    except BaseException as error:
        _close_after(whole, error)
        raise


def import_dmabuf(parcel: Parcel) -> DmabufRange:
    """The dma-buf of another process, for the NICs of this one; it needs no CUDA here.

    Its address is that of the owner: NICs and peers name the bytes by it, and nobody here may follow it.

    Parameters
    ----------
    parcel : Parcel
        Of the dma-buf kind; borrowed, the range has a descriptor of its own.

    Raises
    ------
    BrokenResource
        PEER_GONE: its owner has ended, so that the memory is nobody's.
    ApiError
        The descriptor is not open, or cannot be asked for its size.
    UsageError
        It is another kind of handle. MALFORMED: the handle says another size than the descriptor.
    """
    handle = parcel.handle
    if handle.kind is not ShareKind.DMABUF:
        message = f"a handle of the kind {handle.kind.name} has no dma-buf"
        raise UsageError(message, what_to_do="import_memory() takes it")
    _require_owner(handle)
    (fd,) = parcel.descriptors
    if _size_of(fd) != handle.allocation_bytes:
        message = f"the handle says {handle.allocation_bytes} bytes, and the descriptor has {_size_of(fd)}"
        raise UsageError(message, reason=Reason.MALFORMED)
    return DmabufRange(
        os.dup(fd), offset_bytes=handle.offset_bytes, length_bytes=handle.length_bytes, address=handle.address
    )


def _export_ipc(memory: CudaMemory, offset_bytes: int, length_bytes: int) -> Parcel:
    allocation_bytes, begin_bytes = _place(memory, offset_bytes)
    try:
        ipc = cuda.export_handle(memory)
    except ApiError as error:
        better = explained(error, memory.kind)
        if better is error:
            raise  # From itself, it would be its own cause.
        raise better from error
    handle = ShareHandle(
        kind=ShareKind.IPC,
        allocation_bytes=allocation_bytes,
        offset_bytes=begin_bytes,
        length_bytes=length_bytes,
        device_uuid=_uuid_of(memory.device),
        owner=this_process(),
        ipc=ipc,
    )
    return Parcel(handle.pack())


def _export_vmm(memory: CudaMemory, offset_bytes: int, length_bytes: int) -> Parcel:
    if not isinstance(memory, VmmMemory):
        raise _not_supported(
            "cuMemExportToShareableHandle",
            f"{memory.kind.value} memory that is not of VmmMemory has no chunk to share",
            advice(memory.kind),
        )
    first = offset_bytes // memory.chunk_bytes
    count = (offset_bytes + length_bytes - 1) // memory.chunk_bytes - first + 1
    # Made first: it refuses what cannot be sent before a descriptor is open.
    handle = ShareHandle(
        kind=ShareKind.VMM,
        allocation_bytes=memory.chunk_bytes * count,
        offset_bytes=offset_bytes - first * memory.chunk_bytes,
        length_bytes=length_bytes,
        chunk_bytes=memory.chunk_bytes,
        descriptor_count=count,
        device_uuid=_uuid_of(memory.device),
        owner=this_process(),
    )
    descriptors: list[int] = []
    try:
        for index in range(first, first + count):
            descriptors.append(memory.export_shareable(index))  # noqa: PERF401 - those made so far are closed below.
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return Parcel(handle.pack(), descriptors)


def _export_dmabuf(memory: CudaMemory, offset_bytes: int, length_bytes: int) -> Parcel:
    with memory.export_dmabuf(offset_bytes=offset_bytes, length_bytes=length_bytes) as exported:
        handle = ShareHandle(
            kind=ShareKind.DMABUF,
            allocation_bytes=_size_of(exported.fd),
            offset_bytes=exported.offset_bytes,
            length_bytes=exported.length_bytes,
            address=exported.address,
            descriptor_count=1,
            device_uuid=_uuid_of(memory.device),
            owner=this_process(),
        )
        return Parcel(handle.pack(), [exported.take()])


_EXPORTERS = {ShareKind.IPC: _export_ipc, ShareKind.VMM: _export_vmm, ShareKind.DMABUF: _export_dmabuf}


def _open_ipc(device: cuda.Device, handle: ShareHandle, _descriptors: Sequence[int]) -> CudaMemory:
    return cuda.open_handle(device, handle.ipc)


def _open_vmm(device: cuda.Device, handle: ShareHandle, descriptors: Sequence[int]) -> CudaMemory:
    return VmmMemory.import_shareable(device, descriptors, chunk_bytes=handle.chunk_bytes)


_OPENERS = {ShareKind.IPC: _open_ipc, ShareKind.VMM: _open_vmm}


def _place(memory: CudaMemory, offset_bytes: int) -> tuple[int, int]:
    """Size of the allocation under the memory, and where in it the part begins."""
    base, allocation_bytes, _buffer_id = memory.allocation_key()[0]
    return allocation_bytes, memory.address + offset_bytes - base


def _device_count(operation: str) -> int:
    try:
        return cuda.device_count()
    except SetupMissing as error:
        raise _not_supported(operation, f"this process has no CUDA: {error.message}", error.what_to_do) from error


def _uuid_of(device: cuda.Device) -> bytes:
    return uuid.UUID(device.uuid.removeprefix("GPU-")).bytes


def _require_device(device: cuda.Device, handle: ShareHandle) -> None:
    if _uuid_of(device) != handle.device_uuid:
        raise _elsewhere(handle)


def _elsewhere(handle: ShareHandle) -> UsageError:
    message = f"the memory is on {handle.device}, which this process does not see or did not choose"
    return UsageError(message, reason=Reason.NO_DEVICE, what_to_do="import it on that device, on the owner's machine")


def _require_owner(handle: ShareHandle) -> None:
    # None: it cannot be seen from here (another container), so the driver decides.
    if is_running(handle.owner) is False:
        raise _gone(handle)


def _gone(handle: ShareHandle) -> BrokenResource:
    message = f"the owner of the memory (process {handle.owner.process_id}) has ended"
    return BrokenResource(message, reason=Reason.PEER_GONE)


def _not_supported(operation: str, detail: str, what_to_do: str) -> Unsupported:
    return Unsupported(
        api=Api.NONE,
        operation=operation,
        status=errno.ENOTSUP,
        status_name="ENOTSUP",
        errno=errno.ENOTSUP,
        reason=Reason.NOT_SUPPORTED,
        what_to_do=what_to_do,
        detail=detail,
    )


def _size_of(fd: int) -> int:
    """Size of a dma-buf, which its descriptor tells by a seek to the end."""
    try:
        return os.lseek(fd, 0, os.SEEK_END)
    except OSError as error:
        raise ApiError(
            api=Api.KERNEL,
            operation="lseek",
            status=error.errno,
            status_name=errno_name(error.errno),
            errno=error.errno,
            arguments={"fd": fd},
            reason=Reason.BAD_DESCRIPTOR,
        ) from error


def _close_after(whole: CudaMemory, error: BaseException) -> None:
    try:
        whole.close()
    except GdrkitError as second:
        error.add_note(f"then, while undoing: {second}")

"""Sharing of device memory between processes: export and import.

There are three methods. CUDA IPC shares a whole allocation, and the handle has the offset of the shared part. VMM (the
virtual memory management of CUDA) shares chunks as file descriptors. A dma-buf is a file descriptor that the importer,
such as the usrbio agent, registers with its NICs without mapping it.

:mod:`gdrkit.registration.handle` defines the format of a handle, :mod:`gdrkit.registration.handle_message` sends a
handle through a socket, and :mod:`gdrkit.registration.exports` lists which method works for which kind of memory.

Without a CUDA driver, every function of this module that needs CUDA raises ``Unsupported`` with ENOTSUP instead of
returning an invalid handle.
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
)
from gdrkit.host import is_running, this_process
from gdrkit.registration.dmabuf_memory import DmabufMemory
from gdrkit.registration.exports import explain_export_error, sharing_advice
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.handle_message import HandleMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.buffers import DeviceBuffer

__all__ = [
    "ANY_EXPORTER_UUID",
    "SharedMemory",
    "device_at",
    "device_of",
    "export_address",
    "export_memory",
    "import_dmabuf",
    "import_memory",
]


# The device UUID in a handle whose dma-buf comes from an exporter that gdrkit does not know.
ANY_EXPORTER_UUID = b"any dma-buf".ljust(16, b"\0")


class SharedMemory(CudaMemory):
    """The shared part of memory of another process. :meth:`close` unmaps the whole imported memory."""

    def __init__(self, allocation: CudaMemory, *, offset_bytes: int, length_bytes: int) -> None:
        """Take ownership of `allocation`, the whole imported memory. Callers use :func:`import_memory` instead."""
        super().__init__(
            allocation.device,
            kind=allocation.kind,
            address=allocation.address + offset_bytes,
            length_bytes=length_bytes,
        )
        self._allocation = allocation

    def _release(self) -> None:
        self._allocation.close()


def export_memory(
    memory: DeviceBuffer, *, kind: ShareKind, offset_bytes: int = 0, length_bytes: int | None = None
) -> HandleMessage:
    """Export a part of this memory, and return the message for the importer. The caller sends and closes the message.

    The importer can use the memory until the importer closes it. If the owner frees the memory earlier, the result
    depends on the driver. On an H200, the pages of a dma-buf stay allocated, and the IPC handle cannot be opened any
    more.

    Parameters
    ----------
    memory : DeviceBuffer
        CUDA memory, which may begin inside an allocation, or a :class:`~gdrkit.registration.DmabufMemory`.
    kind : ShareKind
        The export method. :func:`~gdrkit.registration.exports.export_methods` lists the methods of a kind of memory.
    offset_bytes, length_bytes : int
        The part to share. A length of None means up to the end of the memory.

    Raises
    ------
    Unsupported
        ENOTSUP: the memory is neither memory of CUDA nor a dma-buf. Another status: the driver does not support this
        method for this kind of memory.
    ApiError
        The driver failed for another reason.
    UsageError
        The part is empty or not inside the memory. MALFORMED: the part has more chunks than one message can carry.
    """
    length_bytes = memory.length_bytes - offset_bytes if length_bytes is None else length_bytes
    if memory.closed:
        resource = "the memory to share"
        raise ClosedResource(resource)
    check_range(offset_bytes=offset_bytes, length_bytes=length_bytes, size_bytes=memory.length_bytes)
    if length_bytes == 0:
        message = "0 bytes cannot be shared"
        raise UsageError(message)
    if isinstance(memory, DmabufMemory) and kind is ShareKind.DMABUF:
        with memory.export_dmabuf(offset_bytes=offset_bytes, length_bytes=length_bytes) as dmabuf:
            return _make_dmabuf_message(dmabuf, device_uuid=ANY_EXPORTER_UUID)
    if not isinstance(memory, CudaMemory):
        raise _make_unsupported_error(
            "export_memory", f"{memory.kind.value} memory is not CUDA memory", "share CUDA memory"
        )
    return _EXPORT_FUNCTION_BY_KIND[kind](memory, offset_bytes, length_bytes)


def export_address(address: int, *, length_bytes: int, device_index: int, kind: ShareKind) -> HandleMessage:
    """Export memory that other code allocated and owns; see :func:`export_memory`.

    Raises
    ------
    Unsupported
        ENOTSUP: CUDA is not available in this process. NOT_SUPPORTED: the memory is managed. For other
        reasons see :func:`export_memory`.
    UsageError
        NOT_DEVICE_MEMORY: the address is null, of host memory or of another device, or the range is longer than the
        memory. NO_DEVICE: there is no device with this number.
    """
    with (
        device_at(device_index) as device,
        cuda.borrow(device, address, length_bytes=length_bytes) as memory,
    ):
        return export_memory(memory, kind=kind)


def device_at(index: int) -> cuda.Device:
    """Open the CUDA device with this number. The caller closes it.

    Raises
    ------
    Unsupported
        ENOTSUP: CUDA is not available in this process.
    UsageError
        NO_DEVICE: there is no device with this number.
    """
    device_count = _count_devices("device_at")
    if not 0 <= index < device_count:
        message = f"the CUDA device number must be from 0 to {device_count - 1}, not {index}"
        raise UsageError(message, reason=Reason.NO_DEVICE)
    return cuda.Device(index)


def device_of(handle: ShareHandle) -> cuda.Device:
    """Open the CUDA device whose UUID is in a handle. The caller closes the device.

    Raises
    ------
    Unsupported
        ENOTSUP: CUDA is not available in this process.
    UsageError
        NO_DEVICE: no device of this process has that UUID.
    """
    for index in range(_count_devices("device_of")):
        device = cuda.Device(index)
        if _read_uuid(device) == handle.device_uuid:
            return device
        device.close()
    raise _make_wrong_device_error(handle)


def import_memory(device: cuda.Device, handle_message: HandleMessage) -> SharedMemory:
    """Map memory of another process into this process, and return the part that the handle shares.

    Parameters
    ----------
    device : Device
        The device that has the memory; see :func:`device_of`.
    handle_message : HandleMessage
        A handle message of the kind IPC or VMM. The caller still owns it, and can close it afterwards.

    Raises
    ------
    BrokenResource
        PEER_GONE: the owner has ended.
    ApiError
        The driver refused the handle: the owner is this process, or has freed the memory, or a descriptor does not
        belong to a chunk.
    UsageError
        The handle is of the kind dma-buf. NO_DEVICE: the memory is on another device. MALFORMED: the sizes of the
        handle and of the driver differ.
    """
    handle = handle_message.handle
    if handle.kind is ShareKind.DMABUF:
        message = "a dma-buf has no address in this process"
        raise UsageError(message, what_to_do="call import_dmabuf(), and register the result with a NIC")
    _require_device(device, handle)
    _require_running_owner(handle)
    try:
        allocation = _OPEN_FUNCTION_BY_KIND[handle.kind](device, handle, handle_message.descriptors)
    except ApiError as error:
        # If the owner has ended since the check above, report this instead of the error of the driver.
        if is_running(handle.owner) is False:
            raise _make_owner_gone_error(handle) from error
        raise
    try:
        if allocation.length_bytes != handle.allocation_bytes:
            message = (
                f"the allocation has {allocation.length_bytes} bytes, but its handle states {handle.allocation_bytes}"
            )
            raise UsageError(message, reason=Reason.MALFORMED)  # noqa: TRY301 - the except clause closes the allocation.
        return SharedMemory(allocation, offset_bytes=handle.offset_bytes, length_bytes=handle.length_bytes)
    except BaseException as error:
        _close_and_note_errors(allocation, error)
        raise


def import_dmabuf(handle_message: HandleMessage) -> DmabufRange:
    """Return the dma-buf of another process, for the NICs of this process. This needs no CUDA.

    The address of the range is a device address of the owner. Requests through the NICs use this address. It
    is not a valid pointer in this process.

    Parameters
    ----------
    handle_message : HandleMessage
        A handle message of the kind dma-buf. The caller still owns it: the range gets a duplicate of the descriptor.

    Raises
    ------
    BrokenResource
        PEER_GONE: the owner has ended.
    ApiError
        The descriptor is not open, or lseek cannot report its size.
    UsageError
        The handle is of another kind. MALFORMED: the sizes of the handle and of the descriptor differ.
    """
    handle = handle_message.handle
    if handle.kind is not ShareKind.DMABUF:
        message = f"a handle of the kind {handle.kind.name} has no dma-buf"
        raise UsageError(message, what_to_do="pass this message to import_memory()")
    _require_running_owner(handle)
    (fd,) = handle_message.descriptors
    with DmabufRange.from_fd(fd) as whole_dmabuf:
        if whole_dmabuf.size_bytes != handle.allocation_bytes:
            message = (
                f"the descriptor has {whole_dmabuf.size_bytes} bytes, but the handle states {handle.allocation_bytes}"
            )
            raise UsageError(message, reason=Reason.MALFORMED)
        return DmabufRange(
            whole_dmabuf.take(),
            offset_bytes=handle.offset_bytes,
            length_bytes=handle.length_bytes,
            address=handle.address,
        )


def _export_ipc(memory: CudaMemory, offset_bytes: int, length_bytes: int) -> HandleMessage:
    allocation_bytes, offset_in_allocation_bytes = _locate_in_allocation(memory, offset_bytes)
    try:
        ipc_handle = cuda.export_handle(memory)
    except ApiError as error:
        explained_error = explain_export_error(error, memory.kind)
        if explained_error is error:
            raise  # `raise error from error` would make the error its own cause.
        raise explained_error from error
    handle = ShareHandle(
        kind=ShareKind.IPC,
        allocation_bytes=allocation_bytes,
        offset_bytes=offset_in_allocation_bytes,
        length_bytes=length_bytes,
        device_uuid=_read_uuid(memory.device),
        owner=this_process(),
        ipc=ipc_handle,
    )
    return HandleMessage(handle.pack())


def _export_vmm(memory: CudaMemory, offset_bytes: int, length_bytes: int) -> HandleMessage:
    if not isinstance(memory, VmmMemory):
        raise _make_unsupported_error(
            "cuMemExportToShareableHandle",
            f"{memory.kind.value} memory that VmmMemory did not allocate has no chunk to share",
            sharing_advice(memory.kind),
        )
    first_chunk_index = offset_bytes // memory.chunk_bytes
    chunk_count = (offset_bytes + length_bytes - 1) // memory.chunk_bytes - first_chunk_index + 1
    # The handle is created before any descriptor is open, because it raises for a part that cannot be sent.
    handle = ShareHandle(
        kind=ShareKind.VMM,
        allocation_bytes=memory.chunk_bytes * chunk_count,
        offset_bytes=offset_bytes - first_chunk_index * memory.chunk_bytes,
        length_bytes=length_bytes,
        chunk_bytes=memory.chunk_bytes,
        descriptor_count=chunk_count,
        device_uuid=_read_uuid(memory.device),
        owner=this_process(),
    )
    descriptors: list[int] = []
    try:
        for chunk_index in range(first_chunk_index, first_chunk_index + chunk_count):
            descriptors.append(memory.export_shareable(chunk_index))  # noqa: PERF401 - an error must close these.
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return HandleMessage(handle.pack(), descriptors)


def _export_dmabuf(memory: CudaMemory, offset_bytes: int, length_bytes: int) -> HandleMessage:
    with memory.export_dmabuf(offset_bytes=offset_bytes, length_bytes=length_bytes) as dmabuf:
        return _make_dmabuf_message(dmabuf, device_uuid=_read_uuid(memory.device))


def _make_dmabuf_message(dmabuf: DmabufRange, *, device_uuid: bytes) -> HandleMessage:
    """Return the message with a dma-buf. The message then owns the descriptor of the range."""
    handle = ShareHandle(
        kind=ShareKind.DMABUF,
        allocation_bytes=dmabuf.size_bytes,
        offset_bytes=dmabuf.offset_bytes,
        length_bytes=dmabuf.length_bytes,
        address=dmabuf.address,
        descriptor_count=1,
        device_uuid=device_uuid,
        owner=this_process(),
    )
    return HandleMessage(handle.pack(), [dmabuf.take()])


_EXPORT_FUNCTION_BY_KIND = {ShareKind.IPC: _export_ipc, ShareKind.VMM: _export_vmm, ShareKind.DMABUF: _export_dmabuf}


def _open_ipc(device: cuda.Device, handle: ShareHandle, _descriptors: Sequence[int]) -> CudaMemory:
    return cuda.open_handle(device, handle.ipc)


def _open_vmm(device: cuda.Device, handle: ShareHandle, descriptors: Sequence[int]) -> CudaMemory:
    return VmmMemory.import_shareable(device, descriptors, chunk_bytes=handle.chunk_bytes)


_OPEN_FUNCTION_BY_KIND = {ShareKind.IPC: _open_ipc, ShareKind.VMM: _open_vmm}


def _locate_in_allocation(memory: CudaMemory, offset_bytes: int) -> tuple[int, int]:
    """Return the size of the allocation that contains `memory`, and the offset of the part in it, in bytes."""
    base, allocation_bytes, _buffer_id = memory.allocation_key()[0]
    return allocation_bytes, memory.address + offset_bytes - base


def _count_devices(operation: str) -> int:
    try:
        return cuda.device_count()
    except SetupMissing as error:
        raise _make_unsupported_error(
            operation, f"this process has no CUDA: {error.message}", error.what_to_do
        ) from error


def _read_uuid(device: cuda.PrimaryContext) -> bytes:
    return uuid.UUID(device.uuid.removeprefix("GPU-")).bytes


def _require_device(device: cuda.Device, handle: ShareHandle) -> None:
    if _read_uuid(device) != handle.device_uuid:
        raise _make_wrong_device_error(handle)


def _make_wrong_device_error(handle: ShareHandle) -> UsageError:
    message = f"the memory is on {handle.device}, which this process does not see, or which was not passed as device"
    return UsageError(message, reason=Reason.NO_DEVICE, what_to_do="import it on that device, on the owner's machine")


def _require_running_owner(handle: ShareHandle) -> None:
    # None means that this process cannot see the owner (it is in another container). Then the driver decides.
    if is_running(handle.owner) is False:
        raise _make_owner_gone_error(handle)


def _make_owner_gone_error(handle: ShareHandle) -> BrokenResource:
    message = f"the owner of the memory (process {handle.owner.process_id}) has ended"
    return BrokenResource(message, reason=Reason.PEER_GONE)


def _make_unsupported_error(operation: str, detail: str, what_to_do: str) -> Unsupported:
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


def _close_and_note_errors(allocation: CudaMemory, error: BaseException) -> None:
    try:
        allocation.close()
    except GdrkitError as close_error:
        error.add_note(f"then the clean-up failed too: {close_error}")

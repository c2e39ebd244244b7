"""CUDA IPC: access to memory of cuMemAlloc from another process of the same machine.

Imported memory cannot be exported as a dma-buf (CUDA_ERROR_INVALID_VALUE on an H200). Only the process that allocated
the memory can do this, to register the memory or to pass the descriptor of the dma-buf to another process. Source:
"IPC" of the CUDA driver API reference.
"""

from __future__ import annotations

from gdrkit.buffers import MemoryKind
from gdrkit.cuda import _driver, pointer
from gdrkit.cuda.context import PrimaryContext
from gdrkit.cuda.memory import CudaMemory
from gdrkit.errors import ApiError, Reason, UsageError
from gdrkit.handles import ReleaseStack

__all__ = ["HANDLE_BYTES", "ImportedMemory", "device_of_handle", "export_handle", "open_handle"]

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE

_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def export_handle(memory: CudaMemory) -> bytes:
    """Return the 64-byte handle by which another process can open the allocation of this memory.

    The handle is valid until the allocation is freed in this process. It always names the whole allocation. The
    importer gets the base of the allocation, even if `memory` begins inside it.

    Raises
    ------
    ApiError
        CUDA_ERROR_INVALID_VALUE: the memory has no IPC handle. Only memory of cuMemAlloc has one.
    """
    with memory.device.current():
        return _driver.ipc_handle_bytes(pointer.address_range(memory.address).base)


class ImportedMemory(CudaMemory):
    """Memory that another process allocated. :meth:`close` unmaps it in this process."""

    def _release(self) -> None:
        _driver.call("cuIpcCloseMemHandle", dptr=self.address)


def open_handle(device: PrimaryContext, handle: bytes, *, length_bytes: int | None = None) -> ImportedMemory:
    """Open memory of another process.

    Parameters
    ----------
    device : PrimaryContext
        The device that has the memory.
    handle : bytes
        The handle that :func:`export_handle` returned in that process.
    length_bytes : int or None
        Number of bytes to use. None: the whole allocation, which may be larger than the size that the owner requested.

    Raises
    ------
    ApiError
        The handle was made by this process, the process that made it has freed the memory or has ended, or
        CUDA_VISIBLE_DEVICES hides the device from this process.
    UsageError
        MALFORMED: the handle does not have 64 bytes. BAD_ARGUMENT: the allocation is smaller than `length_bytes`.
        NO_DEVICE: another device has the memory.
    """
    _check_handle_length(handle)
    cleanup_stack = ReleaseStack()
    with device.current():
        address = _open_in_current_context(handle)
        cleanup_stack.push(lambda: _driver.call("cuIpcCloseMemHandle", dptr=address))
        try:
            _check_device(address, device)
            used_bytes = _resolve_length(address, length_bytes)
            # The owner has set SYNC_MEMOPS only for its own process, so this process sets it too.
            pointer.set_sync_memops(address)
        except BaseException as error:
            cleanup_stack.run_after(error)
            raise
    return ImportedMemory(device, kind=MemoryKind.CUDA_IMPORTED, address=address, length_bytes=used_bytes)


def device_of_handle(handle: bytes) -> int:
    """Return the index, in this process, of the device that has the memory of an IPC handle.

    The function opens the handle, and asks the driver for the device. A device index from the owner would not help,
    because CUDA_VISIBLE_DEVICES can give the devices other indices in each process.

    Raises
    ------
    ApiError
        The driver opens the handle on none of the devices. For the causes, see :func:`open_handle`.
    UsageError
        MALFORMED: the handle does not have 64 bytes. NO_DEVICE: this process has no CUDA device.
    SetupMissing
        CUDA is not available in this process.
    """
    _check_handle_length(handle)
    device_count = _driver.call_int("cuDeviceGetCount")
    for index in range(device_count):
        with PrimaryContext(index) as device, device.current():
            try:
                address = _open_in_current_context(handle)
            except ApiError:
                if index < device_count - 1:
                    continue  # The driver opens a handle only on devices that can access the memory. Try the next one.
                raise
            try:
                return pointer.device_index(address)
            finally:
                _driver.call("cuIpcCloseMemHandle", dptr=address)
    message = "this process has no CUDA device"
    raise UsageError(message, reason=Reason.NO_DEVICE)


def _check_handle_length(handle: bytes) -> None:
    if len(handle) != HANDLE_BYTES:
        message = f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}"
        raise UsageError(message, reason=Reason.MALFORMED)


def _open_in_current_context(handle: bytes) -> int:
    """Open a handle in the current context, and return the address of the memory."""
    return _driver.call_int(
        "cuIpcOpenMemHandle", handle=_driver.ipc_handle_from_bytes(handle), Flags=_LAZY_ENABLE_PEER_ACCESS
    )


def _check_device(address: int, device: PrimaryContext) -> None:
    actual_index = pointer.device_index(address)
    if actual_index != device.index:
        message = f"the memory is on device {actual_index} of this process, not on device {device.index}"
        raise UsageError(message, reason=Reason.NO_DEVICE)


def _resolve_length(address: int, length_bytes: int | None) -> int:
    """Return the number of bytes to use, or raise UsageError if the allocation at `address` does not have so many."""
    allocation = pointer.address_range(address)
    available_bytes = allocation.base + allocation.length_bytes - address
    requested_bytes = available_bytes if length_bytes is None else length_bytes
    if not 0 < requested_bytes <= available_bytes:
        message = f"length_bytes must be from 1 to {available_bytes} for this allocation, not {requested_bytes}"
        raise UsageError(message)
    return requested_bytes

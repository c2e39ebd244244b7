"""CUDA IPC: access to memory of cuMemAlloc from another process of the same machine.

Imported memory cannot be exported as a dma-buf (CUDA_ERROR_INVALID_VALUE on an H200). Only the process that allocated
the memory can register it by dma-buf, or pass the descriptor to another process. Source: "IPC" of the CUDA driver API
reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.buffers import MemoryKind
from gdrkit.cuda import _driver, pointer
from gdrkit.cuda.memory import CudaMemory
from gdrkit.errors import Reason, UsageError
from gdrkit.handles import ReleaseStack

if TYPE_CHECKING:
    from gdrkit.cuda.context import PrimaryContext

__all__ = ["HANDLE_BYTES", "ImportedMemory", "export_handle", "open_handle"]

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE

_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def export_handle(memory: CudaMemory) -> bytes:
    """Return the 64-byte handle by which another process can open the allocation of this memory.

    The handle is valid until the allocation is freed in this process. It always names the whole allocation. The
    importer gets the base of the allocation, even if `memory` begins inside it.

    Raises
    ------
    ApiError
        CUDA_ERROR_INVALID_VALUE: it is not memory of cuMemAlloc. Only memory of cuMemAlloc has an IPC handle.
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
        How many bytes to use. With None, the whole allocation. It may be larger than the size that the owner requested.

    Raises
    ------
    ApiError
        The handle was made by this process, or its owner has freed the memory or has ended.
    UsageError
        MALFORMED: the handle does not have 64 bytes. BAD_ARGUMENT: the allocation is smaller than `length_bytes`.
    """
    if len(handle) != HANDLE_BYTES:
        message = f"an IPC handle has {HANDLE_BYTES} bytes, not {len(handle)}"
        raise UsageError(message, reason=Reason.MALFORMED)
    undo = ReleaseStack()
    with device.current():
        address = _driver.call_int(
            "cuIpcOpenMemHandle", handle=_driver.ipc_handle_from_bytes(handle), Flags=_LAZY_ENABLE_PEER_ACCESS
        )
        undo.push(lambda: _driver.call("cuIpcCloseMemHandle", dptr=address))
        try:
            used_bytes = _checked_length(address, length_bytes)
            # SYNC_MEMOPS that the owner has set does not apply in this process.
            pointer.synchronize_copies(address)
        except BaseException as error:
            undo.run_after(error)
            raise
    return ImportedMemory(device, kind=MemoryKind.CUDA_IMPORTED, address=address, length_bytes=used_bytes)


def _checked_length(address: int, length_bytes: int | None) -> int:
    """Return the number of bytes to use, or raise UsageError if the allocation at `address` does not have so many."""
    allocation = pointer.address_range(address)
    available_bytes = allocation.base + allocation.length_bytes - address
    requested_bytes = available_bytes if length_bytes is None else length_bytes
    if not 0 < requested_bytes <= available_bytes:
        message = f"length_bytes must be from 1 to {available_bytes} for this allocation, not {requested_bytes}"
        raise UsageError(message)
    return requested_bytes

"""The 80-byte handle of the first GDR interface of hf3fs, for programs that already use this format.

Bytes 0 to 63 are a CUipcMemHandle, bytes 64 to 71 the size and bytes 72 to 79 the device number, both little-endian.
The format has no offset, no version, no checksum and no owner. The device number may mean different devices in two
processes, so :func:`import_gdr` ignores it. :func:`export_gdr` refuses memory that begins inside an allocation, because
its importer would get the bytes at the base of the allocation. :func:`import_gdr` checks that the allocation which the
driver opens has at least the size in the handle. New programs should use
:func:`gdrkit.registration.share.export_memory`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

from gdrkit import cuda
from gdrkit.errors import ApiError, Reason, UsageError
from gdrkit.registration.exports import explain_export_error
from gdrkit.registration.share import SharedMemory

if TYPE_CHECKING:
    from gdrkit.cuda import CudaMemory

__all__ = ["GDR_HANDLE_BYTES", "GdrHandle", "export_gdr", "import_gdr"]

_HANDLE_STRUCT = struct.Struct("<64sQQ")
GDR_HANDLE_BYTES = _HANDLE_STRUCT.size
_LENGTH_BYTES_MAX = (1 << 63) - 1
_DEVICE_INDEX_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class GdrHandle:
    """The fields of the handle: the CUipcMemHandle, the size of the memory in bytes and the device number.

    Raises
    ------
    UsageError
        MALFORMED: the IPC handle is empty, the size is 0 or above 2**63 - 1, or the device number does not fit in an
        int.
    """

    ipc: bytes
    length_bytes: int
    device_index: int

    def __post_init__(self) -> None:
        if not any(self.ipc):
            _refuse("its IPC handle is empty")
        if not 0 < self.length_bytes <= _LENGTH_BYTES_MAX or not 0 <= self.device_index <= _DEVICE_INDEX_MAX:
            _refuse(f"its size {self.length_bytes} or its device number {self.device_index} is out of range")

    def pack(self) -> bytes:
        """Return the handle as 80 bytes."""
        return _HANDLE_STRUCT.pack(self.ipc, self.length_bytes, self.device_index)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """Return the handle that `data` contains, or raise UsageError(MALFORMED)."""
        if len(data) != GDR_HANDLE_BYTES:
            _refuse(f"it has {len(data)} bytes, not {GDR_HANDLE_BYTES}")
        return cls(*_HANDLE_STRUCT.unpack(data))


def export_gdr(memory: CudaMemory) -> bytes:
    """Return the 80-byte handle of memory of cuMemAlloc.

    Raises
    ------
    UsageError
        The memory begins inside its allocation.
    Unsupported, ApiError
        See :func:`gdrkit.registration.share.export_memory`.
    """
    try:
        ipc = cuda.export_handle(memory)
    except ApiError as error:
        explained_error = explain_export_error(error, memory.kind)
        if explained_error is error:
            raise  # `raise error from error` would make the error its own cause.
        raise explained_error from error
    _refuse_unless_at_allocation_base(memory)
    return GdrHandle(ipc=ipc, length_bytes=memory.length_bytes, device_index=memory.device.index).pack()


def import_gdr(device: cuda.Device, data: bytes) -> SharedMemory:
    """Open the memory of an 80-byte handle.

    Raises
    ------
    Unsupported
        ENOTSUP: CUDA is not available in this process.
    UsageError
        MALFORMED: `data` is not a handle, or the memory is smaller than the handle states. NO_DEVICE: the memory is not
        on `device`. The device number in the handle counts the owner's devices, and is not used.
    ApiError
        The driver refused the handle, because the owner is this process, has ended or has freed the memory.
    """
    handle = GdrHandle.parse(data)
    try:
        allocation = cuda.open_handle(device, handle.ipc, length_bytes=handle.length_bytes)
    except UsageError as error:
        if error.reason is Reason.NO_DEVICE:
            raise
        raise UsageError(error.message, reason=Reason.MALFORMED) from error
    return SharedMemory(allocation, offset_bytes=0, length_bytes=handle.length_bytes)


def _refuse_unless_at_allocation_base(memory: CudaMemory) -> None:
    if memory.address != memory.allocation_key()[0][0]:
        message = f"memory at {memory.address:#x} begins inside its allocation, and this handle has no offset"
        raise UsageError(message, what_to_do="use export_memory(..., kind=ShareKind.IPC): its handle has an offset")


def _refuse(problem: str) -> NoReturn:
    message = f"not a handle of GDR memory: {problem}"
    raise UsageError(message, reason=Reason.MALFORMED)

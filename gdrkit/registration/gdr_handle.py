"""The 80-byte handle of the first GDR interface of hf3fs: for programs that have that format already.

Level 3. Bytes 0 to 63 are a CUipcMemHandle, 64 to 71 the size, 72 to 79 the number of the device, both little-endian.
It has no room for an offset, a version, a checksum or the owner, and it names the device by a number that two
processes need not share. So memory that begins inside an allocation is refused here (its importer would get the base,
other bytes), every field is checked against what the driver says, and new programs take
:func:`gdrkit.registration.share.export_memory`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Self

from gdrkit import cuda
from gdrkit.errors import ApiError, Reason, UsageError
from gdrkit.registration.exports import explained
from gdrkit.registration.share import SharedMemory, device_at

if TYPE_CHECKING:
    from gdrkit.cuda import CudaMemory

__all__ = ["GDR_HANDLE_BYTES", "GdrHandle", "export_gdr", "import_gdr"]

_FORMAT = struct.Struct("<64sQQ")
GDR_HANDLE_BYTES = _FORMAT.size
_SIZE_MAX = (1 << 63) - 1
_DEVICE_MAX = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class GdrHandle:
    """Its three fields.

    Raises
    ------
    UsageError
        MALFORMED: an empty IPC handle, a size of 0 or above 2**63 - 1, a device number that no int holds.
    """

    ipc: bytes
    length_bytes: int
    device_index: int

    def __post_init__(self) -> None:
        if not any(self.ipc):
            _refuse("its IPC handle is empty")
        if not 0 < self.length_bytes <= _SIZE_MAX or not 0 <= self.device_index <= _DEVICE_MAX:
            _refuse(f"{self.length_bytes} bytes on device {self.device_index}")

    def pack(self) -> bytes:
        """Its 80 bytes."""
        return _FORMAT.pack(self.ipc, self.length_bytes, self.device_index)

    @classmethod
    def parse(cls, data: bytes) -> Self:
        """The handle in these bytes; UsageError(MALFORMED) when they are none."""
        if len(data) != GDR_HANDLE_BYTES:
            _refuse(f"{len(data)} bytes and not {GDR_HANDLE_BYTES}")
        return cls(*_FORMAT.unpack(data))


def export_gdr(memory: CudaMemory) -> bytes:
    """The 80 bytes for memory of cuMemAlloc, from its first byte on.

    Raises
    ------
    UsageError
        The memory begins inside its allocation.
    Unsupported, ApiError
        As :func:`gdrkit.registration.share.export_memory`.
    """
    try:
        ipc = cuda.export_handle(memory)
    except ApiError as error:
        better = explained(error, memory.kind)
        if better is error:
            raise  # From itself, it would be its own cause.
        raise better from error
    _require_base(memory)
    return GdrHandle(ipc=ipc, length_bytes=memory.length_bytes, device_index=memory.device.index).pack()


def import_gdr(device: cuda.Device, data: bytes) -> SharedMemory:
    """Open the memory of such a handle.

    Raises
    ------
    Unsupported
        ENOTSUP: this process has no CUDA.
    UsageError
        MALFORMED: it is no handle, or its memory is smaller than it says. NO_DEVICE: there is no such device here, or
        it is not `device`.
    ApiError
        The driver refused: its owner is this process, has ended or has freed the memory.
    """
    handle = GdrHandle.parse(data)
    _require_device(handle, device)
    try:
        whole = cuda.open_handle(device, handle.ipc, length_bytes=handle.length_bytes)
    except UsageError as error:
        raise UsageError(error.message, reason=Reason.MALFORMED) from error
    return SharedMemory(whole, offset_bytes=0, length_bytes=handle.length_bytes)


def _require_base(memory: CudaMemory) -> None:
    if memory.address != memory.allocation_key()[0][0]:
        message = f"memory at {memory.address:#x} begins inside its allocation, and this handle has no offset"
        raise UsageError(message, what_to_do="export_memory(..., kind=ShareKind.IPC) has one")


def _require_device(handle: GdrHandle, device: cuda.Device) -> None:
    with device_at(handle.device_index):
        pass
    if handle.device_index != device.index:
        message = f"the memory is on device {handle.device_index} and not on {device.index}"
        raise UsageError(message, reason=Reason.NO_DEVICE)


def _refuse(why: str) -> NoReturn:
    message = f"no handle of GDR memory: {why}"
    raise UsageError(message, reason=Reason.MALFORMED)

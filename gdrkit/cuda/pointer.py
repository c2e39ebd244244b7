"""Queries to the CUDA driver about the memory at a device address, and the setting SYNC_MEMOPS of this memory.

The functions work for memory of every library, such as torch.
Sources: ``cuPointerGetAttribute``, ``cuPointerSetAttribute``, ``cuMemGetAddressRange``, ``cuMemRetainAllocationHandle``
and ``cuCtxSetFlags`` of the CUDA driver API.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from gdrkit.buffers import MemoryKind
from gdrkit.cuda import _driver, _results
from gdrkit.errors import ApiError, Reason, Unsupported, UsageError

__all__ = [
    "AddressRange",
    "address_range",
    "allocation_key",
    "buffer_id",
    "device_index",
    "make_existence_check",
    "memory_kind",
    "set_sync_memops",
]


# make_existence_check(key) returns a function that checks whether the memory of a key from allocation_key() still
# exists. The key has one buffer id for each VMM chunk of the memory, or one for an ordinary allocation. The returned
# function makes one driver call for each buffer id and needs no current context.
make_existence_check = _driver.make_existence_check


class _PointerAttribute(enum.IntEnum):
    """Values of ``CUpointer_attribute``."""

    MEMORY_TYPE = 2
    SYNC_MEMOPS = 6
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    IS_LEGACY_CUDA_IPC_CAPABLE = 10
    MEMPOOL_HANDLE = 17


_MEMORY_TYPE_HOST = 1  # CU_MEMORYTYPE_HOST
_CTX_SYNC_MEMOPS = 0x80  # CU_CTX_SYNC_MEMOPS, CUDA 12.1


@dataclass(frozen=True)
class AddressRange:
    """One allocation of the driver, or one chunk of VMM memory."""

    base: int
    length_bytes: int


def memory_kind(address: int) -> MemoryKind:
    """Return the kind of the memory at `address`.

    An address that the driver does not know is ordinary host memory. Device memory is classified as imported if it is
    neither managed, pooled nor VMM memory, and cannot be exported by CUDA IPC.
    """
    try:
        memory_type = _query_attribute(_PointerAttribute.MEMORY_TYPE, address)
    except ApiError as error:
        if error.status == _results.INVALID_VALUE:
            return MemoryKind.HOST
        raise
    if _query_attribute(_PointerAttribute.IS_MANAGED, address):
        return MemoryKind.CUDA_MANAGED
    if memory_type == _MEMORY_TYPE_HOST:
        return MemoryKind.HOST
    if _query_attribute(_PointerAttribute.MEMPOOL_HANDLE, address):
        return MemoryKind.CUDA_POOL
    if _is_vmm(address):
        return MemoryKind.CUDA_VMM
    can_export_ipc = _query_attribute(_PointerAttribute.IS_LEGACY_CUDA_IPC_CAPABLE, address)
    return MemoryKind.CUDA if can_export_ipc else MemoryKind.CUDA_IMPORTED


def buffer_id(address: int) -> int:
    """Return the buffer id, a number that the driver gives to only one allocation in the life of the process.

    A reused address gets another id, so registrations of the old and of the new memory can be distinguished.
    """
    return _driver.buffer_id(address)


def device_index(address: int) -> int:
    """Return the index of the device that has the memory at `address`."""
    return _query_attribute(_PointerAttribute.DEVICE_ORDINAL, address)


def address_range(address: int) -> AddressRange:
    """Return the allocation (in VMM memory, the chunk) at `address`. The device's context must be current."""
    base_address, length_bytes = _driver.call_int_pair("cuMemGetAddressRange", dptr=address)
    return AddressRange(base_address, length_bytes)


def allocation_key(address: int, length_bytes: int) -> tuple[tuple[int, int, int], ...]:
    """Return (base, length_bytes, buffer id) of every chunk that contains a part of the range, in order.

    The device's context must be current. In VMM memory each chunk has its own id, and the driver reports one chunk per
    call. So this function iterates over the range. Other memory normally has one chunk: its allocation.

    Raises
    ------
    UsageError
        The memory at `address` ends before the range does.
    """
    key = []
    chunk_address = address
    while chunk_address < address + length_bytes:
        try:
            chunk = address_range(chunk_address)
        except ApiError as error:
            if chunk_address == address:
                raise
            message = (
                f"device memory at {address:#x} ends at {chunk_address:#x} and has fewer than {length_bytes} bytes"
            )
            raise UsageError(message, reason=Reason.NOT_DEVICE_MEMORY) from error
        key.append((chunk.base, chunk.length_bytes, buffer_id(chunk_address)))
        chunk_address = chunk.base + chunk.length_bytes
    return tuple(key)


def set_sync_memops(address: int) -> None:
    """Make synchronous copies from or to this memory return only when they are complete.

    The device's context must be current. Without this setting, a cuMemcpy of device memory may return early, and a NIC
    would read old data. VMM memory does not support the attribute SYNC_MEMOPS (CUDA_ERROR_NOT_SUPPORTED on an H200).
    For VMM memory, this function sets the context's flag CU_CTX_SYNC_MEMOPS, which has the same effect on all memory of
    the context.
    """
    attribute = _driver.enum_member("CUpointer_attribute", _PointerAttribute.SYNC_MEMOPS)
    try:
        _driver.call("cuPointerSetAttribute", value=1, attribute=attribute, ptr=address)
    except Unsupported:
        flags = _driver.call_int("cuCtxGetFlags")
        if not flags & _CTX_SYNC_MEMOPS:
            _driver.call("cuCtxSetFlags", flags=flags | _CTX_SYNC_MEMOPS)


def _query_attribute(attribute: _PointerAttribute, address: int) -> int:
    attribute_member = _driver.enum_member("CUpointer_attribute", attribute)
    return _driver.call_int("cuPointerGetAttribute", attribute=attribute_member, ptr=address)


def _is_vmm(address: int) -> bool:
    # Only VMM memory has an allocation handle.
    try:
        allocation_handle = _driver.call_int("cuMemRetainAllocationHandle", addr=address)
    except ApiError as error:
        if error.status == _results.INVALID_VALUE:
            return False
        raise
    _driver.call("cuMemRelease", handle=allocation_handle)
    return True

"""Calls of the CUDA driver API that bypass gdrkit, for cases about memory that gdrkit did not allocate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.cuda import Device

__all__ = [
    "RawMemory",
    "allocate_raw",
    "allocate_raw_from_pool",
    "allocate_raw_managed",
    "export_raw_dmabuf",
    "free_raw",
    "get_ipc_export_status",
    "remap_chunk",
]


class RawMemory:
    """Memory of cuMemAlloc, which is freed by :meth:`free` or at the end of the block."""

    def __init__(self, device: Device, length_bytes: int) -> None:
        self._device = device
        self.address = allocate_raw(device, length_bytes)
        self._is_freed = False

    def free(self) -> None:
        """Free the memory, even if it is registered with a NIC. Further calls do nothing."""
        if not self._is_freed:
            self._is_freed = True
            free_raw(self._device, self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_class: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()


def allocate_raw(device: Device, length_bytes: int) -> int:
    """Call cuMemAlloc, and return the address."""
    from cuda.bindings import driver

    with device.current():
        status, address = driver.cuMemAlloc(length_bytes)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return int(address)


def allocate_raw_managed(device: Device, length_bytes: int) -> int:
    """Call cuMemAllocManaged, and return the address."""
    from cuda.bindings import driver

    with device.current():
        status, address = driver.cuMemAllocManaged(length_bytes, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value)
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return int(address)


def free_raw(device: Device, address: int) -> None:
    """Call cuMemFree, even if the memory is registered with a NIC."""
    from cuda.bindings import driver

    with device.current():
        (status,) = driver.cuMemFree(address)
    assert status == driver.CUresult.CUDA_SUCCESS, status


def allocate_raw_from_pool(device: Device, length_bytes: int) -> int:
    """Call cuMemAllocAsync with the default pool of the device, and return the address. :func:`free_raw` frees it."""
    from cuda.bindings import driver

    with device.current():
        status, address = driver.cuMemAllocAsync(length_bytes, driver.CUstream(0))
        assert status == driver.CUresult.CUDA_SUCCESS, status
        (status,) = driver.cuStreamSynchronize(driver.CUstream(0))
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return int(address)


def get_ipc_export_status(device: Device, address: int) -> int:
    """Return the CUresult of cuIpcGetMemHandle for the address."""
    from cuda.bindings import driver

    with device.current():
        status, _handle = driver.cuIpcGetMemHandle(address)
    return int(status)


def export_raw_dmabuf(device: Device, address: int, *, length_bytes: int, flags: int) -> tuple[int, int]:
    """Call cuMemGetHandleForAddressRange, and return the CUresult and the descriptor of the dma-buf (-1 on failure)."""
    from cuda.bindings import driver

    handle_type = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    with device.current():
        status, fd = driver.cuMemGetHandleForAddressRange(address, length_bytes, handle_type, flags)
    return int(status), int(fd) if int(status) == 0 else -1


def remap_chunk(device: Device, address: int, *, length_bytes: int) -> None:
    """Unmap a chunk of VMM memory and map new memory at its address, as the expandable segments of PyTorch do.

    The new memory is freed when the chunk is unmapped again.
    """
    from cuda.bindings import driver

    def check_success(result: tuple[Any, ...]) -> Any:  # noqa: ANN401 - the bindings have no types.
        assert result[0] == driver.CUresult.CUDA_SUCCESS, result
        return result[1] if len(result) > 1 else None

    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device.index
    properties.allocFlags.gpuDirectRDMACapable = 1
    access = driver.CUmemAccessDesc()
    access.location = properties.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with device.current():
        check_success(driver.cuMemUnmap(address, length_bytes))
        memory_handle = check_success(driver.cuMemCreate(length_bytes, properties, 0))
        check_success(driver.cuMemMap(address, length_bytes, 0, memory_handle, 0))
        check_success(driver.cuMemSetAccess(address, length_bytes, [access], 1))
        check_success(driver.cuMemRelease(memory_handle))

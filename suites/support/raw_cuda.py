"""CUDA memory behind gdrkit's back: what a program does that allocates and frees by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from types import TracebackType

    from gdrkit.cuda import Device

__all__ = [
    "RawMemory",
    "dmabuf_of",
    "ipc_status",
    "raw_allocate",
    "raw_allocate_managed",
    "raw_allocate_pool",
    "raw_free",
    "remap_chunk",
]


class RawMemory:
    """Memory of cuMemAlloc that a program frees whenever it likes, and at the latest when the block ends."""

    def __init__(self, device: Device, length_bytes: int) -> None:
        self._device = device
        self.address = raw_allocate(device, length_bytes)
        self._freed = False

    def free(self) -> None:
        """cuMemFree, whatever is registered over it; once."""
        if not self._freed:
            self._freed = True
            raw_free(self._device, self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.free()


def raw_allocate(device: Device, length_bytes: int) -> int:
    """cuMemAlloc; gives the address."""
    from cuda.bindings import driver

    with device.current():
        result, address = driver.cuMemAlloc(length_bytes)
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return int(address)


def raw_allocate_managed(device: Device, length_bytes: int) -> int:
    """cuMemAllocManaged; gives the address."""
    from cuda.bindings import driver

    with device.current():
        result, address = driver.cuMemAllocManaged(length_bytes, driver.CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL.value)
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return int(address)


def raw_free(device: Device, address: int) -> None:
    """cuMemFree, whatever is registered over it."""
    from cuda.bindings import driver

    with device.current():
        (result,) = driver.cuMemFree(address)
    assert result == driver.CUresult.CUDA_SUCCESS, result


def raw_allocate_pool(device: Device, length_bytes: int) -> int:
    """cuMemAllocAsync from the device's own pool, ready to use; gives the address, for :func:`raw_free`."""
    from cuda.bindings import driver

    with device.current():
        result, address = driver.cuMemAllocAsync(length_bytes, driver.CUstream(0))
        assert result == driver.CUresult.CUDA_SUCCESS, result
        (result,) = driver.cuStreamSynchronize(driver.CUstream(0))
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return int(address)


def ipc_status(device: Device, address: int) -> int:
    """What cuIpcGetMemHandle says of the address."""
    from cuda.bindings import driver

    with device.current():
        result, _handle = driver.cuIpcGetMemHandle(address)
    return int(result)


def dmabuf_of(device: Device, address: int, *, length_bytes: int, flags: int) -> tuple[int, int]:
    """cuMemGetHandleForAddressRange with exactly these arguments: the CUresult, and a descriptor or -1."""
    from cuda.bindings import driver

    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    with device.current():
        result, fd = driver.cuMemGetHandleForAddressRange(address, length_bytes, kind, flags)
    return int(result), int(fd) if int(result) == 0 else -1


def remap_chunk(device: Device, address: int, *, length_bytes: int) -> None:
    """Unmap one chunk of VMM memory and map new memory in its place, as torch's expandable segments do. The new memory
    goes when the chunk is unmapped.
    """
    from cuda.bindings import driver

    def checked(answer: tuple[Any, ...]) -> Any:  # noqa: ANN401 - whatever the call gives.
        assert answer[0] == driver.CUresult.CUDA_SUCCESS, answer
        return answer[1] if len(answer) > 1 else None

    made = driver.CUmemAllocationProp()
    made.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = device.index
    made.allocFlags.gpuDirectRDMACapable = 1
    access = driver.CUmemAccessDesc()
    access.location = made.location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    with device.current():
        checked(driver.cuMemUnmap(address, length_bytes))
        handle = checked(driver.cuMemCreate(length_bytes, made, 0))
        checked(driver.cuMemMap(address, length_bytes, 0, handle, 0))
        checked(driver.cuMemSetAccess(address, length_bytes, [access], 1))
        checked(driver.cuMemRelease(handle))

"""CUDA memory behind gdrkit's back: what a program does that allocates and frees by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.cuda import Device

__all__ = ["dmabuf_of", "raw_allocate", "raw_free"]


def raw_allocate(device: Device, length_bytes: int) -> int:
    """cuMemAlloc; gives the address."""
    from cuda.bindings import driver

    with device.current():
        result, address = driver.cuMemAlloc(length_bytes)
    assert result == driver.CUresult.CUDA_SUCCESS, result
    return int(address)


def raw_free(device: Device, address: int) -> None:
    """cuMemFree, whatever is registered over it."""
    from cuda.bindings import driver

    with device.current():
        (result,) = driver.cuMemFree(address)
    assert result == driver.CUresult.CUDA_SUCCESS, result


def dmabuf_of(device: Device, address: int, *, length_bytes: int, flags: int) -> tuple[int, int]:
    """cuMemGetHandleForAddressRange with exactly these arguments: the CUresult, and a descriptor or -1."""
    from cuda.bindings import driver

    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    with device.current():
        result, fd = driver.cuMemGetHandleForAddressRange(address, length_bytes, kind, flags)
    return int(result), int(fd) if int(result) == 0 else -1

"""Device memory behaves as measured on an H200: access by the CPU, export, free and reuse of addresses."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.raw_cuda import allocate_raw, export_raw_dmabuf, free_raw

from gdrkit import cuda, pattern
from gdrkit.cuda import VmmMemory
from gdrkit.cuda.pointer import address_range
from gdrkit.errors import ApiError, Reason, Unsupported, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.units import HOST_PAGE_BYTES, KIB, MIB

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence

pytestmark = needs(cuda_needs.device())

INVALID_VALUE, INVALID_CONTEXT, NOT_SUPPORTED = 1, 201, 801  # CUresult values
PCIE_MAPPING_FLAG = 1  # CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
# The CUDA twin (a library that emulates the driver and its GPUs), the kernel and the NVIDIA driver refuse mmap(2) of a
# dma-buf with one of these errnos. 524 is ENOTSUPP, an errno of the kernel without a name in the errno module.
MMAP_REFUSAL_ERRNOS = {errno.EACCES, errno.EINVAL, 524}

# This program accesses device memory by the CPU. The access must end the program with SIGSEGV before "survived".
CPU_ACCESS_PROGRAM = """
import ctypes, sys
from gdrkit import cuda
with cuda.Device(0) as device, device.allocate(65536) as memory:
    print("allocated", flush=True)
    {access_statement}
    print("survived", flush=True)
"""


@pytest.mark.qualify
@pytest.mark.parametrize(
    "access_statement",
    [
        pytest.param("ctypes.string_at(memory.address, 16)", id="read"),
        pytest.param("ctypes.memmove(memory.address, b'x' * 16, 16)", id="write"),
    ],
)
def test_cpu_memcpy_on_device_memory_faults(access_statement: str, evidence: Evidence) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CPU_ACCESS_PROGRAM.format(access_statement=access_statement)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    evidence["exit_code"] = child.returncode
    assert child.stdout == "allocated\n", child.stderr
    assert child.returncode == -signal.SIGSEGV


@pytest.mark.qualify
@needs(cuda_needs.dmabuf_export)
def test_a_dmabuf_has_its_size_and_cannot_be_mapped(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, memory.export_dmabuf() as dmabuf:
        assert os.lseek(dmabuf.fd, 0, os.SEEK_END) == 64 * KIB
        with pytest.raises(OSError, match=r".") as error_info:
            mmap.mmap(dmabuf.fd, 64 * KIB)
        assert error_info.value.errno in MMAP_REFUSAL_ERRNOS


@needs(cuda_needs.dmabuf_export)
def test_interior_range_is_exported_in_pages_with_its_offset(device: Device) -> None:
    with device.allocate(MIB) as memory, memory.export_dmabuf(offset_bytes=5001, length_bytes=100) as dmabuf:
        assert dmabuf.offset_bytes == 5001 % HOST_PAGE_BYTES
        assert dmabuf.address == memory.address + 5001
        assert os.lseek(dmabuf.fd, 0, os.SEEK_END) == HOST_PAGE_BYTES


@needs(cuda_needs.dmabuf_export)
@pytest.mark.parametrize(
    ("address_offset", "length_bytes", "flags", "expected_status"),
    [
        pytest.param(0, 64 * KIB, 0, 0, id="whole"),
        pytest.param(4 * KIB, 4 * KIB, 0, 0, id="page-in-the-middle"),
        pytest.param(1, 4 * KIB, 0, INVALID_VALUE, id="odd-address"),
        pytest.param(0, 4 * KIB + 1, 0, INVALID_VALUE, id="odd-length"),
        pytest.param(0, 64 * KIB, PCIE_MAPPING_FLAG, NOT_SUPPORTED, id="pcie-mapping"),
    ],
)
def test_dmabuf_export_status_matches_the_measured_table(
    device: Device, address_offset: int, length_bytes: int, flags: int, expected_status: int
) -> None:
    with device.allocate(64 * KIB) as memory:
        actual_status, fd = export_raw_dmabuf(
            device, memory.address + address_offset, length_bytes=length_bytes, flags=flags
        )
        if fd >= 0:
            os.close(fd)
    assert actual_status == expected_status


@needs(cuda_needs.vmm, cuda_needs.dmabuf_export)
def test_vmm_memory_has_a_buffer_id_per_chunk_and_one_dmabuf(device: Device) -> None:
    with VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory:
        # The key has a tuple for each chunk: address, length and buffer id.
        (first_chunk, second_chunk) = memory.allocation_key()
        assert (first_chunk[0], second_chunk[0]) == (memory.address, memory.address + 2 * MIB)
        assert first_chunk[2] != second_chunk[2]
        with memory.export_dmabuf() as dmabuf:
            assert os.lseek(dmabuf.fd, 0, os.SEEK_END) == 4 * MIB


@pytest.mark.qualify
def test_reused_address_has_another_buffer_id(device: Device, evidence: Evidence) -> None:
    old_address = allocate_raw(device, 2 * MIB)
    with cuda.borrow(device, old_address, length_bytes=2 * MIB) as memory:
        old_id = memory.buffer_id()
    free_raw(device, old_address)
    new_address = allocate_raw(device, 2 * MIB)
    with cuda.borrow(device, new_address, length_bytes=2 * MIB) as memory:
        new_id = memory.buffer_id()
    free_raw(device, new_address)
    evidence["buffer_ids"] = [old_id, new_id]
    assert (new_address, new_id) != (old_address, old_id)
    assert new_id > old_id


@needs(cuda_needs.dmabuf_export)
def test_freed_memory_stays_allocated_until_its_dmabuf_is_closed(device: Device) -> None:
    with device.allocate(64 * MIB) as memory:
        dmabuf = memory.export_dmabuf()
        free_bytes_before = device.memory_info().free_bytes
    with dmabuf:
        assert device.memory_info().free_bytes == free_bytes_before
    assert device.memory_info().free_bytes >= free_bytes_before + 64 * MIB


def test_host_memory_is_refused_as_device_memory(device: Device) -> None:
    with mmap.mmap(-1, 64 * KIB) as host_memory:
        import ctypes

        address = ctypes.addressof(view := ctypes.c_char.from_buffer(host_memory))
        with pytest.raises((UsageError, ApiError)) as error_info:
            cuda.borrow(device, address, length_bytes=64 * KIB)
        del view  # The mapping cannot be closed while a view of it exists.
    assert error_info.value.reason in {Reason.NOT_DEVICE_MEMORY, Reason.BAD_ARGUMENT}


def test_address_range_needs_the_current_context(device: Device) -> None:
    with device.allocate(MIB) as memory:
        with pytest.raises(ApiError) as error_info:
            address_range(memory.address)
        assert error_info.value.status == INVALID_CONTEXT
        with device.current():
            allocation = address_range(memory.address)
        assert allocation.base <= memory.address < allocation.base + allocation.length_bytes


def test_copies_check_their_bounds_exactly(device: Device, seed: int) -> None:
    with device.allocate(64 * KIB) as memory:
        memory.write(pattern.payload(64 * KIB, seed=seed))
        for offset_bytes, length_bytes in [(-1, 1), (64 * KIB, 1), (64 * KIB - 1, 2), (0, 64 * KIB + 1)]:
            with pytest.raises(UsageError):
                memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)
        pattern.check(memory.read(), seed=seed)


def test_too_large_allocation_is_refused_and_others_still_work(device: Device) -> None:
    with pytest.raises(ApiError) as error_info:
        device.allocate(1 << 50)
    assert error_info.value.status_name == "CUDA_ERROR_OUT_OF_MEMORY"
    assert not isinstance(error_info.value, Unsupported)
    device.allocate(64 * KIB).close()

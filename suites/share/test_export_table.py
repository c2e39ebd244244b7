"""The table gdrkit.registration.exports.EXPORTS is true: the cases measure every row again with the driver."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from support.raw_cuda import (
    allocate_raw_from_pool,
    allocate_raw_managed,
    export_raw_dmabuf,
    free_raw,
    get_ipc_export_status,
)

from gdrkit import cuda
from gdrkit.buffers import MemoryKind
from gdrkit.cuda import VmmMemory
from gdrkit.errors import ApiError, Unsupported
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.registration.exports import EXPORTS, ExportRow, export_methods
from gdrkit.registration.handle import ShareKind
from gdrkit.registration.share import export_memory
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import CudaMemory, Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer

pytestmark = needs(cuda_needs.device(), cuda_needs.ipc, cuda_needs.vmm, cuda_needs.dmabuf_export)

MEMORY_BYTES = 2 * MIB
MEMORY_KINDS = sorted({row.memory for row in EXPORTS}, key=str)


@contextlib.contextmanager
def allocate_memory_of_kind(kind: MemoryKind, device: Device, peer: Peer) -> Iterator[tuple[int, CudaMemory | None]]:
    """Yield new memory of a kind: its address, and its buffer object if gdrkit supports the kind."""
    match kind:
        case MemoryKind.CUDA:
            with device.allocate(MEMORY_BYTES) as memory:
                yield memory.address, memory
        case MemoryKind.CUDA_VMM:
            with VmmMemory.create(device, MEMORY_BYTES) as vmm_memory:
                yield vmm_memory.address, vmm_memory
        case MemoryKind.CUDA_IMPORTED:
            with cuda.open_handle(device, peer.device().allocate(MEMORY_BYTES).export_ipc()) as imported_memory:
                yield imported_memory.address, imported_memory
        case MemoryKind.CUDA_POOL:
            address = allocate_raw_from_pool(device, MEMORY_BYTES)
            with cuda.borrow(device, address, length_bytes=MEMORY_BYTES) as borrowed_memory:
                yield address, borrowed_memory
            free_raw(device, address)
        case _:  # CUDA_MANAGED, which gdrkit does not support.
            address = allocate_raw_managed(device, MEMORY_BYTES)
            yield address, None
            free_raw(device, address)


def get_export_status(row: ExportRow, device: Device, address: int, memory: CudaMemory | None) -> int:
    """Return the CUresult of the driver for the export that a row describes."""
    if row.method is ShareKind.VMM:
        assert isinstance(memory, VmmMemory)
        os.close(memory.export_shareable())
        return 0
    if row.method is ShareKind.IPC:
        return get_ipc_export_status(device, address)
    # Offset, length and flags of the dma-buf export. Flag 1 is CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE.
    arguments_by_part = {
        "whole": (0, MEMORY_BYTES, 0),
        "page": (4096, MEMORY_BYTES - 4096, 0),
        "odd_address": (1, 4096, 0),
        "odd_length": (0, 4097, 0),
        "pcie": (0, MEMORY_BYTES, 1),
    }
    offset_bytes, length_bytes, flags = arguments_by_part[row.part]
    status, fd = export_raw_dmabuf(device, address + offset_bytes, length_bytes=length_bytes, flags=flags)
    if fd >= 0:
        os.close(fd)
    return status


@pytest.mark.parametrize("kind", MEMORY_KINDS, ids=lambda kind: kind.value)
def test_driver_status_matches_the_export_table(
    device: Device, peer: Peer, evidence: Evidence, kind: MemoryKind
) -> None:
    rows = [row for row in EXPORTS if row.memory is kind]
    with allocate_memory_of_kind(kind, device, peer) as (address, memory):
        statuses = [get_export_status(row, device, address, memory) for row in rows]
    evidence["answers"] = [[row.method.name, row.part, status] for row, status in zip(rows, statuses, strict=True)]
    assert statuses == [row.status for row in rows]


@pytest.mark.parametrize("kind", [kind for kind in MEMORY_KINDS if kind is not MemoryKind.CUDA_MANAGED], ids=str)
def test_unsupported_share_kind_is_refused_with_advice(device: Device, peer: Peer, kind: MemoryKind) -> None:
    with allocate_memory_of_kind(kind, device, peer) as (_address, memory):
        assert memory is not None
        assert memory.kind is kind
        for method in ShareKind:
            if method in export_methods(kind):
                export_memory(memory, kind=method).close()
                continue
            with pytest.raises(ApiError) as error_info:
                export_memory(memory, kind=method)
            assert type(error_info.value) is Unsupported
            assert error_info.value.what_to_do


def test_managed_memory_is_refused_with_advice(device: Device, peer: Peer) -> None:
    with (
        allocate_memory_of_kind(MemoryKind.CUDA_MANAGED, device, peer) as (address, _memory),
        pytest.raises(Unsupported, match="moves between host and device"),
    ):
        cuda.borrow(device, address, length_bytes=MEMORY_BYTES)

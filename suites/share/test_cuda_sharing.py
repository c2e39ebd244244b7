"""Device memory that two processes share: by CUDA IPC handles, VMM descriptors and dma-buf descriptors.

The expected errors were observed on an H200.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF

from gdrkit import cuda, pattern
from gdrkit.cuda import VmmMemory
from gdrkit.errors import ApiError, Unsupported
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

# A CUresult of cuda.h.
CUDA_ERROR_INVALID_VALUE = 1


@pytest.mark.qualify
@needs(cuda_needs.device(), cuda_needs.ipc)
def test_ipc_handle_maps_the_same_memory(device: Device, peer: Peer, seed: int) -> None:
    with device.allocate(MIB) as memory:
        memory.write(pattern.payload(MIB, seed=seed))
        imported_memory = peer.device().open_ipc(cuda.export_handle(memory), length_bytes=MIB)
        imported_memory.check(seed=seed)
        imported_memory.write(seed=seed + 1, offset_bytes=4095, length_bytes=8193)
        pattern.check(memory.read(offset_bytes=4095, length_bytes=8193), seed=seed + 1)
        pattern.check(memory.read(length_bytes=4095), seed=seed)
        imported_memory.close()


@needs(cuda_needs.device(), cuda_needs.ipc)
def test_ipc_handle_opened_by_its_owner_is_refused(device: Device) -> None:
    with device.allocate(MIB) as memory, pytest.raises(ApiError) as error_info:
        cuda.open_handle(device, cuda.export_handle(memory))
    assert error_info.value.operation == "cuIpcOpenMemHandle"


@needs(cuda_needs.device(), cuda_needs.ipc, cuda_needs.vmm)
def test_vmm_memory_has_no_ipc_handle(device: Device) -> None:
    with VmmMemory.create(device, 2 * MIB) as memory, pytest.raises(ApiError) as error_info:
        cuda.export_handle(memory)
    assert (error_info.value.operation, error_info.value.status) == ("cuIpcGetMemHandle", CUDA_ERROR_INVALID_VALUE)


@needs(cuda_needs.device(), cuda_needs.ipc, cuda_needs.dmabuf_export)
def test_memory_of_another_process_cannot_be_exported_again(device: Device, peer: Peer) -> None:
    peer_memory = peer.device().allocate(MIB)
    with (
        cuda.open_handle(device, peer_memory.export_ipc()) as imported_memory,
        pytest.raises(Unsupported) as error_info,
    ):
        imported_memory.export_dmabuf()
    assert error_info.value.status == CUDA_ERROR_INVALID_VALUE
    assert "the process that allocated it" in error_info.value.what_to_do
    peer_memory.close()


@pytest.mark.qualify
@needs(cuda_needs.device(), cuda_needs.vmm)
def test_vmm_descriptors_map_the_same_memory(device: Device, peer: Peer, seed: int) -> None:
    with VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory:
        memory.write(pattern.payload(4 * MIB, seed=seed))
        descriptors = [memory.export_shareable(index) for index in range(memory.chunk_count)]
        try:
            imported_memory = peer.device().import_vmm(descriptors, chunk_bytes=memory.chunk_bytes)
        finally:
            for fd in descriptors:
                os.close(fd)
        imported_memory.check(seed=seed)
        imported_memory.write(seed=seed + 1, offset_bytes=2 * MIB - 5, length_bytes=10)
        pattern.check(memory.read(offset_bytes=2 * MIB - 5, length_bytes=10), seed=seed + 1)
        imported_memory.close()


@NEEDS_DMABUF
@needs(cuda_needs.ipc)
def test_peer_registers_a_received_dmabuf(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    """The peer registers memory of this process, as a storage agent does. Then a NIC writes to the memory."""
    with (
        device.allocate(256 * KIB) as memory,
        memory.export_dmabuf() as dmabuf,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as local_pair,
        nic.register_host(bytearray(pattern.payload(64 * KIB, seed=seed))) as host_region,
    ):
        # The peer registers the dma-buf of the owner with the address that the memory has in the peer.
        imported_memory = peer.device().open_ipc(cuda.export_handle(memory), length_bytes=256 * KIB)
        region = peer.nic.register_dmabuf(
            dmabuf.fd,
            offset_bytes=dmabuf.offset_bytes,
            length_bytes=dmabuf.length_bytes,
            address=imported_memory.address,
        )
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        local_pair.post_write(host_region, region.remote(offset_bytes=77, length_bytes=64 * KIB), work_id=1)
        local_pair.wait(10_000).expect(Status.SUCCESS)
        pattern.check(memory.read(offset_bytes=77, length_bytes=64 * KIB), seed=seed)
        region.close()
        imported_memory.close()

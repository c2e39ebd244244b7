"""Facts about devices that registration and sharing rely on. Each case checks one fact."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair, register_by_route
from support.raw_cuda import RawMemory
from support.sharing import import_in_peer

from gdrkit import cuda, pattern
from gdrkit.buffers import MemoryKind
from gdrkit.cuda import VmmMemory
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import host, needs
from gdrkit.registration import RegionCache, RegistrationRoute
from gdrkit.registration.handle import ShareKind
from gdrkit.registration.share import export_memory
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from types import ModuleType

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic


def check_write_by_dmabuf(memory: DeviceBuffer, nic: Nic, peer: Peer, seed: int) -> None:
    """Let the peer write MIB + 3 bytes at the offset 4097 by RDMA and read them back, and check every byte."""
    with (
        register_by_route(memory, [nic], route=RegistrationRoute.DMABUF) as registration,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        remote_range = registration.remote(nic, offset_bytes=4097, length_bytes=MIB + 3)
        peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(offset_bytes=4097, length_bytes=MIB + 3), seed=seed)
        peer_pair.read(remote_range, seed=seed).completion.expect(Status.SUCCESS)


@NEEDS_DMABUF
def test_malloc_memory_is_written_by_dmabuf(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with device.allocate(2 * MIB) as memory:
        check_write_by_dmabuf(memory, nic, peer, seed)


@NEEDS_DMABUF
@needs(cuda_needs.vmm)
def test_vmm_memory_is_written_by_dmabuf(device: Device, nic: Nic, peer: Peer, seed: int, evidence: Evidence) -> None:
    with VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory:
        evidence["allocation_key"] = memory.allocation_key()
        check_write_by_dmabuf(memory, nic, peer, seed)


@needs(cuda_needs.device(), cuda_needs.ipc)
def test_ipc_share_of_interior_memory_has_its_bytes(device: Device, peer: Peer, seed: int) -> None:
    with device.allocate(MIB) as memory:
        memory.write(pattern.payload(MIB, seed=seed))
        with export_memory(memory, kind=ShareKind.IPC, offset_bytes=65537, length_bytes=70_001) as message:
            peer_memory = import_in_peer(peer.device(), message)
        peer_memory.check(seed=seed, pattern_offset_bytes=65537)
        peer_memory.write(seed=seed + 1)
        pattern.check(memory.read(offset_bytes=65537, length_bytes=70_001), seed=seed + 1)
        pattern.check(memory.read(length_bytes=65537), seed=seed)
        peer_memory.close()


@needs(cuda_needs.device(), cuda_needs.vmm)
def test_vmm_share_across_chunks_has_its_bytes(device: Device, peer: Peer, seed: int) -> None:
    with VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory:
        memory.write(pattern.payload(6 * MIB, seed=seed))
        with export_memory(memory, kind=ShareKind.VMM, offset_bytes=2 * MIB - 5, length_bytes=2 * MIB) as message:
            peer_memory = import_in_peer(peer.device(), message)
        peer_memory.check(seed=seed, pattern_offset_bytes=2 * MIB - 5)
        peer_memory.write(seed=seed + 1, length_bytes=10)
        pattern.check(memory.read(offset_bytes=2 * MIB - 5, length_bytes=10), seed=seed + 1)
        peer_memory.close()


@NEEDS_DMABUF
def test_reused_address_has_a_new_buffer_id_and_key(
    device: Device, nic: Nic, peer: Peer, seed: int, evidence: Evidence
) -> None:
    """A reused address is a miss of the cache, and the old key never accesses the new memory."""
    with (
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
        RawMemory(device, 2 * MIB) as old_allocation,
        cuda.borrow(device, old_allocation.address, length_bytes=2 * MIB) as memory,
    ):
        with cache.lease(memory) as lease:
            old_range = lease.remote(nic, length_bytes=64 * KIB)
            peer_pair.write(old_range, seed=seed).expect(Status.SUCCESS)
        old_buffer_id = memory.buffer_id()
        old_allocation.free()
        with (
            RawMemory(device, 2 * MIB) as new_allocation,
            cuda.borrow(device, new_allocation.address, length_bytes=2 * MIB) as new_memory,
        ):
            assert new_allocation.address == old_allocation.address
            evidence["buffer_ids"] = [old_buffer_id, new_memory.buffer_id()]
            assert new_memory.buffer_id() != old_buffer_id
            new_memory.fill(0x5A)
            misses_before = cache.statistics().misses
            with cache.lease(new_memory) as lease:
                assert cache.statistics().misses == misses_before + 1
                assert lease.remote(nic).rkey != old_range.rkey
                # The old key may still be valid, but it must not access the new memory.
                peer_pair.write(old_range, seed=seed + 1)
                assert new_memory.read() == b"\x5a" * (2 * MIB)


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Return PyTorch. Its CUDA context is created here, before the check for leaked handles of a case begins."""
    torch_module = importlib.import_module("torch")
    torch_module.zeros(1, device="cuda:0")
    torch_module.cuda.synchronize()
    return torch_module


@NEEDS_DMABUF
@needs(host.module("torch"))
def test_wrapped_torch_tensor_is_written_by_dmabuf(
    device: Device, nic: Nic, peer: Peer, seed: int, torch: ModuleType
) -> None:
    tensor = torch.full((3, 1024, 1024), 0xA5, dtype=torch.uint8, device=f"cuda:{device.index}")
    torch.cuda.synchronize()
    with cuda.wrap(tensor, device=device) as memory:
        assert (memory.address, memory.length_bytes, memory.kind) == (tensor.data_ptr(), 3 * MIB, MemoryKind.CUDA)
        check_write_by_dmabuf(memory, nic, peer, seed)
    # The tensor still belongs to torch, and contains the written bytes.
    tensor_bytes = bytes(tensor.flatten()[4097 : 4097 + MIB + 3].cpu().numpy())
    pattern.check(tensor_bytes, seed=seed)
    assert int(tensor[0, 0, 0]) == 0xA5

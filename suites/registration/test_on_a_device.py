"""Facts that registration and sharing need on a real device: one case for each, recorded per machine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import pytest
from support.raw_cuda import RawMemory
from support.reach import DMABUF, joined, registered
from support.sharing import memory_in_peer

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


def written_by_dmabuf(memory: DeviceBuffer, nic: Nic, peer: Peer, seed: int) -> None:
    """Let the peer write a part of the memory by RDMA, and check every byte."""
    with registered(memory, [nic], route=RegistrationRoute.DMABUF) as registration, joined(nic, peer) as theirs:
        remote = registration.remote(nic, offset_bytes=4097, length_bytes=MIB + 3)
        theirs.write(remote, seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(offset_bytes=4097, length_bytes=MIB + 3), seed=seed)
        theirs.read(remote, seed=seed).completion.expect(Status.SUCCESS)


@DMABUF
def test_dmabuf_malloc(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with device.allocate(2 * MIB) as memory:
        written_by_dmabuf(memory, nic, peer, seed)


@DMABUF
@needs(cuda_needs.vmm)
def test_dmabuf_vmm(device: Device, nic: Nic, peer: Peer, seed: int, evidence: Evidence) -> None:
    with VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory:
        evidence["allocation_key"] = memory.allocation_key()
        written_by_dmabuf(memory, nic, peer, seed)


@needs(cuda_needs.device(), cuda_needs.ipc)
def test_ipc_interior(device: Device, peer: Peer, seed: int) -> None:
    with device.allocate(MIB) as whole:
        whole.write(pattern.payload(MIB, seed=seed))
        with export_memory(whole, kind=ShareKind.IPC, offset_bytes=65537, length_bytes=70_001) as message:
            theirs = memory_in_peer(peer.device(), message)
        theirs.check(seed=seed, stream_offset_bytes=65537)
        theirs.write(seed=seed + 1)
        pattern.check(whole.read(offset_bytes=65537, length_bytes=70_001), seed=seed + 1)
        pattern.check(whole.read(length_bytes=65537), seed=seed)
        theirs.close()


@needs(cuda_needs.device(), cuda_needs.vmm)
def test_vmm_export(device: Device, peer: Peer, seed: int) -> None:
    with VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory:
        memory.write(pattern.payload(6 * MIB, seed=seed))
        with export_memory(memory, kind=ShareKind.VMM, offset_bytes=2 * MIB - 5, length_bytes=2 * MIB) as message:
            theirs = memory_in_peer(peer.device(), message)
        theirs.check(seed=seed, stream_offset_bytes=2 * MIB - 5)
        theirs.write(seed=seed + 1, length_bytes=10)
        pattern.check(memory.read(offset_bytes=2 * MIB - 5, length_bytes=10), seed=seed + 1)
        theirs.close()


@DMABUF
def test_buffer_id_reuse(device: Device, nic: Nic, peer: Peer, seed: int, evidence: Evidence) -> None:
    """A reused address is a miss of the cache, and the old key never accesses the new memory."""
    with (
        RegionCache([nic]) as cache,
        joined(nic, peer) as theirs,
        RawMemory(device, 2 * MIB) as first,
        cuda.borrow(device, first.address, length_bytes=2 * MIB) as memory,
    ):
        with cache.lease(memory) as lease:
            stale = lease.remote(nic, length_bytes=64 * KIB)
            theirs.write(stale, seed=seed).expect(Status.SUCCESS)
        old_id = memory.buffer_id()
        first.free()
        with (
            RawMemory(device, 2 * MIB) as again,
            cuda.borrow(device, again.address, length_bytes=2 * MIB) as successor,
        ):
            assert again.address == first.address
            evidence["buffer_ids"] = [old_id, successor.buffer_id()]
            assert successor.buffer_id() != old_id
            successor.fill(0x5A)
            misses = cache.statistics().misses
            with cache.lease(successor) as lease:
                assert cache.statistics().misses == misses + 1
                assert lease.remote(nic).rkey != stale.rkey
                # Whether or not the old key is still valid, it never accesses the new memory.
                theirs.write(stale, seed=seed + 1)
                assert successor.read() == b"\x5a" * (2 * MIB)


@pytest.fixture(scope="module")
def torch() -> ModuleType:
    """Return PyTorch after its start, so that what the CUDA runtime keeps open does not count as a leak of a case."""
    module = importlib.import_module("torch")
    module.zeros(1, device="cuda:0")
    module.cuda.synchronize()
    return module


@DMABUF
@needs(host.module("torch"))
def test_torch_wrap(device: Device, nic: Nic, peer: Peer, seed: int, torch: ModuleType) -> None:
    tensor = torch.full((3, 1024, 1024), 0xA5, dtype=torch.uint8, device=f"cuda:{device.index}")
    torch.cuda.synchronize()
    with cuda.wrap(tensor, device=device) as memory:
        assert (memory.address, memory.length_bytes, memory.kind) == (tensor.data_ptr(), 3 * MIB, MemoryKind.CUDA)
        written_by_dmabuf(memory, nic, peer, seed)
    # The tensor still belongs to torch, and contains the written bytes.
    seen = bytes(tensor.flatten()[4097 : 4097 + MIB + 3].cpu().numpy())
    pattern.check(seen, seed=seed)
    assert int(tensor[0, 0, 0]) == 0xA5

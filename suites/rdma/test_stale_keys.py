"""The key of deregistered memory is refused, and no key accesses the memory of a later owner of the same address."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import MEMORY_KINDS, NEEDS_DMABUF, connect_peer_queue_pair, register_by_route
from support.raw_cuda import RawMemory

from gdrkit import cuda, pattern
from gdrkit.host import HostAllocator
from gdrkit.registration import RegistrationRoute
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.memory_kinds import RdmaMemoryKind

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = pytest.mark.qualify


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
def test_old_key_is_refused_after_deregistration(nic: Nic, peer: Peer, seed: int, memory_kind: RdmaMemoryKind) -> None:
    with memory_kind.memory() as memory, connect_peer_queue_pair(nic, peer) as peer_pair:
        remote_range = memory.remote(length_bytes=4 * KIB)
        peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
        memory.deregister()
        peer_pair.write(remote_range, seed=seed + 1).expect(Status.REM_ACCESS_ERR)
        pattern.check(memory.read(length_bytes=4 * KIB), seed=seed)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
def test_free_by_gdrkit_deregisters_first(nic: Nic, peer: Peer, seed: int, memory_kind: RdmaMemoryKind) -> None:
    allocator = HostAllocator() if memory_kind.device is None else memory_kind.device
    with (
        allocator.allocate(256 * KIB) as memory,
        register_by_route(memory, [nic], route=memory_kind.route) as registration,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        remote_range = registration.remote(nic, length_bytes=4 * KIB)
        memory.close()
        assert registration.closed
        with allocator.allocate(256 * KIB) as successor:
            successor.fill(0x5A)
            peer_pair.write(remote_range, seed=seed).expect(Status.REM_ACCESS_ERR)
            assert successor.read() == b"\x5a" * (256 * KIB)


@NEEDS_DMABUF
def test_old_key_after_a_raw_free_never_accesses_the_new_owner(
    device: Device, nic: Nic, peer: Peer, evidence: Evidence, seed: int
) -> None:
    with (
        RawMemory(device, 2 * MIB) as first_memory,
        cuda.borrow(device, first_memory.address, length_bytes=2 * MIB) as borrowed_memory,
        register_by_route(borrowed_memory, [nic], route=RegistrationRoute.DMABUF) as registration,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        remote_range = registration.remote(nic, length_bytes=64 * KIB)
        peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
        old_allocation_key = borrowed_memory.allocation_key()
        first_memory.free()  # This calls cuMemFree. gdrkit does not notice it, so the region stays registered.
        with RawMemory(device, 2 * MIB) as second_memory:
            # The next allocation gets the same address with another buffer id, as observed on an H200.
            assert second_memory.address == first_memory.address
            with cuda.borrow(device, second_memory.address, length_bytes=2 * MIB) as successor:
                new_allocation_key = successor.allocation_key()
                # An allocation key has (address, length, buffer id) for each allocation.
                evidence["buffer_ids"] = [old_allocation_key[0][2], new_allocation_key[0][2]]
                assert new_allocation_key != old_allocation_key
                successor.fill(0x5A)
                # The region still refers to the pages of the first memory, so these requests succeed.
                peer_pair.write(remote_range, seed=seed + 1).expect(Status.SUCCESS)
                peer_pair.read(remote_range, seed=seed + 1).completion.expect(Status.SUCCESS)
                assert successor.read() == b"\x5a" * (2 * MIB)

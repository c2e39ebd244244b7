"""Regression cases for defects that were found after the GDR review (docs/findings.md, letters a to o).

The cases of the defects d, f, m and o are in test_usrbio_review.py. The case of g is in test_storage_review.py.

A docstring says what the defect was. `nox -s review` restores each defect, and shows that its case then fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair
from support.raw_cuda import allocate_raw, free_raw, remap_chunk
from support.sharing import import_in_peer, receive_message_from_peer

from gdrkit import cuda, handles, pattern
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, Reason, RegistrationFailed, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.registration import GdrManager, RegionCache, register
from gdrkit.registration.gdr_handle import GdrHandle, export_gdr, import_gdr
from gdrkit.registration.handle import ShareKind
from gdrkit.registration.share import export_memory, import_dmabuf
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.buffers import DmabufRange
    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

NEEDS_IPC = needs(cuda_needs.device(), cuda_needs.ipc)
NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA))
# Rules of fault plans: every call of the function in the verbs twin (a library that emulates NICs) fails with the
# errno.
NO_NICS = "ibv_get_device_list call=* errno=ENOSYS"
NO_DMABUF = "ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP"
NO_PEER_MEMORY = "ibv_reg_mr call=* errno=EFAULT"


@NEEDS_DMABUF
def test_region_is_deregistered_before_the_free(device: Device, nic: Nic) -> None:
    """Defect a: memory was freed before its region was deregistered."""
    observations: list[str] = []
    memory = device.allocate(64 * KIB)

    def observe_memory() -> None:
        observations.append("deregistered" if registration.closed else "registered")
        try:
            memory.read(length_bytes=1)
        except ApiError as error:
            observations.append(error.operation)
        else:
            observations.append("readable")

    # The actions before a release run in reverse order. So the action that is added first runs directly before the
    # free.
    memory.before_release(observe_memory)
    registration = register(memory, [nic])
    memory.close()
    assert observations == ["deregistered", "readable"], (
        f"the memory was freed before its deregistration: {observations}"
    )


@NEEDS_DMABUF
def test_borrowed_memories_of_one_pointer_keep_their_keys(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    """Defect b: two borrowed memories of one pointer shared a region.

    After one of them was invalidated, their region was deregistered too early, or it was never deregistered.
    """
    with (
        device.allocate(64 * KIB) as memory,
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        first_memory = cuda.borrow(device, memory.address, length_bytes=64 * KIB)
        with (
            cuda.borrow(device, memory.address, length_bytes=64 * KIB) as second_memory,
            cache.lease(second_memory) as lease,
        ):
            remote_range = lease.remote(nic, length_bytes=KIB)
            cache.lease(first_memory).close()
            cache.invalidate(first_memory.address, length_bytes=64 * KIB)
            first_memory.close()
            status = peer_pair.write(remote_range, seed=seed).status
            assert status is Status.SUCCESS, f"the other memory lost its region: {status.name}"
        # A refused write moves its queue pair to the error state, so this write has a queue pair of its own.
        with connect_peer_queue_pair(nic, peer) as second_peer_pair:
            status = second_peer_pair.write(remote_range, seed=seed + 1).status
        assert status is Status.REM_ACCESS_ERR, f"the region outlived its last lease: {status.name}"
        pattern.check(memory.read(length_bytes=KIB), seed=seed)


@NEEDS_IPC
def test_export_of_interior_memory_keeps_its_offset(device: Device, peer: Peer, seed: int) -> None:
    """Defect c: the importer of an interior pointer got the base of the allocation, which has other bytes."""
    with device.allocate(MIB) as allocation:
        allocation.write(pattern.payload(MIB, seed=seed))
        message = export_memory(allocation, kind=ShareKind.IPC, offset_bytes=4097, length_bytes=64 * KIB)
        imported_memory = import_in_peer(peer.device(), message)
        imported_memory.check(seed=seed, pattern_offset_bytes=4097)
        imported_memory.close()


@NEEDS_IPC
def test_80_byte_handle_of_interior_memory_is_refused(device: Device) -> None:
    """Defect c: gdrkit exported interior memory as an 80-byte handle, which has no field for an offset."""
    with (
        device.allocate(MIB) as allocation,
        cuda.borrow(device, allocation.address + 4096, length_bytes=KIB) as interior_memory,
        pytest.raises(UsageError) as error_info,
    ):
        export_gdr(interior_memory)
    assert "export_memory" in error_info.value.what_to_do


@NEEDS_DMABUF
@needs(software(Api.VERBS), verbs_needs.nic(count_min=2))
def test_memory_is_registered_with_every_nic_or_none(device: Device, nics: tuple[Nic, ...]) -> None:
    """Defect e: a registration with one NIC counted as success, and transfers by the other NICs failed later."""
    # supports_dmabuf() probes each NIC once, by a registration. The fault plan must not count these calls.
    assert all(nic.supports_dmabuf() for nic in nics)
    with device.allocate(64 * KIB) as memory, inject_faults(Api.VERBS, "ibv_reg_dmabuf_mr call=2 errno=ENOMEM"):
        handles_before = handles.live()
        with pytest.raises(ApiError) as error_info:
            register(memory, nics).close()
        assert handles.live() == handles_before
    assert error_info.value.reason is Reason.OUT_OF_MEMORY


@NEEDS_DMABUF
@NEEDS_TWINS
def test_manager_that_cannot_register_is_unavailable() -> None:
    """Defect h: the start reported success although no memory could be registered."""
    with inject_faults(Api.VERBS, NO_DMABUF, NO_PEER_MEMORY), GdrManager() as manager:
        assert not manager.state.available, "the manager is available although no memory can be registered"
        assert manager.state.obstacles
        assert all(gpu.obstacle is not None for gpu in manager.state.gpus)


def get_current_device_index() -> int:
    """Return the index of the current CUDA device of this thread."""
    from cuda.bindings import driver

    status, index = driver.cuCtxGetDevice()
    assert int(status) == 0
    return int(index)


@NEEDS_DMABUF
@needs(cuda_needs.device(count_min=2), cuda_needs.ipc)
def test_calls_keep_the_current_device(devices: tuple[Device, ...], nic: Nic) -> None:
    """Defect i: a call changed the current device of the caller's thread."""
    with devices[1].current():
        with devices[0].allocate(64 * KIB) as memory:
            assert get_current_device_index() == 1, "allocate left another device current"
            memory.fill(1)
            export_memory(memory, kind=ShareKind.DMABUF).close()
            export_memory(memory, kind=ShareKind.IPC).close()
            assert get_current_device_index() == 1, "an export left another device current"
            with RegionCache([nic]) as cache:
                cache.lease(memory).close()
                assert get_current_device_index() == 1, "a lease left another device current"
        assert get_current_device_index() == 1, "a free left another device current"


@NEEDS_DMABUF
def test_cache_evicts_the_least_recently_used_region(device: Device, nic: Nic) -> None:
    """Defect j: the cache evicted an arbitrary region."""
    memories = [device.allocate(64 * KIB) for _ in range(3)]
    with RegionCache([nic], regions_max=2) as cache:
        # When the third memory is leased, the second memory is the least recently used.
        for index in (0, 1, 0, 2):
            cache.lease(memories[index]).close()
        hits_before = cache.statistics().hits
        cache.lease(memories[0]).close()
        assert cache.statistics().hits == hits_before + 1, "the most recently used region was evicted"


@NEEDS_DMABUF
def test_leased_region_is_not_registered_twice(device: Device, nic: Nic) -> None:
    """Defect j: a region that was evicted while in use stayed registered, and its memory was registered again."""
    memories = [device.allocate(64 * KIB) for _ in range(3)]
    with RegionCache([nic], regions_max=1) as cache:
        with cache.lease(memories[0]):
            for memory in memories[1:]:
                cache.lease(memory).close()
            cache.lease(memories[0]).close()
        assert cache.statistics().registrations == 3, "memory in use was registered twice"


@NEEDS_DMABUF
def test_reused_address_gets_a_new_key(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    """Defect k: after a free that bypassed gdrkit, the cache returned the old rkey for new memory at that address."""
    address = allocate_raw(device, 2 * MIB)
    with RegionCache([nic]) as cache, connect_peer_queue_pair(nic, peer) as peer_pair:
        with cuda.borrow(device, address, length_bytes=2 * MIB) as memory, cache.lease(memory) as old_lease:
            stale_range = old_lease.remote(nic, length_bytes=4 * KIB)
        free_raw(device, address)
        new_address = allocate_raw(device, 2 * MIB)
        try:
            assert new_address == address
            with cuda.borrow(device, new_address, length_bytes=2 * MIB) as memory, cache.lease(memory) as lease:
                new_range = lease.remote(nic, length_bytes=4 * KIB)
                assert new_range.rkey != stale_range.rkey, "the cache returned the key of the old memory"
                peer_pair.write(new_range, seed=seed).expect(Status.SUCCESS)
                pattern.check(memory.read(length_bytes=4 * KIB), seed=seed)
        finally:
            free_raw(device, new_address)


@NEEDS_DMABUF
@needs(cuda_needs.vmm)
def test_range_with_a_remapped_chunk_gets_a_new_key(device: Device, nic: Nic) -> None:
    """Defect k in the middle of a range: the cache checked only whether the first chunk was still the same."""
    with VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory, RegionCache([nic]) as cache:
        with cache.lease(memory) as lease:
            stale_range = lease.remote(nic)
        remap_chunk(device, memory.address + 2 * MIB, length_bytes=2 * MIB)
        with cache.lease(memory) as lease:
            assert lease.remote(nic).rkey != stale_range.rkey, "the cache returned the key of the unmapped chunk"


@NEEDS_IPC
@needs(cuda_needs.device(count_min=2))
def test_device_of_a_received_handle_is_checked(devices: tuple[Device, ...], peer: Peer) -> None:
    """Defect l: the device of memory from another process was not checked.

    The handle contains the device number of the owner, which may be wrong in this process. So gdrkit must ask the
    driver which device has the memory.
    """
    peer_memory = peer.device().allocate(64 * KIB)
    for owner_device_index in (0, 1, (1 << 31) - 1):
        handle = GdrHandle(ipc=peer_memory.export_ipc(), length_bytes=64 * KIB, device_index=owner_device_index)
        with import_gdr(devices[0], handle.pack()) as memory:
            assert memory.device.index == 0
        with pytest.raises(UsageError) as error_info:
            import_gdr(devices[1], handle.pack()).close()
        assert error_info.value.reason is Reason.NO_DEVICE
    peer_memory.close()


def register_with_all_nics(manager: GdrManager, dmabuf: DmabufRange) -> None:
    """Register a received dma-buf with every NIC of the manager.

    The property `nics` of an unavailable manager raises RegistrationFailed.
    """
    for nic in manager.nics:
        nic.register_dmabuf(dmabuf).close()


@NEEDS_DMABUF
@NEEDS_TWINS
def test_registration_of_an_import_without_nics_fails(peer: Peer) -> None:
    """Defect n: an importer whose manager was unavailable reported success without a region."""
    with (
        receive_message_from_peer(peer.device().allocate(64 * KIB), ShareKind.DMABUF) as message,
        import_dmabuf(message) as dmabuf,
        inject_faults(Api.VERBS, NO_NICS),
        GdrManager() as manager,
        pytest.raises(RegistrationFailed),
    ):
        register_with_all_nics(manager, dmabuf)

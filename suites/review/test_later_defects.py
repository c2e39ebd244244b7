"""Defects that came to light after the GDR review, as what a user would see; `nox -s review` shows that each case can
fail.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.faults import faults
from support.raw_cuda import raw_allocate, raw_free, remap_chunk
from support.reach import DMABUF, joined
from support.sharing import from_peer, memory_in_peer

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

IPC = needs(cuda_needs.device(), cuda_needs.ipc)
TWINS = needs(software(Api.VERBS), software(Api.CUDA))
NO_NICS = "ibv_get_device_list call=* errno=ENOSYS"
NO_DMABUF = "ibv_reg_dmabuf_mr call=* errno=EOPNOTSUPP"
NO_PEER_MEMORY = "ibv_reg_mr call=* errno=EFAULT"


@DMABUF
def test_the_nic_lets_go_before_the_memory_is_freed(device: Device, nic: Nic) -> None:
    """Defect a: memory was freed first, and deregistered afterwards."""
    seen: list[str] = []
    memory = device.allocate(64 * KIB)

    def look() -> None:
        seen.append("deregistered" if registration.closed else "registered")
        try:
            memory.read(length_bytes=1)
        except ApiError as error:
            seen.append(error.operation)
        else:
            seen.append("still there")

    memory.before_release(look)  # Added first, so it is what runs right before the free.
    registration = register(memory, [nic])
    memory.close()
    assert seen == ["deregistered", "still there"], f"the memory was freed before the NIC let go: {seen}"


@DMABUF
def test_two_wraps_of_one_pointer_do_not_take_each_others_key(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    """Defect b: to invalidate one wrap took the region from the other one, or left it registered for ever."""
    with device.allocate(64 * KIB) as memory, RegionCache([nic]) as cache, joined(nic, peer) as theirs:
        first = cuda.borrow(device, memory.address, length_bytes=64 * KIB)
        with cuda.borrow(device, memory.address, length_bytes=64 * KIB) as second, cache.lease(second) as lease:
            remote = lease.remote(nic, length_bytes=KIB)
            cache.lease(first).close()
            cache.invalidate(first.address, length_bytes=64 * KIB)
            first.close()
            status = theirs.write(remote, seed=seed).status
            assert status is Status.SUCCESS, f"the other wrap lost its region: {status.name}"
        # Another pair of queues, since an error ends one.
        with joined(nic, peer) as again:
            status = again.write(remote, seed=seed + 1).status
        assert status is Status.REM_ACCESS_ERR, f"the region outlived its last lease: {status.name}"
        pattern.check(memory.read(length_bytes=KIB), seed=seed)


@IPC
def test_memory_inside_an_allocation_arrives_at_the_right_byte(device: Device, peer: Peer, seed: int) -> None:
    """Defect c: the importer of an interior pointer got the base, and so other bytes."""
    with device.allocate(MIB) as whole:
        whole.write(pattern.payload(MIB, seed=seed))
        message = export_memory(whole, kind=ShareKind.IPC, offset_bytes=4097, length_bytes=64 * KIB)
        theirs = memory_in_peer(peer.device(), message)
        theirs.check(seed=seed, stream_offset_bytes=4097)
        theirs.close()


@IPC
def test_a_handle_without_an_offset_is_not_made_for_memory_inside_an_allocation(device: Device) -> None:
    """Defect c: the 80-byte handle has no room for the offset, and was made all the same."""
    with (
        device.allocate(MIB) as whole,
        cuda.borrow(device, whole.address + 4096, length_bytes=KIB) as part,
        pytest.raises(UsageError) as raised,
    ):
        export_gdr(part)
    assert "export_memory" in raised.value.what_to_do


@DMABUF
@needs(software(Api.VERBS), verbs_needs.nic(count_min=2))
def test_memory_is_registered_with_every_nic_or_with_none(device: Device, nics: tuple[Nic, ...]) -> None:
    """Defect e: one NIC was enough for success, and transfers by the others failed later."""
    assert all(nic.supports_dmabuf() for nic in nics)
    with device.allocate(64 * KIB) as memory, faults(Api.VERBS, "ibv_reg_dmabuf_mr call=2 errno=ENOMEM"):
        before = handles.live()
        with pytest.raises(ApiError) as raised:
            register(memory, nics).close()
        assert handles.live() == before
    assert raised.value.reason is Reason.OUT_OF_MEMORY


@DMABUF
@TWINS
def test_available_is_said_only_where_a_region_can_be_had() -> None:
    """Defect h: the start said success where nothing could be registered."""
    with faults(Api.VERBS, NO_DMABUF, NO_PEER_MEMORY), GdrManager() as manager:
        assert not manager.state.available, "it says that it is available, and nothing can be registered"
        assert manager.state.obstacles
        assert all(gpu.obstacle is not None for gpu in manager.state.gpus)


def current_device() -> int:
    from cuda.bindings import driver

    result, number = driver.cuCtxGetDevice()
    assert int(result) == 0
    return int(number)


@DMABUF
@needs(cuda_needs.device(count_min=2), cuda_needs.ipc)
def test_no_call_leaves_another_device_current(devices: tuple[Device, ...], nic: Nic) -> None:
    """Defect i: a call changed the current device of the caller's thread."""
    with devices[1].current():
        with devices[0].allocate(64 * KIB) as memory:
            assert current_device() == 1, "allocate left another device current"
            memory.fill(1)
            export_memory(memory, kind=ShareKind.DMABUF).close()
            export_memory(memory, kind=ShareKind.IPC).close()
            assert current_device() == 1, "an export left another device current"
            with RegionCache([nic]) as cache:
                cache.lease(memory).close()
                assert current_device() == 1, "a lease left another device current"
        assert current_device() == 1, "a free left another device current"


@DMABUF
def test_the_cache_forgets_what_was_used_least_recently(device: Device, nic: Nic) -> None:
    """Defect j: the cache threw out an arbitrary region."""
    memories = [device.allocate(64 * KIB) for _ in range(3)]
    with RegionCache([nic], regions_max=2) as cache:
        for index in (0, 1, 0, 2):  # The second was used least recently when the third came.
            cache.lease(memories[index]).close()
        hits = cache.statistics().hits
        cache.lease(memories[0]).close()
        assert cache.statistics().hits == hits + 1, "what was used last was thrown out"


@DMABUF
def test_a_region_that_is_in_use_is_not_registered_a_second_time(device: Device, nic: Nic) -> None:
    """Defect j: a region that was thrown out while in use stayed registered, and was registered again."""
    memories = [device.allocate(64 * KIB) for _ in range(3)]
    with RegionCache([nic], regions_max=1) as cache:
        with cache.lease(memories[0]):
            for memory in memories[1:]:
                cache.lease(memory).close()
            cache.lease(memories[0]).close()
        assert cache.statistics().registrations == 3, "memory in use was registered a second time"


@DMABUF
def test_an_address_that_comes_back_is_another_memory(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    """Defect k: after a free that nobody told of, the cache gave the old key for the new memory."""
    address = raw_allocate(device, 2 * MIB)
    with RegionCache([nic]) as cache, joined(nic, peer) as theirs:
        with cuda.borrow(device, address, length_bytes=2 * MIB) as memory, cache.lease(memory) as old:
            stale = old.remote(nic, length_bytes=4 * KIB)
        raw_free(device, address)
        again = raw_allocate(device, 2 * MIB)
        try:
            assert again == address
            with cuda.borrow(device, again, length_bytes=2 * MIB) as memory, cache.lease(memory) as lease:
                fresh = lease.remote(nic, length_bytes=4 * KIB)
                assert fresh.rkey != stale.rkey, "the key of the old memory was given for the new one"
                theirs.write(fresh, seed=seed).expect(Status.SUCCESS)
                pattern.check(memory.read(length_bytes=4 * KIB), seed=seed)
        finally:
            raw_free(device, again)


@DMABUF
@needs(cuda_needs.vmm)
def test_a_chunk_that_was_remapped_under_the_range_is_another_memory(device: Device, nic: Nic) -> None:
    """Defect k, in the middle of a range: only its first chunk was looked at."""
    with VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory, RegionCache([nic]) as cache:
        with cache.lease(memory) as lease:
            stale = lease.remote(nic)
        remap_chunk(device, memory.address + 2 * MIB, length_bytes=2 * MIB)
        with cache.lease(memory) as lease:
            assert lease.remote(nic).rkey != stale.rkey, "the key of the chunk before was given"


@IPC
def test_the_device_number_of_a_stranger_is_checked(device: Device, peer: Peer) -> None:
    """Defect l: the device number of a handle from another process was taken as it came."""
    theirs = peer.device().allocate(64 * KIB)
    right = GdrHandle(ipc=theirs.export_ipc(), length_bytes=64 * KIB, device_index=0)
    for index in (cuda.device_count(), (1 << 31) - 1):
        with pytest.raises(UsageError) as raised:
            import_gdr(device, replace(right, device_index=index).pack()).close()
        assert raised.value.reason is Reason.NO_DEVICE
    theirs.close()


def register_with_all(manager: GdrManager, dmabuf: DmabufRange) -> None:
    for nic in manager.nics:
        nic.register_dmabuf(dmabuf).close()


@DMABUF
@TWINS
def test_an_importer_without_nics_fails_and_does_not_register_with_none(peer: Peer) -> None:
    """Defect n: an importer whose manager was unavailable said success, and had no region."""
    with (
        from_peer(peer.device().allocate(64 * KIB), ShareKind.DMABUF) as message,
        import_dmabuf(message) as dmabuf,
        faults(Api.VERBS, NO_NICS),
        GdrManager() as manager,
        pytest.raises(RegistrationFailed),
    ):
        register_with_all(manager, dmabuf)

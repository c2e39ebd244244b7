"""Gaudi memory with all parts of gdrkit that use device memory: copies, pools, cache, queries and peer processes."""

from __future__ import annotations

import dataclasses
import errno
import os
from typing import TYPE_CHECKING, Any

import pytest
from support.faults import inject_faults
from support.memory_kinds import connect_peer_queue_pair

from gdrkit import pattern
from gdrkit.buffers import DeviceBuffer, MemoryKind
from gdrkit.errors import (
    Api,
    ApiError,
    ClosedResource,
    Reason,
    RegistrationFailed,
    Unsupported,
    UsageError,
)
from gdrkit.gaudi import Device, DmabufPool, HostMapping, device_count, list_devices
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import BufferPool, RegionCache, RegistrationRoute, ShareKind, export_memory, register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

NEEDS_GAUDI = needs(gaudi_needs.device())
NEEDS_GAUDI_AND_NIC = needs(gaudi_needs.device(), verbs.nic(), verbs.dmabuf_region)


@NEEDS_GAUDI
def test_device_opens_by_number_bus_id_and_module() -> None:
    for device_info in list_devices():
        all_open_arguments: list[dict[str, Any]] = [
            {"number": device_info.number},
            {"pci_bus_id": device_info.pci_bus_id},
            {"module_id": device_info.module_id},
        ]
        for open_arguments in all_open_arguments:
            with Device(**open_arguments) as device:
                assert (device.pci_bus_id, device.module_id) == (device_info.pci_bus_id, device_info.module_id)
                assert device.generation is device_info.generation


@NEEDS_GAUDI
def test_open_of_a_missing_device_is_refused() -> None:
    with pytest.raises(UsageError) as error_info:
        Device(device_count())
    assert error_info.value.reason is Reason.NO_DEVICE
    with pytest.raises(UsageError) as error_info:
        Device(module_id=4711)
    assert error_info.value.reason is Reason.NO_DEVICE
    with pytest.raises(ApiError) as second_error_info:
        Device(pci_bus_id="ffff:ff:1f.7")
    assert second_error_info.value.errno == errno.EINVAL
    with pytest.raises(UsageError):
        Device(0, module_id=0)


@NEEDS_GAUDI
def test_memory_implements_device_buffer(gaudi: Device) -> None:
    with gaudi.allocate(5 * KIB) as memory, gaudi.pool(MIB) as pool, pool.allocate(100) as part:
        assert isinstance(memory, DeviceBuffer)
        assert isinstance(part, DeviceBuffer)
        assert memory.kind is part.kind is MemoryKind.GAUDI


@NEEDS_GAUDI
def test_copies_transfer_every_byte(gaudi: Device, seed: int) -> None:
    data = pattern.payload(2 * MIB + 4097, seed=seed)
    with gaudi.allocate(len(data) + 1) as memory:
        memory.write(data, offset_bytes=1)
        assert memory.read(offset_bytes=1) == data
        assert memory.read(offset_bytes=MIB + 1, length_bytes=3) == data[MIB : MIB + 3]
        with pytest.raises(UsageError):
            memory.write(b"12", offset_bytes=len(data))


@NEEDS_GAUDI
def test_closed_memory_refuses_use_and_closes_twice(gaudi: Device) -> None:
    memory = gaudi.allocate(100)
    memory.close()
    memory.close()
    for call in (memory.read, memory.export_dmabuf, memory.allocation_key):
        with pytest.raises(ClosedResource):
            call()
    with pytest.raises(UsageError):
        gaudi.allocate(0)


@NEEDS_GAUDI
def test_device_close_closes_its_objects() -> None:
    device = Device(0)
    memory, pool = device.allocate(100), device.pool(MIB)
    part, mapping = pool.allocate(100), device.map_host(bytearray(100))
    part.write(b"there")
    device.close()
    device.close()
    assert memory.closed
    assert part.closed
    assert pool.closed
    assert mapping.closed
    for call in (lambda: device.allocate(100), lambda: device.map_host(bytearray(1)), lambda: device.pool(1)):
        with pytest.raises(ClosedResource):
            call()


@needs(gaudi_needs.device(), gaudi_needs.mapped_memory, software("hlthunk"))
@pytest.mark.parametrize("function_name", ["hlthunk_memory_unmap", "hlthunk_device_memory_free"])
def test_failed_release_continues_at_the_failed_step(gaudi: Device, function_name: str) -> None:
    memory = gaudi.allocate(100)
    with inject_faults(Api.HLTHUNK, f"{function_name} call=1 errno=EBUSY"), pytest.raises(ApiError) as error_info:
        memory.close()
    assert (error_info.value.operation, error_info.value.errno) == (function_name, errno.EBUSY)
    memory.close()


@needs(gaudi_needs.device(), gaudi_needs.mapped_memory, software("hlthunk"))
@pytest.mark.parametrize(
    ("function_name", "status_name", "reason"),
    [
        ("hlthunk_device_memory_alloc", "ENOMEM", Reason.OUT_OF_MEMORY),
        ("hlthunk_device_memory_map", "ENOMEM", Reason.OUT_OF_MEMORY),
        ("hlthunk_device_memory_alloc", "EBUSY", Reason.BUSY),
    ],
)
def test_failed_allocation_leaves_nothing(gaudi: Device, function_name: str, status_name: str, reason: Reason) -> None:
    with (
        inject_faults(Api.HLTHUNK, f"{function_name} call=1 errno={status_name}"),
        pytest.raises(ApiError) as error_info,
    ):
        gaudi.allocate(100)
    assert (error_info.value.api, error_info.value.operation, error_info.value.reason) == (
        Api.HLTHUNK,
        function_name,
        reason,
    )
    assert error_info.value.status_name == status_name


@needs(gaudi_needs.device(), software("hlthunk"))
def test_refused_copy_is_an_error(gaudi: Device) -> None:
    with gaudi.allocate(100) as memory:
        with inject_faults(Api.HLTHUNK, "hlthunk_wait_for_cs call=1 errno=EIO"), pytest.raises(ApiError) as error_info:
            memory.write(b"data")
        assert (error_info.value.operation, error_info.value.errno) == ("hlthunk_wait_for_cs", errno.EIO)


@needs(gaudi_needs.device(), software("hlthunk"))
def test_memory_stays_mapped_during_a_timed_out_copy(gaudi: Device) -> None:
    # A timeout in the caller does not stop the copy of the device. If gdrkit unmapped the memory, the device would
    # access unmapped memory. The case repeats the copy, because the software twin (a library that emulates the
    # hardware) may complete the copy before the close.
    for _ in range(50):
        with (
            gaudi.allocate(100) as memory,
            inject_faults(Api.HLTHUNK, "hlthunk_wait_for_cs call=1 errno=ETIMEDOUT"),
            pytest.raises(ApiError),
        ):
            memory.write(b"data")
    with gaudi.allocate(100) as memory:
        memory.write(b"more")
        assert memory.read(length_bytes=4) == b"more"


@needs(gaudi_needs.device(), gaudi_needs.mapped_memory, software("hlthunk"))
def test_lost_device_can_be_closed_with_its_memory() -> None:
    with Device(0) as device:
        memory, pool, mapping = device.allocate(100), device.pool(MIB), device.map_host(bytearray(100))
        # A copy to an unmapped address is a page fault of the device. The driver resets the device, and the open
        # device becomes unusable.
        with pytest.raises(ApiError) as error_info:
            device.copies.write(memory.address + (1 << 40), memoryview(b"nowhere"))
        assert error_info.value.errno == errno.EIO
        with pytest.raises(ApiError) as second_error_info:
            device.allocate(100)
        assert second_error_info.value.errno == errno.EBUSY
        mapping.close()
    assert memory.closed
    assert pool.closed
    Device(0).close()


@NEEDS_GAUDI_AND_NIC
def test_cache_registers_an_allocation_once(gaudi: Device, nic: Nic) -> None:
    with gaudi.pool(MIB) as pool, RegionCache([nic]) as cache:
        with (
            pool.allocate(1000) as first_part,
            pool.allocate(70_000) as second_part,
            cache.lease(first_part) as first_lease,
            cache.lease(second_part, offset_bytes=5) as second_lease,
        ):
            assert first_lease.remote(nic).rkey == second_lease.remote(nic).rkey
            assert second_lease.remote(nic).address == second_part.address + 5
        assert cache.statistics().registrations == 1


@NEEDS_GAUDI
def test_reused_address_has_another_allocation_key(gaudi: Device) -> None:
    with gaudi.allocate(64 * KIB) as old_memory:
        old_key, is_present = old_memory.allocation_key(), old_memory.make_existence_check(old_memory.allocation_key())
        assert is_present()
    with gaudi.allocate(64 * KIB) as new_memory:
        assert new_memory.address == old_memory.address
        assert new_memory.allocation_key() != old_key
        assert not is_present()


@NEEDS_GAUDI_AND_NIC
def test_cache_misses_new_memory_at_a_reused_address(gaudi: Device, nic: Nic) -> None:
    with RegionCache([nic]) as cache:
        rkeys, addresses = [], []
        for _ in range(2):
            with gaudi.allocate(64 * KIB) as memory:
                with cache.lease(memory) as lease:
                    rkeys.append(lease.remote(nic).rkey)
                addresses.append(memory.address)
        assert addresses[0] == addresses[1]
        assert rkeys[0] != rkeys[1]
        assert cache.statistics().hits == 0


@NEEDS_GAUDI_AND_NIC
def test_buffer_pool_uses_gaudi_memory(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with BufferPool(gaudi, [nic], buffer_bytes=5000, count=3) as pool, pool.allocate() as buffer:
        with connect_peer_queue_pair(nic, peer) as peer_pair:
            peer_pair.write(buffer.remote(nic), seed=seed).expect(Status.SUCCESS)
        pattern.check(buffer.read(), seed=seed)


@NEEDS_GAUDI
def test_pool_is_exported_as_one_dmabuf(gaudi: Device) -> None:
    with (
        gaudi.pool(MIB) as pool,
        pool.allocate(5000) as first_part,
        pool.allocate(5000) as second_part,
        first_part.export_dmabuf() as first_dmabuf,
        second_part.export_dmabuf(offset_bytes=7) as second_dmabuf,
    ):
        assert os.fstat(first_dmabuf.fd).st_ino == os.fstat(second_dmabuf.fd).st_ino
        assert first_dmabuf.fd != second_dmabuf.fd
        # The pool rounds the 5000 bytes of the first part up to 8192.
        assert (first_dmabuf.offset_bytes, second_dmabuf.offset_bytes) == (0, 8192 + 7)
        assert second_dmabuf.address - second_dmabuf.offset_bytes == pool.address
        assert os.lseek(second_dmabuf.fd, 0, os.SEEK_END) == pool.length_bytes


@NEEDS_GAUDI
def test_full_pool_reports_its_largest_free_part(gaudi: Device) -> None:
    with gaudi.pool(64 * KIB) as pool:
        allocations = [pool.allocate(16 * KIB) for _ in range(4)]
        with pytest.raises(ApiError) as error_info:
            pool.allocate(1)
        assert (error_info.value.errno, error_info.value.reason) == (errno.ENOMEM, Reason.OUT_OF_MEMORY)
        allocations[1].close()
        allocations[2].close()
        with pool.allocate(32 * KIB) as joined_part:
            assert joined_part.address == pool.address + 16 * KIB


@NEEDS_GAUDI_AND_NIC
def test_peer_writes_into_a_part_of_a_pool(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with gaudi.pool(MIB) as pool, pool.allocate(5000) as previous_part, pool.allocate(9001) as memory:
        previous_part.write(b"\x5a" * 5000)
        with register(memory, [nic]) as registration, connect_peer_queue_pair(nic, peer) as peer_pair:
            peer_pair.write(registration.remote(nic), seed=seed).expect(Status.SUCCESS)
            # The region covers only the part, although the dma-buf covers the whole pool.
            range_before_region = dataclasses.replace(
                registration.remote(nic), address=previous_part.address, length_bytes=1
            )
            assert peer_pair.write(range_before_region, seed=seed).status is Status.REM_ACCESS_ERR
        pattern.check(memory.read(), seed=seed)
        assert previous_part.read() == b"\x5a" * 5000


@NEEDS_GAUDI
def test_address_query_returns_the_fields_of_ucx(gaudi: Device) -> None:
    """UCX queries memory for the same fields: kind, device, base address, length, dma-buf and its offset."""
    with gaudi.allocate(100_000) as memory, gaudi.pool(MIB) as pool, gaudi.map_host(bytearray(9000)) as mapping:
        with gaudi.query(memory.address + 4097, length_bytes=10) as query_result:
            assert (query_result.kind, query_result.device, query_result.base) == (
                MemoryKind.GAUDI,
                gaudi,
                memory.address,
            )
            assert query_result.length_bytes >= 100_000
            assert query_result.dmabuf is not None
            assert (query_result.dmabuf.offset_bytes, query_result.dmabuf.address) == (4097, memory.address + 4097)
        with gaudi.query(pool.address + 128) as query_result:
            assert query_result.dmabuf is not None
            assert (query_result.base, query_result.length_bytes, query_result.dmabuf.offset_bytes) == (
                pool.address,
                MIB,
                128,
            )
        with gaudi.query(mapping.address + 1) as query_result:
            assert (query_result.kind, query_result.base, query_result.dmabuf) == (
                MemoryKind.HOST,
                mapping.address,
                None,
            )
        assert isinstance(pool, DmabufPool)
        assert isinstance(mapping, HostMapping)
        for address, length_bytes in ((memory.address - 1, 1), (memory.address, 1 << 30), (0, 1)):
            with pytest.raises(UsageError) as error_info:
                gaudi.query(address, length_bytes=length_bytes)
            assert error_info.value.reason is Reason.NOT_DEVICE_MEMORY


@NEEDS_GAUDI_AND_NIC
def test_gaudi_memory_is_registered_only_by_dmabuf(gaudi: Device, nic: Nic) -> None:
    assert RegistrationRoute.methods_for(MemoryKind.GAUDI) == (RegistrationRoute.DMABUF,)
    with gaudi.allocate(4096) as memory, pytest.raises(RegistrationFailed) as error_info:
        register(memory, [nic], route=RegistrationRoute.PEER_MEMORY)
    assert [cause.reason for cause in error_info.value.causes] == [Reason.PEER_MEMORY_UNSUPPORTED]


@NEEDS_GAUDI
@pytest.mark.parametrize("kind", list(ShareKind))
def test_gaudi_memory_has_no_share_handle(gaudi: Device, kind: ShareKind) -> None:
    with gaudi.allocate(4096) as memory, pytest.raises(Unsupported) as error_info:
        export_memory(memory, kind=kind)
    assert error_info.value.errno == errno.ENOTSUP


@NEEDS_GAUDI_AND_NIC
def test_peer_registers_a_part_by_its_descriptor(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        gaudi.allocate(256 * KIB) as memory,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as queue_pair,
        nic.register_host(bytearray(pattern.payload(8 * KIB, seed=seed))) as host_region,
    ):
        memory.write(bytes(256 * KIB))
        # The peer has no Gaudi and no valid pointer to the memory. The descriptor is enough.
        with memory.export_dmabuf(offset_bytes=4097, length_bytes=9 * KIB) as part_dmabuf:
            region = peer.nic.register_dmabuf(
                part_dmabuf.fd,
                offset_bytes=part_dmabuf.offset_bytes,
                length_bytes=part_dmabuf.length_bytes,
                address=part_dmabuf.address,
            )
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(queue_pair)
        queue_pair.post_write(host_region, region.remote(offset_bytes=10, length_bytes=8 * KIB), work_id=1)
        queue_pair.wait(10_000).expect(Status.SUCCESS)
        pattern.check(memory.read(offset_bytes=4107, length_bytes=8 * KIB), seed=seed)
        assert memory.read(length_bytes=4107) == bytes(4107)
        region.close()

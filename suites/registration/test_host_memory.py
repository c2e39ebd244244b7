"""Host memory that gdrkit has mapped is registered and cached like device memory. Other host memory is not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair

from gdrkit import handles, pattern
from gdrkit.buffers import Allocator, DeviceBuffer, MemoryKind
from gdrkit.errors import ClosedResource, Reason, RegistrationFailed, Unsupported, UsageError
from gdrkit.harness.needs import needs, verbs
from gdrkit.host import HostAllocator, HostMemory, MappedFile
from gdrkit.registration import RegionCache, RegistrationRoute, register
from gdrkit.units import HOST_PAGE_BYTES, KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

NEEDS_NIC = needs(verbs.nic())
LENGTH_BYTES = 64 * KIB


def test_host_memory_has_the_interface_of_device_memory() -> None:
    with HostMemory(5000) as memory:
        assert isinstance(memory, DeviceBuffer)
        assert isinstance(HostAllocator(), Allocator)
        assert (memory.kind, memory.length_bytes, memory.owned) == (MemoryKind.HOST, 5000, True)
        assert memory.address % HOST_PAGE_BYTES == 0
        assert memory.read() == bytes(5000)
        memory.write(b"abc", offset_bytes=4997)
        memory.fill(0x5A, offset_bytes=1, length_bytes=2)
        assert memory.read(length_bytes=4) == b"\0\x5a\x5a\0"
        assert memory.read(offset_bytes=4997) == b"abc"
        with memory.allocation() as allocation:
            assert (allocation.address, allocation.length_bytes, allocation.owned) == (
                memory.address,
                2 * HOST_PAGE_BYTES,
                False,
            )
            assert allocation.allocation_key() == memory.allocation_key()


def test_new_mapping_at_the_same_address_is_a_miss() -> None:
    mapping_ids, addresses = set(), set()
    for _ in range(20):
        with HostMemory(LENGTH_BYTES) as memory:
            allocation_key = memory.allocation_key()
            assert memory.make_existence_check(allocation_key)()
            ((base_address, length_bytes, mapping_id),) = allocation_key
            assert (base_address, length_bytes) == (memory.address, LENGTH_BYTES)
            mapping_ids.add(mapping_id)
            addresses.add(base_address)
        assert not memory.make_existence_check(allocation_key)()
    assert len(mapping_ids) == 20
    # The kernel reuses the address that was just unmapped, so the address alone does not identify the memory.
    assert len(addresses) < 20


@NEEDS_NIC
def test_old_key_never_accesses_the_next_mapping(nic: Nic, peer: Peer, seed: int) -> None:
    with RegionCache([nic]) as cache, connect_peer_queue_pair(nic, peer) as peer_pair:
        with HostMemory(LENGTH_BYTES) as memory:
            with cache.lease(memory) as lease:
                assert lease.route is RegistrationRoute.HOST
                old_range = lease.remote(nic)
                peer_pair.write(old_range, seed=seed).expect(Status.SUCCESS)
            pattern.check(memory.read(), seed=seed)
            old_address = memory.address
        with HostMemory(LENGTH_BYTES) as new_memory:
            assert new_memory.address == old_address
            with cache.lease(new_memory) as lease:
                assert lease.remote(nic).rkey != old_range.rkey
                assert (cache.statistics().hits, cache.statistics().misses) == (0, 2)
            peer_pair.write(old_range, seed=seed + 1).expect(Status.REM_ACCESS_ERR)
            assert new_memory.read() == bytes(LENGTH_BYTES)


@NEEDS_NIC
def test_free_deregisters_host_memory_from_all_nics(nics: tuple[Nic, ...]) -> None:
    handles_before = handles.live()
    memory = HostMemory(LENGTH_BYTES)
    registration = register(memory, nics)
    assert (registration.route, registration.nics, registration.refusals) == (RegistrationRoute.HOST, nics, ())
    assert {registration.region(nic).remote_address for nic in nics} == {memory.address}
    memory.close()
    assert registration.closed
    assert handles.live() == handles_before


@NEEDS_NIC
def test_mapped_file_is_registered_and_shared(nic: Nic, peer: Peer, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "shared"
    path.write_bytes(bytes(LENGTH_BYTES + 1))
    with path.open("r+b") as file, MappedFile(file.fileno(), length_bytes=LENGTH_BYTES + 1) as memory:
        assert isinstance(memory, DeviceBuffer)
        with register(memory, [nic]) as registration, connect_peer_queue_pair(nic, peer) as peer_pair:
            assert registration.route is RegistrationRoute.HOST
            peer_pair.write(registration.remote(nic), seed=seed).expect(Status.SUCCESS)
        pattern.check(path.read_bytes(), seed=seed)
        memory.write(b"end", offset_bytes=LENGTH_BYTES - 2)
        assert path.read_bytes().endswith(b"end")
        assert len(path.read_bytes()) == LENGTH_BYTES + 1


def test_mapping_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").write_bytes(b"x")
    handles_before = handles.live()
    with (tmp_path / "shared").open("r+b") as file:
        for length_bytes in (0, -1, 2):
            with pytest.raises(UsageError) as error_info:
                MappedFile(file.fileno(), length_bytes=length_bytes)
            assert error_info.value.reason is Reason.BAD_ARGUMENT
    assert handles.live() == handles_before


@NEEDS_NIC
def test_borrowed_host_memory_stays_mapped(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory:
        allocation = memory.allocation()
        registration = register(allocation, [nic])
        with pytest.raises(UsageError) as error_info:
            memory.close()
        assert error_info.value.reason is Reason.BUSY
        assert not memory.closed
        assert not registration.closed
        allocation.close()
        assert registration.closed
    with pytest.raises(ClosedResource):
        memory.allocation()


@NEEDS_NIC
def test_host_memory_has_neither_peer_memory_nor_dmabuf(nic: Nic) -> None:
    with HostMemory(LENGTH_BYTES) as memory:
        handles_before = handles.live()
        with pytest.raises(UsageError):
            register(memory, [nic], route=RegistrationRoute.PEER_MEMORY)
        with pytest.raises(RegistrationFailed) as error_info:
            register(memory, [nic], route=RegistrationRoute.DMABUF)
        # register() probes the NIC before it exports the memory, so the cause may be the NIC or the export.
        (cause,) = error_info.value.causes
        assert cause.reason in {Reason.DMABUF_EXPORT_UNSUPPORTED, Reason.DMABUF_REGION_UNSUPPORTED}
        with pytest.raises(Unsupported):
            memory.export_dmabuf()
        for address, length_bytes in ((0, LENGTH_BYTES), (memory.address, 0)):
            with pytest.raises(UsageError):
                nic.register_pages(address, length_bytes=length_bytes)
        assert handles.live() == handles_before


@NEEDS_DMABUF
def test_device_memory_is_not_registered_as_host_memory(device: Device, nic: Nic) -> None:
    with device.allocate(LENGTH_BYTES) as memory:
        register(memory, [nic]).close()
        with pytest.raises(UsageError):
            register(memory, [nic], route=RegistrationRoute.HOST)


def test_invalid_host_memory_arguments_are_refused() -> None:
    handles_before = handles.live()
    for length_bytes in (0, -1, 1 << 62, 1 << 80):
        with pytest.raises(UsageError):
            HostMemory(length_bytes)
    assert handles.live() == handles_before
    with HostMemory(10) as memory:
        for invalid_call in (
            lambda: memory.read(offset_bytes=-1),
            lambda: memory.read(length_bytes=11),
            lambda: memory.write(b"ab", offset_bytes=9),
            lambda: memory.write(memoryview(b"abcd")[::2]),
            lambda: memory.fill(256),
            lambda: memory.fill(1, offset_bytes=11, length_bytes=0),
        ):
            with pytest.raises(UsageError):
                invalid_call()
        assert memory.read() == bytes(10)
    calls_on_closed_memory: tuple[Callable[[], object], ...] = (memory.read, memory.allocation_key, memory.allocation)
    for call in (*calls_on_closed_memory, memory.export_dmabuf):
        with pytest.raises(ClosedResource):
            call()
    memory.close()

"""Hits, misses, evictions and invalidations of a region cache."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts
from support.memory_kinds import NEEDS_DMABUF, connect_peer_queue_pair, find_registration_function
from support.raw_cuda import RawMemory, remap_chunk

from gdrkit import cuda, handles, pattern
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import RegionCache
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.memory_kinds import AnyAllocator

    from gdrkit.cuda import Device, DeviceMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.host import HostMemory
    from gdrkit.verbs import Nic

# The need of cases that read the call counters of the libibverbs twin (a library that emulates NICs), or make its calls
# fail.
NEEDS_VERBS_TWIN = needs(software(Api.VERBS))


def test_second_lookup_is_a_hit_and_its_key_is_valid(allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        allocator.allocate(256 * KIB) as memory,
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        with cache.lease(memory) as first_lease:
            assert first_lease.length_bytes == memory.length_bytes
        with cache.lease(memory) as second_lease:
            peer_pair.write(second_lease.remote(nic), seed=seed).expect(Status.SUCCESS)
        assert (cache.statistics().hits, cache.statistics().misses, cache.statistics().regions) == (1, 1, 1)
        pattern.check(memory.read(), seed=seed)
        memory.close()
        assert cache.statistics().registered_bytes == 0


def test_interior_range_is_a_hit_with_the_right_address(
    allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int
) -> None:
    with (
        allocator.allocate(256 * KIB) as memory,
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        memory.fill(0xA5)
        cache.lease(memory).close()
        with cache.lease(memory, offset_bytes=4097, length_bytes=1000) as lease:
            remote_range = lease.remote(nic)
            assert (remote_range.length_bytes, lease.address) == (1000, memory.address + 4097)
            peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
            with pytest.raises(UsageError):
                lease.remote(nic, offset_bytes=999, length_bytes=2)
        assert cache.statistics().registrations == 1
        assert memory.read(length_bytes=4097) == b"\xa5" * 4097
        pattern.check(memory.read(offset_bytes=4097, length_bytes=1000), seed=seed)
        assert memory.read(offset_bytes=5097, length_bytes=3) == b"\xa5" * 3
        memory.close()


@NEEDS_DMABUF
def test_other_part_of_a_registered_allocation_is_a_hit(device: Device, nic: Nic) -> None:
    # A caching allocator places its tensors like this: several borrowed parts in the middle of one allocation.
    with device.allocate(MIB) as memory, RegionCache([nic]) as cache:
        with (
            cuda.borrow(device, memory.address + 300 * KIB, length_bytes=KIB) as first_part,
            cuda.borrow(device, memory.address + 700 * KIB, length_bytes=KIB) as second_part,
        ):
            cache.lease(first_part).close()
            cache.lease(second_part).close()
        cache.lease(memory).close()
        statistics = cache.statistics()
        assert (statistics.registrations, statistics.hits, statistics.registered_bytes) == (1, 2, MIB)


@NEEDS_VERBS_TWIN
def test_hit_makes_no_verbs_call(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(256 * KIB) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        call_counts_before = read_call_counts(Api.VERBS)
        for offset_bytes in range(0, 256 * KIB, 4 * KIB):
            with cache.lease(memory, offset_bytes=offset_bytes) as lease:
                assert lease.remote(nic).length_bytes == 256 * KIB - offset_bytes
        assert read_call_counts(Api.VERBS) == call_counts_before


@NEEDS_DMABUF
def test_changed_buffer_id_at_the_same_address_is_a_miss(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        RawMemory(device, 2 * MIB) as old_allocation,
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        with (
            cuda.borrow(device, old_allocation.address, length_bytes=2 * MIB) as memory,
            cache.lease(memory) as old_lease,
        ):
            old_range = old_lease.remote(nic, length_bytes=4 * KIB)
        old_allocation.free()
        with RawMemory(device, 2 * MIB) as new_allocation:
            assert new_allocation.address == old_allocation.address
            with cuda.borrow(device, new_allocation.address, length_bytes=2 * MIB) as memory:
                memory.fill(0x5A)
                with cache.lease(memory) as lease:
                    statistics = cache.statistics()
                    assert (statistics.hits, statistics.misses, statistics.invalidations, statistics.regions) == (
                        0,
                        2,
                        1,
                        1,
                    )
                    peer_pair.write(lease.remote(nic, length_bytes=4 * KIB), seed=seed).expect(Status.SUCCESS)
                    pattern.check(memory.read(length_bytes=4 * KIB), seed=seed)
                peer_pair.write(old_range, seed=seed + 1).expect(Status.REM_ACCESS_ERR)
                pattern.check(memory.read(length_bytes=4 * KIB), seed=seed)


@NEEDS_DMABUF
@needs(cuda_needs.vmm)
def test_remapping_only_the_second_chunk_is_a_miss(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory,
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        with cache.lease(memory) as lease:
            old_range = lease.remote(nic, offset_bytes=2 * MIB, length_bytes=4 * KIB)
        remap_chunk(device, memory.address + 2 * MIB, length_bytes=2 * MIB)
        with cache.lease(memory, length_bytes=KIB) as lease:
            assert (cache.statistics().hits, cache.statistics().invalidations) == (0, 1)
        with cache.lease(memory) as lease:
            # The peer writes into the first, the new second and the third chunk.
            remote_range = lease.remote(nic, offset_bytes=2 * MIB - 5, length_bytes=2 * MIB + 10)
            peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(offset_bytes=2 * MIB - 5, length_bytes=2 * MIB + 10), seed=seed)
        peer_pair.write(old_range, seed=seed + 1).expect(Status.REM_ACCESS_ERR)


def test_free_by_gdrkit_removes_the_entry_first(allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int) -> None:
    with RegionCache([nic]) as cache, connect_peer_queue_pair(nic, peer) as peer_pair:
        memory = allocator.allocate(256 * KIB)
        with cache.lease(memory) as lease:
            remote_range = lease.remote(nic, length_bytes=KIB)
        memory.close()
        assert (cache.statistics().regions, cache.statistics().registered_bytes) == (0, 0)
        with allocator.allocate(256 * KIB) as new_memory:
            new_memory.fill(0x5A)
            peer_pair.write(remote_range, seed=seed).expect(Status.REM_ACCESS_ERR)
            assert new_memory.read() == b"\x5a" * (256 * KIB)


def test_free_of_leased_memory_is_refused_until_lease_ends(allocator: AnyAllocator, nic: Nic) -> None:
    with RegionCache([nic]) as cache, allocator.allocate(256 * KIB) as memory:
        with cache.lease(memory) as lease:
            with pytest.raises(UsageError) as error_info:
                memory.close()
            assert error_info.value.reason is Reason.BUSY
            assert not memory.closed
            # The cache has removed the entry, and the lease is still valid.
            assert cache.statistics().regions == 0
            assert lease.remote(nic).length_bytes == 256 * KIB
        assert cache.statistics().registered_bytes == 0
        memory.close()
        with pytest.raises(ClosedResource):
            cache.lease(memory)


def test_invalidated_entry_is_deregistered_with_its_last_lease(
    allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int
) -> None:
    with (
        allocator.allocate(256 * KIB) as memory,
        RegionCache([nic]) as cache,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        with cache.lease(memory) as first_lease, cache.lease(memory) as second_lease:
            remote_range = first_lease.remote(nic, length_bytes=KIB)
            assert cache.invalidate(memory.address + 5, length_bytes=1) == 1
            with cache.lease(memory) as new_lease:
                assert new_lease.remote(nic).rkey != remote_range.rkey
            first_lease.close()
            peer_pair.write(second_lease.remote(nic, length_bytes=KIB), seed=seed).expect(Status.SUCCESS)
        peer_pair.write(remote_range, seed=seed + 1).expect(Status.REM_ACCESS_ERR)
        pattern.check(memory.read(length_bytes=KIB), seed=seed)
        assert cache.statistics().registered_bytes == 256 * KIB
        assert cache.invalidate(memory.address, length_bytes=1) == 1
        assert cache.invalidate(memory.address, length_bytes=1) == 0


def test_eviction_by_count_is_lru_and_skips_leased_entries(allocator: AnyAllocator, nic: Nic) -> None:
    with contextlib.ExitStack() as stack, RegionCache([nic], regions_max=2) as cache:
        # The stack closes these memories after the cache is closed.
        memories: list[DeviceMemory | HostMemory] = [allocator.allocate(64 * KIB) for _ in range(4)]
        for memory in memories:
            stack.callback(memory.close)
        first_lease = cache.lease(memories[0])
        for memory in memories[1:]:
            cache.lease(memory).close()
        # The first memory is leased. So only entries of the other memories were evicted.
        statistics = cache.statistics()
        assert (statistics.regions, statistics.evictions, statistics.registered_bytes) == (2, 2, 128 * KIB)
        first_lease.close()
        cache.lease(memories[3]).close()
        cache.lease(memories[0]).close()
        # The entry of the fourth memory is the least recently used entry, so this lease evicts it.
        cache.lease(memories[1]).close()
        statistics_before = cache.statistics()
        cache.lease(memories[0]).close()
        assert cache.statistics().hits == statistics_before.hits + 1
        cache.lease(memories[3]).close()
        assert cache.statistics().misses == statistics_before.misses + 1


def test_byte_limit_evicts_and_excludes_large_allocations(allocator: AnyAllocator, nic: Nic) -> None:
    with (
        allocator.allocate(128 * KIB) as first_memory,
        allocator.allocate(128 * KIB) as second_memory,
        allocator.allocate(MIB) as large_memory,
        RegionCache([nic], bytes_max=200 * KIB) as cache,
    ):
        cache.lease(first_memory).close()
        cache.lease(second_memory).close()
        assert (cache.statistics().registered_bytes, cache.statistics().evictions) == (128 * KIB, 1)
        # Memory that is larger than the limit is registered for its lease only.
        with cache.lease(large_memory):
            assert cache.statistics().registered_bytes == MIB + 128 * KIB
        assert (cache.statistics().registered_bytes, cache.statistics().regions) == (128 * KIB, 1)


def test_statistics_are_a_frozen_copy(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        statistics_before = cache.statistics()
        cache.lease(memory).close()
        assert statistics_before.misses == 0
        assert cache.statistics().misses == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            statistics_before.hits = 1  # type: ignore[misc]


@NEEDS_VERBS_TWIN
def test_failed_registration_is_not_cached(allocator: AnyAllocator, nic: Nic) -> None:
    # This call probes the NIC now, so the fault rule below counts only registrations.
    assert nic.supports_dmabuf()
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        handles_before = handles.live()
        with inject_faults(Api.VERBS, f"{find_registration_function(allocator)} call=1 errno=ENOMEM"):
            with pytest.raises(ApiError) as error_info:
                cache.lease(memory)
            assert error_info.value.errno == errno.ENOMEM
            assert handles.live() == handles_before
            assert (cache.statistics().regions, cache.statistics().in_flight) == (0, 0)
            cache.lease(memory).close()
        assert (cache.statistics().misses, cache.statistics().registrations) == (2, 1)


def test_close_with_open_leases_is_refused_and_cache_stays_open(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        lease = cache.lease(memory)
        for timeout_ms in (0, 1):
            with pytest.raises(UsageError) as error_info:
                cache.close(timeout_ms=timeout_ms)
            assert error_info.value.reason is Reason.BUSY
        cache.lease(memory).close()
        # A second close() does nothing.
        lease.close()
        lease.close()
        cache.close()
        cache.close()
        with pytest.raises(ClosedResource):
            cache.lease(memory)
        with pytest.raises(ClosedResource):
            lease.remote(nic)


@NEEDS_VERBS_TWIN
def test_failed_deregistration_is_counted_and_retried(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        with inject_faults(Api.VERBS, "ibv_dereg_mr call=1 errno=EBUSY"), pytest.raises(ApiError) as error_info:
            cache.invalidate(memory.address, length_bytes=1)
        assert error_info.value.errno == errno.EBUSY
        assert (cache.statistics().regions, cache.statistics().not_deregistered) == (0, 1)
        # Before the free, gdrkit tries the deregistration again. So the memory is never freed while it is registered.
        with inject_faults(Api.VERBS, "ibv_dereg_mr call=1 errno=EBUSY"), pytest.raises(ApiError):
            memory.close()
        assert not memory.closed
        memory.close()
        assert cache.statistics().not_deregistered == 0


@needs(verbs.nic())
def test_attribute_error_of_a_buffer_is_raised_unchanged(nic: Nic) -> None:
    class BufferWithoutLength:
        """A buffer with the attributes of a DeviceBuffer. Its length cannot be read."""

        before_release = None

        @property
        def length_bytes(self) -> int:
            message = "the length is unknown"
            raise AttributeError(message)

    with RegionCache([nic]) as cache, pytest.raises(AttributeError, match="the length is unknown"):
        cache.lease(BufferWithoutLength())  # type: ignore[arg-type]


def test_invalid_range_or_limit_is_refused(allocator: AnyAllocator, nic: Nic) -> None:
    with allocator.allocate(64 * KIB) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
        # The end of the last range exceeds 64 bits.
        for offset_bytes, length_bytes in ((-1, 1), (0, 0), (0, 64 * KIB + 1), (64 * KIB, None), (1 << 63, 1 << 63)):
            with pytest.raises(UsageError):
                cache.lease(memory, offset_bytes=offset_bytes, length_bytes=length_bytes)
    for limits in ({"regions_max": 0}, {"bytes_max": 0}):
        with pytest.raises(UsageError):
            RegionCache([nic], **limits)  # type: ignore[arg-type]
    with pytest.raises(UsageError):
        RegionCache([])
    with pytest.raises(UsageError):
        RegionCache([nic, nic])

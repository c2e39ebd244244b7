"""A pool of registered buffers serves threads in order of arrival, and never gives one buffer to two threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from support.faults import inject_faults
from support.ledger import read_call_counts
from support.memory_kinds import connect_peer_queue_pair, find_registration_function

from gdrkit import handles, pattern
from gdrkit.errors import Api, ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import needs, software
from gdrkit.registration import BufferPool
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.memory_kinds import AnyAllocator

    from gdrkit.harness.peer import Peer
    from gdrkit.registration import RdmaBuffer
    from gdrkit.verbs import Nic

BUFFER_BYTES = 10 * KIB


def test_buffers_are_accessible_and_separate(allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=3) as pool,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        buffers = [pool.allocate() for _ in range(3)]
        for index, buffer in enumerate(buffers):
            peer_pair.write(buffer.remote(nic), seed=seed + index).expect(Status.SUCCESS)
        for index, buffer in enumerate(buffers):
            pattern.check(buffer.read(), seed=seed + index)
            buffer.close()


def test_slice_is_closed_with_its_buffer(allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=1) as pool,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        with pool.allocate() as buffer:
            buffer.write(b"\xa5" * BUFFER_BYTES)
            nested_slice = buffer.slice(offset_bytes=100, length_bytes=1000).slice(offset_bytes=10)
            assert (nested_slice.address, len(nested_slice)) == (buffer.address + 110, 990)
            peer_pair.write(nested_slice.remote(nic, offset_bytes=5), seed=seed).expect(Status.SUCCESS)
            pattern.check(buffer.read(offset_bytes=115, length_bytes=985), seed=seed)
            assert buffer.read(length_bytes=115) == b"\xa5" * 115
            assert buffer.read(offset_bytes=1100) == b"\xa5" * (BUFFER_BYTES - 1100)
            for offset_bytes, length_bytes in ((0, 991), (-1, 2), (990, None), (1 << 63, 1)):
                with pytest.raises(UsageError):
                    nested_slice.slice(offset_bytes=offset_bytes, length_bytes=length_bytes)
        for method_call in (
            nested_slice.read,
            lambda: nested_slice.remote(nic),
            lambda: nested_slice.slice(offset_bytes=0),
        ):
            with pytest.raises(ClosedResource):
                method_call()


@needs(software(Api.VERBS))
def test_allocate_makes_no_verbs_call(allocator: AnyAllocator, nic: Nic) -> None:
    with BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=2) as pool:
        call_counts_before = read_call_counts(Api.VERBS)
        for _ in range(10):
            with pool.allocate() as buffer:
                assert buffer.remote(nic).length_bytes == BUFFER_BYTES
        assert read_call_counts(Api.VERBS) == call_counts_before


def test_allocate_from_an_empty_pool_times_out(allocator: AnyAllocator, nic: Nic) -> None:
    with BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=1) as pool, pool.allocate():
        for timeout_ms in (0, 1):
            with pytest.raises(UsageError) as error_info:
                pool.allocate(timeout_ms=timeout_ms)
            assert error_info.value.reason is Reason.TIMEOUT
        statistics = pool.statistics()
        assert (statistics.free, statistics.waiting, statistics.timeouts, statistics.allocations) == (0, 0, 2, 1)


def test_waiting_threads_are_served_in_order_of_arrival(allocator: AnyAllocator, nic: Nic) -> None:
    served_indices: list[int] = []
    with BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=1) as pool, ThreadPoolExecutor(4) as executor:
        held_buffer = pool.allocate()

        def wait_for_buffer(thread_index: int) -> None:
            with pool.allocate(timeout_ms=30_000):
                served_indices.append(thread_index)

        futures = []
        for thread_index in range(4):
            futures.append(executor.submit(wait_for_buffer, thread_index))
            # The next thread starts only when this thread waits, so the order of arrival is known.
            while pool.statistics().waiting <= thread_index:
                assert not futures[-1].done()
        held_buffer.close()
        for future in futures:
            future.result(30)
        assert served_indices == [0, 1, 2, 3]
        assert pool.statistics().waits == 4


def test_buffer_is_never_allocated_twice(allocator: AnyAllocator, nic: Nic) -> None:
    open_addresses: set[int] = set()
    lock = threading.Lock()
    with BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=3) as pool, ThreadPoolExecutor(8) as executor:

        def allocate_repeatedly(_index: int) -> None:
            for _ in range(50):
                with pool.allocate(timeout_ms=30_000) as buffer:
                    with lock:
                        assert buffer.address not in open_addresses
                        open_addresses.add(buffer.address)
                    with lock:
                        open_addresses.remove(buffer.address)

        list(executor.map(allocate_repeatedly, range(8)))
        statistics = pool.statistics()
        assert (statistics.free, statistics.waiting, statistics.allocations) == (3, 0, 400)


def test_buffer_closed_by_two_threads_is_returned_once(allocator: AnyAllocator, nic: Nic) -> None:
    with BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=2) as pool, ThreadPoolExecutor(8) as executor:
        buffer: RdmaBuffer = pool.allocate()
        list(executor.map(lambda _index: buffer.close(), range(8)))
        assert pool.statistics().free == 2


def test_pool_close_with_an_open_buffer_is_refused(allocator: AnyAllocator, nic: Nic) -> None:
    pool = BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=2)
    buffer = pool.allocate()
    with pytest.raises(UsageError) as error_info:
        pool.close()
    assert error_info.value.reason is Reason.BUSY
    assert buffer.remote(nic).length_bytes == BUFFER_BYTES
    pool.allocate().close()
    buffer.close()
    pool.close()
    pool.close()
    with pytest.raises(ClosedResource):
        pool.allocate()


@needs(software(Api.VERBS))
def test_pool_with_failed_registration_leaves_nothing(allocator: AnyAllocator, nic: Nic) -> None:
    # This call probes the NIC now, so the fault rule below counts only registrations.
    assert nic.supports_dmabuf()
    with allocator.allocate(BUFFER_BYTES):
        handles_before = handles.live()
        with (
            inject_faults(Api.VERBS, f"{find_registration_function(allocator)} call=1 errno=ENOMEM"),
            pytest.raises(ApiError),
        ):
            BufferPool(allocator, [nic], buffer_bytes=BUFFER_BYTES, count=2)
        assert handles.live() == handles_before
    for options in ({"buffer_bytes": 0, "count": 1}, {"buffer_bytes": 1, "count": 0}):
        with pytest.raises(UsageError):
            BufferPool(allocator, [nic], buffer_bytes=options["buffer_bytes"], count=options["count"])

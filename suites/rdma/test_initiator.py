"""The native initiator, a C++ loop that posts RDMA requests for benchmarks.

It transfers the right bytes, reports errors with their status, and does not hold the interpreter lock.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from support.initiators import connect_initiator
from support.memory_kinds import MEMORY_KINDS

from gdrkit import pattern
from gdrkit.errors import ApiError, ClosedResource, Reason, UsageError
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB
from gdrkit.verbs import Access, Direction, Initiator, RemoteRange, Status

if TYPE_CHECKING:
    from support.memory_kinds import RdmaMemoryKind

    from gdrkit.verbs import Nic

# Each burst has a number of slots in the memory, a number of operations, a number of outstanding operations (depth),
# and a number of operations per ibv_post_send (list length). The operations access the slots in turn.
BURSTS = [
    pytest.param(1, 7, 1, 1, id="one_after_the_other"),
    pytest.param(16, 100, 16, 4, id="lists"),
    pytest.param(64, 1000, 60, 7, id="odd_lists"),
]


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize(("slot_count", "operations", "depth", "list_length"), BURSTS)
def test_burst_of_writes_fills_every_slot_and_nothing_else(
    nic: Nic, memory_kind: RdmaMemoryKind, seed: int, slot_count: int, operations: int, depth: int, list_length: int
) -> None:
    # The length is odd, so most slots begin at unaligned addresses.
    length_bytes = 1021
    memory_bytes = slot_count * length_bytes
    with (
        memory_kind.memory(length_bytes=memory_bytes + 64) as memory,
        connect_initiator(nic, memory_bytes=memory_bytes) as initiator,
    ):
        initiator.write(pattern.payload(memory_bytes, seed=seed))
        remote_range = memory.remote(length_bytes=memory_bytes)
        burst = initiator.run(
            Direction.WRITE,
            remote_range,
            length_bytes=length_bytes,
            operations=operations,
            depth=depth,
            list_length=list_length,
        )
        assert (burst.moved_bytes, burst.elapsed_ns > 0) == (operations * length_bytes, True)
        written_bytes = min(operations, slot_count) * length_bytes
        data = memory.read()
    pattern.check(data[:written_bytes], seed=seed)
    # RdmaMemoryKind.memory() has filled the memory with 0xA5.
    assert data[written_bytes:] == b"\xa5" * (len(data) - written_bytes)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
def test_burst_of_reads_by_several_queue_pairs_reads_every_slot(
    nic: Nic, memory_kind: RdmaMemoryKind, seed: int
) -> None:
    memory_bytes = 32 * 4 * KIB
    with (
        memory_kind.memory(length_bytes=memory_bytes) as memory,
        connect_initiator(nic, memory_bytes=memory_bytes, queue_pair_count=3) as initiator,
    ):
        memory.write(pattern.payload(memory_bytes, seed=seed))
        initiator.run(Direction.READ, memory.remote(), length_bytes=4 * KIB, operations=64, depth=24, list_length=2)
        pattern.check(initiator.read(), seed=seed)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize("direction", Direction)
def test_single_operations_are_timed_one_by_one(nic: Nic, memory_kind: RdmaMemoryKind, direction: Direction) -> None:
    with memory_kind.memory(length_bytes=64) as memory, connect_initiator(nic, memory_bytes=64) as initiator:
        latencies = initiator.run_singly(direction, memory.remote(), length_bytes=8, operations=20)
    assert len(latencies.times_ns) == 20
    assert min(latencies.times_ns) > 0


@needs(verbs.nic())
def test_refused_operation_raises_its_completion_status(nic: Nic) -> None:
    data = bytearray(64)
    with (
        nic.register_host(data, access=Access.LOCAL_WRITE | Access.REMOTE_READ) as region,
        connect_initiator(nic, memory_bytes=64) as initiator,
    ):
        with pytest.raises(ApiError) as error_info:
            initiator.run(Direction.WRITE, region.remote(), length_bytes=64, operations=4, depth=2)
        assert error_info.value.status == Status.REM_ACCESS_ERR
        assert error_info.value.operation == "wc rdma_write"
    assert data == bytearray(64)


@needs(verbs.nic())
def test_endless_burst_is_ended_by_another_thread(nic: Nic) -> None:
    errors: list[ApiError] = []
    with connect_initiator(nic, memory_bytes=64) as initiator, nic.register_host(bytearray(64)) as region:
        remote_range = region.remote()

        def run_endless_burst() -> None:
            try:
                initiator.run(Direction.READ, remote_range, length_bytes=8, operations=2**40, depth=4)
            except ApiError as error:
                errors.append(error)

        thread = threading.Thread(target=run_endless_burst)
        thread.start()
        # The close of the region ends the burst with an error. If the burst held the interpreter lock, this thread
        # could never close the region.
        region.close()
        thread.join()
    assert [error.status for error in errors] == [Status.REM_ACCESS_ERR]


@needs(verbs.nic())
def test_invalid_numbers_are_refused_and_initiator_stays_usable(nic: Nic) -> None:
    data = bytearray(4096)
    with nic.register_host(data) as region, connect_initiator(nic, memory_bytes=4096, depth_max=8) as initiator:
        remote_range = region.remote()
        for invalid_options in (
            {"length_bytes": 0, "operations": 1},
            {"length_bytes": 4097, "operations": 1},
            {"length_bytes": 8, "operations": 0},
            {"length_bytes": 8, "operations": 1, "depth": 0},
        ):
            with pytest.raises(UsageError):
                initiator.run(Direction.WRITE, remote_range, **invalid_options)
        for invalid_options in ({"depth": 9}, {"depth": 4, "list_length": 5}):
            with pytest.raises(ApiError) as error_info:
                initiator.run(Direction.WRITE, remote_range, length_bytes=8, operations=9, **invalid_options)
            assert error_info.value.reason is Reason.BAD_ARGUMENT
        with pytest.raises(UsageError):
            initiator.write(bytes(4097))
        initiator.run(Direction.WRITE, remote_range, length_bytes=8, operations=9, depth=8)
    with pytest.raises(ClosedResource):
        initiator.run(Direction.WRITE, remote_range, length_bytes=8, operations=1)


@needs(verbs.nic())
def test_error_names_the_missing_device(nic: Nic) -> None:
    with pytest.raises(ApiError) as error_info:
        Initiator(f"{nic.name}_not", memory_bytes=64)
    assert error_info.value.reason is Reason.NO_DEVICE
    assert f"{nic.name}_not" in str(error_info.value)


@needs(verbs.nic())
def test_unconnected_initiator_cannot_post(nic: Nic) -> None:
    with Initiator(nic.name, memory_bytes=64) as initiator, pytest.raises(ApiError):
        initiator.run(Direction.WRITE, RemoteRange(address=0, rkey=1, length_bytes=64), length_bytes=8, operations=1)

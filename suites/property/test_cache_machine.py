"""State machine test (Hypothesis) of the region cache: a remote key accesses only the allocation of the key.

The steps, in random order, allocate and free memory, reuse addresses, and lease and invalidate regions. Meanwhile a
peer process writes by RDMA with every key that it ever received.

The environment variable GDRKIT_EXAMPLES is the number of examples (100 by default, 2,000 in ``nox -s long``). The
harness sets the seed (``--seed``) and prints it at the start of the run.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test
from support.raw_cuda import allocate_raw, free_raw

from gdrkit import cuda, handles, pattern
from gdrkit.errors import ClosedResource, Reason, UsageError
from gdrkit.harness import leaks
from gdrkit.host import HostAllocator
from gdrkit.registration import Lease, RegionCache
from gdrkit.units import KIB
from gdrkit.verbs import RemoteRange, Status

if TYPE_CHECKING:
    from support.memory_kinds import AnyAllocator

    from gdrkit.cuda import BorrowedMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

# Length of each allocation, of each leased range in an allocation, and the largest number of cached regions.
MEMORY_BYTES = 64 * KIB
LEASE_BYTES = 512
REGIONS_MAX = 3


@dataclass(eq=False)
class Allocation:
    """An allocation. A remote key that was created for it must never access another allocation.

    Attributes
    ----------
    memory : DeviceMemory, HostMemory or BorrowedMemory
        The allocated or borrowed memory.
    fill_byte : int
        The value that every byte has between two steps. A step restores it after an allowed write of the peer.
    is_raw : bool
        Whether the program allocated the memory without gdrkit.
    is_allocated : bool
        Whether the memory has not been freed.
    """

    memory: Any
    fill_byte: int
    is_raw: bool
    is_allocated: bool = True


@dataclass(eq=False)
class HeldLease:
    """A lease, the allocation of which it leases a part, and whether the lease is open."""

    lease: Lease
    allocation: Allocation
    is_open: bool = True


@dataclass
class SharedResources:
    """The allocator, the NIC and the peer. All examples share them, because opening them takes long."""

    allocator: AnyAllocator
    nic: Nic
    peer: Peer


class CacheMachine(RuleBasedStateMachine):
    """The state machine of the cache, the memory and the keys. A subclass sets `resources`."""

    resources: SharedResources
    allocations = Bundle("allocations")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.cache = RegionCache([self.resources.nic], regions_max=REGIONS_MAX)
        self.live_allocations: list[Allocation] = []
        self.held_leases: list[HeldLease] = []
        # Every range (address and remote key) that the peer received, with the allocation to which the key belongs.
        self.sent_ranges: list[tuple[RemoteRange, Allocation]] = []
        self.allocation_count = 0
        self.stack = contextlib.ExitStack()
        self._connect()

    def _connect(self) -> None:
        """Connect a new queue pair of the peer, at the start and after a refused write, which breaks the connection."""
        nic, peer = self.resources.nic, self.resources.peer
        completion_queue = self.stack.enter_context(nic.completion_queue(depth=8))
        local_queue_pair = self.stack.enter_context(nic.queue_pair(completion_queue))
        self.peer_queue_pair = peer.open_nic(nic.name, port=nic.port.number, gid_index=nic.gid_index).queue_pair()
        self.peer_queue_pair.connect_with(local_queue_pair)

    def _add_memory(self, memory: BorrowedMemory | Any, *, is_raw: bool) -> Allocation:  # noqa: ANN401
        self.allocation_count += 1
        # Allocations that exist at the same time have different fill bytes: an example has fewer than 251 steps.
        allocation = Allocation(memory, fill_byte=self.allocation_count % 251, is_raw=is_raw)
        memory.fill(allocation.fill_byte)
        self.live_allocations.append(allocation)
        return allocation

    @rule(target=allocations, is_raw=strategies.booleans())
    def allocate(self, *, is_raw: bool) -> Allocation:
        return self._allocate(is_raw=is_raw)

    def _allocate(self, *, is_raw: bool) -> Allocation:
        """Allocate memory with gdrkit, or with the CUDA driver directly."""
        allocator = self.resources.allocator
        # The cache cannot distinguish host memory from later host memory at the same address. So all host memory is
        # allocated by gdrkit, which notifies the cache of each free.
        if not is_raw or isinstance(allocator, HostAllocator):
            return self._add_memory(allocator.allocate(MEMORY_BYTES), is_raw=False)
        address = allocate_raw(allocator, MEMORY_BYTES)
        return self._add_memory(cuda.borrow(allocator, address, length_bytes=MEMORY_BYTES), is_raw=True)

    @rule(allocation=consumes(allocations))
    def free(self, allocation: Allocation) -> None:
        if not allocation.is_allocated:
            return
        address = allocation.memory.address
        if allocation.is_raw:
            # The cache is not notified of this free. A program must not free leased memory, so the leases end first.
            self._end_leases(allocation)
            allocation.memory.close()
            self._free_raw(address)
        elif any(held_lease.is_open and held_lease.allocation is allocation for held_lease in self.held_leases):
            with pytest.raises(UsageError) as error_info:
                allocation.memory.close()
            assert error_info.value.reason is Reason.BUSY
            self._end_leases(allocation)
            allocation.memory.close()
        else:
            allocation.memory.close()
        allocation.is_allocated = False
        self.live_allocations.remove(allocation)

    @rule(target=allocations, allocation=consumes(allocations))
    def free_and_allocate_again(self, allocation: Allocation) -> Allocation:
        """Free memory and allocate again, so that the new allocation usually has the same address."""
        self.free(allocation)
        return self._allocate(is_raw=allocation.is_raw)

    @rule(target=leases, allocation=allocations, offset_bytes=strategies.integers(0, MEMORY_BYTES - LEASE_BYTES))
    def lease(self, allocation: Allocation, offset_bytes: int) -> HeldLease | None:
        if not allocation.is_allocated:
            with pytest.raises(ClosedResource):
                self.cache.lease(allocation.memory)
            # Hypothesis requires a result. The other rules ignore this entry.
            return HeldLease(lease=None, allocation=allocation, is_open=False)  # type: ignore[arg-type]
        lease = self.cache.lease(allocation.memory, offset_bytes=offset_bytes, length_bytes=LEASE_BYTES)
        held_lease = HeldLease(lease, allocation)
        self.held_leases.append(held_lease)
        remote_range = lease.remote(self.resources.nic)
        assert remote_range.address == allocation.memory.address + offset_bytes
        self.sent_ranges.append((remote_range, allocation))
        self._write_and_check(held_lease, seed=len(self.sent_ranges))
        return held_lease

    @rule(held_lease=consumes(leases))
    def end_lease(self, held_lease: HeldLease) -> None:
        if held_lease.is_open:
            held_lease.is_open = False
            held_lease.lease.close()

    @rule(allocation=allocations)
    def invalidate(self, allocation: Allocation) -> None:
        if allocation.is_allocated:
            self.cache.invalidate(allocation.memory.address, length_bytes=1)

    @rule(held_lease=leases, seed=strategies.integers(0, 1000))
    def write_by_a_lease(self, held_lease: HeldLease, seed: int) -> None:
        """Write with the key of an open lease. The key stays valid even if the region is invalidated."""
        if not held_lease.is_open:
            return
        self._write_and_check(held_lease, seed=seed)

    def _write_and_check(self, held_lease: HeldLease, *, seed: int) -> None:
        self.peer_queue_pair.write(held_lease.lease.remote(self.resources.nic), seed=seed).expect(Status.SUCCESS)
        offset_bytes = held_lease.lease.address - held_lease.allocation.memory.address
        pattern.check(held_lease.allocation.memory.read(offset_bytes=offset_bytes, length_bytes=LEASE_BYTES), seed=seed)
        held_lease.allocation.memory.fill(
            held_lease.allocation.fill_byte, offset_bytes=offset_bytes, length_bytes=LEASE_BYTES
        )

    @rule(rng=strategies.randoms(use_true_random=False), seed=strategies.integers(0, 1000))
    def write_by_any_key(self, rng: Any, seed: int) -> None:  # noqa: ANN401 - a random.Random of Hypothesis.
        """Write with any earlier key. The write may only change the memory of that key, or freed memory."""
        if not self.sent_ranges:
            return
        remote_range, allocation = rng.choice(self.sent_ranges)
        completion = self.peer_queue_pair.write(remote_range, seed=seed)
        if completion.status is not Status.SUCCESS:
            assert completion.status is Status.REM_ACCESS_ERR
            # A key of an open lease must never be refused.
            assert not any(
                held_lease.is_open
                and held_lease.allocation is allocation
                and held_lease.lease.remote(self.resources.nic) == remote_range
                for held_lease in self.held_leases
            )
            self._connect()
        elif allocation.is_allocated:
            offset_bytes = remote_range.address - allocation.memory.address
            pattern.check(allocation.memory.read(offset_bytes=offset_bytes, length_bytes=LEASE_BYTES), seed=seed)
            allocation.memory.fill(allocation.fill_byte, offset_bytes=offset_bytes, length_bytes=LEASE_BYTES)

    @invariant()
    def no_memory_was_written_by_a_key_of_another_allocation(self) -> None:
        for allocation in self.live_allocations:
            assert allocation.memory.read() == bytes([allocation.fill_byte]) * MEMORY_BYTES

    @invariant()
    def no_region_outlives_its_memory(self) -> None:
        statistics = self.cache.statistics()
        assert (statistics.in_flight, statistics.waiting, statistics.not_deregistered) == (0, 0, 0)
        assert statistics.leases == sum(held_lease.is_open for held_lease in self.held_leases)
        leased_allocation_count = len({held_lease.allocation for held_lease in self.held_leases if held_lease.is_open})
        assert statistics.regions <= REGIONS_MAX + leased_allocation_count
        # `regions` counts entries that a lookup can find. An invalidated region stays registered until its leases end.
        assert statistics.registered_bytes <= (statistics.regions + statistics.leases) * MEMORY_BYTES
        # The cache is not notified of a raw free, so a region of raw memory may outlive it.
        if not any(allocation.is_raw for _remote, allocation in self.sent_ranges):
            assert statistics.regions <= len(self.live_allocations)

    def _end_leases(self, allocation: Allocation) -> None:
        for held_lease in self.held_leases:
            if held_lease.allocation is allocation and held_lease.is_open:
                held_lease.is_open = False
                held_lease.lease.close()

    def _free_raw(self, address: int) -> None:
        assert not isinstance(self.resources.allocator, HostAllocator)
        free_raw(self.resources.allocator, address)

    def teardown(self) -> None:
        for allocation in tuple(self.live_allocations):
            self._end_leases(allocation)
            address = allocation.memory.address
            allocation.memory.close()
            if allocation.is_raw:
                self._free_raw(address)
        self.cache.close()
        assert self.cache.statistics().registered_bytes == 0
        self.stack.close()
        self.resources.peer.reset()


@pytest.mark.timeout(3600)
def test_keys_never_access_memory_of_another_owner(allocator: AnyAllocator, nic: Nic, peer: Peer, seed: int) -> None:
    example_count = int(os.environ.get("GDRKIT_EXAMPLES", "100"))

    class Machine(CacheMachine):
        resources = SharedResources(allocator, nic, peer)

    settings = hypothesis.settings(
        max_examples=example_count,
        stateful_step_count=25,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    # Before the handles are counted, open the CUDA context and everything else that stays open.
    with allocator.allocate(MEMORY_BYTES) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
    handles_before = handles.live(), leaks.count_twin_handles()
    run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=settings)
    assert (handles.live(), leaks.count_twin_handles()) == handles_before

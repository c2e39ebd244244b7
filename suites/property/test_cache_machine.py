"""Random order of allocate, free, reuse of an address, lease, invalidate, evict and close, by Hypothesis.

Meanwhile another process writes by every key that was ever given to it. GDRKIT_EXAMPLES is the number of examples (100
by default, 2,000 in ``nox -s long``). The seed is that of the harness (``--seed``), printed at the start of the run.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
from hypothesis import strategies
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule, run_state_machine_as_test
from support.raw_cuda import raw_allocate, raw_free

from gdrkit import cuda, handles, pattern
from gdrkit.errors import ClosedResource, Reason, UsageError
from gdrkit.harness import leaks
from gdrkit.host import HostAllocator
from gdrkit.registration import Lease, RegionCache
from gdrkit.units import KIB
from gdrkit.verbs import RemoteRange, Status

if TYPE_CHECKING:
    from support.reach import Space

    from gdrkit.cuda import BorrowedMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.harness.peer_handles import PeerQueuePair
    from gdrkit.verbs import Nic

SIZE = 64 * KIB
PART = 512
REGIONS_MAX = 3


@dataclass(eq=False)
class Owned:
    """Memory of gdrkit, or of another owner. ``mark`` is the byte in all places that no peer may have written."""

    memory: Any
    mark: int
    is_raw: bool
    alive: bool = True
    written: int | None = None


@dataclass(eq=False)
class Held:
    """A lease with the owner of its memory."""

    lease: Lease
    owner: Owned
    open: bool = True


@dataclass
class World:
    """The devices and the peer that all examples of a run share, because opening them takes longer than an example."""

    space: Space
    nic: Nic
    peer: Peer
    pairs: list[PeerQueuePair] = field(default_factory=list)


class CacheMachine(RuleBasedStateMachine):
    """The state machine of the cache, its owners and their keys. Subclasses set the world."""

    world: World
    owners = Bundle("owners")
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.cache = RegionCache([self.world.nic], regions_max=REGIONS_MAX)
        self.alive: list[Owned] = []
        self.held: list[Held] = []
        self.keys: list[tuple[RemoteRange, Owned]] = []
        self.count = 0
        self.stack = contextlib.ExitStack()
        self._connect()

    def _connect(self) -> None:
        # A refused write breaks the connection, so the next write gets a new one.
        nic, peer = self.world.nic, self.world.peer
        queue = self.stack.enter_context(nic.completion_queue(depth=8))
        ours = self.stack.enter_context(nic.queue_pair(queue))
        self.theirs = peer.open_nic(nic.name, port=nic.port.number, gid_index=nic.gid_index).queue_pair()
        self.theirs.join(ours)

    def _owner(self, memory: BorrowedMemory | Any, *, is_raw: bool) -> Owned:  # noqa: ANN401
        self.count += 1
        owner = Owned(memory, mark=self.count % 251, is_raw=is_raw)
        memory.fill(owner.mark)
        self.alive.append(owner)
        return owner

    @rule(target=owners, is_raw=strategies.booleans())
    def allocate(self, *, is_raw: bool) -> Owned:
        return self._allocate(is_raw=is_raw)

    def _allocate(self, *, is_raw: bool) -> Owned:
        """Allocate memory by gdrkit, or by the driver directly."""
        space = self.world.space
        # A cache cannot distinguish host pages from later ones at the same address, so all host memory is of gdrkit.
        if not is_raw or isinstance(space, HostAllocator):
            return self._owner(space.allocate(SIZE), is_raw=False)
        address = raw_allocate(space, SIZE)
        return self._owner(cuda.borrow(space, address, length_bytes=SIZE), is_raw=True)

    @rule(owner=consumes(owners))
    def free(self, owner: Owned) -> None:
        if not owner.alive:
            return
        address = owner.memory.address
        if owner.is_raw:
            # The cache is not notified. A program must not free leased memory, so the leases end first.
            self._end_leases(owner)
            owner.memory.close()
            self._raw_free(address)
        elif any(held.open and held.owner is owner for held in self.held):
            with pytest.raises(UsageError) as raised:
                owner.memory.close()
            assert raised.value.reason is Reason.BUSY
            self._end_leases(owner)
            owner.memory.close()
        else:
            owner.memory.close()
        owner.alive = False
        self.alive.remove(owner)

    @rule(target=owners, owner=consumes(owners))
    def free_and_allocate_again(self, owner: Owned) -> Owned:
        """Free memory and allocate again, which reuses the address for another owner."""
        self.free(owner)
        return self._allocate(is_raw=owner.is_raw)

    @rule(target=leases, owner=owners, offset_bytes=strategies.integers(0, SIZE - PART))
    def lease(self, owner: Owned, offset_bytes: int) -> Held | None:
        if not owner.alive:
            with pytest.raises(ClosedResource):
                self.cache.lease(owner.memory)
            return Held(lease=None, owner=owner, open=False)  # type: ignore[arg-type]
        lease = self.cache.lease(owner.memory, offset_bytes=offset_bytes, length_bytes=PART)
        held = Held(lease, owner)
        self.held.append(held)
        remote = lease.remote(self.world.nic)
        assert remote.address == owner.memory.address + offset_bytes
        self.keys.append((remote, owner))
        self._check(held, seed=len(self.keys))
        return held

    @rule(held=consumes(leases))
    def end_lease(self, held: Held) -> None:
        if held.open:
            held.open = False
            held.lease.close()

    @rule(owner=owners)
    def invalidate(self, owner: Owned) -> None:
        if owner.alive:
            self.cache.invalidate(owner.memory.address, length_bytes=1)

    @rule(held=leases, seed=strategies.integers(0, 1000))
    def write_by_a_lease(self, held: Held, seed: int) -> None:
        """Write by the key of a lease, which stays valid also after an invalidation."""
        if not held.open:
            return
        self._check(held, seed=seed)

    def _check(self, held: Held, *, seed: int) -> None:
        self.theirs.write(held.lease.remote(self.world.nic), seed=seed).expect(Status.SUCCESS)
        offset_bytes = held.lease.address - held.owner.memory.address
        pattern.check(held.owner.memory.read(offset_bytes=offset_bytes, length_bytes=PART), seed=seed)
        held.owner.memory.fill(held.owner.mark, offset_bytes=offset_bytes, length_bytes=PART)

    @rule(choice=strategies.randoms(use_true_random=False), seed=strategies.integers(0, 1000))
    def write_by_any_key(self, choice: Any, seed: int) -> None:  # noqa: ANN401 - a Random.
        """Write by any earlier key: it accesses its own memory, pages without an owner, or nothing."""
        if not self.keys:
            return
        remote, owner = choice.choice(self.keys)
        completion = self.theirs.write(remote, seed=seed)
        if completion.status is not Status.SUCCESS:
            assert completion.status is Status.REM_ACCESS_ERR
            # Leased memory must be accessible.
            assert not any(
                held.open and held.owner is owner and held.lease.remote(self.world.nic) == remote for held in self.held
            )
            self._connect()
        elif owner.alive:
            offset_bytes = remote.address - owner.memory.address
            pattern.check(owner.memory.read(offset_bytes=offset_bytes, length_bytes=PART), seed=seed)
            owner.memory.fill(owner.mark, offset_bytes=offset_bytes, length_bytes=PART)

    @invariant()
    def no_memory_was_written_by_a_key_of_another_owner(self) -> None:
        for owner in self.alive:
            assert owner.memory.read() == bytes([owner.mark]) * SIZE

    @invariant()
    def no_region_of_ours_outlives_its_memory(self) -> None:
        statistics = self.cache.statistics()
        assert (statistics.in_flight, statistics.waiting, statistics.not_deregistered) == (0, 0, 0)
        assert statistics.leases == sum(held.open for held in self.held)
        leased = len({held.owner for held in self.held if held.open})
        assert statistics.regions <= REGIONS_MAX + leased
        # One region per NIC for each unlinked leased entry and for each linked entry.
        assert statistics.registered_bytes <= (statistics.regions + statistics.leases) * SIZE
        if not any(owner.is_raw for _remote, owner in self.keys):
            assert statistics.regions <= len(self.alive)

    def _end_leases(self, owner: Owned) -> None:
        for held in self.held:
            if held.owner is owner and held.open:
                held.open = False
                held.lease.close()

    def _raw_free(self, address: int) -> None:
        assert not isinstance(self.world.space, HostAllocator)
        raw_free(self.world.space, address)

    def teardown(self) -> None:
        for owner in tuple(self.alive):
            self._end_leases(owner)
            address = owner.memory.address
            owner.memory.close()
            if owner.is_raw:
                self._raw_free(address)
        self.cache.close()
        assert self.cache.statistics().registered_bytes == 0
        self.stack.close()
        self.world.peer.reset()


@pytest.mark.timeout(3600)
def test_keys_never_access_memory_of_another_owner(space: Space, nic: Nic, peer: Peer, seed: int) -> None:
    examples = int(os.environ.get("GDRKIT_EXAMPLES", "100"))

    class Machine(CacheMachine):
        world = World(space, nic, peer)

    settings = hypothesis.settings(
        max_examples=examples,
        stateful_step_count=25,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    # The context and everything else that stays open is opened before the first count of handles.
    with space.allocate(SIZE) as memory, RegionCache([nic]) as cache:
        cache.lease(memory).close()
    before = handles.live(), leaks.ledger_handles()
    run_state_machine_as_test(hypothesis.seed(seed)(Machine), settings=settings)
    assert (handles.live(), leaks.ledger_handles()) == before

"""A deregistered key is refused, and no key ever accesses memory of another owner."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.raw_cuda import RawMemory
from support.reach import DMABUF, KINDS, joined, registered

from gdrkit import cuda, pattern
from gdrkit.host import HostAllocator
from gdrkit.registration import RegistrationRoute
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.reach import Reach

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = pytest.mark.qualify


@pytest.mark.parametrize("reach", KINDS, indirect=True)
def test_old_key_is_refused_after_deregistration(nic: Nic, peer: Peer, seed: int, reach: Reach) -> None:
    with reach.memory() as memory, joined(nic, peer) as theirs:
        remote = memory.remote(length_bytes=4 * KIB)
        theirs.write(remote, seed=seed).expect(Status.SUCCESS)
        memory.deregister()
        theirs.write(remote, seed=seed + 1).expect(Status.REM_ACCESS_ERR)
        pattern.check(memory.read(length_bytes=4 * KIB), seed=seed)


@pytest.mark.parametrize("reach", KINDS, indirect=True)
def test_free_by_gdrkit_deregisters_first(nic: Nic, peer: Peer, seed: int, reach: Reach) -> None:
    space = HostAllocator() if reach.device is None else reach.device
    with (
        space.allocate(256 * KIB) as memory,
        registered(memory, [nic], route=reach.route) as registration,
        joined(nic, peer) as theirs,
    ):
        remote = registration.remote(nic, length_bytes=4 * KIB)
        memory.close()
        assert registration.closed
        with space.allocate(256 * KIB) as successor:
            successor.fill(0x5A)
            theirs.write(remote, seed=seed).expect(Status.REM_ACCESS_ERR)
            assert successor.read() == b"\x5a" * (256 * KIB)


@DMABUF
def test_old_key_after_a_raw_free_never_accesses_the_new_owner(
    device: Device, nic: Nic, peer: Peer, evidence: Evidence, seed: int
) -> None:
    with (
        RawMemory(device, 2 * MIB) as first,
        cuda.borrow(device, first.address, length_bytes=2 * MIB) as memory,
        registered(memory, [nic], route=RegistrationRoute.DMABUF) as registration,
        joined(nic, peer) as theirs,
    ):
        remote = registration.remote(nic, length_bytes=64 * KIB)
        theirs.write(remote, seed=seed).expect(Status.SUCCESS)
        old_key = memory.allocation_key()
        first.free()
        with RawMemory(device, 2 * MIB) as again:
            # On an H200, the next allocation gets the same address at once, with another buffer id.
            assert again.address == first.address
            with cuda.borrow(device, again.address, length_bytes=2 * MIB) as successor:
                new_key = successor.allocation_key()
                evidence["buffer_ids"] = [old_key[0][2], new_key[0][2]]
                assert new_key != old_key
                successor.fill(0x5A)
                theirs.write(remote, seed=seed + 1).expect(Status.SUCCESS)
                theirs.read(remote, seed=seed + 1).completion.expect(Status.SUCCESS)
                assert successor.read() == b"\x5a" * (2 * MIB)

"""Another process writes to memory and reads from it by RDMA, and every byte is checked on both sides.

This process allocates and registers the memory. It checks device memory by the device's own copy call. The peer, a
spawned process, has only an address and a key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.reach import KINDS, ROUTES, SIZES, joined, reachable

from gdrkit import pattern
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from support.reach import Reach

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.registration import RegistrationRoute
    from gdrkit.verbs import Nic

pytestmark = pytest.mark.qualify

MARGIN_BYTES = 4096
# A kernel that transfers 64 MiB in software, on a shared virtual processor, may take longer than 10 s.
TIMEOUT_MS = 60_000.0


@pytest.mark.parametrize("reach", KINDS, indirect=True)
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), SIZES)
def test_remote_write_arrives_in_memory(
    nic: Nic,
    peer: Peer,
    evidence: Evidence,
    seed: int,
    reach: Reach,
    length_bytes: int,
    offset_bytes: int,
) -> None:
    whole_bytes = offset_bytes + length_bytes + MARGIN_BYTES
    with reach.memory(length_bytes=whole_bytes) as memory, joined(nic, peer) as theirs:
        remote = memory.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
        theirs.write(remote, seed=seed, timeout_ms=TIMEOUT_MS).expect(Status.SUCCESS)
        data = memory.read()
    pattern.check(memoryview(data)[offset_bytes : offset_bytes + length_bytes], seed=seed)
    # The byte before the range and the bytes after it are unchanged.
    assert data[:offset_bytes] == b"\xa5" * offset_bytes
    assert data[offset_bytes + length_bytes :] == b"\xa5" * MARGIN_BYTES
    reach.claim(evidence)


@pytest.mark.parametrize("reach", KINDS, indirect=True)
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), SIZES)
def test_remote_read_returns_memory(
    nic: Nic,
    peer: Peer,
    evidence: Evidence,
    seed: int,
    reach: Reach,
    length_bytes: int,
    offset_bytes: int,
) -> None:
    whole_bytes = offset_bytes + length_bytes
    with reach.memory(length_bytes=whole_bytes) as memory, joined(nic, peer) as theirs:
        memory.write(pattern.payload(length_bytes, seed=seed), offset_bytes=offset_bytes)
        remote = memory.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
        # The peer compares the received bytes with the stream of the seed.
        theirs.read(remote, seed=seed, timeout_ms=TIMEOUT_MS).completion.expect(Status.SUCCESS)
    reach.claim(evidence)


@pytest.mark.parametrize("route", ROUTES)
def test_every_nic_accesses_every_device(
    devices: tuple[Device, ...],
    nics: tuple[Nic, ...],
    peer: Peer,
    evidence: Evidence,
    seed: int,
    route: RegistrationRoute,
) -> None:
    for device in devices:
        for nic in nics:
            with reachable(device, nic, route) as (memory, registration), joined(nic, peer) as theirs:
                remote = registration.remote(nic, offset_bytes=77, length_bytes=64 * KIB)
                theirs.write(remote, seed=seed).expect(Status.SUCCESS)
                pattern.check(memory.read(offset_bytes=77, length_bytes=64 * KIB), seed=seed)
                theirs.read(remote, seed=seed).completion.expect(Status.SUCCESS)
            evidence.route(device=device, nic=nic, way=route)

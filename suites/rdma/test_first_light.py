"""Another process writes into memory by RDMA and reads from it; every byte is checked on both sides.

This process allocates the memory and registers it (that of a device by one of the two ways, and then it looks at it by
the device's own copy call). The peer, a
spawned process, never sees the memory: it has an address and a key.
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
# A kernel that moves 64 MiB in software, on a virtual processor that others use too, may take longer than 10 s.
TIMEOUT_MS = 60_000.0


@pytest.mark.parametrize("reach", KINDS, indirect=True)
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), SIZES)
def test_remote_write_lands_in_memory(
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
    # Neither the byte before nor the bytes behind were touched.
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
        # The peer compares what arrived, byte by byte, with the stream of the seed.
        theirs.read(remote, seed=seed, timeout_ms=TIMEOUT_MS).completion.expect(Status.SUCCESS)
    reach.claim(evidence)


@pytest.mark.parametrize("route", ROUTES)
def test_every_nic_reaches_every_device(
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

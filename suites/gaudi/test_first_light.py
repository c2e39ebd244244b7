"""A peer process writes to Gaudi memory and reads from it by RDMA. The cases compare every byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import LENGTHS_AND_OFFSETS as ALL_LENGTHS_AND_OFFSETS
from support.memory_kinds import connect_peer_queue_pair

from gdrkit import pattern
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, verbs
from gdrkit.registration import RegistrationRoute, register
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.gaudi import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(gaudi_needs.device(), verbs.nic(), verbs.dmabuf_region)

# The largest size is left out. memory.write() and memory.read() copy in parts of 1 MiB, so the largest size would take
# longer, but test nothing more.
LENGTHS_AND_OFFSETS = ALL_LENGTHS_AND_OFFSETS[:-1]
# The memory after the written range has this size, and must stay unchanged.
MARGIN_BYTES = 4096


@pytest.mark.qualify
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), LENGTHS_AND_OFFSETS)
def test_remote_write_arrives_in_memory(
    gaudi: Device, nic: Nic, peer: Peer, seed: int, length_bytes: int, offset_bytes: int
) -> None:
    with gaudi.allocate(offset_bytes + length_bytes + MARGIN_BYTES) as memory:
        memory.write(b"\xa5" * memory.length_bytes)
        with register(memory, [nic]) as registration, connect_peer_queue_pair(nic, peer) as peer_pair:
            remote_range = registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
            peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
        data = memory.read()
    pattern.check(memoryview(data)[offset_bytes : offset_bytes + length_bytes], seed=seed)
    # The bytes before and after the range are unchanged.
    assert data[:offset_bytes] == b"\xa5" * offset_bytes
    assert data[offset_bytes + length_bytes :] == b"\xa5" * MARGIN_BYTES


@pytest.mark.qualify
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), LENGTHS_AND_OFFSETS)
def test_remote_read_returns_memory(
    gaudi: Device, nic: Nic, peer: Peer, seed: int, length_bytes: int, offset_bytes: int
) -> None:
    with gaudi.allocate(offset_bytes + length_bytes) as memory:
        memory.write(pattern.payload(length_bytes, seed=seed), offset_bytes=offset_bytes)
        with register(memory, [nic]) as registration, connect_peer_queue_pair(nic, peer) as peer_pair:
            remote_range = registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
            peer_pair.read(remote_range, seed=seed).completion.expect(Status.SUCCESS)


def test_region_has_the_device_address(gaudi: Device, nic: Nic) -> None:
    with gaudi.allocate(64 << 10) as memory, register(memory, [nic]) as registration:
        assert registration.route is RegistrationRoute.DMABUF
        assert registration.remote(nic, offset_bytes=77).address == memory.address + 77


def test_every_nic_accesses_gaudi_memory(gaudi: Device, nics: tuple[Nic, ...], peer: Peer, seed: int) -> None:
    with gaudi.allocate(64 << 10) as memory, register(memory, nics) as registration:
        for nic_index, nic in enumerate(nics):
            with connect_peer_queue_pair(nic, peer) as peer_pair:
                peer_pair.write(registration.remote(nic), seed=seed + nic_index).expect(Status.SUCCESS)
            pattern.check(memory.read(), seed=seed + nic_index)

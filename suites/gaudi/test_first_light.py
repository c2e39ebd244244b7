"""Another process writes to memory of a Gaudi and reads from it by RDMA. The device's DMA checks every byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.reach import SIZES as ALL_SIZES
from support.reach import joined

from gdrkit import pattern
from gdrkit.harness.needs import gaudi as a_gaudi
from gdrkit.harness.needs import needs, verbs
from gdrkit.registration import RegistrationRoute, register
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.gaudi import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(a_gaudi.device(), verbs.nic(), verbs.dmabuf_region)

# The device copies through a staging buffer of 1 MiB, so the largest size would only take longer.
SIZES = ALL_SIZES[:-1]
MARGIN_BYTES = 4096


@pytest.mark.qualify
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), SIZES)
def test_remote_write_arrives_in_memory(
    gaudi: Device, nic: Nic, peer: Peer, seed: int, length_bytes: int, offset_bytes: int
) -> None:
    with gaudi.allocate(offset_bytes + length_bytes + MARGIN_BYTES) as memory:
        memory.write(b"\xa5" * memory.length_bytes)
        with register(memory, [nic]) as registration, joined(nic, peer) as theirs:
            remote = registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
            theirs.write(remote, seed=seed).expect(Status.SUCCESS)
        data = memory.read()
    pattern.check(memoryview(data)[offset_bytes : offset_bytes + length_bytes], seed=seed)
    # The byte before the range and the bytes after it are unchanged.
    assert data[:offset_bytes] == b"\xa5" * offset_bytes
    assert data[offset_bytes + length_bytes :] == b"\xa5" * MARGIN_BYTES


@pytest.mark.qualify
@pytest.mark.parametrize(("length_bytes", "offset_bytes"), SIZES)
def test_remote_read_returns_memory(
    gaudi: Device, nic: Nic, peer: Peer, seed: int, length_bytes: int, offset_bytes: int
) -> None:
    with gaudi.allocate(offset_bytes + length_bytes) as memory:
        memory.write(pattern.payload(length_bytes, seed=seed), offset_bytes=offset_bytes)
        with register(memory, [nic]) as registration, joined(nic, peer) as theirs:
            remote = registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
            theirs.read(remote, seed=seed).completion.expect(Status.SUCCESS)


def test_region_has_the_device_address(gaudi: Device, nic: Nic) -> None:
    with gaudi.allocate(64 << 10) as memory, register(memory, [nic]) as registration:
        assert registration.route is RegistrationRoute.DMABUF
        assert registration.remote(nic, offset_bytes=77).address == memory.address + 77


def test_every_nic_accesses_gaudi_memory(gaudi: Device, nics: tuple[Nic, ...], peer: Peer, seed: int) -> None:
    with gaudi.allocate(64 << 10) as memory, register(memory, nics) as registration:
        for number, nic in enumerate(nics):
            with joined(nic, peer) as theirs:
                theirs.write(registration.remote(nic), seed=seed + number).expect(Status.SUCCESS)
            pattern.check(memory.read(), seed=seed + number)

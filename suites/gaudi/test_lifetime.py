"""Lifetime of an exported dma-buf: it exists until its last descriptor is closed and its last importer has ended.

An importer is, for example, a memory region of a NIC. The descriptors and importers may be in any process.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import RawDevice
from support.memory_kinds import connect_peer_queue_pair

from gdrkit import launch, pattern
from gdrkit.buffers import DmabufRange
from gdrkit.errors import ApiError, Reason
from gdrkit.gaudi import Device
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import register
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.gaudi import GaudiMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(gaudi_needs.device(), verbs.nic(), verbs.dmabuf_region)
ALLOCATION_BYTES = 64 * KIB


def assert_close_is_refused(memory: GaudiMemory) -> ApiError:
    """Check that a close of the memory fails with EINVAL, and return the error."""
    with pytest.raises(ApiError) as error_info:
        memory.close()
    assert (error_info.value.operation, error_info.value.errno) == ("hlthunk_memory_unmap", errno.EINVAL)
    assert error_info.value.reason is Reason.BUSY
    assert not memory.closed
    return error_info.value


def test_region_survives_the_close_of_its_descriptor(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with gaudi.allocate(ALLOCATION_BYTES) as memory:
        with memory.export_dmabuf() as dmabuf:
            region = nic.register_dmabuf(dmabuf)
        with region, connect_peer_queue_pair(nic, peer) as peer_pair:
            peer_pair.write(region.remote(), seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(), seed=seed)


@needs(gaudi_needs.mapped_memory)
def test_memory_cannot_be_freed_while_registered_here(gaudi: Device, nic: Nic) -> None:
    memory = gaudi.allocate(ALLOCATION_BYTES)
    with memory.export_dmabuf() as dmabuf:
        region = nic.register_dmabuf(dmabuf)
    assert "still alive" in assert_close_is_refused(memory).what_to_do
    memory.write(b"there")
    region.close()
    memory.close()


@needs(gaudi_needs.mapped_memory)
def test_memory_cannot_be_freed_while_registered_by_a_peer(gaudi: Device, peer: Peer) -> None:
    memory = gaudi.allocate(ALLOCATION_BYTES)
    with memory.export_dmabuf() as dmabuf:
        region = peer.nic.register_dmabuf(
            dmabuf.fd, offset_bytes=0, length_bytes=ALLOCATION_BYTES, address=dmabuf.address
        )
    assert_close_is_refused(memory)
    region.close()
    memory.close()


@needs(gaudi_needs.mapped_memory)
def test_memory_cannot_be_freed_while_a_descriptor_is_open(gaudi: Device) -> None:
    memory = gaudi.allocate(ALLOCATION_BYTES)
    dmabuf = memory.export_dmabuf()
    duplicate_dmabuf = dmabuf.dup()
    dmabuf.close()
    assert_close_is_refused(memory)
    duplicate_dmabuf.close()
    memory.close()


def test_free_by_gdrkit_deregisters_first(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    memory = gaudi.allocate(ALLOCATION_BYTES)
    registration = register(memory, [nic])
    remote_range = registration.remote(nic)
    memory.close()
    assert registration.closed
    with connect_peer_queue_pair(nic, peer) as peer_pair:
        assert peer_pair.write(remote_range, seed=seed).status is Status.REM_ACCESS_ERR


@needs(gaudi_needs.mapped_memory)
def test_dmabuf_survives_the_close_of_its_device(nic: Nic, peer: Peer, seed: int) -> None:
    with RawDevice() as raw_device:
        _handle, address = raw_device.allocate_mapped(ALLOCATION_BYTES)
        dmabuf = DmabufRange(
            raw_device.export(address, ALLOCATION_BYTES), offset_bytes=0, length_bytes=ALLOCATION_BYTES, address=address
        )
        region = nic.register_dmabuf(dmabuf)
        dmabuf.close()
    with connect_peer_queue_pair(nic, peer) as peer_pair:
        peer_pair.write(region.remote(), seed=seed).expect(Status.SUCCESS)
        peer_pair.read(region.remote(), seed=seed).completion.expect(Status.SUCCESS)
    # The region keeps the dma-buf, and the dma-buf keeps the device file open. So no process, not even this one, can
    # open the device before the region is closed.
    with pytest.raises(ApiError) as error_info:
        Device(0)
    assert error_info.value.errno == errno.EBUSY
    region.close()
    Device(0).close()


@needs(gaudi_needs.mapped_memory, software("hlthunk"))
def test_exports_are_counted_separately(gaudi: Device, nic: Nic) -> None:
    def count_open_exports() -> object:
        return (launch.twin_control().ledger("hlthunk") or {})["exports"]

    with gaudi.allocate(ALLOCATION_BYTES) as memory:
        first_dmabuf, second_dmabuf = memory.export_dmabuf(), memory.export_dmabuf(length_bytes=4096)
        region = nic.register_dmabuf(first_dmabuf)
        assert count_open_exports() == 2
        first_dmabuf.close()
        assert count_open_exports() == 2
        second_dmabuf.close()
        assert count_open_exports() == 1
        region.close()
        assert count_open_exports() == 0

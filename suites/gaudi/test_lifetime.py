"""Lifetime of an export: until the last descriptor is closed and the last importer has ended, in any process."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import RawDevice
from support.reach import joined

from gdrkit import gaudi as product
from gdrkit import launch, pattern
from gdrkit.buffers import DmabufRange
from gdrkit.errors import ApiError, Reason
from gdrkit.harness.needs import gaudi as a_gaudi
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import register
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.gaudi import Device, GaudiMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(a_gaudi.device(), verbs.nic(), verbs.dmabuf_region)
SIZE = 64 * KIB


def refused_close(memory: GaudiMemory) -> ApiError:
    with pytest.raises(ApiError) as caught:
        memory.close()
    assert (caught.value.operation, caught.value.errno) == ("hlthunk_memory_unmap", errno.EINVAL)
    assert caught.value.reason is Reason.BUSY
    assert not memory.closed
    return caught.value


def test_region_survives_the_close_of_its_descriptor(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with gaudi.allocate(SIZE) as memory:
        with memory.export_dmabuf() as exported:
            region = nic.register_dmabuf(exported)
        with region, joined(nic, peer) as theirs:
            theirs.write(region.remote(), seed=seed).expect(Status.SUCCESS)
        pattern.check(memory.read(), seed=seed)


@needs(a_gaudi.mapped_memory)
def test_memory_cannot_be_freed_while_registered_here(gaudi: Device, nic: Nic) -> None:
    memory = gaudi.allocate(SIZE)
    with memory.export_dmabuf() as exported:
        region = nic.register_dmabuf(exported)
    assert "still alive" in refused_close(memory).what_to_do
    memory.write(b"there")
    region.close()
    memory.close()


@needs(a_gaudi.mapped_memory)
def test_memory_cannot_be_freed_while_registered_by_a_peer(gaudi: Device, peer: Peer) -> None:
    memory = gaudi.allocate(SIZE)
    with memory.export_dmabuf() as exported:
        region = peer.nic.register_dmabuf(exported.fd, offset_bytes=0, length_bytes=SIZE, address=exported.address)
    refused_close(memory)
    region.close()
    memory.close()


@needs(a_gaudi.mapped_memory)
def test_memory_cannot_be_freed_while_a_descriptor_is_open(gaudi: Device) -> None:
    memory = gaudi.allocate(SIZE)
    exported = memory.export_dmabuf()
    copy = exported.dup()
    exported.close()
    refused_close(memory)
    copy.close()
    memory.close()


def test_free_by_gdrkit_deregisters_first(gaudi: Device, nic: Nic, peer: Peer, seed: int) -> None:
    memory = gaudi.allocate(SIZE)
    registration = register(memory, [nic])
    remote = registration.remote(nic)
    memory.close()
    assert registration.closed
    with joined(nic, peer) as theirs:
        assert theirs.write(remote, seed=seed).status is Status.REM_ACCESS_ERR


@needs(a_gaudi.mapped_memory)
def test_dmabuf_survives_the_close_of_its_device(nic: Nic, peer: Peer, seed: int) -> None:
    with RawDevice() as raw:
        _handle, address = raw.allocate_mapped(SIZE)
        exported = DmabufRange(raw.export(address, SIZE), offset_bytes=0, length_bytes=SIZE, address=address)
        region = nic.register_dmabuf(exported)
        exported.close()
    with joined(nic, peer) as theirs:
        theirs.write(region.remote(), seed=seed).expect(Status.SUCCESS)
        theirs.read(region.remote(), seed=seed).completion.expect(Status.SUCCESS)
    # The dma-buf holds the file of the device, so no other program can open the device before the dma-buf is closed.
    with pytest.raises(ApiError) as caught:
        product.Device(0)
    assert caught.value.errno == errno.EBUSY
    region.close()
    product.Device(0).close()


@needs(a_gaudi.mapped_memory, software("hlthunk"))
def test_exports_are_counted_separately(gaudi: Device, nic: Nic) -> None:
    def exports() -> object:
        return (launch.twin_control().ledger("hlthunk") or {})["exports"]

    with gaudi.allocate(SIZE) as memory:
        first, second = memory.export_dmabuf(), memory.export_dmabuf(length_bytes=4096)
        region = nic.register_dmabuf(first)
        assert exports() == 2
        first.close()
        assert exports() == 2
        second.close()
        assert exports() == 1
        region.close()
        assert exports() == 0

"""Device.query() finds Gaudi memory that other code of this process allocated through the device descriptor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from gaudi.raw_hlthunk import RawDevice
from support.memory_kinds import connect_peer_queue_pair

from gdrkit import pattern
from gdrkit.buffers import MemoryKind
from gdrkit.errors import Reason, UsageError
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, verbs
from gdrkit.registration import DmabufMemory, register
from gdrkit.units import KIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.gaudi import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

pytestmark = needs(gaudi_needs.device(), gaudi_needs.mapped_memory)


@pytest.fixture
def foreign_device(gaudi: Device) -> Iterator[RawDevice]:
    """Yield a device that calls hl-thunk as another library of this process does, with the same device descriptor."""
    with RawDevice(gaudi.fd) as raw_device:
        yield raw_device


@pytest.mark.parametrize("pages_count", [1, 3, 8])
def test_memory_of_other_code_is_found_with_its_bounds(
    gaudi: Device, foreign_device: RawDevice, pages_count: int
) -> None:
    size_bytes = pages_count * gaudi.page_bytes
    handle, base_address = foreign_device.allocate_mapped(size_bytes)
    end_address = base_address + size_bytes
    for address, length_bytes in (
        (base_address, 1),
        (base_address, size_bytes),
        (base_address + 4099, 5000),
        (end_address - 1, 1),
    ):
        with gaudi.query(address, length_bytes=length_bytes) as query_result:
            assert (query_result.kind, query_result.base, query_result.length_bytes) == (
                MemoryKind.GAUDI,
                base_address,
                size_bytes,
            )
            assert query_result.dmabuf is not None
            assert (query_result.dmabuf.offset_bytes, query_result.dmabuf.address) == (address - base_address, address)
            assert (query_result.dmabuf.length_bytes, query_result.dmabuf.size_bytes) == (length_bytes, size_bytes)
    for address, length_bytes in (
        (base_address - 1, 2),
        (end_address - 1, 2),
        (end_address + gaudi.page_bytes, 1),
        (0, 1),
    ):
        with pytest.raises(UsageError) as error_info:
            gaudi.query(address, length_bytes=length_bytes)
        assert error_info.value.reason is Reason.NOT_DEVICE_MEMORY
    # The query has left no dma-buf open. Otherwise, the driver would refuse to unmap the memory.
    assert foreign_device.unmap(base_address) == 0
    assert foreign_device.free(handle) == 0
    with pytest.raises(UsageError):
        gaudi.query(base_address)


def test_host_memory_mapped_by_other_code_is_not_found(gaudi: Device, foreign_device: RawDevice) -> None:
    buffer = bytearray(64 * KIB)
    address = foreign_device.map_host(buffer)
    assert address
    with pytest.raises(UsageError) as error_info:
        gaudi.query(address)
    assert error_info.value.reason is Reason.NOT_DEVICE_MEMORY
    assert foreign_device.unmap(address) == 0


@needs(verbs.nic(), verbs.dmabuf_region)
def test_memory_of_other_code_is_written_by_rdma(
    gaudi: Device, foreign_device: RawDevice, nic: Nic, peer: Peer, seed: int
) -> None:
    handle, base_address = foreign_device.allocate_mapped(gaudi.page_bytes)
    query_result = gaudi.query(base_address + 4099, length_bytes=10_000)
    assert query_result.dmabuf is not None
    with (
        DmabufMemory(query_result.dmabuf) as memory,
        register(memory, [nic]) as registration,
        connect_peer_queue_pair(nic, peer) as peer_pair,
    ):
        peer_pair.write(registration.remote(nic), seed=seed).expect(Status.SUCCESS)
        device_bytes = bytearray(10_000)
        gaudi.copies.read_into(base_address + 4099, memoryview(device_bytes))
        pattern.check(bytes(device_bytes), seed=seed)
    assert foreign_device.unmap(base_address) == 0
    assert foreign_device.free(handle) == 0

"""Interior memory, which begins inside an allocation: every sharing method shares it from the right byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.sharing import import_in_peer, receive_message_from_peer, register_dmabuf_in_peer

from gdrkit import cuda, pattern
from gdrkit.cuda import VmmMemory
from gdrkit.errors import UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.registration.gdr_handle import export_gdr, import_gdr
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.share import device_of, export_memory, import_memory
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

NEEDS_IPC = needs(cuda_needs.device(), cuda_needs.ipc)
NEEDS_VMM = needs(cuda_needs.device(), cuda_needs.vmm)


@pytest.mark.qualify
@NEEDS_IPC
@pytest.mark.parametrize("offset_bytes", [0, 1, 4096, 65537])
def test_ipc_import_of_interior_memory_has_the_right_offset(
    device: Device, peer: Peer, seed: int, evidence: Evidence, offset_bytes: int
) -> None:
    with device.allocate(MIB) as allocation:
        allocation.write(pattern.payload(MIB, seed=seed))
        with cuda.borrow(device, allocation.address + offset_bytes, length_bytes=64 * KIB) as interior_memory:
            message = export_memory(interior_memory, kind=ShareKind.IPC)
        handle = ShareHandle.parse(message.data)
        evidence["allocation_bytes"] = handle.allocation_bytes
        assert (handle.offset_bytes, handle.length_bytes) == (offset_bytes, 64 * KIB)
        imported_memory = import_in_peer(peer.device(), message)
        assert imported_memory.length_bytes == 64 * KIB
        imported_memory.check(seed=seed, pattern_offset_bytes=offset_bytes)
        imported_memory.write(seed=seed + 1, length_bytes=100)
        pattern.check(allocation.read(offset_bytes=offset_bytes, length_bytes=100), seed=seed + 1)
        pattern.check(allocation.read(length_bytes=offset_bytes), seed=seed)
        imported_memory.close()


@NEEDS_IPC
def test_the_importer_finds_the_device_by_its_uuid(device: Device, peer: Peer, seed: int) -> None:
    peer_memory = peer.device().allocate(MIB)
    peer_memory.write(seed=seed)
    message = receive_message_from_peer(peer_memory, ShareKind.IPC, offset_bytes=4099, length_bytes=70_001)
    with device_of(message.handle) as owner_device, import_memory(owner_device, message) as memory:
        assert owner_device.uuid == device.uuid == message.handle.device
        assert memory.kind.value == "cuda_imported"
        pattern.check(memory.read(), seed=seed, offset_bytes=4099)
    peer_memory.close()


@NEEDS_IPC
def test_memory_opened_twice_is_closed_twice(device: Device, peer: Peer, seed: int) -> None:
    peer_memory = peer.device().allocate(MIB)
    peer_memory.write(seed=seed)
    first_message = receive_message_from_peer(peer_memory, ShareKind.IPC)
    second_message = receive_message_from_peer(peer_memory, ShareKind.IPC, offset_bytes=64 * KIB)
    with import_memory(device, second_message) as second_memory:
        with import_memory(device, first_message) as first_memory:
            pattern.check(first_memory.read(length_bytes=100), seed=seed)
        pattern.check(second_memory.read(length_bytes=100), seed=seed, offset_bytes=64 * KIB)
    peer_memory.close()


@pytest.mark.qualify
@NEEDS_VMM
@pytest.mark.parametrize(
    ("offset_bytes", "length_bytes", "expected_chunk_count"),
    [(0, 6 * MIB, 3), (2 * MIB - 5, 10, 2), (2 * MIB, 2 * MIB, 1), (4 * MIB + 3, 4097, 1), (1, 6 * MIB - 1, 3)],
)
def test_export_contains_only_the_chunks_of_the_range(
    device: Device, peer: Peer, seed: int, offset_bytes: int, length_bytes: int, expected_chunk_count: int
) -> None:
    with VmmMemory.create(device, 6 * MIB, chunk_bytes=2 * MIB) as memory:
        memory.write(pattern.payload(6 * MIB, seed=seed))
        with export_memory(memory, kind=ShareKind.VMM, offset_bytes=offset_bytes, length_bytes=length_bytes) as message:
            assert len(message.descriptors) == expected_chunk_count
            imported_memory = import_in_peer(peer.device(), message)
        imported_memory.check(seed=seed, pattern_offset_bytes=offset_bytes)
        imported_memory.write(seed=seed + 1, length_bytes=8)
        pattern.check(memory.read(offset_bytes=offset_bytes, length_bytes=8), seed=seed + 1)
        imported_memory.close()


@pytest.mark.qualify
@NEEDS_DMABUF
@needs(verbs_needs.foreign_dmabuf)
def test_peer_registers_a_part_that_the_owner_exports(device: Device, nic: Nic, peer: Peer, seed: int) -> None:
    with (
        device.allocate(256 * KIB) as memory,
        nic.completion_queue() as completion_queue,
        nic.queue_pair(completion_queue) as local_pair,
        nic.register_host(bytearray(pattern.payload(8 * KIB, seed=seed))) as host_region,
    ):
        memory.fill(0)
        with export_memory(memory, kind=ShareKind.DMABUF, offset_bytes=4097, length_bytes=9 * KIB) as message:
            assert message.handle.address == memory.address + 4097
            region = register_dmabuf_in_peer(peer.nic, message)
        peer_pair = peer.queue_pair()
        peer_pair.connect_with(local_pair)
        # The exported part begins at byte 4097 of the memory, and the write 10 bytes later.
        local_pair.post_write(host_region, region.remote(offset_bytes=10, length_bytes=8 * KIB), work_id=1)
        local_pair.wait(10_000).expect(Status.SUCCESS)
        pattern.check(memory.read(offset_bytes=4107, length_bytes=8 * KIB), seed=seed)
        assert memory.read(length_bytes=4107) == bytes(4107)
        region.close()


@pytest.mark.qualify
@NEEDS_IPC
def test_80_byte_handle_needs_a_whole_allocation(device: Device, peer: Peer, seed: int) -> None:
    with device.allocate(MIB) as memory:
        memory.write(pattern.payload(MIB, seed=seed))
        packed_handle = export_gdr(memory)
        # Bytes 64 to 71 of the handle are the size, bytes 72 to 79 the device number.
        assert (len(packed_handle), packed_handle[64:72], packed_handle[72:]) == (
            80,
            MIB.to_bytes(8, "little"),
            bytes(8),
        )
        import_reply = peer.request("share.import_gdr", device=peer.device().handle_number, handle=packed_handle.hex())
        contents_hex = peer.request("cuda.contents", memory=import_reply["handle"], offset_bytes=0, length_bytes=4096)
        pattern.check(bytes.fromhex(contents_hex), seed=seed)
        with (
            cuda.borrow(device, memory.address + 256, length_bytes=1024) as interior_memory,
            pytest.raises(UsageError) as error_info,
        ):
            export_gdr(interior_memory)
        assert "export_memory" in error_info.value.what_to_do
        peer.request("close", number=import_reply["handle"])


@NEEDS_IPC
def test_80_byte_handle_of_a_peer_can_be_opened(device: Device, peer: Peer, seed: int) -> None:
    peer_memory = peer.device().allocate(MIB)
    peer_memory.write(seed=seed)
    packed_handle = bytes.fromhex(peer.request("share.export_gdr", memory=peer_memory.handle_number))
    with import_gdr(device, packed_handle) as memory:
        pattern.check(memory.read(), seed=seed)
    peer_memory.close()

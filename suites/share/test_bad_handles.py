"""A wrong handle of an untrusted peer is refused with one typed error, and nothing is left open."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.reach import DMABUF
from support.sharing import flipped, from_peer, refusal, sample

from gdrkit import cuda
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, BrokenResource, ClosedResource, Reason, Unsupported, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software
from gdrkit.registration.gdr_handle import GdrHandle, import_gdr
from gdrkit.registration.handle import ShareKind
from gdrkit.registration.handle_message import HandleMessage
from gdrkit.registration.share import (
    device_at,
    device_of,
    export_address,
    export_memory,
    import_dmabuf,
    import_memory,
)
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

IPC = needs(cuda_needs.device(), cuda_needs.ipc)
VMM = needs(cuda_needs.device(), cuda_needs.vmm)


@pytest.fixture
def device(device: Device) -> Device:
    """Return the device with its context, which the first call of a case would otherwise retain."""
    device.synchronize()
    return device


@IPC
def test_handle_of_an_unknown_device_is_refused(device: Device, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    with from_peer(theirs, ShareKind.IPC) as message:
        altered = HandleMessage(replace(message.handle, device_uuid=b"\x11" * 16).pack())
    for error in (refusal(device_of, altered.handle), refusal(import_memory, device, altered)):
        assert type(error) is UsageError
        assert error.reason is Reason.NO_DEVICE
    theirs.close()


@IPC
def test_handle_of_an_ended_owner_is_refused(device: Device, peer: Peer) -> None:
    message = from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC)
    peer.kill()
    error = refusal(import_memory, device, message)
    assert type(error) is BrokenResource
    assert error.reason is Reason.PEER_GONE


@IPC
def test_reused_process_id_does_not_count_as_the_owner(device: Device, peer: Peer) -> None:
    with from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC) as message:
        owner = replace(message.handle.owner, started_ticks=message.handle.owner.started_ticks - 1)
        altered = HandleMessage(replace(message.handle, owner=owner).pack())
    assert refusal(import_memory, device, altered).reason is Reason.PEER_GONE


@DMABUF
def test_dmabuf_of_an_ended_owner_is_refused(peer: Peer) -> None:
    with from_peer(peer.device().allocate(64 * KIB), ShareKind.DMABUF) as message:
        peer.kill()
        assert type(refusal(import_dmabuf, message)) is BrokenResource


@IPC
def test_ipc_handle_of_freed_memory_is_refused_by_the_driver(device: Device, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    message = from_peer(theirs, ShareKind.IPC)
    theirs.close()
    error = refusal(import_memory, device, message)
    assert isinstance(error, ApiError)
    assert error.operation == "cuIpcOpenMemHandle"


@IPC
@needs(software(Api.CUDA))
def test_changed_ipc_handle_is_refused_by_the_twin(device: Device, peer: Peer) -> None:
    """The twin is stricter than the driver: the driver of an H200 opened handles with a flipped bit."""
    with from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC) as message:
        altered = HandleMessage(replace(message.handle, ipc=flipped(message.handle.ipc, 100)).pack())
    error = refusal(import_memory, device, altered)
    assert isinstance(error, ApiError)
    assert error.operation == "cuIpcOpenMemHandle"


@IPC
def test_handle_with_a_wrong_size_is_refused(device: Device, peer: Peer) -> None:
    with from_peer(peer.device().allocate(MIB), ShareKind.IPC) as message:
        altered = HandleMessage(replace(message.handle, allocation_bytes=2 * MIB).pack())
    assert refusal(import_memory, device, altered).reason is Reason.MALFORMED


@IPC
def test_handle_of_the_own_process_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory:
        message = export_memory(memory, kind=ShareKind.IPC)
        error = refusal(import_memory, device, message)
        assert isinstance(error, ApiError)
        assert error.operation == "cuIpcOpenMemHandle"


@DMABUF
@needs(cuda_needs.vmm)
def test_memfd_is_refused_as_dmabuf_and_as_chunk(device: Device, nic: Nic, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    with from_peer(theirs, ShareKind.DMABUF) as message, tempfile.TemporaryFile() as file:
        file.truncate(message.handle.allocation_bytes)
        with HandleMessage(message.data, [os.dup(file.fileno())]) as altered, import_dmabuf(altered) as dmabuf:
            # Only the kernel can check that a descriptor is a dma-buf. It does so when a NIC registers the dma-buf.
            error = refusal(nic.register_dmabuf, dmabuf)
            assert isinstance(error, ApiError)
            assert (error.operation, error.errno) == ("ibv_reg_dmabuf_mr", errno.EINVAL)
        file.truncate(1)
        with HandleMessage(message.data, [os.dup(file.fileno())]) as altered:
            assert refusal(import_dmabuf, altered).reason is Reason.MALFORMED
        chunk = replace(
            message.handle,
            kind=ShareKind.VMM,
            allocation_bytes=2 * MIB,
            chunk_bytes=2 * MIB,
            address=0,
            offset_bytes=0,
        )
        file.truncate(2 * MIB)
        with HandleMessage(chunk.pack(), [os.dup(file.fileno())]) as altered:
            error = refusal(import_memory, device, altered)
            assert isinstance(error, ApiError)
            assert error.operation == "cuMemImportFromShareableHandle"
    theirs.close()


@DMABUF
def test_a_closed_descriptor_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, export_memory(memory, kind=ShareKind.DMABUF) as message:
        (fd,) = message.descriptors
        duplicate = os.dup(fd)
        os.close(fd)
        error = refusal(import_dmabuf, message)
        assert isinstance(error, ApiError)
        assert (error.operation, error.errno) == ("lseek", errno.EBADF)
        os.dup2(duplicate, fd)
        os.close(duplicate)
    with pytest.raises(ClosedResource):
        import_dmabuf(message)


@VMM
def test_chunks_of_another_size_are_refused(device: Device, peer: Peer) -> None:
    with (
        VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory,
        export_memory(memory, kind=ShareKind.VMM) as message,
    ):
        larger = replace(message.handle, allocation_bytes=8 * MIB, chunk_bytes=4 * MIB, length_bytes=8 * MIB).pack()
        with HandleMessage(larger, [os.dup(fd) for fd in message.descriptors]) as altered:
            assert isinstance(refusal(import_memory, device, altered), ApiError)
        fds = [os.dup(message.descriptors[0])]
        with pytest.raises(UsageError) as raised:
            HandleMessage(message.data, fds)
        assert raised.value.reason is Reason.MALFORMED
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fds[0])


@IPC
def test_handle_kind_needs_its_own_importer(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, export_memory(memory, kind=ShareKind.DMABUF) as message:
        assert "import_dmabuf" in refusal(import_memory, device, message).what_to_do
        ipc = export_memory(memory, kind=ShareKind.IPC)
        assert "import_memory" in refusal(import_dmabuf, ipc).what_to_do
        assert refusal(export_memory, memory, kind=ShareKind.VMM).what_to_do == "share it as IPC or DMABUF"
        for part in ({"length_bytes": 0}, {"offset_bytes": 64 * KIB}, {"offset_bytes": 1, "length_bytes": 64 * KIB}):
            assert type(refusal(export_memory, memory, kind=ShareKind.IPC, **part)) is UsageError
    assert type(refusal(export_memory, memory, kind=ShareKind.IPC)) is ClosedResource


@VMM
def test_too_many_chunks_are_refused_before_the_export(device: Device) -> None:
    with VmmMemory.create(device, 254 * 2 * MIB, chunk_bytes=2 * MIB) as memory:
        assert refusal(export_memory, memory, kind=ShareKind.VMM).reason is Reason.MALFORMED
        with export_memory(memory, kind=ShareKind.VMM, length_bytes=253 * 2 * MIB) as message:
            assert len(message.descriptors) == 253


INVALID_RANGES = [
    pytest.param(0, 4096, Reason.NOT_DEVICE_MEMORY, id="null"),
    pytest.param(4096, 4096, Reason.NOT_DEVICE_MEMORY, id="host"),
    pytest.param(4096, 0, Reason.NOT_DEVICE_MEMORY, id="zero"),
    pytest.param(4096, 1 << 64, Reason.NOT_DEVICE_MEMORY, id="overflow"),
]


@IPC
@pytest.mark.parametrize(("address", "length_bytes", "reason"), INVALID_RANGES)
def test_export_of_host_memory_is_refused(device: Device, address: int, length_bytes: int, reason: Reason) -> None:
    for kind in ShareKind:
        error = refusal(lambda kind=kind: export_address(address, length_bytes=length_bytes, device_index=0, kind=kind))
        assert error.reason is reason


@IPC
def test_an_unknown_device_is_named(device: Device) -> None:
    for index in (-1, cuda.device_count(), 1 << 40):
        assert refusal(device_at, index).reason is Reason.NO_DEVICE


@IPC
def test_80_byte_handle_with_wrong_fields_is_refused(device: Device, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    valid = GdrHandle.parse(bytes.fromhex(peer.request("share.export_gdr", memory=theirs.number)))
    data = valid.pack()
    invalid: list[tuple[bytes, Reason]] = [
        (data[:79], Reason.MALFORMED),
        (data + b"\0", Reason.MALFORMED),
        (bytes(80), Reason.MALFORMED),
        (data[:64] + bytes(8) + data[72:], Reason.MALFORMED),
        (data[:64] + (1 << 63).to_bytes(8, "little") + data[72:], Reason.MALFORMED),
        (data[:72] + (1 << 32).to_bytes(8, "little"), Reason.MALFORMED),
        (replace(valid, length_bytes=64 * KIB + 1).pack(), Reason.MALFORMED),
        (replace(valid, device_index=cuda.device_count()).pack(), Reason.NO_DEVICE),
    ]
    for changed, reason in invalid:
        error = refusal(import_gdr, device, changed)
        assert type(error) is UsageError
        assert error.reason is reason
    theirs.close()


@IPC
@needs(software(Api.CUDA))
def test_80_byte_handle_with_a_flipped_bit_is_refused_by_twin(device: Device, peer: Peer) -> None:
    """The 80-byte handle has no checksum: the driver of an H200 opened a changed one. ShareHandle has a checksum."""
    theirs = peer.device().allocate(64 * KIB)
    data = bytes.fromhex(peer.request("share.export_gdr", memory=theirs.number))
    assert isinstance(refusal(import_gdr, device, flipped(data, 70)), ApiError)
    theirs.close()


@needs(cuda_needs.device(count_min=2), cuda_needs.ipc)
def test_handle_opens_only_on_its_own_device(devices: tuple[Device, ...], peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    message = from_peer(theirs, ShareKind.IPC)
    assert refusal(import_memory, devices[1], message).reason is Reason.NO_DEVICE
    data = bytes.fromhex(peer.request("share.export_gdr", memory=theirs.number))
    assert refusal(import_gdr, devices[1], data).reason is Reason.NO_DEVICE
    theirs.close()


WITHOUT_CUDA = """
import json
from gdrkit.errors import GdrkitError
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.share import device_at, device_of, export_address
handle = ShareHandle.parse(bytes.fromhex("{data}"))
calls = [lambda: device_at(0), lambda: device_of(handle)]
calls += [lambda kind=kind: export_address(1 << 40, length_bytes=4096, device_index=0, kind=kind) for kind in ShareKind]
for call in calls:
    try:
        print(json.dumps(["a handle", repr(call())]))
    except GdrkitError as error:
        print(json.dumps([type(error).__name__, getattr(error, "errno", None)]))
"""


def test_export_without_cuda_is_unsupported() -> None:
    # The folder of the twins is removed from the loader's path, and a real driver shows no device.
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1"}
    code = WITHOUT_CUDA.format(data=sample().pack().hex())
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in child.stdout.splitlines()]
    assert results == [[Unsupported.__name__, errno.ENOTSUP]] * 5

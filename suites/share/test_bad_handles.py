"""An invalid handle of an untrusted peer is refused with a typed error, and nothing is left open."""

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
from support.memory_kinds import NEEDS_DMABUF
from support.sharing import flip_bit, make_handle, receive_message_from_peer, require_error

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

NEEDS_IPC = needs(cuda_needs.device(), cuda_needs.ipc)
NEEDS_VMM = needs(cuda_needs.device(), cuda_needs.vmm)


@pytest.fixture
def device(device: Device) -> Device:
    """Open the context of the device by a first call, and return the device.

    require_error() compares the open handles before and after a call, so it must not see the context being opened.
    """
    device.synchronize()
    return device


@NEEDS_IPC
def test_handle_of_an_unknown_device_is_refused(device: Device, peer: Peer) -> None:
    peer_memory = peer.device().allocate(64 * KIB)
    with receive_message_from_peer(peer_memory, ShareKind.IPC) as message:
        altered_message = HandleMessage(replace(message.handle, device_uuid=b"\x11" * 16).pack())
    for error in (
        require_error(device_of, altered_message.handle),
        require_error(import_memory, device, altered_message),
    ):
        assert type(error) is UsageError
        assert error.reason is Reason.NO_DEVICE
    peer_memory.close()


@NEEDS_IPC
def test_handle_of_an_ended_owner_is_refused(device: Device, peer: Peer) -> None:
    message = receive_message_from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC)
    peer.kill()
    error = require_error(import_memory, device, message)
    assert type(error) is BrokenResource
    assert error.reason is Reason.PEER_GONE


@NEEDS_IPC
def test_reused_process_id_does_not_count_as_the_owner(device: Device, peer: Peer) -> None:
    with receive_message_from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC) as message:
        # The handle names an earlier process with the process id of the peer.
        earlier_owner = replace(message.handle.owner, started_ticks=message.handle.owner.started_ticks - 1)
        altered_message = HandleMessage(replace(message.handle, owner=earlier_owner).pack())
    assert require_error(import_memory, device, altered_message).reason is Reason.PEER_GONE


@NEEDS_DMABUF
def test_dmabuf_of_an_ended_owner_is_refused(peer: Peer) -> None:
    with receive_message_from_peer(peer.device().allocate(64 * KIB), ShareKind.DMABUF) as message:
        peer.kill()
        assert type(require_error(import_dmabuf, message)) is BrokenResource


@NEEDS_IPC
def test_ipc_handle_of_freed_memory_is_refused_by_the_driver(device: Device, peer: Peer) -> None:
    peer_memory = peer.device().allocate(64 * KIB)
    message = receive_message_from_peer(peer_memory, ShareKind.IPC)
    peer_memory.close()
    error = require_error(import_memory, device, message)
    assert isinstance(error, ApiError)
    assert error.operation == "cuIpcOpenMemHandle"


@NEEDS_IPC
@needs(software(Api.CUDA))
def test_changed_ipc_handle_is_refused_by_the_twin(device: Device, peer: Peer) -> None:
    """The case runs only on the CUDA twin, a library that emulates the driver.

    The driver of an H200 opened handles with a flipped bit.
    """
    with receive_message_from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC) as message:
        altered_message = HandleMessage(replace(message.handle, ipc=flip_bit(message.handle.ipc, 100)).pack())
    error = require_error(import_memory, device, altered_message)
    assert isinstance(error, ApiError)
    assert error.operation == "cuIpcOpenMemHandle"


@NEEDS_IPC
def test_handle_with_a_wrong_size_is_refused(device: Device, peer: Peer) -> None:
    with receive_message_from_peer(peer.device().allocate(MIB), ShareKind.IPC) as message:
        altered_message = HandleMessage(replace(message.handle, allocation_bytes=2 * MIB).pack())
    assert require_error(import_memory, device, altered_message).reason is Reason.MALFORMED


@NEEDS_IPC
def test_handle_of_this_process_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory:
        message = export_memory(memory, kind=ShareKind.IPC)
        error = require_error(import_memory, device, message)
        assert isinstance(error, ApiError)
        assert error.operation == "cuIpcOpenMemHandle"


@NEEDS_DMABUF
@needs(cuda_needs.vmm)
def test_memfd_is_refused_as_dmabuf_and_as_chunk(device: Device, nic: Nic, peer: Peer) -> None:
    peer_memory = peer.device().allocate(64 * KIB)
    with receive_message_from_peer(peer_memory, ShareKind.DMABUF) as message, tempfile.TemporaryFile() as ordinary_file:
        # The descriptor of an ordinary file replaces the descriptor of the dma-buf.
        ordinary_file.truncate(message.handle.allocation_bytes)
        with (
            HandleMessage(message.data, [os.dup(ordinary_file.fileno())]) as altered_message,
            import_dmabuf(altered_message) as dmabuf,
        ):
            # Only the kernel can check whether a descriptor is a dma-buf. It does so when a NIC registers the dma-buf.
            error = require_error(nic.register_dmabuf, dmabuf)
            assert isinstance(error, ApiError)
            assert (error.operation, error.errno) == ("ibv_reg_dmabuf_mr", errno.EINVAL)
        # gdrkit itself compares the size of the descriptor with the size in the handle.
        ordinary_file.truncate(1)
        with HandleMessage(message.data, [os.dup(ordinary_file.fileno())]) as altered_message:
            assert require_error(import_dmabuf, altered_message).reason is Reason.MALFORMED
        chunk_handle = replace(
            message.handle,
            kind=ShareKind.VMM,
            allocation_bytes=2 * MIB,
            chunk_bytes=2 * MIB,
            address=0,
            offset_bytes=0,
        )
        ordinary_file.truncate(2 * MIB)
        with HandleMessage(chunk_handle.pack(), [os.dup(ordinary_file.fileno())]) as altered_message:
            error = require_error(import_memory, device, altered_message)
            assert isinstance(error, ApiError)
            assert error.operation == "cuMemImportFromShareableHandle"
    peer_memory.close()


@NEEDS_DMABUF
def test_a_closed_descriptor_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, export_memory(memory, kind=ShareKind.DMABUF) as message:
        (fd,) = message.descriptors
        # The message closes its descriptor at the end of the block, so the number must be open again by then.
        duplicate_fd = os.dup(fd)
        os.close(fd)
        error = require_error(import_dmabuf, message)
        assert isinstance(error, ApiError)
        assert (error.operation, error.errno) == ("lseek", errno.EBADF)
        os.dup2(duplicate_fd, fd)
        os.close(duplicate_fd)
    with pytest.raises(ClosedResource):
        import_dmabuf(message)


@NEEDS_VMM
def test_chunks_of_another_size_are_refused(device: Device, peer: Peer) -> None:
    with (
        VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory,
        export_memory(memory, kind=ShareKind.VMM) as message,
    ):
        handle_with_larger_chunks = replace(
            message.handle, allocation_bytes=8 * MIB, chunk_bytes=4 * MIB, length_bytes=8 * MIB
        ).pack()
        with HandleMessage(handle_with_larger_chunks, [os.dup(fd) for fd in message.descriptors]) as altered_message:
            assert isinstance(require_error(import_memory, device, altered_message), ApiError)
        # This message has one descriptor for two chunks. The constructor refuses and closes the descriptor.
        fds = [os.dup(message.descriptors[0])]
        with pytest.raises(UsageError) as error_info:
            HandleMessage(message.data, fds)
        assert error_info.value.reason is Reason.MALFORMED
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fds[0])


@NEEDS_IPC
def test_importer_of_another_handle_kind_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, export_memory(memory, kind=ShareKind.DMABUF) as message:
        assert "import_dmabuf" in require_error(import_memory, device, message).what_to_do
        ipc_message = export_memory(memory, kind=ShareKind.IPC)
        assert "import_memory" in require_error(import_dmabuf, ipc_message).what_to_do
        assert require_error(export_memory, memory, kind=ShareKind.VMM).what_to_do == "share it as IPC or DMABUF"
        for invalid_range in (
            {"length_bytes": 0},
            {"offset_bytes": 64 * KIB},
            {"offset_bytes": 1, "length_bytes": 64 * KIB},
        ):
            assert type(require_error(export_memory, memory, kind=ShareKind.IPC, **invalid_range)) is UsageError
    assert type(require_error(export_memory, memory, kind=ShareKind.IPC)) is ClosedResource


@NEEDS_VMM
def test_too_many_chunks_are_refused_before_the_export(device: Device) -> None:
    # A message of a UNIX socket has at most 253 descriptors (SCM_MAX_FD), and every chunk needs one.
    with VmmMemory.create(device, 254 * 2 * MIB, chunk_bytes=2 * MIB) as memory:
        assert require_error(export_memory, memory, kind=ShareKind.VMM).reason is Reason.MALFORMED
        with export_memory(memory, kind=ShareKind.VMM, length_bytes=253 * 2 * MIB) as message:
            assert len(message.descriptors) == 253


INVALID_RANGES = [
    pytest.param(0, 4096, Reason.NOT_DEVICE_MEMORY, id="null"),
    pytest.param(4096, 4096, Reason.NOT_DEVICE_MEMORY, id="host"),
    pytest.param(4096, 0, Reason.NOT_DEVICE_MEMORY, id="zero"),
    pytest.param(4096, 1 << 64, Reason.NOT_DEVICE_MEMORY, id="overflow"),
]


@NEEDS_IPC
@pytest.mark.parametrize(("address", "length_bytes", "expected_reason"), INVALID_RANGES)
def test_export_of_host_memory_is_refused(
    device: Device, address: int, length_bytes: int, expected_reason: Reason
) -> None:
    for kind in ShareKind:
        error = require_error(
            lambda kind=kind: export_address(address, length_bytes=length_bytes, device_index=0, kind=kind)
        )
        assert error.reason is expected_reason


@NEEDS_IPC
def test_an_unknown_device_is_named(device: Device) -> None:
    for device_index in (-1, cuda.device_count(), 1 << 40):
        assert require_error(device_at, device_index).reason is Reason.NO_DEVICE


@NEEDS_IPC
def test_80_byte_handle_with_wrong_fields_is_refused(device: Device, peer: Peer) -> None:
    peer_memory = peer.device().allocate(64 * KIB)
    valid_handle = GdrHandle.parse(bytes.fromhex(peer.request("share.export_gdr", memory=peer_memory.handle_number)))
    packed_handle = valid_handle.pack()
    # Bytes 0 to 63 are the IPC handle, bytes 64 to 71 the size and bytes 72 to 79 the device number.
    invalid_handles: list[tuple[bytes, Reason]] = [
        (packed_handle[:79], Reason.MALFORMED),
        (packed_handle + b"\0", Reason.MALFORMED),
        (bytes(80), Reason.MALFORMED),
        (packed_handle[:64] + bytes(8) + packed_handle[72:], Reason.MALFORMED),
        (packed_handle[:64] + (1 << 63).to_bytes(8, "little") + packed_handle[72:], Reason.MALFORMED),
        (packed_handle[:72] + (1 << 32).to_bytes(8, "little"), Reason.MALFORMED),
        (replace(valid_handle, length_bytes=64 * KIB + 1).pack(), Reason.MALFORMED),
    ]
    for invalid_handle, expected_reason in invalid_handles:
        error = require_error(import_gdr, device, invalid_handle)
        assert type(error) is UsageError
        assert error.reason is expected_reason
    peer_memory.close()


@NEEDS_IPC
@needs(software(Api.CUDA))
def test_80_byte_handle_with_a_flipped_bit_is_refused_by_twin(device: Device, peer: Peer) -> None:
    """The case runs only on the CUDA twin.

    The handle has no checksum, and the driver of an H200 opened a changed handle.
    """
    peer_memory = peer.device().allocate(64 * KIB)
    packed_handle = bytes.fromhex(peer.request("share.export_gdr", memory=peer_memory.handle_number))
    assert isinstance(require_error(import_gdr, device, flip_bit(packed_handle, 70)), ApiError)
    peer_memory.close()


@needs(cuda_needs.device(count_min=2), cuda_needs.ipc)
def test_import_on_another_device_is_refused(devices: tuple[Device, ...], peer: Peer) -> None:
    peer_memory = peer.device().allocate(64 * KIB)
    message = receive_message_from_peer(peer_memory, ShareKind.IPC)
    assert require_error(import_memory, devices[1], message).reason is Reason.NO_DEVICE
    packed_handle = bytes.fromhex(peer.request("share.export_gdr", memory=peer_memory.handle_number))
    with devices[1].current():
        pass  # The context stays open after its first use. It is opened before require_error() counts the open handles.
    assert require_error(import_gdr, devices[1], packed_handle).reason is Reason.NO_DEVICE
    peer_memory.close()


# Program that makes five calls that need CUDA, and prints the type and the errno of each error.
WITHOUT_CUDA_PROGRAM = """
import json
from gdrkit.errors import GdrkitError
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.share import device_at, device_of, export_address
handle = ShareHandle.parse(bytes.fromhex("{handle_hex}"))
calls = [lambda: device_at(0), lambda: device_of(handle)]
calls += [lambda kind=kind: export_address(1 << 40, length_bytes=4096, device_index=0, kind=kind) for kind in ShareKind]
for call in calls:
    try:
        print(json.dumps(["a handle", repr(call())]))
    except GdrkitError as error:
        print(json.dumps([type(error).__name__, getattr(error, "errno", None)]))
"""


def test_export_without_cuda_is_unsupported() -> None:
    # Without LD_LIBRARY_PATH and LD_AUDIT, the process does not load the twins. With CUDA_VISIBLE_DEVICES=-1, a real
    # driver shows no device.
    environ = {name: value for name, value in os.environ.items() if name not in {"LD_LIBRARY_PATH", "LD_AUDIT"}}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1"}
    program = WITHOUT_CUDA_PROGRAM.format(handle_hex=make_handle().pack().hex())
    completed = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    results = [json.loads(line) for line in completed.stdout.splitlines()]
    assert results == [[Unsupported.__name__, errno.ENOTSUP]] * 5

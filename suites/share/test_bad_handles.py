"""A handle from a stranger is refused with one typed error, and nothing is left open."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
import tempfile
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from support.reach import DMABUF
from support.sharing import flipped, from_peer, open_descriptors

from gdrkit import cuda, handles, pattern
from gdrkit.cuda import VmmMemory
from gdrkit.errors import Api, ApiError, BrokenResource, ClosedResource, GdrkitError, Reason, Unsupported, UsageError
from gdrkit.harness.needs import cuda as cuda_needs
from gdrkit.harness.needs import needs, software
from gdrkit.host import this_process
from gdrkit.registration.gdr_handle import GdrHandle, export_gdr, import_gdr
from gdrkit.registration.handle import SHARE_HANDLE_BYTES, ShareHandle, ShareKind
from gdrkit.registration.parcel import Parcel, receive
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
    from collections.abc import Callable

    from gdrkit.cuda import Device
    from gdrkit.harness.peer import Peer
    from gdrkit.verbs import Nic

IPC = needs(cuda_needs.device(), cuda_needs.ipc)
VMM = needs(cuda_needs.device(), cuda_needs.vmm)


@pytest.fixture
def device(device: Device) -> Device:
    """With its context, which the first call would else open and keep."""
    device.synchronize()
    return device


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> GdrkitError:
    """What the call raises; nothing that it opened may stay open."""
    before = handles.live(), open_descriptors()
    with pytest.raises(GdrkitError) as raised:
        call(*arguments, **options)
    assert (handles.live(), open_descriptors()) == before
    return raised.value


def refusal_of_bytes(data: bytes) -> GdrkitError:
    error = refusal(ShareHandle.parse, data)
    assert type(error) is UsageError
    assert error.reason is Reason.MALFORMED
    return error


def sample(**changes: object) -> ShareHandle:
    """A handle that is right in itself."""
    right = ShareHandle(
        kind=ShareKind.IPC,
        allocation_bytes=MIB,
        offset_bytes=4096,
        length_bytes=8192,
        device_uuid=bytes(range(1, 17)),
        owner=this_process(),
        ipc=bytes(range(64)),
    )
    return replace(right, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [0, 1, 80, SHARE_HANDLE_BYTES - 1, SHARE_HANDLE_BYTES + 1, 4096])
def test_a_handle_of_another_length_is_refused(length: int) -> None:
    refusal_of_bytes((sample().pack() * 30)[:length])


def test_every_single_flipped_bit_is_refused() -> None:
    data = sample().pack()
    for bit in range(8 * SHARE_HANDLE_BYTES):
        refusal_of_bytes(flipped(data, bit))


def test_another_version_is_named() -> None:
    data = sample().pack()
    error = refusal_of_bytes(data[:8] + b"\x02\x00" + data[10:])
    assert "version 2" in error.message


WRONG_FIELDS = [
    pytest.param({"length_bytes": 0}, id="empty"),
    pytest.param({"allocation_bytes": 0}, id="no-allocation"),
    pytest.param({"length_bytes": MIB}, id="beyond-the-end"),
    pytest.param({"offset_bytes": (1 << 64) - 4096}, id="offset-that-would-wrap"),
    pytest.param({"length_bytes": (1 << 64) - 4096}, id="length-that-would-wrap"),
    pytest.param({"allocation_bytes": 1 << 63}, id="allocation-above-half"),
    pytest.param({"ipc": bytes(64)}, id="empty-ipc"),
    pytest.param({"address": 4096}, id="address-in-ipc"),
    pytest.param({"descriptor_count": 1}, id="descriptor-in-ipc"),
    pytest.param({"chunk_bytes": MIB}, id="chunk-in-ipc"),
    pytest.param({"device_uuid": bytes(16)}, id="no-device"),
    pytest.param({"kind": ShareKind.DMABUF, "ipc": bytes(64), "descriptor_count": 1}, id="dmabuf-without-address"),
    pytest.param(
        {"kind": ShareKind.DMABUF, "ipc": bytes(64), "descriptor_count": 1, "address": (1 << 64) - 4096},
        id="dmabuf-beyond-all-addresses",
    ),
    pytest.param(
        {"kind": ShareKind.DMABUF, "ipc": bytes(64), "descriptor_count": 1, "address": 8191}, id="dmabuf-askew"
    ),
    pytest.param(
        {"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 254, "chunk_bytes": 4096}, id="too-many-chunks"
    ),
    pytest.param(
        {"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 2, "chunk_bytes": MIB}, id="chunks-of-another-sum"
    ),
    pytest.param(
        {"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 2, "chunk_bytes": MIB // 2}, id="unused-chunk"
    ),
    pytest.param({"kind": ShareKind.VMM, "ipc": bytes(64), "descriptor_count": 1, "chunk_bytes": 0}, id="no-chunk"),
]


@pytest.mark.parametrize("changes", WRONG_FIELDS)
def test_fields_that_cannot_be_true_are_refused(changes: dict[str, object]) -> None:
    assert refusal(sample, **changes).reason is Reason.MALFORMED


@IPC
def test_a_handle_for_a_device_that_is_not_here_is_refused(device: Device, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    with from_peer(theirs, ShareKind.IPC) as parcel:
        stranger = Parcel(replace(parcel.handle, device_uuid=b"\x11" * 16).pack())
    for error in (refusal(device_of, stranger.handle), refusal(import_memory, device, stranger)):
        assert type(error) is UsageError
        assert error.reason is Reason.NO_DEVICE
    theirs.close()


@IPC
def test_a_handle_of_a_dead_owner_is_refused(device: Device, peer: Peer) -> None:
    parcel = from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC)
    peer.kill()
    error = refusal(import_memory, device, parcel)
    assert type(error) is BrokenResource
    assert error.reason is Reason.PEER_GONE


@IPC
def test_the_number_of_a_dead_owner_that_another_process_has_now_is_no_owner(device: Device, peer: Peer) -> None:
    with from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC) as parcel:
        owner = replace(parcel.handle.owner, started_ticks=parcel.handle.owner.started_ticks - 1)
        stranger = Parcel(replace(parcel.handle, owner=owner).pack())
    assert refusal(import_memory, device, stranger).reason is Reason.PEER_GONE


@DMABUF
def test_a_dmabuf_of_a_dead_owner_is_refused(peer: Peer) -> None:
    with from_peer(peer.device().allocate(64 * KIB), ShareKind.DMABUF) as parcel:
        peer.kill()
        assert type(refusal(import_dmabuf, parcel)) is BrokenResource


@IPC
def test_memory_that_its_owner_has_freed_is_refused_by_the_driver(device: Device, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    parcel = from_peer(theirs, ShareKind.IPC)
    theirs.close()
    error = refusal(import_memory, device, parcel)
    assert isinstance(error, ApiError)
    assert error.operation == "cuIpcOpenMemHandle"


@IPC
@needs(software(Api.CUDA))
def test_an_ipc_handle_that_no_driver_made_is_refused_by_the_driver(device: Device, peer: Peer) -> None:
    """The twin is stricter than the driver: an H200's was seen to open handles of which a bit had been turned."""
    with from_peer(peer.device().allocate(64 * KIB), ShareKind.IPC) as parcel:
        stranger = Parcel(replace(parcel.handle, ipc=flipped(parcel.handle.ipc, 100)).pack())
    error = refusal(import_memory, device, stranger)
    assert isinstance(error, ApiError)
    assert error.operation == "cuIpcOpenMemHandle"


@IPC
def test_a_handle_that_says_another_size_than_the_driver_is_refused(device: Device, peer: Peer) -> None:
    with from_peer(peer.device().allocate(MIB), ShareKind.IPC) as parcel:
        stranger = Parcel(replace(parcel.handle, allocation_bytes=2 * MIB).pack())
    assert refusal(import_memory, device, stranger).reason is Reason.MALFORMED


@IPC
def test_a_handle_of_this_very_process_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory:
        parcel = export_memory(memory, kind=ShareKind.IPC)
        error = refusal(import_memory, device, parcel)
        assert isinstance(error, ApiError)
        assert error.operation == "cuIpcOpenMemHandle"


@DMABUF
@needs(cuda_needs.vmm)
def test_a_memfd_is_neither_a_dmabuf_nor_a_chunk(device: Device, nic: Nic, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    with from_peer(theirs, ShareKind.DMABUF) as parcel, tempfile.TemporaryFile() as file:
        file.truncate(parcel.handle.allocation_bytes)
        with Parcel(parcel.data, [os.dup(file.fileno())]) as stranger, import_dmabuf(stranger) as dmabuf:
            # Only the exporter's driver can tell a dma-buf, and the NIC's asks it.
            error = refusal(nic.register_dmabuf, dmabuf)
            assert isinstance(error, ApiError)
            assert (error.operation, error.errno) == ("ibv_reg_dmabuf_mr", errno.EINVAL)
        file.truncate(1)
        with Parcel(parcel.data, [os.dup(file.fileno())]) as stranger:
            assert refusal(import_dmabuf, stranger).reason is Reason.MALFORMED
        chunk = replace(
            parcel.handle, kind=ShareKind.VMM, allocation_bytes=2 * MIB, chunk_bytes=2 * MIB, address=0, offset_bytes=0
        )
        file.truncate(2 * MIB)
        with Parcel(chunk.pack(), [os.dup(file.fileno())]) as stranger:
            error = refusal(import_memory, device, stranger)
            assert isinstance(error, ApiError)
            assert error.operation == "cuMemImportFromShareableHandle"
    theirs.close()


@DMABUF
def test_a_closed_descriptor_is_refused(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, export_memory(memory, kind=ShareKind.DMABUF) as parcel:
        (fd,) = parcel.descriptors
        kept = os.dup(fd)
        os.close(fd)
        error = refusal(import_dmabuf, parcel)
        assert isinstance(error, ApiError)
        assert (error.operation, error.errno) == ("lseek", errno.EBADF)
        os.dup2(kept, fd)
        os.close(kept)
    with pytest.raises(ClosedResource):
        import_dmabuf(parcel)


@VMM
def test_chunks_of_another_size_are_refused(device: Device, peer: Peer) -> None:
    with (
        VmmMemory.create(device, 4 * MIB, chunk_bytes=2 * MIB) as memory,
        export_memory(memory, kind=ShareKind.VMM) as parcel,
    ):
        larger = replace(parcel.handle, allocation_bytes=8 * MIB, chunk_bytes=4 * MIB, length_bytes=8 * MIB).pack()
        with Parcel(larger, [os.dup(fd) for fd in parcel.descriptors]) as stranger:
            assert isinstance(refusal(import_memory, device, stranger), ApiError)
        fds = [os.dup(parcel.descriptors[0])]
        with pytest.raises(UsageError) as raised:
            Parcel(parcel.data, fds)
        assert raised.value.reason is Reason.MALFORMED
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fds[0])


@IPC
def test_a_kind_is_taken_by_its_own_importer_alone(device: Device) -> None:
    with device.allocate(64 * KIB) as memory, export_memory(memory, kind=ShareKind.DMABUF) as parcel:
        assert "import_dmabuf" in refusal(import_memory, device, parcel).what_to_do
        ipc = export_memory(memory, kind=ShareKind.IPC)
        assert "import_memory" in refusal(import_dmabuf, ipc).what_to_do
        assert refusal(export_memory, memory, kind=ShareKind.VMM).what_to_do == "share it as IPC or DMABUF"
        for part in ({"length_bytes": 0}, {"offset_bytes": 64 * KIB}, {"offset_bytes": 1, "length_bytes": 64 * KIB}):
            assert type(refusal(export_memory, memory, kind=ShareKind.IPC, **part)) is UsageError
    assert type(refusal(export_memory, memory, kind=ShareKind.IPC)) is ClosedResource


@VMM
def test_more_chunks_than_a_message_carries_are_refused_before_any_is_exported(device: Device) -> None:
    with VmmMemory.create(device, 254 * 2 * MIB, chunk_bytes=2 * MIB) as memory:
        assert refusal(export_memory, memory, kind=ShareKind.VMM).reason is Reason.MALFORMED
        with export_memory(memory, kind=ShareKind.VMM, length_bytes=253 * 2 * MIB) as parcel:
            assert len(parcel.descriptors) == 253


NO_POINTERS = [
    pytest.param(0, 4096, Reason.NOT_DEVICE_MEMORY, id="null"),
    pytest.param(4096, 4096, Reason.NOT_DEVICE_MEMORY, id="host"),
    pytest.param(4096, 0, Reason.NOT_DEVICE_MEMORY, id="zero"),
    pytest.param(4096, 1 << 64, Reason.NOT_DEVICE_MEMORY, id="overflow"),
]


@IPC
@pytest.mark.parametrize(("address", "length_bytes", "reason"), NO_POINTERS)
def test_what_is_no_device_memory_is_not_exported(
    device: Device, address: int, length_bytes: int, reason: Reason
) -> None:
    for kind in ShareKind:
        error = refusal(lambda kind=kind: export_address(address, length_bytes=length_bytes, device_index=0, kind=kind))
        assert error.reason is reason


@IPC
def test_an_unknown_device_is_named(device: Device) -> None:
    for index in (-1, cuda.device_count(), 1 << 40):
        assert refusal(device_at, index).reason is Reason.NO_DEVICE


@IPC
def test_an_80_byte_handle_that_lies_is_refused(device: Device, peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    right = GdrHandle.parse(bytes.fromhex(peer.request("share.export_gdr", memory=theirs.number)))
    data = right.pack()
    wrong: list[tuple[bytes, Reason]] = [
        (data[:79], Reason.MALFORMED),
        (data + b"\0", Reason.MALFORMED),
        (bytes(80), Reason.MALFORMED),
        (data[:64] + bytes(8) + data[72:], Reason.MALFORMED),
        (data[:64] + (1 << 63).to_bytes(8, "little") + data[72:], Reason.MALFORMED),
        (data[:72] + (1 << 32).to_bytes(8, "little"), Reason.MALFORMED),
        (replace(right, length_bytes=64 * KIB + 1).pack(), Reason.MALFORMED),
        (replace(right, device_index=cuda.device_count()).pack(), Reason.NO_DEVICE),
    ]
    for changed, reason in wrong:
        error = refusal(import_gdr, device, changed)
        assert type(error) is UsageError
        assert error.reason is reason
    theirs.close()


@IPC
@needs(software(Api.CUDA))
def test_an_80_byte_handle_with_a_turned_bit_is_refused_by_the_twin(device: Device, peer: Peer) -> None:
    """It has no checksum, and an H200's driver was seen to open such a handle: only the versioned one notices."""
    theirs = peer.device().allocate(64 * KIB)
    data = bytes.fromhex(peer.request("share.export_gdr", memory=theirs.number))
    assert isinstance(refusal(import_gdr, device, flipped(data, 70)), ApiError)
    theirs.close()


@needs(cuda_needs.device(count_min=2), cuda_needs.ipc)
def test_a_handle_is_opened_on_its_own_device_alone(devices: tuple[Device, ...], peer: Peer) -> None:
    theirs = peer.device().allocate(64 * KIB)
    parcel = from_peer(theirs, ShareKind.IPC)
    assert refusal(import_memory, devices[1], parcel).reason is Reason.NO_DEVICE
    data = bytes.fromhex(peer.request("share.export_gdr", memory=theirs.number))
    assert refusal(import_gdr, devices[1], data).reason is Reason.NO_DEVICE
    theirs.close()


def send_raw(data: bytes, count: int) -> socket.socket:
    """A socket on which these bytes wait with so many descriptors, and whose other end is closed."""
    ours, theirs = socket.socketpair()
    with theirs, tempfile.TemporaryFile() as file:
        if data:
            socket.send_fds(theirs, [data], [file.fileno()] * count)
    return ours


def test_a_message_that_is_no_parcel_is_refused_and_its_descriptors_are_closed() -> None:
    right = sample().pack()
    messages = [
        (b"", 0, Reason.PEER_GONE),
        (right[:100], 0, Reason.PEER_GONE),
        (right[:100], 3, Reason.PEER_GONE),
        (b"x" * SHARE_HANDLE_BYTES, 253, Reason.MALFORMED),
        (right, 1, Reason.MALFORMED),
    ]
    for data, count, reason in messages:
        with send_raw(data, count) as connection:
            assert refusal(receive, connection).reason is reason


def test_descriptors_over_two_parts_are_counted_together() -> None:
    right = sample().pack()
    ours, theirs = socket.socketpair()
    with ours, theirs, tempfile.TemporaryFile() as file:
        for part in (right[:10], right[10:]):
            theirs.sendmsg([part], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [file.fileno()] * 200))])
        assert refusal(receive, ours).reason is Reason.MALFORMED


def test_a_silent_sender_is_given_up() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        error = refusal(receive, ours, timeout_ms=10)
        assert (type(error), error.reason) == (BrokenResource, Reason.TIMEOUT)


def test_a_parcel_goes_nowhere_when_the_other_side_is_closed() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with ours:
        error = refusal(Parcel(sample().pack()).send, ours)
        assert (type(error), error.reason) == (BrokenResource, Reason.PEER_GONE)


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


def test_without_cuda_there_is_never_a_handle() -> None:
    # The folder of the twins is taken from the loader's path; a real driver is hidden by showing no device.
    environ = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environ |= {"CUDA_VISIBLE_DEVICES": "-1"}
    code = WITHOUT_CUDA.format(data=sample().pack().hex())
    child = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in child.stdout.splitlines()]
    assert answers == [[Unsupported.__name__, errno.ENOTSUP]] * 5


@IPC
def test_a_handle_is_what_the_documents_say(device: Device, seed: int) -> None:
    with device.allocate(MIB) as memory:
        data = export_memory(memory, kind=ShareKind.IPC, offset_bytes=4096, length_bytes=100).data
        assert len(data) == SHARE_HANDLE_BYTES == 192
        assert data[:16] == b"GDRSHARE\x01\x00\x01\x00\xc0\x00\x00\x00"
        sizes = [int.from_bytes(data[at : at + 8], "little") for at in (16, 24, 32, 40, 48, 56)]
        assert sizes == [MIB, 4096, 100, 0, 0, 0]
        assert int.from_bytes(data[96:100], "little") == os.getpid()
        assert data[112:176] == cuda.export_handle(memory) == export_gdr(memory)[:64]
        memory.write(pattern.payload(16, seed=seed))

"""Handle messages: exchange them with a peer process through a socket, and create valid and damaged handles."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit import handles
from gdrkit.errors import GdrkitError
from gdrkit.harness.peer_handles import PeerRegion
from gdrkit.harness.peer_memory import PeerMemory
from gdrkit.host import this_process
from gdrkit.registration.handle import ShareHandle, ShareKind
from gdrkit.registration.handle_message import HandleMessage, receive
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from gdrkit.harness.peer_handles import PeerNic
    from gdrkit.harness.peer_memory import PeerDevice

__all__ = [
    "flip_bit",
    "import_in_peer",
    "list_open_descriptors",
    "make_handle",
    "receive_message_from_peer",
    "register_dmabuf_in_peer",
    "require_error",
]

_TIMEOUT_MS = 10_000.0


def receive_message_from_peer(
    memory: PeerMemory, kind: ShareKind, *, offset_bytes: int = 0, length_bytes: int | None = None
) -> HandleMessage:
    """Let a peer process export its memory, and return the handle message. The caller must close the message."""
    local_socket, peer_socket = socket.socketpair()
    with local_socket, peer_socket:
        memory.peer.request(
            "share.export",
            memory=memory.handle_number,
            kind=int(kind),
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            descriptors=[peer_socket.fileno()],
        )
        return receive(local_socket, timeout_ms=_TIMEOUT_MS)


def import_in_peer(device: PeerDevice, message: HandleMessage) -> PeerMemory:
    """Send a handle message to a peer process, and return the memory that the peer imports from the message."""
    local_socket, peer_socket = socket.socketpair()
    with local_socket, peer_socket:
        message.send(local_socket)
        memory_handle_number = device.peer.request(
            "share.import_memory", device=device.handle_number, descriptors=[peer_socket.fileno()]
        )
    return PeerMemory(device.peer, memory_handle_number)


def register_dmabuf_in_peer(nic: PeerNic, message: HandleMessage) -> PeerRegion:
    """Send a message with a dma-buf to a peer process, and return the region that the peer registers."""
    local_socket, peer_socket = socket.socketpair()
    with local_socket, peer_socket:
        message.send(local_socket)
        region_handle_number = nic.peer.request(
            "share.register_dmabuf", nic=nic.handle_number, descriptors=[peer_socket.fileno()]
        )
    return PeerRegion(nic.peer, region_handle_number)


def require_error(call: Callable[..., object], *arguments: object, **options: object) -> GdrkitError:
    """Require that the call raises a GdrkitError and leaves no handle or descriptor open. Return the error."""
    handles_and_descriptors_before = handles.live(), list_open_descriptors()
    with pytest.raises(GdrkitError) as error_info:
        call(*arguments, **options)
    assert (handles.live(), list_open_descriptors()) == handles_and_descriptors_before
    return error_info.value


def make_handle(**changes: object) -> ShareHandle:
    """Return a handle that has valid fields, except for `changes`."""
    handle = ShareHandle(
        kind=ShareKind.IPC,
        allocation_bytes=MIB,
        offset_bytes=4096,
        length_bytes=8192,
        device_uuid=bytes(range(1, 17)),
        owner=this_process(),
        ipc=bytes(range(64)),
    )
    return replace(handle, **changes)  # type: ignore[arg-type]


def flip_bit(data: bytes, bit_index: int) -> bytes:
    """Return the data with one bit flipped. Bit 0 is the lowest bit of the first byte."""
    changed_data = bytearray(data)
    changed_data[bit_index // 8] ^= 1 << (bit_index % 8)
    return bytes(changed_data)


def list_open_descriptors() -> frozenset[str]:
    """Return the numbers of the open descriptors of this process.

    The descriptor that this function opens for the query is not among them, because it is closed again.
    """
    return frozenset(path.name for path in Path("/proc/self/fd").iterdir() if path.exists())

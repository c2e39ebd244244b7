"""Sharing with a peer: handle messages to it and from it through a socket, as two programs would do it."""

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

__all__ = ["flipped", "from_peer", "memory_in_peer", "open_descriptors", "refusal", "region_in_peer", "sample"]

TIMEOUT_MS = 10_000.0


def from_peer(
    memory: PeerMemory, kind: ShareKind, *, offset_bytes: int = 0, length_bytes: int | None = None
) -> HandleMessage:
    """What a peer exports, as it arrives here; the caller closes it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        memory.peer.request(
            "share.export",
            memory=memory.number,
            kind=int(kind),
            offset_bytes=offset_bytes,
            length_bytes=length_bytes,
            descriptors=[theirs.fileno()],
        )
        return receive(ours, timeout_ms=TIMEOUT_MS)


def memory_in_peer(device: PeerDevice, message: HandleMessage) -> PeerMemory:
    """What a peer has of memory that is shared with it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(ours)
        made = device.peer.request("share.import_memory", device=device.number, descriptors=[theirs.fileno()])
    return PeerMemory(device.peer, made)


def region_in_peer(nic: PeerNic, message: HandleMessage) -> PeerRegion:
    """Have a peer register a dma-buf that is sent to it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        message.send(ours)
        made = nic.peer.request("share.register_dmabuf", nic=nic.number, descriptors=[theirs.fileno()])
    return PeerRegion(nic.peer, made)


def refusal(call: Callable[..., object], *arguments: object, **options: object) -> GdrkitError:
    """What the call raises; nothing that it opened may stay open."""
    before = handles.live(), open_descriptors()
    with pytest.raises(GdrkitError) as raised:
        call(*arguments, **options)
    assert (handles.live(), open_descriptors()) == before
    return raised.value


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


def flipped(data: bytes, bit: int) -> bytes:
    """The same bytes with one bit turned."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << (bit % 8)
    return bytes(changed)


def open_descriptors() -> frozenset[str]:
    """The descriptors that this process has open, without the one that looks."""
    return frozenset(path.name for path in Path("/proc/self/fd").iterdir() if path.exists())

"""What the RDMA cases begin with: device memory that a NIC can reach, and a queue pair to a peer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest

from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.registration import RegistrationRoute, register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Access

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.cuda import Device, DeviceMemory
    from gdrkit.harness.peer import Peer
    from gdrkit.harness.peer_handles import PeerQueuePair
    from gdrkit.registration import Registration
    from gdrkit.verbs import Nic

__all__ = ["ALL_ACCESS", "DMABUF", "ROUTES", "SIZES", "joined", "reachable"]

ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE

DMABUF = needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
ROUTES = [
    pytest.param(RegistrationRoute.DMABUF, id="dmabuf", marks=DMABUF),
    pytest.param(
        RegistrationRoute.PEER_MEMORY, id="peer_memory", marks=needs(verbs.nic(), verbs.peer_memory, cuda.device())
    ),
]

# Length and offset: a byte, a page less one, GPU pages, odd sizes, and one that takes many packets; all at odd places.
SIZES = [
    pytest.param(1, 1, id="1B"),
    pytest.param(4 * KIB - 1, 4097, id="4KiB-1"),
    pytest.param(64 * KIB, 65535, id="64KiB"),
    pytest.param(MIB + 3, 3, id="1MiB+3"),
    pytest.param(64 * MIB, 12345, id="64MiB"),
]


@contextlib.contextmanager
def reachable(
    device: Device,
    nic: Nic,
    route: RegistrationRoute | None = None,
    *,
    length_bytes: int = 256 * KIB,
    access: Access = ALL_ACCESS,
) -> Iterator[tuple[DeviceMemory, Registration]]:
    """New device memory, every byte 0xA5, registered with `nic`."""
    with device.allocate(length_bytes) as memory:
        memory.fill(0xA5)
        with register(memory, [nic], route=route, access=access) as registration:
            yield memory, registration


@contextlib.contextmanager
def joined(nic: Nic, peer: Peer, **options: int) -> Iterator[PeerQueuePair]:
    """A queue pair of the peer, connected to one of this process (which only has to be there); options are those of
    ``QueuePair.connect``.
    """
    with nic.completion_queue(depth=16) as queue, nic.queue_pair(queue) as ours:
        # By the same NIC, which reaches itself on any fabric; two NICs of a host may be on rails that never meet.
        theirs = peer.open_nic(nic.name, port=nic.port.number, gid_index=nic.gid_index).queue_pair()
        theirs.join(ours, **options)
        yield theirs

"""What the RDMA cases begin with: memory of the host or of a device that a NIC can reach, and a pair to a peer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

import pytest

from gdrkit.errors import RegistrationFailed
from gdrkit.harness.needs import cuda, needs, verbs
from gdrkit.host import HostAllocator
from gdrkit.registration import RegistrationRoute, register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Access

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.buffers import DeviceBuffer
    from gdrkit.cuda import Device, DeviceMemory
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer
    from gdrkit.harness.peer_handles import PeerQueuePair
    from gdrkit.registration import Registration
    from gdrkit.verbs import Nic, Region, RemoteRange

__all__ = [
    "ALL_ACCESS",
    "DMABUF",
    "KINDS",
    "ROUTES",
    "SIZES",
    "SPACES",
    "Reach",
    "Reached",
    "Space",
    "joined",
    "reachable",
    "registered",
    "registering",
    "space",
]

ALL_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE

DMABUF = needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
ROUTES = [
    pytest.param(RegistrationRoute.DMABUF, id="dmabuf", marks=DMABUF),
    pytest.param(
        RegistrationRoute.PEER_MEMORY, id="peer_memory", marks=needs(verbs.nic(), verbs.peer_memory, cuda.device())
    ),
]

# The kinds of memory for the fixture `reach`: of the host, and of a device by each way of registration.
KINDS = [pytest.param(None, id="host", marks=needs(verbs.nic())), *ROUTES]

# The kinds of memory for the fixture `space`, by which cases of a cache, a pool or a registration take theirs.
SPACES = [pytest.param("host", marks=needs(verbs.nic())), pytest.param("device", marks=DMABUF)]
Space: TypeAlias = "Device | HostAllocator"

# Length and offset: a byte, a page less one, GPU pages, odd sizes, and one that takes many packets; all at odd places.
SIZES = [
    pytest.param(1, 1, id="1B"),
    pytest.param(4 * KIB - 1, 4097, id="4KiB-1"),
    pytest.param(64 * KIB, 65535, id="64KiB"),
    pytest.param(MIB + 3, 3, id="1MiB+3"),
    pytest.param(64 * MIB, 12345, id="64MiB"),
]


class Reached(Protocol):
    """Memory that the peers of a NIC can reach until it is deregistered."""

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """What a peer needs for a part of it; None: up to the end."""

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Its bytes, as its owner sees them."""

    def write(self, data: bytes, *, offset_bytes: int = 0) -> None:
        """Change its bytes as its owner."""

    def deregister(self) -> None:
        """Take the key back; the memory stays."""


@dataclass(frozen=True)
class _HostReached:
    data: memoryview
    region: Region

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        return self.region.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        end = None if length_bytes is None else offset_bytes + length_bytes
        return bytes(self.data[offset_bytes:end])

    def write(self, data: bytes, *, offset_bytes: int = 0) -> None:
        self.data[offset_bytes : offset_bytes + len(data)] = data

    def deregister(self) -> None:
        self.region.close()


@dataclass(frozen=True)
class _DeviceReached:
    nic: Nic
    memory: DeviceMemory
    registration: Registration

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        return self.registration.remote(self.nic, offset_bytes=offset_bytes, length_bytes=length_bytes)

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        return self.memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes)

    def write(self, data: bytes, *, offset_bytes: int = 0) -> None:
        self.memory.write(data, offset_bytes=offset_bytes)

    def deregister(self) -> None:
        self.registration.close()


@dataclass(frozen=True)
class Reach:
    """Makes memory of one kind reachable through one NIC; ``device`` and ``route`` are None for the host's."""

    nic: Nic
    device: Device | None
    route: RegistrationRoute | None

    @contextlib.contextmanager
    def memory(self, *, length_bytes: int = 256 * KIB, access: Access = ALL_ACCESS) -> Iterator[Reached]:
        """New memory, every byte 0xA5, registered."""
        if self.device is None:
            data = bytearray(b"\xa5") * length_bytes
            with self.nic.register_host(data, access=access) as region:
                yield _HostReached(memoryview(data), region)
        else:
            with reachable(self.device, self.nic, self.route, length_bytes=length_bytes, access=access) as made:
                yield _DeviceReached(self.nic, *made)

    def claim(self, evidence: Evidence) -> None:
        """Say that the bytes of the case took this route; host memory has none that could be direct."""
        if self.device is not None and self.route is not None:
            evidence.route(device=self.device, nic=self.nic, way=self.route)


@pytest.fixture(params=SPACES)
def space(request: pytest.FixtureRequest) -> Space:
    """What gives the memory of the case: the host, or the first CUDA device."""
    if request.param == "host":
        return HostAllocator()
    device: Device = request.getfixturevalue("device")
    return device


def registering(space: Space) -> str:
    """The function of libibverbs that registers memory from there."""
    return "ibv_reg_mr" if isinstance(space, HostAllocator) else "ibv_reg_dmabuf_mr"


def registered(
    memory: DeviceBuffer, nics: Sequence[Nic], *, route: RegistrationRoute | None, access: Access = ALL_ACCESS
) -> Registration:
    """Register by this way; where that one is refused, say by the policy's own error whether there is any other."""
    try:
        return register(memory, nics, route=route, access=access)
    except RegistrationFailed:
        # Raises with the cause of every way where none is possible.
        register(memory, nics, access=access).close()
        raise


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
        with registered(memory, [nic], route=route, access=access) as registration:
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

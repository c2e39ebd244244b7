"""Memory kinds as parameters of cases: host memory, and device memory with each registration route.

Further functions register such memory, and connect a queue pair of a peer process.
"""

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
    "ALLOCATORS",
    "LENGTHS_AND_OFFSETS",
    "MEMORY_KINDS",
    "NEEDS_DMABUF",
    "READ_WRITE_ACCESS",
    "ROUTES",
    "AnyAllocator",
    "RdmaMemory",
    "RdmaMemoryKind",
    "allocator",
    "connect_peer_queue_pair",
    "find_registration_function",
    "register_by_route",
    "register_device_memory",
]

# Access flags for local writes, and for reads and writes by peers.
READ_WRITE_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_READ | Access.REMOTE_WRITE

# Mark of the cases that register device memory as a dma-buf.
NEEDS_DMABUF = needs(verbs.nic(), verbs.dmabuf_region, cuda.device(), cuda.dmabuf_export)
# Parameters of cases: the registration routes of device memory.
ROUTES = [
    pytest.param(RegistrationRoute.DMABUF, id="dmabuf", marks=NEEDS_DMABUF),
    pytest.param(
        RegistrationRoute.PEER_MEMORY, id="peer_memory", marks=needs(verbs.nic(), verbs.peer_memory, cuda.device())
    ),
]

# Parameters of the fixture `memory_kind`: host memory, and device memory by each registration route.
MEMORY_KINDS = [pytest.param(None, id="host", marks=needs(verbs.nic())), *ROUTES]

# Parameters of the fixture `allocator`. The tested cache, pool or registration gets the memory from this allocator.
ALLOCATORS = [pytest.param("host", marks=needs(verbs.nic())), pytest.param("device", marks=NEEDS_DMABUF)]
AnyAllocator: TypeAlias = "Device | HostAllocator"

# Length and offset of a transfer, in bytes. The offsets are odd, and the longest transfer takes many packets.
LENGTHS_AND_OFFSETS = [
    pytest.param(1, 1, id="1B"),
    pytest.param(4 * KIB - 1, 4097, id="4KiB-1"),
    pytest.param(64 * KIB, 65535, id="64KiB"),
    pytest.param(MIB + 3, 3, id="1MiB+3"),
    pytest.param(64 * MIB, 12345, id="64MiB"),
]


class RdmaMemory(Protocol):
    """Memory that the peers of a NIC can access until it is deregistered."""

    def remote(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> RemoteRange:
        """Return the remote address and key of a range, which by default ends at the end of the memory."""

    def read(self, *, offset_bytes: int = 0, length_bytes: int | None = None) -> bytes:
        """Read bytes of the memory by local access."""

    def write(self, data: bytes, *, offset_bytes: int = 0) -> None:
        """Change bytes of the memory by local access."""

    def deregister(self) -> None:
        """Deregister the memory without freeing it."""


@dataclass(frozen=True)
class _HostRdmaMemory:
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
class _DeviceRdmaMemory:
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
class RdmaMemoryKind:
    """A kind of memory for RDMA with one NIC.

    Attributes
    ----------
    nic : Nic
        The NIC with which the memory is registered.
    device : Device, optional
        The CUDA device; None for host memory.
    route : RegistrationRoute, optional
        Registration route of device memory; None for host memory.
    """

    nic: Nic
    device: Device | None
    route: RegistrationRoute | None

    @contextlib.contextmanager
    def memory(self, *, length_bytes: int = 256 * KIB, access: Access = READ_WRITE_ACCESS) -> Iterator[RdmaMemory]:
        """Yield new registered memory, every byte of which is 0xA5."""
        if self.device is None:
            data = bytearray(b"\xa5") * length_bytes
            with self.nic.register_host(data, access=access) as region:
                yield _HostRdmaMemory(memoryview(data), region)
        else:
            with register_device_memory(
                self.device, self.nic, self.route, length_bytes=length_bytes, access=access
            ) as (memory, registration):
                yield _DeviceRdmaMemory(self.nic, memory, registration)

    def record_route(self, evidence: Evidence) -> None:
        """Record that the bytes of the case took this registration route. Host memory has no route to record."""
        if self.device is not None and self.route is not None:
            evidence.route(device=self.device, nic=self.nic, method=self.route)


@pytest.fixture(params=ALLOCATORS)
def allocator(request: pytest.FixtureRequest) -> AnyAllocator:
    """Return the allocator of the case's memory: the host, or the first CUDA device."""
    if request.param == "host":
        return HostAllocator()
    device: Device = request.getfixturevalue("device")
    return device


def find_registration_function(allocator: AnyAllocator) -> str:
    """Return the name of the libibverbs function that registers memory of this allocator."""
    return "ibv_reg_mr" if isinstance(allocator, HostAllocator) else "ibv_reg_dmabuf_mr"


def register_by_route(
    memory: DeviceBuffer, nics: Sequence[Nic], *, route: RegistrationRoute | None, access: Access = READ_WRITE_ACCESS
) -> Registration:
    """Register memory by `route`.

    If `route` fails, register the memory by the default policy. If the policy fails too, raise its error, because
    that error says why each route failed. Otherwise raise the error of `route`.
    """
    try:
        return register(memory, nics, route=route, access=access)
    except RegistrationFailed:
        register(memory, nics, access=access).close()
        raise


@contextlib.contextmanager
def register_device_memory(
    device: Device,
    nic: Nic,
    route: RegistrationRoute | None = None,
    *,
    length_bytes: int = 256 * KIB,
    access: Access = READ_WRITE_ACCESS,
) -> Iterator[tuple[DeviceMemory, Registration]]:
    """Yield new device memory, every byte of which is 0xA5, and its registration with `nic`."""
    with device.allocate(length_bytes) as memory:
        memory.fill(0xA5)
        with register_by_route(memory, [nic], route=route, access=access) as registration:
            yield memory, registration


@contextlib.contextmanager
def connect_peer_queue_pair(nic: Nic, peer: Peer, **options: int) -> Iterator[PeerQueuePair]:
    """Yield a queue pair of the peer that is connected to a queue pair of this process.

    The queue pair of this process posts no requests. Both queue pairs use the same NIC, because two NICs of a host may
    be on separate networks. The options are passed to ``QueuePair.connect``.
    """
    with nic.completion_queue(depth=16) as completion_queue, nic.queue_pair(completion_queue) as local_queue_pair:
        peer_queue_pair = peer.open_nic(nic.name, port=nic.port.number, gid_index=nic.gid_index).queue_pair()
        peer_queue_pair.connect_with(local_queue_pair, **options)
        yield peer_queue_pair

"""Reach: whether the DMA of a NIC can access the memory of a GPU, measured with checked bytes and port counters.

On some machines, GPU memory can be registered with every NIC, but the DMA of some NICs fails. So a NIC reaches a GPU
only if a page was registered, written and read through the NIC, and every byte was right. Then the port counters of
both NICs of the transfer decide whether the transfer proves a direct route: see :attr:`Reach.state`.
"""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gdrkit import pattern
from gdrkit.cuda import DeviceMemory
from gdrkit.errors import BrokenResource, DataMismatch, GdrkitError
from gdrkit.host import PortGrowth, port_growth, read_port_counters
from gdrkit.registration.connected_pair import ConnectedPair
from gdrkit.registration.ordering import Ordering
from gdrkit.registration.policy import register
from gdrkit.units import GPU_RDMA_PAGE_BYTES
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.cuda import PrimaryContext
    from gdrkit.host import HostTree, PortCounters
    from gdrkit.registration.policy import Registration, RegistrationRoute
    from gdrkit.verbs import Nic, RemoteRange

__all__ = ["COUNTERS_TIMEOUT_S", "Reach", "TransferPath", "measure_devices", "measure_reach", "unproven_reason"]

# Size of the transfer in each direction: one page. nvidia-peermem pins device memory in pages of this size.
_PAGE_BYTES = GPU_RDMA_PAGE_BYTES
# Seeds of three patterns, the ASCII codes of "old", "wrt" and "rea": for the content of the page before the write, for
# the written bytes, and for the bytes that are read.
_OLD_SEED, _WRITE_SEED, _READ_SEED = 0x6F6C64, 0x777274, 0x726561
# Longest time that the driver of a NIC needs to update the port counters after a transfer.
COUNTERS_TIMEOUT_S = 0.3
# Pause between two reads of the counters.
_COUNTERS_PAUSE_S = 0.01


class TransferPath(enum.Enum):
    """The path of the bytes between the two ends of a transfer.

    LOOPBACK: both ends are the same NIC, and the bytes may never leave it. WIRE: the ends are two NICs, in one host or
    in two hosts.
    """

    LOOPBACK = "loopback"
    WIRE = "wire"


@dataclass(frozen=True, slots=True)
class Reach:
    """The result of measuring one GPU, a NIC that accesses the memory of the GPU, and the NIC that posts the requests.

    Attributes
    ----------
    gpu_uuid, pci_bus_id : str
        UUID and PCI address of the GPU.
    nic, nic_gid : str
        Name and GID of the NIC that accesses the memory of the GPU.
    peer_nic : str
        Name of the NIC that posted the requests.
    path : TransferPath
        ``LOOPBACK`` if both NICs are the same, else ``WIRE``.
    route : RegistrationRoute or None
        The method by which the memory was registered. None: it could not be registered.
    moved : bool
        Whether a page was written and read through the NIC, and every byte was right.
    cause : str
        The reason why `moved` is false; empty if it is true.
    transfer_bytes : int
        Size of the transfer in each direction, in bytes.
    nic_growth, peer_growth : PortGrowth or None
        The bytes that the counters of the two ports counted during the transfers. None: the memory could not be
        registered, so nothing was transferred.
    measured_s : float
        Time of the measurement, in seconds since 1970.
    failure : GdrkitError or None
        The error, if the measurement failed in this process. None for results from the file, which stores no errors.
    """

    gpu_uuid: str
    pci_bus_id: str
    nic: str
    nic_gid: str
    peer_nic: str
    path: TransferPath
    route: RegistrationRoute | None
    moved: bool
    cause: str
    transfer_bytes: int
    nic_growth: PortGrowth | None
    peer_growth: PortGrowth | None
    measured_s: float
    failure: GdrkitError | None = field(default=None, compare=False)

    @property
    def state(self) -> RouteOutcome:
        """The state of the route between the GPU and the NIC.

        PROVEN: every byte was right, and the counters of both ports grew by at least the transferred bytes. UNPROVEN:
        every byte was right, and :attr:`reason` says why the counters do not prove the route. NOT_POSSIBLE: see
        :attr:`cause`.
        """
        if not self.moved:
            return RouteOutcome.NOT_POSSIBLE
        return RouteOutcome.UNPROVEN if self.reason else RouteOutcome.PROVEN

    @property
    def reason(self) -> str:
        """The reason why the moved bytes do not prove the route; empty if they do. See :func:`unproven_reason`."""
        if not self.moved or self.nic_growth is None or self.peer_growth is None:
            return ""
        return unproven_reason(self.path, self.transfer_bytes, self.nic_growth, self.peer_growth)


def unproven_reason(path: TransferPath, transfer_bytes: int, *growths: PortGrowth) -> str:
    """Return why the counters of two ports do not prove that bytes moved between them, or an empty string if they do.

    ``counters_missing``: a port has no byte counters. ``loopback_not_counted``: the NIC does not count bytes that stay
    inside it. ``counters_did_not_grow``: the bytes passed two NICs, and a counter grew by less than these bytes.

    Parameters
    ----------
    path : TransferPath
        Whether both ends of the transfer were one NIC.
    transfer_bytes : int
        Number of bytes that moved in each direction.
    growths : PortGrowth
        The bytes that the counters of the two ports counted.
    """
    counted_bytes = [count for growth in growths for count in (growth.sent_bytes, growth.received_bytes)]
    if None in counted_bytes:
        return "counters_missing"
    is_loopback = path is TransferPath.LOOPBACK
    # In loopback, one port sends and receives the bytes of both directions.
    expected_bytes = transfer_bytes * (2 if is_loopback else 1)
    if all(count is not None and count >= expected_bytes for count in counted_bytes):
        return ""
    return "loopback_not_counted" if is_loopback else "counters_did_not_grow"


def measure_reach(
    device: PrimaryContext,
    nic_pairs: Sequence[tuple[Nic, Nic]],
    *,
    tree: HostTree,
    route: RegistrationRoute | None = None,
    counters_timeout_s: float = 0.0,
) -> tuple[Reach, ...]:
    """Write and read a page of a GPU through NICs, and return one result for each pair of NICs.

    Parameters
    ----------
    device : PrimaryContext
        The GPU.
    nic_pairs : sequence of (Nic, Nic)
        In each pair, first the NIC that accesses the memory of the GPU, then the NIC that posts the requests.
    tree : HostTree
        The host whose sysfs has the port counters.
    route : RegistrationRoute or None
        The only method of registration to use. With None, :func:`~gdrkit.registration.register` chooses it.
    counters_timeout_s : float
        Longest time to wait until the counters have grown, in seconds. Some drivers update them late.

    Raises
    ------
    ApiError
        The memory of the GPU could not be allocated.
    """
    with DeviceMemory(device, _PAGE_BYTES) as memory:
        return tuple(
            _Measurement(memory, pair, tree=tree, counters_timeout_s=counters_timeout_s).run(route)
            for pair in nic_pairs
        )


def measure_devices(
    devices: Sequence[PrimaryContext],
    nic_pairs: Sequence[tuple[Nic, Nic]],
    *,
    tree: HostTree,
    route: RegistrationRoute | None = None,
    counters_timeout_s: float = COUNTERS_TIMEOUT_S,
) -> tuple[Reach, ...]:
    """Call :func:`measure_reach` for one GPU after another, without the pairs of NICs that failed before.

    If the transfer between two NICs fails for one GPU, later GPUs have no result of this pair: the NICs are probably on
    separate networks, where each request takes long to fail.
    """
    results: list[Reach] = []
    failed_pairs: set[tuple[Nic, Nic]] = set()
    for device in devices:
        tried_pairs = [pair for pair in nic_pairs if pair not in failed_pairs]
        pair_results = measure_reach(device, tried_pairs, tree=tree, route=route, counters_timeout_s=counters_timeout_s)
        results += pair_results
        failed_pairs |= {
            pair
            for pair, reach in zip(tried_pairs, pair_results, strict=True)
            if reach.path is TransferPath.WIRE and reach.route is not None and not reach.moved
        }
    return tuple(results)


class _Measurement:
    """The measurement of one GPU and one pair of NICs: the NIC that accesses the GPU memory, and its peer."""

    def __init__(
        self, memory: DeviceMemory, pair: tuple[Nic, Nic], *, tree: HostTree, counters_timeout_s: float
    ) -> None:
        self._device, self._memory, self._tree = memory.device, memory, tree
        self._nic, self._peer = pair
        self._counters_timeout_s = counters_timeout_s
        self._route: RegistrationRoute | None = None
        self._growths: tuple[PortGrowth | None, PortGrowth | None] = (None, None)

    def run(self, route: RegistrationRoute | None) -> Reach:
        """Register the memory, write and read a page through the NICs, compare the bytes, and return the result."""
        failure: GdrkitError | None = None
        try:
            with register(self._memory, [self._nic], route=route) as registration:
                self._route = registration.route
                self._transfer(registration)
        except GdrkitError as error:
            failure = error.clone()
        is_loopback = self._nic.name == self._peer.name
        return Reach(
            gpu_uuid=self._device.uuid,
            pci_bus_id=self._device.pci_bus_id,
            nic=self._nic.name,
            nic_gid=self._nic.gid,
            peer_nic=self._peer.name,
            path=TransferPath.LOOPBACK if is_loopback else TransferPath.WIRE,
            route=self._route,
            moved=failure is None,
            cause="" if failure is None else failure.message,
            transfer_bytes=_PAGE_BYTES,
            nic_growth=self._growths[0],
            peer_growth=self._growths[1],
            measured_s=time.time(),
            failure=failure,
        )

    def _transfer(self, registration: Registration) -> None:
        remote_range = registration.remote(self._nic, length_bytes=_PAGE_BYTES)
        counters_before = self._read_counters()
        try:
            with self._connect() as connected_pair:
                self._check_write(connected_pair, remote_range)
            with self._connect() as connected_pair:
                self._check_read(connected_pair, remote_range)
        finally:
            self._growths = self._wait_for_growth(counters_before)

    def _connect(self) -> ConnectedPair:
        return ConnectedPair(self._nic, self._peer, length_bytes=_PAGE_BYTES)

    def _check_write(self, connected_pair: ConnectedPair, remote_range: RemoteRange) -> None:
        self._memory.write(pattern.payload(_PAGE_BYTES, seed=_OLD_SEED))
        connected_pair.fill(_WRITE_SEED)
        connected_pair.write(remote_range).expect()
        Ordering.of(self._device).make_visible(self._device)
        _check_pattern(self._memory.read(), _WRITE_SEED, "RDMA WRITE")

    def _check_read(self, connected_pair: ConnectedPair, remote_range: RemoteRange) -> None:
        self._memory.write(pattern.payload(_PAGE_BYTES, seed=_READ_SEED))
        connected_pair.read(remote_range).expect()
        _check_pattern(connected_pair.data, _READ_SEED, "RDMA READ")

    def _read_counters(self) -> tuple[PortCounters, PortCounters]:
        nic_counters, peer_counters = (
            read_port_counters(self._tree, nic.name, nic.port.number) for nic in (self._nic, self._peer)
        )
        return nic_counters, peer_counters

    def _wait_for_growth(self, counters_before: tuple[PortCounters, PortCounters]) -> tuple[PortGrowth, PortGrowth]:
        """Wait until all counters have grown by a page, or until the timeout. Return the growth of both ports."""
        deadline_s = time.monotonic() + self._counters_timeout_s
        while True:
            counters_after = self._read_counters()
            growths = (
                port_growth(counters_before[0], counters_after[0]),
                port_growth(counters_before[1], counters_after[1]),
            )
            counted_bytes = [count for growth in growths for count in (growth.sent_bytes, growth.received_bytes)]
            is_complete = None in counted_bytes or all(
                count is not None and count >= _PAGE_BYTES for count in counted_bytes
            )
            if is_complete or time.monotonic() >= deadline_s:
                return growths
            time.sleep(_COUNTERS_PAUSE_S)


def _check_pattern(data: bytes | bytearray, seed: int, request_name: str) -> None:
    """Raise BrokenResource unless `data` has the pattern of `seed`."""
    try:
        pattern.check(data, seed=seed)
    except DataMismatch as error:
        message = f"{request_name} succeeded, but {error.message}"
        raise BrokenResource(message) from error

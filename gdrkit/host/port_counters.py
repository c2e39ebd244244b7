"""Reader of the traffic counters of RDMA ports.

The counters of a port increase when bytes pass the port, and only then. So a transfer that is reported as direct, but
leaves all counters unchanged, did not use a NIC.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gdrkit.host.tree import HostTree

__all__ = ["PortCounters", "PortGrowth", "port_counters", "port_growth", "read_port_counters"]

_RDMA_DEVICES_FOLDER = "/sys/class/infiniband"
# The InfiniBand specification counts port data in words of four bytes. sysfs exports these words.
_WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class PortCounters:
    """The counters of one port at one moment. A counter is None if the driver does not provide it."""

    device: str
    port: int
    sent_bytes: int | None
    received_bytes: int | None
    sent_packets: int | None
    received_packets: int | None


@dataclass(frozen=True, slots=True)
class PortGrowth:
    """The increase of the byte counters of one port. A number is None if the driver does not count these bytes."""

    sent_bytes: int | None
    received_bytes: int | None


def port_counters(tree: HostTree) -> tuple[PortCounters, ...]:
    """Read the counters of every port of every RDMA device below the root of `tree`."""
    return tuple(
        read_port_counters(tree, device, int(port_name))
        for device in tree.names(_RDMA_DEVICES_FOLDER)
        for port_name in tree.names(f"{_RDMA_DEVICES_FOLDER}/{device}/ports")
        if port_name.isdecimal()
    )


def port_growth(before: PortCounters, after: PortCounters) -> PortGrowth:
    """Return the increase of the byte counters of a port between two moments."""
    return PortGrowth(
        sent_bytes=_compute_difference(before.sent_bytes, after.sent_bytes),
        received_bytes=_compute_difference(before.received_bytes, after.received_bytes),
    )


def _compute_difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def read_port_counters(tree: HostTree, device: str, port: int) -> PortCounters:
    """Read the counters of one port of one RDMA device. The counters of a port that is not in sysfs are None."""
    counters_folder = f"{_RDMA_DEVICES_FOLDER}/{device}/ports/{port}/counters"
    # The rxe driver counts packets in hw_counters only.
    hw_counters_folder = f"{_RDMA_DEVICES_FOLDER}/{device}/ports/{port}/hw_counters"
    sent_words, received_words = (
        tree.number(f"{counters_folder}/port_xmit_data"),
        tree.number(f"{counters_folder}/port_rcv_data"),
    )
    return PortCounters(
        device=device,
        port=port,
        sent_bytes=None if sent_words is None else sent_words * _WORD_BYTES,
        received_bytes=None if received_words is None else received_words * _WORD_BYTES,
        sent_packets=_read_first_number(
            tree, f"{counters_folder}/port_xmit_packets", f"{hw_counters_folder}/sent_pkts"
        ),
        received_packets=_read_first_number(
            tree, f"{counters_folder}/port_rcv_packets", f"{hw_counters_folder}/rcvd_pkts"
        ),
    )


def _read_first_number(tree: HostTree, *paths: str) -> int | None:
    """Return the number in the first of the files that can be read, or None."""
    return next((count for path in paths if (count := tree.number(path)) is not None), None)

"""Ports count as many packets as a transfer needs at the path MTU, on twins and on the rxe devices of `nox -s lab`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.initiators import connect_initiator

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.host import HostTree, read_port_counters
from gdrkit.units import MIB
from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

# Each operation has so many packets that the one request packet of a READ stays within the tolerance of 2 %.
TRANSFER_BYTES, OPERATIONS, DEPTH = MIB, 8, 2


def read_packet_counters(nic: Nic) -> tuple[int, int] | None:
    """Return how many packets the port of `nic` has sent and received, or None if the port does not count them."""
    counters = read_port_counters(HostTree(), nic.name, nic.port.number)
    if counters.sent_packets is None or counters.received_packets is None:
        return None
    return counters.sent_packets, counters.received_packets


def read_repeated_packets(responder: Nic) -> int:
    """Return the number of packets that the port received again, or dropped because an earlier packet was missing.

    The requester repeats packets if an acknowledgement is late, for example on a loaded virtual machine.
    """
    folder = f"/sys/class/infiniband/{responder.name}/ports/{responder.port.number}/hw_counters"
    return sum(HostTree().number(f"{folder}/{name}") or 0 for name in ("duplicate_request", "out_of_seq_request"))


@needs(verbs.nic(count_min=2))
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("nic_index", [0, 1])
def test_ports_count_the_packets_of_the_path_mtu(
    nics: tuple[Nic, ...], seed: int, evidence: Evidence, nic_index: int, direction: Direction
) -> None:
    """Transfer between two different NICs, so that different counters count data packets and acknowledgements."""
    nic, peer_nic = nics[nic_index], nics[1 - nic_index]
    data, is_write = pattern.payload(TRANSFER_BYTES, seed=seed), direction is Direction.WRITE
    memory = bytearray(TRANSFER_BYTES) if is_write else bytearray(data)
    with (
        peer_nic.register_host(memory) as region,
        connect_initiator(nic, peer=peer_nic, memory_bytes=TRANSFER_BYTES) as initiator,
    ):
        initiator.write(data if is_write else bytes(TRANSFER_BYTES))
        counters_before = [read_packet_counters(measured_nic) for measured_nic in (nic, peer_nic)]
        repeated_packets_before = read_repeated_packets(peer_nic)
        initiator.run(direction, region.remote(), length_bytes=TRANSFER_BYTES, operations=OPERATIONS, depth=DEPTH)
        counters_after = [read_packet_counters(measured_nic) for measured_nic in (nic, peer_nic)]
        repeated_packets = read_repeated_packets(peer_nic) - repeated_packets_before
        pattern.check(bytes(memory) if is_write else initiator.read(), seed=seed)
    if None in counters_before:
        evidence.unproven("the port has no packet counters (counters_missing)")
        return
    counter_increases = [
        tuple(map(int.__sub__, count_after, count_before))
        for count_before, count_after in zip(counters_before, counters_after, strict=True)
        if count_before and count_after
    ]
    (sent_packets, received_packets), (peer_sent_packets, peer_received_packets) = counter_increases
    expected_packets = OPERATIONS * -(-TRANSFER_BYTES // nic.port.mtu_bytes)
    evidence["packets"] = {"expected": expected_packets, "mtu": nic.port.mtu_bytes, "repeated": repeated_packets}
    evidence["growth"] = {"nic": counter_increases[0], "peer": counter_increases[1]}
    # Only the two counters of the data packets are checked. The other two count acknowledgements or requests, whose
    # number is not known.
    if is_write:
        assert (sent_packets - repeated_packets, peer_received_packets - repeated_packets) == pytest.approx(
            (expected_packets, expected_packets), rel=0.02
        )
    elif repeated_packets:
        # The responder answers a repeated READ request again, and no counter shows the number of these packets.
        assert min(peer_sent_packets, received_packets) >= expected_packets
    else:
        assert (peer_sent_packets, received_packets) == pytest.approx((expected_packets, expected_packets), rel=0.02)

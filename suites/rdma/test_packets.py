"""Each port counts the packets that the bytes need with the path MTU, also that of an rxe device in the lab."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.initiators import connected_initiator

from gdrkit import pattern
from gdrkit.harness.needs import needs, verbs
from gdrkit.host import HostTree, read_port
from gdrkit.units import MIB
from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

# A transfer has many packets, so that the request of a READ is below 2 % of them.
TRANSFER_BYTES, OPERATIONS, DEPTH = MIB, 8, 2


@needs(verbs.nic(count_min=2))
@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("position", [0, 1])
def test_port_counts_the_packets_of_the_path_mtu(
    nics: tuple[Nic, ...], seed: int, evidence: Evidence, position: int, direction: Direction
) -> None:
    """Both ends are one NIC, because a READ from one rxe device of the lab to the other did not complete."""
    nic = nics[position]
    data, is_write = pattern.payload(TRANSFER_BYTES, seed=seed), direction is Direction.WRITE
    memory = bytearray(TRANSFER_BYTES) if is_write else bytearray(data)
    with nic.register_host(memory) as region, connected_initiator(nic, memory_bytes=TRANSFER_BYTES) as initiator:
        initiator.write(data if is_write else bytes(TRANSFER_BYTES))
        before = read_port(HostTree(), nic.name, nic.port.number)
        initiator.run(direction, region.remote(), length_bytes=TRANSFER_BYTES, operations=OPERATIONS, depth=DEPTH)
        after = read_port(HostTree(), nic.name, nic.port.number)
        pattern.check(bytes(memory) if is_write else initiator.read(), seed=seed)
    if before.sent_packets is None or before.received_packets is None:
        evidence.unproven("the port has no packet counters (counters_missing)")
        return
    packets = (after.sent_packets or 0) - before.sent_packets, (after.received_packets or 0) - before.received_packets
    if packets == (0, 0):
        evidence.unproven("the port does not count packets that stay inside the NIC (loopback_not_counted)")
        return
    expected = OPERATIONS * -(-TRANSFER_BYTES // nic.port.mtu_bytes)
    evidence["packets"] = {"expected": expected, "sent": packets[0], "received": packets[1], "mtu": nic.port.mtu_bytes}
    if is_write:
        # The port also counts the acknowledgements, and the responder decides how many packets each of them confirms.
        assert min(packets) >= expected
    else:
        assert packets == pytest.approx((expected, expected), rel=0.02)

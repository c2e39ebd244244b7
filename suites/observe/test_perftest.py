"""Tests that `gdrkit observe` reports the route and the packets of perftest, on twins and on Soft-RoCE devices."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from rdma import perftest

from gdrkit.harness.needs import host, needs, verbs
from gdrkit.observe import Observation
from gdrkit.verbs import Direction
from gdrkit.verdict import RouteOutcome

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Nic

# `gdrkit observe` reads the state of perftest at intervals. 1000 transfers take seconds in an emulated machine, so at
# least one reading shows the queue pair and the region.
TRANSFER_BYTES, TRANSFER_COUNT = 65536, 1000


@needs(verbs.nic(count_min=2), host.program("ib_write_bw"))
@pytest.mark.timeout(300)
def test_packets_of_perftest_are_those_of_the_path_mtu(
    nics: tuple[Nic, ...], tmp_path: Path, evidence: Evidence
) -> None:
    nic, peer_nic = nics[:2]
    report_path = tmp_path / "report"
    perftest.run_perftest(
        nic,
        Direction.WRITE,
        length_bytes=TRANSFER_BYTES,
        operations=TRANSFER_COUNT,
        depth=16,
        list_length=1,
        reads_max=1,
        peer=peer_nic,
        observer_command=[sys.executable, "-m", "gdrkit", "observe", "--report", str(report_path), "--"],
    )
    observation = Observation.from_json(report_path.read_text())
    route = observation.route("rdma")
    assert route is not None
    evidence["route"] = {"outcome": route.outcome.value, "evidence": route.evidence, "cause": route.cause}
    assert route.outcome is RouteOutcome.PROVEN
    (perftest_process,) = [process for process in observation.processes if process.program == "ib_write_bw"]
    assert perftest_process.twin_objects.get("verbs") or (perftest_process.queue_pairs and perftest_process.regions)
    (port,) = [port for port in observation.ports if port.device == nic.name]
    # The NIC sends each transfer in packets of at most the path MTU. The division rounds up.
    expected_packets = TRANSFER_COUNT * -(-TRANSFER_BYTES // nic.port.mtu_bytes)
    evidence["packets"] = {"expected": expected_packets, "sent": port.sent_packets, "mtu": nic.port.mtu_bytes}
    assert port.sent_packets == pytest.approx(expected_packets, rel=0.02)

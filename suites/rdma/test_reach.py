"""Every NIC moves bytes to and from every GPU, in loopback and with other NICs of this host. Ports count the bytes.

The record has a row for each GPU and pair of NICs, with the state of the path (proven, unproven, ...) and the growth of
the counters of both ports.
"""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import permutations
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import ROUTES, register_device_memory

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostTree
from gdrkit.registration import measure_devices

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.registration import Reach, RegistrationRoute
    from gdrkit.verbs import Nic


def record_results(results: Sequence[Reach], devices: Sequence[Device], evidence: Evidence) -> None:
    """Record a row for each result, and a route for each result whose bytes moved."""
    devices_by_uuid = {device.uuid: device for device in devices}
    for reach in results:
        if reach.moved and reach.route is not None:
            evidence.route(device=devices_by_uuid[reach.gpu_uuid], nic=reach.nic, method=reach.route, reach=reach)
    evidence["reach"] = [make_row(reach) for reach in results]


def make_row(reach: Reach) -> dict[str, object]:
    """Return the row for a GPU and a pair of NICs."""
    counted_bytes = {
        f"{side}_{direction}": getattr(increase, direction)
        for side, increase in (("nic", reach.nic_growth), ("peer_nic", reach.peer_growth))
        for direction in ("sent_bytes", "received_bytes")
        if increase is not None
    }
    return {
        "gpu": reach.pci_bus_id,
        "nic": reach.nic,
        "peer_nic": reach.peer_nic,
        "path": reach.path,
        "state": reach.state,
        "reason": reach.reason or reach.cause,
        "moved_bytes": reach.transfer_bytes if reach.moved else 0,
        **counted_bytes,
    }


def require_registration(devices: Sequence[Device], nics: Sequence[Nic], route: RegistrationRoute) -> None:
    """Register memory by `route` once. If that fails, the error has the causes of all registration routes."""
    with register_device_memory(devices[0], nics[0], route):
        pass


@pytest.mark.qualify
@pytest.mark.parametrize("route", ROUTES)
def test_every_nic_accesses_every_device(
    devices: tuple[Device, ...], nics: tuple[Nic, ...], evidence: Evidence, route: RegistrationRoute
) -> None:
    require_registration(devices, nics, route)
    neighbor_pairs = zip(nics, nics[1:] + nics[:1], strict=True)
    nic_pairs = dict.fromkeys([*((nic, nic) for nic in nics), *neighbor_pairs])
    results = measure_devices(devices, list(nic_pairs), tree=HostTree(), route=route)
    record_results(results, devices, evidence)
    # For each GPU and NIC, a transfer in loopback or with the next NIC must have moved bytes.
    reached_pairs = {(reach.gpu_uuid, reach.nic) for reach in results if reach.moved}
    for reach in results:
        if (reach.gpu_uuid, reach.nic) not in reached_pairs and reach.failure is not None:
            raise reach.failure


@pytest.mark.qualify
@needs(verbs.nic(count_min=2))
@pytest.mark.parametrize("route", ROUTES)
def test_nics_of_this_host_access_devices_for_each_other(
    devices: tuple[Device, ...], nics: tuple[Nic, ...], evidence: Evidence, route: RegistrationRoute
) -> None:
    require_registration(devices, nics, route)
    results = measure_devices(devices, list(permutations(nics, 2)), tree=HostTree(), route=route)
    record_results(results, devices, evidence)
    for reach in results:
        if reach.route is None and reach.failure is not None:
            raise reach.failure  # The memory cannot be registered.
    if not any(reach.moved for reach in results):
        causes = dict.fromkeys(reach.cause for reach in results)
        evidence.unproven(f"no two NICs of this host are connected: {'; '.join(causes)}")


@needs(software(Api.VERBS), software(Api.CUDA))
def test_command_stores_the_reach_and_proves_nothing_on_twins(state_folder: Path) -> None:
    command = [sys.executable, "-m", "gdrkit", "reach", "--json"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert completed.returncode == 0, completed.stderr
    rows = json.loads(completed.stdout)["reach"]
    assert {(row["state"], row["cause"]) for row in rows} == {("unproven", "ran on software twins")}
    assert {(row["nic"] == row["peer_nic"], row["path"]) for row in rows} == {(True, "loopback"), (False, "wire")}
    reach_file_text = (state_folder / "reach").read_text()
    assert reach_file_text.startswith("gdrkit-reach 1\n")
    assert reach_file_text.count(" moved=yes ") == len({(row["gpu_uuid"], row["nic"]) for row in rows})
    assert "proven" not in reach_file_text

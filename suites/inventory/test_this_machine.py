"""Facts, topology and diagnosis of this machine, without twins. The records of the cases contain the results.

Twins are libraries that emulate the hardware below an API.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from support import udev

from gdrkit import launch
from gdrkit.host import HostTree, mounts
from gdrkit.inventory import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence

# Causes that only a machine with a NIC can have.
NIC_CAUSES = {
    "no-registration-route",
    "no-dmabuf-region",
    "p2p-one-way",
    "ats-off-in-vm",
    "small-read-request",
    "port-down",
    "small-mtu",
    "no-roce-gid",
    "memlock-low",
    "stale-key",
    "missing-flush",
}
# The doctor reports a missing part by one of these texts if, and only if, the path does not exist or is empty.
PATH_OF_MISSING_PART = {
    "no NVIDIA driver": "/proc/driver/nvidia/version",
    "no RDMA device": "/sys/class/infiniband",
    "no nvidia-fs": "/proc/driver/nvidia-fs",
    "no udev database (/run/udev/data)": "/run/udev/data",
}


# One process examines the machine, so that the APIs are queried once.
EXAMINE_MACHINE_PROGRAM = """
import json
from gdrkit import inventory
machine = inventory.this_machine()
results = (machine.facts, inventory.topology(machine), inventory.diagnose(machine))
print(json.dumps([json.loads(result.to_json()) for result in results]))
"""


@pytest.fixture(scope="module")
def results() -> Iterator[tuple[dict[str, Any], ...]]:
    """Yield facts, topology and diagnosis of this machine, as a process without twins reports them."""
    environment = launch.environment(launch.Launch(twin_apis=frozenset()))
    command = [sys.executable, "-c", EXAMINE_MACHINE_PROGRAM]
    with udev.lock_entries():
        process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
        assert process.returncode == 0, process.stderr
        yield tuple(json.loads(_hide_mount_points(process.stdout)))


def _hide_mount_points(json_text: str) -> str:
    """Replace the mount points of this machine, because a record must not reveal them."""
    paths = {mount.mount_point for mount in mounts(HostTree())}
    # Findings name these folders, which exist on every machine.
    common_folders = ("/proc", "/sys", "/dev", "/run", "/etc")
    private_paths = sorted(
        (path for path in paths if path != "/" and not path.startswith(common_folders)), key=len, reverse=True
    )
    for index, path in enumerate(private_paths, start=1):
        json_text = json_text.replace(json.dumps(path, ensure_ascii=False)[1:-1], f"/mount-{index}")
    return json_text


def is_present(path: str) -> bool:
    """Return whether a file exists, or a folder exists and is not empty."""
    # This process may see the devices of the twins in sysfs, so a process without twins lists the folder.
    environment = launch.environment(launch.Launch(twin_apis=frozenset()))
    listing = subprocess.run(["ls", "-A", path], env=environment, capture_output=True, check=False)
    return bool(listing.stdout)


@pytest.mark.qualify
def test_facts_agree_with_the_driver(results: tuple[dict[str, Any], ...], evidence: Evidence) -> None:
    facts_data, _, _ = results
    facts = Facts.from_json(json.dumps(facts_data))
    evidence["facts"] = facts_data
    pci_addresses = {gpu.address for gpu in facts.gpus}
    for devices in (facts.cuda.devices if facts.cuda else (), facts.nvml.gpus if facts.nvml else ()):
        assert {device.pci_bus_id.lower() for device in devices} <= pci_addresses or not pci_addresses
    assert bool(facts.rdma_devices) == is_present("/sys/class/infiniband")
    if facts.nvml and facts.nvidia_driver_version:
        assert facts.nvml.driver_version == facts.nvidia_driver_version


@pytest.mark.qualify
def test_topology_has_every_gpu(results: tuple[dict[str, Any], ...], evidence: Evidence) -> None:
    facts, topology, _ = results
    evidence["topology"] = topology
    gpu_addresses = [place["address"] for place in topology["places"] if place["kind"] == "gpu"]
    assert {gpu["address"] for gpu in facts["gpus"]} <= set(gpu_addresses)
    assert all(
        len(distances_of_device) == len(topology["places"]) - 1
        for distances_of_device in topology["distances"].values()
    )


def test_doctor_raises_no_false_alarm(results: tuple[dict[str, Any], ...], evidence: Evidence) -> None:
    _, _, diagnosis = results
    evidence["doctor"] = diagnosis
    failed_codes = {finding["code"] for finding in diagnosis["findings"] if finding["verdict"] == "fail"}
    evidence["causes that are here"] = sorted(failed_codes)
    evidence["missing"] = diagnosis["missing"]
    for missing_part, path in PATH_OF_MISSING_PART.items():
        assert (missing_part in diagnosis["missing"]) == (not is_present(path)), missing_part
    if "no RDMA device" in diagnosis["missing"]:
        assert not failed_codes & NIC_CAUSES
    if "no NVIDIA GPU on PCI" in diagnosis["missing"] and "no NVIDIA driver" in diagnosis["missing"]:
        assert not failed_codes
    elif not is_present("/run/udev/data"):
        assert "udev-database" in failed_codes
    for finding in diagnosis["findings"]:
        assert finding["verdict"] == "not_run" or finding["read"], (
            f"{finding['code']} has a verdict and has read nothing"
        )

"""Facts, topology and doctor of the machine that the case runs on, as they are without any twin, kept in the record."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import udev

from gdrkit import launch
from gdrkit.host import HostTree, mounts
from gdrkit.inventory import Facts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gdrkit.harness.evidence import Evidence

# Those that only a NIC can have.
ABOUT_NICS = {
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
# What is missing, and where it would be.
PLACES = {
    "no NVIDIA driver": "/proc/driver/nvidia/version",
    "no RDMA device": "/sys/class/infiniband",
    "no nvidia-fs": "/proc/driver/nvidia-fs",
    "no udev database (/run/udev/data)": "/run/udev/data",
}


# In one process, which asks the APIs once.
PROGRAM = """
import json
from gdrkit import inventory
machine = inventory.this_machine()
found = (machine.facts, inventory.topology(machine), inventory.diagnose(machine))
print(json.dumps([json.loads(one.to_json()) for one in found]))
"""


@pytest.fixture(scope="module")
def said() -> Iterator[tuple[dict[str, Any], ...]]:
    """Facts, topology and diagnosis on the libraries that this machine really has, which stays as it is."""
    environment = launch.environment(launch.Launch(software=frozenset()))
    command = [sys.executable, "-c", PROGRAM]
    with udev.unchanged():
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=110)
        assert done.returncode == 0, done.stderr
        yield tuple(json.loads(_without_places(done.stdout)))


def _without_places(text: str) -> str:
    """Without the names of this machine's folders: where something is mounted is nobody's business in a record."""
    places = {mount.mount_point for mount in mounts(HostTree())}
    # What a finding is about, and what every machine has, stays.
    kept = ("/proc", "/sys", "/dev", "/run", "/etc")
    own = sorted((place for place in places if place != "/" and not place.startswith(kept)), key=len, reverse=True)
    for number, place in enumerate(own, start=1):
        text = text.replace(json.dumps(place, ensure_ascii=False)[1:-1], f"/mount-{number}")
    return text


def is_there(path: str) -> bool:
    place = Path(path)
    return any(place.iterdir()) if place.is_dir() else place.exists()


@pytest.mark.qualify
def test_facts_agree_with_what_the_driver_says(said: tuple[dict[str, Any], ...], evidence: Evidence) -> None:
    data, _, _ = said
    found = Facts.from_json(json.dumps(data))
    evidence["facts"] = data
    on_pci = {gpu.address for gpu in found.gpus}
    for named in (found.cuda.devices if found.cuda else (), found.nvml.gpus if found.nvml else ()):
        assert {one.pci_bus_id.lower() for one in named} <= on_pci or not on_pci
    assert bool(found.rdma_devices) == is_there("/sys/class/infiniband")
    if found.nvml and found.nvidia_driver_version:
        assert found.nvml.driver_version == found.nvidia_driver_version


@pytest.mark.qualify
def test_the_topology_has_every_gpu(said: tuple[dict[str, Any], ...], evidence: Evidence) -> None:
    facts, data, _ = said
    evidence["topology"] = data
    gpus = [place["address"] for place in data["places"] if place["kind"] == "gpu"]
    assert {gpu["address"] for gpu in facts["gpus"]} <= set(gpus)
    assert all(len(row) == len(data["places"]) - 1 for row in data["distances"].values())


def test_the_doctor_names_what_is_missing_and_raises_no_false_alarm(
    said: tuple[dict[str, Any], ...], evidence: Evidence
) -> None:
    _, _, data = said
    evidence["doctor"] = data
    failed = {finding["code"] for finding in data["findings"] if finding["verdict"] == "fail"}
    evidence["causes that are here"] = sorted(failed)
    evidence["missing"] = data["missing"]
    for words, path in PLACES.items():
        assert (words in data["missing"]) == (not is_there(path)), words
    if "no RDMA device" in data["missing"]:
        assert not failed & ABOUT_NICS
    if "no NVIDIA GPU on PCI" in data["missing"] and "no NVIDIA driver" in data["missing"]:
        assert not failed
    elif not is_there("/run/udev/data"):
        assert "udev-database" in failed
    for finding in data["findings"]:
        assert finding["verdict"] == "not_run" or finding["read"], f"{finding['code']} judges without having read"

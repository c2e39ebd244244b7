"""The nearest NIC of a GPU is found by the PCI tree, and transfers the bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.python_child import suites_environ
from support.reach import DMABUF

from gdrkit.errors import Api, UsageError
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.host import HostTree
from gdrkit.registration import Distance, Placement

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

GPU = "0000:03:00.0"
# One host bridge with a switch, a second one of the same NUMA node, and a third one of the other node.
SWITCH = "pci0000:00/0000:00:01.0/0000:01:00.0"
PCI_PATHS = {
    GPU: (f"{SWITCH}/0000:02:00.0/{GPU}", 0),
    "0000:04:00.0": (f"{SWITCH}/0000:02:00.0/0000:04:00.0", 0),
    "0000:05:00.0": (f"{SWITCH}/0000:02:01.0/0000:05:00.0", 0),
    # This NIC is below a second switch, which is below the first one.
    "0000:0a:00.0": (f"{SWITCH}/0000:02:02.0/0000:08:00.0/0000:09:00.0/0000:0a:00.0", 0),
    "0000:06:00.0": ("pci0000:00/0000:00:02.0/0000:06:00.0", 0),
    "0000:41:00.0": ("pci0000:40/0000:40:01.0/0000:41:00.0", 0),
    "0000:81:00.0": ("pci0000:80/0000:80:01.0/0000:81:00.0", 1),
}


def tree_at(root: Path, nics: Mapping[str, str], *, pci_paths: Mapping[str, tuple[str, int]] = PCI_PATHS) -> HostTree:
    """Create the files of sysfs for PCI devices and for RDMA devices (PCI address by name)."""
    for address, (path, node) in pci_paths.items():
        folder = root / "sys/devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{node}\n")
        link = root / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/{path}")
    for name, address in nics.items():
        place = root / "sys/class/infiniband" / name
        place.mkdir(parents=True)
        (place / "device").symlink_to(f"../../../{address}")
    return HostTree(root)


@pytest.mark.parametrize(
    ("nic", "distance"),
    [
        ("0000:04:00.0", Distance.PIX),
        ("0000:05:00.0", Distance.PIX),
        ("0000:0a:00.0", Distance.PXB),
        ("0000:06:00.0", Distance.PHB),
        ("0000:41:00.0", Distance.NODE),
        ("0000:81:00.0", Distance.SYS),
        ("0000:ff:00.0", Distance.UNKNOWN),
    ],
)
def test_distance_follows_the_pci_tree(tmp_path: Path, nic: str, distance: Distance) -> None:
    assert Placement(tree_at(tmp_path, {"nic": nic})).distance(GPU, "nic") is distance


def test_device_missing_in_sysfs_has_unknown_distance(tmp_path: Path) -> None:
    found = Placement(tree_at(tmp_path, {"nic": "0000:04:00.0"}))
    assert found.distance("0000:99:00.0", "nic") is Distance.UNKNOWN
    assert found.distance("", "nic") is Distance.UNKNOWN


def test_distance_of_a_missing_nic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no RDMA device 'mlx5_9'") as caught:
        Placement(tree_at(tmp_path, {"nic": "0000:04:00.0"})).distance(GPU, "mlx5_9")
    assert caught.value.what_to_do == "choose from nic"
    with pytest.raises(UsageError, match="there is no RDMA device 'mlx5_99'"):
        Placement().distance(GPU, "mlx5_99")


@needs(verbs.nic())
def test_distance_of_a_nic_known_only_to_verbs_is_unknown(nics: tuple[Nic, ...]) -> None:
    for nic in nics:
        assert Placement().distance("", nic.name) is Distance.UNKNOWN


def test_host_bridges_without_numa_node_count_as_one_node(tmp_path: Path) -> None:
    pci_paths = {address: (path, -1) for address, (path, _node) in PCI_PATHS.items()}
    tree = tree_at(tmp_path, {"nic": "0000:81:00.0"}, pci_paths=pci_paths)
    assert Placement(tree).distance(GPU, "nic") is Distance.NODE


def test_choice_without_nics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Placement(tree_at(tmp_path, {})).choose(GPU, [])


# This runs in a child, because the twin reads the number of NICs when it is loaded.
CHILD = """
import json, sys
from gdrkit import verbs
from gdrkit.harness.peer import Peer
from gdrkit.host import HostTree
from gdrkit.registration import GdrManager
from support.ledger import traffic
from support.reach import joined
from gdrkit.errors import Api
from gdrkit.verbs import Status

with GdrManager(gpu_indices=[0], tree=HostTree(sys.argv[1])) as manager, Peer() as peer:
    assert manager.state.available, manager.state
    used = []
    with manager.device(0).allocate(1 << 20) as memory:
        for step in range(4):
            with manager.lease(memory) as lease:
                nic, remote = manager.remote(lease, gpu_index=0, length_bytes=100_000)
                with joined(nic, peer) as theirs:
                    theirs.write(remote, seed=step).expect(Status.SUCCESS)
                used.append(nic.name)
        served = {name: row["served_write_bytes"] for name, row in traffic(Api.VERBS).items()}
    print(json.dumps({"nics": list(manager.state.nics), "used": used, "served": served}))
"""


def served_by(root: Path, nics: Mapping[str, str]) -> dict[str, object]:
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, str(root)],
        env=suites_environ() | {"GDRKIT_TWINS_NICS": "4"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found: dict[str, object] = json.loads(ended.stdout)
    return found


def near_pci_paths(gpu: str) -> dict[str, tuple[str, int]]:
    """Return PCI_PATHS with another PCI address of the GPU."""
    path, node = PCI_PATHS[GPU]
    return {address: place for address, place in PCI_PATHS.items() if address != GPU} | {
        gpu: (f"{path.rpartition('/')[0]}/{gpu}", node)
    }


NEEDS = needs(software(Api.VERBS), software(Api.CUDA))


@DMABUF
@NEEDS
def test_nearest_nic_transfers_the_bytes(tmp_path: Path, device: Device) -> None:
    nics = {"twin0": "0000:81:00.0", "twin1": "0000:06:00.0", "twin2": "0000:04:00.0", "twin3": "0000:41:00.0"}
    tree_at(tmp_path, nics, pci_paths=near_pci_paths(device.pci_bus_id))
    found = served_by(tmp_path, nics)
    assert found["nics"] == list(nics)
    assert found["used"] == ["twin2"] * 4
    assert found["served"] == {"twin0": 0, "twin1": 0, "twin2": 400_000, "twin3": 0}


@DMABUF
@NEEDS
def test_nics_that_are_equally_near_take_turns(tmp_path: Path, device: Device) -> None:
    nics = {"twin0": "0000:41:00.0", "twin1": "0000:04:00.0", "twin2": "0000:81:00.0", "twin3": "0000:07:00.0"}
    pci_paths = near_pci_paths(device.pci_bus_id) | {"0000:07:00.0": (f"{SWITCH}/0000:02:00.0/0000:07:00.0", 0)}
    tree_at(tmp_path, nics, pci_paths=pci_paths)
    found = served_by(tmp_path, nics)
    assert found["used"] == ["twin1", "twin3", "twin1", "twin3"]
    assert found["served"] == {"twin0": 0, "twin1": 200_000, "twin2": 0, "twin3": 200_000}

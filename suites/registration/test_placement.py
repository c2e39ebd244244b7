"""gdrkit finds the nearest NIC of a GPU in the PCI tree, and this NIC transfers the bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.pci_tree import GPU_ADDRESS, PCI_PATHS, SWITCH_PATH, create_pci_tree, make_pci_paths
from support.python_child import suites_environ

from gdrkit.errors import Api, UsageError
from gdrkit.harness.needs import needs, software, verbs
from gdrkit.registration import Distance, Placement

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic


# support.pci_tree describes where each address is in the tree. 0000:ff:00.0 is not there.
@pytest.mark.parametrize(
    ("nic_address", "expected_distance"),
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
def test_distance_follows_the_pci_tree(tmp_path: Path, nic_address: str, expected_distance: Distance) -> None:
    assert Placement(create_pci_tree(tmp_path, {"nic": nic_address})).distance(GPU_ADDRESS, "nic") is expected_distance


def test_device_missing_in_sysfs_has_unknown_distance(tmp_path: Path) -> None:
    placement = Placement(create_pci_tree(tmp_path, {"nic": "0000:04:00.0"}))
    assert placement.distance("0000:99:00.0", "nic") is Distance.UNKNOWN
    assert placement.distance("", "nic") is Distance.UNKNOWN


def test_distance_of_a_missing_nic_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no RDMA device 'mlx5_9'") as error_info:
        Placement(create_pci_tree(tmp_path, {"nic": "0000:04:00.0"})).distance(GPU_ADDRESS, "mlx5_9")
    assert error_info.value.what_to_do == "choose from nic"
    with pytest.raises(UsageError, match="there is no RDMA device 'mlx5_99'"):
        Placement().distance(GPU_ADDRESS, "mlx5_99")


@needs(verbs.nic())
def test_distance_of_a_nic_known_only_to_verbs_is_unknown(nics: tuple[Nic, ...]) -> None:
    for nic in nics:
        assert Placement().distance("", nic.name) is Distance.UNKNOWN


def test_host_bridges_without_numa_node_count_as_one_node(tmp_path: Path) -> None:
    # The kernel reports the NUMA node -1 if the firmware names none.
    pci_paths = {address: (path, -1) for address, (path, _node) in PCI_PATHS.items()}
    tree = create_pci_tree(tmp_path, {"nic": "0000:81:00.0"}, pci_paths=pci_paths)
    assert Placement(tree).distance(GPU_ADDRESS, "nic") is Distance.NODE


def test_choice_without_nics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        Placement(create_pci_tree(tmp_path, {})).choose(GPU_ADDRESS, [])


# A child runs this program, because the libibverbs twin (a library that emulates NICs) reads the number of NICs when
# it is loaded.
_TRANSFERS_PROGRAM = """
import json, sys
from gdrkit import verbs
from gdrkit.harness.peer import Peer
from gdrkit.host import HostTree
from gdrkit.registration import GdrManager
from support.ledger import read_traffic
from support.memory_kinds import connect_peer_queue_pair
from gdrkit.errors import Api
from gdrkit.verbs import Status

with GdrManager(gpu_indices=[0], tree=HostTree(sys.argv[1])) as manager, Peer() as peer:
    assert manager.state.available, manager.state
    # The counters are not 0 here: the manager measured which NICs reach the GPU.
    traffic_before, counter_name = read_traffic(Api.VERBS), "served_write_bytes"
    nic_names = []
    with manager.device(0).allocate(1 << 20) as memory:
        for seed in range(4):
            with manager.lease(memory) as lease:
                nic, remote_range = manager.remote(lease, gpu_index=0, length_bytes=100_000)
                with connect_peer_queue_pair(nic, peer) as peer_pair:
                    peer_pair.write(remote_range, seed=seed).expect(Status.SUCCESS)
                nic_names.append(nic.name)
        served_bytes = {
            name: counters[counter_name] - traffic_before[name][counter_name]
            for name, counters in read_traffic(Api.VERBS).items()
        }
    print(json.dumps({"nics": list(manager.state.nics), "used_nics": nic_names, "served_bytes": served_bytes}))
"""


def run_transfers(root: Path) -> dict[str, object]:
    """Run four transfers in a child with the PCI tree in `root`. Return the report that the program prints."""
    child = subprocess.run(
        [sys.executable, "-c", _TRANSFERS_PROGRAM, str(root)],
        env=suites_environ() | {"GDRKIT_TWINS_NICS": "4"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    report: dict[str, object] = json.loads(child.stdout)
    return report


NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA))


@NEEDS_DMABUF
@NEEDS_TWINS
def test_nearest_nic_transfers_the_bytes(tmp_path: Path, device: Device) -> None:
    address_by_nic = {
        "twin0": "0000:81:00.0",
        "twin1": "0000:06:00.0",
        "twin2": "0000:04:00.0",
        "twin3": "0000:41:00.0",
    }
    create_pci_tree(tmp_path, address_by_nic, pci_paths=make_pci_paths(device.pci_bus_id))
    report = run_transfers(tmp_path)
    assert report["nics"] == list(address_by_nic)
    assert report["used_nics"] == ["twin2"] * 4
    assert report["served_bytes"] == {"twin0": 0, "twin1": 0, "twin2": 400_000, "twin3": 0}


@NEEDS_DMABUF
@NEEDS_TWINS
def test_nics_that_are_equally_near_take_turns(tmp_path: Path, device: Device) -> None:
    address_by_nic = {
        "twin0": "0000:41:00.0",
        "twin1": "0000:04:00.0",
        "twin2": "0000:81:00.0",
        "twin3": "0000:07:00.0",
    }
    # The NIC at 0000:07:00.0 is below the same port of the switch as the NIC at 0000:04:00.0.
    pci_paths = make_pci_paths(device.pci_bus_id) | {"0000:07:00.0": (f"{SWITCH_PATH}/0000:02:00.0/0000:07:00.0", 0)}
    create_pci_tree(tmp_path, address_by_nic, pci_paths=pci_paths)
    report = run_transfers(tmp_path)
    assert report["used_nics"] == ["twin1", "twin3", "twin1", "twin3"]
    assert report["served_bytes"] == {"twin0": 0, "twin1": 200_000, "twin2": 0, "twin3": 200_000}


@needs(verbs.nic(count_min=2))
def test_faster_link_wins_among_equally_near_nics(tmp_path: Path, nics: tuple[Nic, ...]) -> None:
    nic_names = [nic.name for nic in nics[:2]]
    tree = create_pci_tree(tmp_path, dict(zip(nic_names, ["0000:04:00.0", "0000:05:00.0"], strict=True)))
    for name, link_rate in zip(nic_names, ["200 Gb/sec (4X HDR)", "400 Gb/sec (4X NDR)"], strict=True):
        port_folder = tmp_path / f"sys/class/infiniband/{name}/ports/1"
        port_folder.mkdir(parents=True)
        (port_folder / "rate").write_text(f"{link_rate}\n")
    placement = Placement(tree)
    assert [placement.link_gbit_per_s(nic) for nic in nics[:2]] == [200.0, 400.0]
    assert placement.nearest_nics(GPU_ADDRESS, nics[:2]) == (nics[1],)
    # The faster NIC moves away from the GPU. The nearer NIC wins over it.
    (tmp_path / f"sys/class/infiniband/{nic_names[1]}/device").unlink()
    (tmp_path / f"sys/class/infiniband/{nic_names[1]}/device").symlink_to("../../../0000:81:00.0")
    assert Placement(tree).nearest_nics(GPU_ADDRESS, nics[:2]) == (nics[0],)

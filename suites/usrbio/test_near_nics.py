"""For device memory, the agent chooses the NICs nearest to the GPU for the transfers of the storage server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.pci_tree import PCI_PATHS, SWITCH_PATH, create_pci_tree, make_pci_paths
from support.python_child import suites_environ

from gdrkit import pattern
from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.cuda import Device

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), software(Api.CUDA))]

FILE_BYTES = 16 * MIB
# The agent runs in this program, so that the program can count the bytes that each NIC moves. The NICs of the agent
# serve the RDMA writes of the storage server. The application is another process.
AGENT_PROGRAM = """
import json, subprocess, sys
from pathlib import Path
from gdrkit.errors import Api
from gdrkit.host import HostTree
from gdrkit.registration import Placement
from gdrkit.usrbio.agent.agent import plain_agent
from support.ledger import read_traffic
from support.python_child import module_command

mount, tree, seed = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
with plain_agent(mount, mount, placement=Placement(HostTree(tree))):
    # The agent has tested which NICs reach the GPUs. These tests have moved bytes, too.
    traffic_before = read_traffic(Api.VERBS)
    command = module_command("support.application", mount, mount / "file", mount / "copy", "--kind", sys.argv[4])
    subprocess.run([*command, "--seed", seed, "--rounds", "1"], check=True, stdout=subprocess.DEVNULL, timeout=60)
    traffic_after, counter_name = read_traffic(Api.VERBS), "served_write_bytes"
    print(json.dumps({nic: counters[counter_name] - traffic_before[nic][counter_name]
                      for nic, counters in traffic_after.items()}))
"""


def measure_bytes_by_nic(
    mount: Path, tree: Path, *, seed: int, memory_kind: str, fault_rules: str = ""
) -> dict[str, int]:
    """Read a file of the mount into memory of this kind, and return the bytes that each NIC of the agent served.

    All processes use a fault plan with `fault_rules`.
    """
    plan_path = tree / "plan"
    plan_path.write_text(f"gdrkit-faults 1\n{fault_rules}")
    (mount / "file").write_bytes(pattern.payload(FILE_BYTES, seed=seed))
    child = subprocess.run(
        [sys.executable, "-c", AGENT_PROGRAM, str(mount), str(tree), str(seed), memory_kind],
        env=suites_environ() | {"GDRKIT_TWINS_NICS": "4", "GDRKIT_TWINS_FAULTS": str(plan_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    served_bytes: dict[str, int] = json.loads(child.stdout)
    return served_bytes


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Return an empty folder for the mount, and an empty folder for a tree of sysfs."""
    mount, tree = tmp_path / "mount", tmp_path / "tree"
    mount.mkdir()
    tree.mkdir()
    return mount, tree


# The third NIC shares a PCIe switch with the GPU. In the second case, the second NIC shares it, too.
@pytest.mark.parametrize(
    ("second_nic_address", "nearest_nics"), [("0000:06:00.0", {"twin2"}), ("0000:07:00.0", {"twin1", "twin2"})]
)
def test_device_memory_is_accessed_by_the_nearest_nics(
    folders: tuple[Path, Path], device: Device, seed: int, second_nic_address: str, nearest_nics: set[str]
) -> None:
    mount, tree = folders
    pci_address_by_nic: Mapping[str, str] = {
        "twin0": "0000:81:00.0",
        "twin1": second_nic_address,
        "twin2": "0000:04:00.0",
        "twin3": "0000:41:00.0",
    }
    pci_paths = make_pci_paths(device.pci_bus_id) | {"0000:07:00.0": (f"{SWITCH_PATH}/0000:02:00.0/0000:07:00.0", 0)}
    create_pci_tree(tree, pci_address_by_nic, pci_paths=pci_paths)
    served_bytes = measure_bytes_by_nic(mount, tree, seed=seed, memory_kind="device")
    assert {nic for nic, byte_count in served_bytes.items() if byte_count} == nearest_nics


def test_nearest_nic_that_moves_nothing_is_not_used(folders: tuple[Path, Path], device: Device, seed: int) -> None:
    mount, tree = folders
    pci_address_by_nic = {
        "twin0": "0000:81:00.0",
        "twin1": "0000:06:00.0",
        "twin2": "0000:04:00.0",
        "twin3": "0000:41:00.0",
    }
    create_pci_tree(tree, pci_address_by_nic, pci_paths=make_pci_paths(device.pci_bus_id))
    # twin2, the nearest NIC, registers memory and moves nothing: the status 12 is IBV_WC_RETRY_EXC_ERR. twin1 is the
    # next nearest NIC.
    fault_rules = "wc.rdma_write call=* status=12 nic=twin2\nwc.rdma_read call=* status=12 nic=twin2\n"
    served_bytes = measure_bytes_by_nic(mount, tree, seed=seed, memory_kind="device", fault_rules=fault_rules)
    assert {nic for nic, byte_count in served_bytes.items() if byte_count} == {"twin1"}


def test_host_memory_is_accessed_by_all_nics(folders: tuple[Path, Path], seed: int) -> None:
    mount, tree = folders
    pci_addresses = ["0000:81:00.0", "0000:06:00.0", "0000:04:00.0", "0000:41:00.0"]
    create_pci_tree(tree, {f"twin{index}": address for index, address in enumerate(pci_addresses)}, pci_paths=PCI_PATHS)
    served_bytes = measure_bytes_by_nic(mount, tree, seed=seed, memory_kind="host")
    assert all(served_bytes.values()), served_bytes

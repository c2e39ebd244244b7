"""The storage client uses the NICs that are nearest to a GPU, and leaves out a NIC as long as it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from support.memory_kinds import NEEDS_DMABUF
from support.pci_tree import SWITCH_PATH, create_pci_tree, make_pci_paths
from support.python_child import suites_environ

from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from gdrkit.cuda import Device

pytestmark = [NEEDS_DMABUF, needs(software(Api.VERBS), software(Api.CUDA))]

READ_BYTES, READ_COUNT = 65536, 8
# The program reads a file into GPU 0 by one batch of requests, and prints how many bytes each NIC of the client served:
# the server sends RDMA WRITEs to these NICs. If a failing NIC is named, the program reads the file twice more. In the
# second read, by a fault plan, this NIC can register memory, but every RDMA WRITE or READ by the NIC ends with
# IBV_WC_RETRY_EXC_ERR (12). In the third read, there is no fault plan.
PROGRAM = """
import json, sys
from pathlib import Path
from gdrkit import cuda, pattern
from gdrkit.errors import Api
from gdrkit.host import HostTree
from gdrkit.registration import Placement, ReachTable
from gdrkit.storage.client import IORequest
from support.faults import inject_faults
from support.ledger import read_traffic
from support.storage import StorageClient, run_storage_server

root, failing_nic, seed, read_bytes, read_count = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
data = pattern.payload(read_bytes * read_count, seed=seed)
placement = Placement(HostTree(root / "tree"), reach=ReachTable(retry_after_s=0))

def read_served_bytes():
    return {name: row["served_write_bytes"] for name, row in read_traffic(Api.VERBS).items()}

def read_into_gpu(client, file, device):
    with device.allocate(len(data)) as memory, client.register(memory) as buffer:
        served_bytes_before = read_served_bytes()
        requests = [
            IORequest(file, offset, buffer.subrange(offset_bytes=offset, length_bytes=read_bytes))
            for offset in range(0, len(data), read_bytes)
        ]
        assert sum(result.length_bytes for result in client.batch_read(requests)) == len(data)
        assert memory.read() == data
        print(json.dumps({nic: count - served_bytes_before[nic] for nic, count in read_served_bytes().items()}))

with run_storage_server(root / "store", root / "log") as server, cuda.Device(0) as device:
    (root / "store" / "file").write_bytes(data)
    with StorageClient(server.address, token=server.token(), placement=placement) as client:
        with client.open("file") as file:
            read_into_gpu(client, file, device)
    if failing_nic:
        rules = [f"wc.{kind} call=* status=12 nic={failing_nic}" for kind in ("rdma_write", "rdma_read")]
        with inject_faults(Api.VERBS, *rules):
            placement.reach.forget(device.uuid, client.nics)
            with StorageClient(server.address, token=server.token(), placement=placement) as client:
                with client.open("file") as file:
                    read_into_gpu(client, file, device)
                    with inject_faults(Api.VERBS):
                        read_into_gpu(client, file, device)
"""


def measure_bytes_by_nic(
    root: Path, pci_address_by_nic: Mapping[str, str], gpu: Device, *, failing_nic: str, seed: int
) -> list[dict[str, int]]:
    """Run the program, and return how many bytes each NIC served each time that the program read the file."""
    # The tree has the GPU at the address that its driver reports, and the PCI device of twin1 beside it.
    pci_paths = make_pci_paths(gpu.pci_bus_id) | {"0000:07:00.0": (f"{SWITCH_PATH}/0000:02:00.0/0000:07:00.0", 0)}
    (root / "tree").mkdir()
    create_pci_tree(root / "tree", pci_address_by_nic, pci_paths=pci_paths)
    child = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), failing_nic, str(seed), str(READ_BYTES), str(READ_COUNT)],
        env=suites_environ() | {"GDRKIT_TWINS_NICS": "4"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert child.returncode == 0, child.stdout + child.stderr
    if failing_nic:
        assert f"NIC {failing_nic} is left out for GPU {gpu.pci_bus_id}" in child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


# twin1 and twin2 share a switch with the GPU. twin3 is on the same NUMA node as the GPU, and twin0 is on the other
# node.
PCI_ADDRESS_BY_NIC = {
    "twin0": "0000:81:00.0",
    "twin1": "0000:07:00.0",
    "twin2": "0000:04:00.0",
    "twin3": "0000:41:00.0",
}


def test_reads_into_a_gpu_use_the_near_nics_only(tmp_path: Path, device: Device, seed: int) -> None:
    (served_bytes,) = measure_bytes_by_nic(tmp_path, PCI_ADDRESS_BY_NIC, device, failing_nic="", seed=seed)
    half_bytes = READ_BYTES * READ_COUNT // 2
    assert served_bytes == {"twin0": 0, "twin1": half_bytes, "twin2": half_bytes, "twin3": 0}


@pytest.mark.parametrize("failing_nic", ["twin1", "twin2"])
def test_nic_that_moves_nothing_is_left_out_until_it_works(
    tmp_path: Path, device: Device, seed: int, failing_nic: str
) -> None:
    _, bytes_with_fault, bytes_without_fault = measure_bytes_by_nic(
        tmp_path, PCI_ADDRESS_BY_NIC, device, failing_nic=failing_nic, seed=seed
    )
    total_bytes = READ_BYTES * READ_COUNT
    other_nic = {"twin1": "twin2", "twin2": "twin1"}[failing_nic]
    assert bytes_with_fault == {name: total_bytes if name == other_nic else 0 for name in PCI_ADDRESS_BY_NIC}
    assert bytes_without_fault == {
        name: total_bytes // 2 if name in {failing_nic, other_nic} else 0 for name in PCI_ADDRESS_BY_NIC
    }

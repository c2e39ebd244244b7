"""Regression cases for defects: gdrkit reported routes, visible data or usable NICs that no transfer had proven.

The defects have the letters p to t in docs/findings.md. A docstring says what the defect was. `nox -s review` restores
each defect, and shows that its case then fails.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from support.faults import inject_faults
from support.memory_kinds import NEEDS_DMABUF
from support.python_child import suites_environ
from support.raw_usrbio import AgentProcess
from support.records import make_facts, make_proven_route, make_record

from gdrkit import pattern, usrbio
from gdrkit.children import kill_child
from gdrkit.errors import Api
from gdrkit.harness.needs import needs, software
from gdrkit.harness.needs import verbs as verbs_needs
from gdrkit.host import HostTree
from gdrkit.registration import GdrManager, Placement, ReachTable, TransferPath, measure_reach
from gdrkit.report import ClaimedRoute, RouteOutcome, route_statuses
from gdrkit.units import MIB

if TYPE_CHECKING:
    from pathlib import Path

    from gdrkit.cuda import Device
    from gdrkit.verbs import Nic

NEEDS_TWINS = needs(software(Api.VERBS), software(Api.CUDA))
HARDWARE_SUBSTRATES = {"verbs": "hardware", "cuda": "hardware"}
# With this environment, kernels on the GPUs of the CUDA twin (a library that emulates the driver and its GPUs) see the
# bytes that a NIC wrote only after a flush.
ENVIRON_WITH_REQUIRED_FLUSHES = {"GDRKIT_TWINS_WRITES_ORDERING": "0"}


def run_program_with_required_flushes(program: str, *arguments: object) -> None:
    """Run a program on GPUs that need flushes, and require that its exit code is 0."""
    with subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=suites_environ() | ENVIRON_WITH_REQUIRED_FLUSHES,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    ) as child:
        try:
            output, error_output = child.communicate(timeout=60)
        finally:
            # With a defect, SIGSEGV can kill the program before it has ended its storage server. So the process group,
            # with the server, is killed.
            kill_child(child)
    # The message begins with the AssertionError of the program, because a record has only the first line of a message.
    assertion_lines = [line for line in error_output.decode().splitlines() if line.startswith("AssertionError: ")]
    assert child.returncode == 0, "\n".join([*assertion_lines[-1:], output.decode(), error_output.decode()])


def test_route_without_counted_bytes_is_unproven() -> None:
    """Defect p: a route counted as proven because of the loaded libraries, without the counters of the ports."""
    proven_record = make_record(routes=(make_proven_route(0, "mlx5_0"),), substrate=HARDWARE_SUBSTRATES)
    claimed_record = make_record(routes=(ClaimedRoute(0, "mlx5_0", "dmabuf"),), substrate=HARDWARE_SUBSTRATES)
    states = [route_statuses(make_facts(), [record])[0].state for record in (proven_record, claimed_record)]
    assert states == [RouteOutcome.PROVEN, RouteOutcome.UNPROVEN], f"the states are {states}"


@NEEDS_DMABUF
@NEEDS_TWINS
def test_loopback_is_not_called_wire(tmp_path: Path, device: Device, nic: Nic) -> None:
    """Defect q: bytes that stayed inside one NIC were reported as bytes on a wire."""
    # The port counters of the NIC stay at 0, because the bytes do not leave it.
    counter_folder = tmp_path / f"sys/class/infiniband/{nic.name}/ports/{nic.port.number}/counters"
    counter_folder.mkdir(parents=True)
    for counter_name in ("port_xmit_data", "port_rcv_data"):
        (counter_folder / counter_name).write_text("0\n")
    (reach,) = measure_reach(device, [(nic, nic)], tree=HostTree(tmp_path))
    assert (reach.path, reach.reason) == (TransferPath.LOOPBACK, "loopback_not_counted"), f"the path is {reach.path}"


# Program that reads a file with the storage client into device memory, and compares the memory with the file.
READ_PROGRAM = """
import sys
from pathlib import Path
from gdrkit import cuda, pattern
from support.storage import run_storage_server

root, seed = Path(sys.argv[1]), int(sys.argv[2])
data = pattern.payload(1 << 16, seed=seed)
with run_storage_server(root / "store", root / "log") as server, cuda.Device(0) as device:
    (root / "store" / "file").write_bytes(data)
    with server.connect() as client, device.allocate(len(data)) as memory, client.register(memory) as buffer:
        with client.open("file") as file:
            file.read(buffer, offset_bytes=0)
        assert memory.read() == data, "the GPU sees old data after a read of the storage client"
"""


@NEEDS_DMABUF
@NEEDS_TWINS
def test_read_of_the_storage_client_is_visible(tmp_path: Path, seed: int) -> None:
    """Defect r: the caller had to flush the writes of the NIC after a read."""
    run_program_with_required_flushes(READ_PROGRAM, tmp_path, seed)


# Program that reads a file with usrbio into device memory, and compares the memory with the file.
WAIT_PROGRAM = """
import os, sys
from gdrkit import usrbio
from gdrkit.errors import DataMismatch
from support.application import Application

mount, seed, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
fd = os.open(f"{mount}/file", os.O_RDONLY)
usrbio.register_fd(fd)
with Application(mount, memory_kind="device", length_bytes=length) as application:
    # A transfer has a descriptor, an offset in the memory, an offset in the file, and a length.
    assert application.read((fd, 0, 0, length)) == [length]
    try:
        application.check(0, length, seed=seed, file_offset=0)
    except DataMismatch as error:
        raise AssertionError("the GPU sees old data after hf3fs_wait_for_ios") from error
"""


@NEEDS_DMABUF
@NEEDS_TWINS
def test_read_is_visible_after_hf3fs_wait_for_ios(tmp_path: Path, seed: int) -> None:
    """Defect r: the application had to call hf3fs_iovsync_gpu after a read."""
    (tmp_path / "file").write_bytes(pattern.payload(MIB, seed=seed))
    with AgentProcess(tmp_path):
        run_program_with_required_flushes(WAIT_PROGRAM, tmp_path, seed, MIB)


@NEEDS_DMABUF
@NEEDS_TWINS
def test_manager_is_available_only_if_bytes_moved() -> None:
    """Defect s: the manager was available when memory could be registered, whether the DMA worked or not."""
    # Every RDMA read ends with IBV_WC_REM_ACCESS_ERR (10).
    with inject_faults(Api.VERBS, "wc.rdma_read call=* status=10"), GdrManager() as manager:
        assert not manager.state.available, "the manager is available although no bytes moved"


@NEEDS_DMABUF
@NEEDS_TWINS
def test_client_library_is_available_only_if_bytes_moved(device: Device, nics: tuple[Nic, ...]) -> None:
    """Defect s: hf3fs_gdr_available did not check whether a NIC reaches the GPU."""
    # Every RDMA write ends with IBV_WC_RETRY_EXC_ERR (12). ReachTable stores its results in a file, which the client
    # library reads.
    with inject_faults(Api.VERBS, "wc.rdma_write call=* status=12"):
        ReachTable().get_results(device, nics)
    assert not usrbio.gdr_available(), "GDR is available although no bytes moved"
    # With retry_after_s=0, the failed NICs are measured again at once.
    ReachTable(retry_after_s=0).get_results(device, nics)
    assert usrbio.gdr_available()
    assert usrbio.gdr_device_count() == 1


@NEEDS_DMABUF
@NEEDS_TWINS
@needs(verbs_needs.nic(count_min=2))
def test_nic_that_moves_nothing_is_not_used(device: Device, nics: tuple[Nic, ...]) -> None:
    """Defect t: a NIC was used because it had registered the memory, although its DMA failed."""
    # Every RDMA read by the first NIC ends with IBV_WC_RETRY_EXC_ERR (12).
    with inject_faults(Api.VERBS, f"wc.rdma_read call=* status=12 nic={nics[0].name}"):
        usable_nics = Placement().usable_nics(device, nics)
    assert usable_nics == nics[1:], f"{nics[0].name} is used although it moves nothing"

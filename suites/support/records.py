"""Small synthetic machine facts, records and runs, for cases about reports and verdicts."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from gdrkit.errors import Reason
from gdrkit.evidence import DeviceNode, ElfNote, GpuEvidence, KernelEvidence, LoadedLibrary, RdmaEvidence
from gdrkit.host import KernelFacts, Limits, RdmaDevice
from gdrkit.inventory import ApiFailure, CudaDeviceFacts, CudaFacts, Facts, NicFacts, RouteFacts, VerbsFacts
from gdrkit.report import CaseReason, ClaimedFile, ClaimedRoute, Record, Run, SeenLibrary, Verdict

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "DRIVER_VERSION",
    "KERNEL_EVIDENCE",
    "NIC",
    "TWIN_LIBRARY",
    "make_facts",
    "make_hardware_facts",
    "make_library",
    "make_proven_route",
    "make_record",
    "make_route_facts",
    "make_run",
]

# Version of the NVIDIA driver of the synthetic machines.
DRIVER_VERSION = "580.159.04"
# The NIC of a synthetic machine with one NIC.
NIC = RdmaDevice(
    name="mlx5_0",
    driver="mlx5_core",
    has_device=True,
    node_guid="b83f:d203:00a1:7c52",
    firmware=None,
    pci_address="0000:1c:00.0",
    numa_node=None,
    ports=(),
)


# Each device node has a path, a major number and a minor number.
_CONTROL_NODE, _GPU_NODE = DeviceNode("/dev/nvidiactl", 195, 255), DeviceNode("/dev/nvidia0", 195, 0)
_UVERBS_NODE = DeviceNode("/dev/infiniband/uverbs0", 231, 192)
# The kernel evidence of a machine with one GPU and one NIC.
KERNEL_EVIDENCE = KernelEvidence(
    nvidia_version=DRIVER_VERSION,
    nvidia_control=_CONTROL_NODE,
    gpus=(GpuEvidence(pci_address="0000:1b:00.0", pci_driver="nvidia", node=_GPU_NODE, missing=()),),
    rdma=(
        RdmaEvidence(
            name=NIC.name,
            node_guid="b83f:d203:00a1:7c52",
            driver="mlx5",
            node=_UVERBS_NODE,
            pci_address=NIC.pci_address,
            pci_driver="mlx5_core",
            missing=(),
        ),
    ),
)


def make_library(soname: str, *, notes: tuple[ElfNote, ...] = (), error: str | None = None) -> LoadedLibrary:
    """Return a loaded library with this SONAME.

    With `error`, the file is damaged, so that only its file name contains the SONAME.
    """
    path = f"/usr/lib/{soname}"
    return LoadedLibrary(path=path, soname=None if error else soname, build_id="ab12", notes=notes, error=error)


# The verbs twin as a loaded library.
TWIN_LIBRARY = make_library("libibverbs.so.1", notes=(ElfNote("GDRKIT", 1, "ibverbs twin"),))


def make_route_facts(method: str, *, is_possible: bool = True) -> RouteFacts:
    """Return the facts of a registration route (``dmabuf`` or ``peer_memory``) between GPU 0 and mlx5_0."""
    failure = ApiFailure(
        api="verbs",
        operation="ibv_reg_mr",
        status=14,
        status_name="EFAULT",
        errno=14,
        reason=Reason.PEER_MEMORY_UNSUPPORTED,
        message="ibv_reg_mr failed: Bad address (EFAULT)",
        what_to_do="load a module",
    )
    return RouteFacts(
        device_index=0, nic="mlx5_0", way=method, possible=is_possible, failure=None if is_possible else failure
    )


def make_facts(
    *,
    rdma_devices: Sequence[RdmaDevice] = (),
    driver_version: str | None = None,
    routes: Sequence[RouteFacts] = (),
    cuda_failure: ApiFailure | None = None,
) -> Facts:
    """Return the facts of a machine that has only these components."""
    return Facts(
        schema_version=1,
        machine="x86_64",
        python="CPython 3.11.2",
        kernel=KernelFacts(None, None, (), 0, ()),
        gpus=(),
        nvidia_driver_version=driver_version,
        rdma_devices=tuple(rdma_devices),
        libraries=(),
        packages=(),
        limits=Limits(memlock_bytes=None, memlock_known=True, open_files=1024, capabilities=()),
        container=(),
        cuda=None,
        cuda_failure=cuda_failure,
        verbs=None,
        verbs_failure=None,
        routes=tuple(routes),
        routes_failure=None,
        unreadable=(),
    )


def make_hardware_facts(
    *, evidence: KernelEvidence | None = KERNEL_EVIDENCE, is_cuda_open: bool = True, is_verbs_open: bool = True
) -> Facts:
    """Return the facts of a machine with one GPU and one NIC.

    `is_cuda_open` and `is_verbs_open` state whether the process had the device nodes of CUDA and verbs open.
    """
    gpu = CudaDeviceFacts(index=0, name="NVIDIA H200", uuid="GPU-0", pci_bus_id="0000:1B:00.0", attributes={})
    nic = NicFacts(name=NIC.name, driver="mlx5", node_guid="", active_ports=(1,), dmabuf=True, failure=None)
    return dataclasses.replace(
        make_facts(rdma_devices=[NIC], driver_version=DRIVER_VERSION),
        cuda=CudaFacts("13.0", (gpu,), (), nodes=(_CONTROL_NODE, _GPU_NODE) if is_cuda_open else ()),
        verbs=VerbsFacts((nic,), (), nodes=(_UVERBS_NODE,) if is_verbs_open else ()),
        evidence=evidence,
    )


def make_proven_route(device_index: int, nic: str, method: str = "dmabuf") -> ClaimedRoute:
    """Return a route that is proven: the port counters of its two NICs grew by at least the transferred bytes."""
    return ClaimedRoute(device_index, nic, method, path="wire", peer_nic="mlx5_9", unproven=None)


def make_record(
    verdict: Verdict = Verdict.PASS,
    *,
    case: str = "suite/test_a.py::test_a",
    title: str = "",
    reasons: tuple[CaseReason, ...] = (),
    routes: tuple[ClaimedRoute, ...] = (),
    substrate: dict[str, str] | None = None,
    libraries: tuple[SeenLibrary, ...] = (),
    evidence: dict[str, object] | None = None,
    numbers: dict[str, float] | None = None,
    files: tuple[ClaimedFile, ...] = (),
    uses: tuple[str, ...] = (),
) -> Record:
    """Return a record with these fields, and with defaults for all other fields."""
    return Record(
        schema_version=1,
        case=case,
        title=title,
        verdict=verdict,
        reasons=reasons,
        profile="any",
        facts_digest=make_facts().digest,
        substrate=substrate or {},
        libraries=libraries,
        seed=1,
        evidence=evidence or {},
        numbers=numbers or {},
        routes=routes,
        duration_ms=1.5,
        started="2026-11-20T12:00:00Z",
        commit=None,
        version="0.1.0",
        command="gdrkit qualify",
        files=files,
        uses=uses,
    )


def make_run(*, exit_code: int = 0, verdict: str = "The code passed", substrate: dict[str, str] | None = None) -> Run:
    """Return a run with this exit code, verdict and substrate."""
    return Run(
        schema_version=1,
        started="2026-11-20T12:00:00Z",
        duration_s=1.0,
        command="gdrkit qualify",
        profile="any",
        profile_about="",
        substrate=substrate or {},
        software_asked=False,
        seed=1,
        commit=None,
        version="0.1.0",
        exit_code=exit_code,
        verdict=verdict,
        causes=(),
        to_do=(),
        required=(),
    )

"""Facts and records as small as the types allow, for cases about what is made of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdrkit.errors import Reason
from gdrkit.host import KernelFacts, Limits, RdmaDevice
from gdrkit.inventory import ApiFailure, Facts, RouteFacts
from gdrkit.report import CaseReason, ClaimedFile, ClaimedRoute, Record, Run, SeenLibrary, Verdict
from gdrkit.witness import ElfNote, LoadedLibrary

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DRIVER", "NIC", "TWIN", "facts_of", "library", "record_of", "route", "run_of"]

DRIVER = "580.159.04"
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


def library(soname: str, *, notes: tuple[ElfNote, ...] = (), error: str | None = None) -> LoadedLibrary:
    """A loaded library of this name."""
    path = f"/usr/lib/{soname}"
    return LoadedLibrary(path=path, soname=None if error else soname, build_id="ab12", notes=notes, error=error)


TWIN = library("libibverbs.so.1", notes=(ElfNote("GDRKIT", 1, "ibverbs twin"),))


def route(way: str, *, possible: bool = True) -> RouteFacts:
    """A way of registration for GPU 0 and mlx5_0."""
    refusal = ApiFailure(
        api="verbs",
        operation="ibv_reg_mr",
        status=14,
        status_name="EFAULT",
        errno=14,
        reason=Reason.PEER_MEMORY_UNSUPPORTED,
        message="ibv_reg_mr gave EFAULT (14)",
        what_to_do="load a module",
    )
    return RouteFacts(device_index=0, nic="mlx5_0", way=way, possible=possible, failure=None if possible else refusal)


def facts_of(
    *,
    rdma: Sequence[RdmaDevice] = (),
    driver: str | None = None,
    routes: Sequence[RouteFacts] = (),
    failure: ApiFailure | None = None,
) -> Facts:
    """Facts of a machine with this and nothing else."""
    return Facts(
        schema_version=1,
        machine="x86_64",
        python="CPython 3.11.2",
        kernel=KernelFacts(None, None, (), 0, ()),
        gpus=(),
        nvidia_driver_version=driver,
        rdma_devices=tuple(rdma),
        libraries=(),
        packages=(),
        limits=Limits(memlock_bytes=None, memlock_known=True, open_files=1024, capabilities=()),
        container=(),
        cuda=None,
        cuda_failure=failure,
        verbs=None,
        verbs_failure=None,
        routes=tuple(routes),
        routes_failure=None,
        unreadable=(),
    )


def record_of(
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
    """A record of a case with this and nothing else."""
    return Record(
        schema_version=1,
        case=case,
        title=title,
        verdict=verdict,
        reasons=reasons,
        profile="any",
        facts_digest=facts_of().digest,
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


def run_of(*, exit_code: int = 0, verdict: str = "The code passed", substrate: dict[str, str] | None = None) -> Run:
    """A run with this outcome."""
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

"""Synthetic hosts for cases about reports: facts of any number of GPUs and NICs, records of every kind, run folders."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from support.records import make_facts, make_proven_route, make_record, make_run

from gdrkit.host import PciDevice, PortFacts, RdmaDevice
from gdrkit.inventory import CudaDeviceFacts, CudaFacts
from gdrkit.report import CaseReason, ClaimedFile, RunFolder, Verdict, append_record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gdrkit.inventory import Facts
    from gdrkit.report import Record

__all__ = ["HARDWARE_SUBSTRATES", "make_host_facts", "make_host_records", "write_run"]

# Substrates of a run in which verbs and CUDA used hardware.
HARDWARE_SUBSTRATES = {"verbs": "hardware", "cuda": "hardware"}
# Sizes in the ids of the synthetic throughput cases.
SIZE_LABELS = ("64KiB", "1MiB", "16MiB", "256MiB")


def make_host_facts(*, gpu_count: int, nic_count: int) -> Facts:
    """Return the facts of a synthetic host with two NUMA nodes and H200 GPUs."""
    gpus = tuple(_make_gpu(index, gpu_count) for index in range(gpu_count))
    devices = tuple(
        CudaDeviceFacts(
            index=index,
            name="NVIDIA H200",
            uuid=f"GPU-{index}",
            pci_bus_id=gpu.address,
            attributes={"DMA_BUF_SUPPORTED": 1},
        )
        for index, gpu in enumerate(gpus)
    )
    return dataclasses.replace(
        make_facts(
            driver_version="580.159.04", rdma_devices=[_make_nic(index, nic_count) for index in range(nic_count)]
        ),
        gpus=gpus,
        cuda=CudaFacts(driver_version="13.0", devices=devices, libraries=()),
    )


def make_host_records(facts: Facts, *, rate_factor: float = 1.0) -> Iterator[Record]:
    """Yield records of every kind for a host.

    The records have registration routes with every outcome, file routes, a case that did not run, and transfer rates,
    which are multiplied by `rate_factor`.
    """
    devices = facts.cuda.devices if facts.cuda else ()
    for device in devices:
        for nic_index, nic in enumerate(facts.rdma_devices):
            yield _make_route_record(device.index, nic.name, (device.index + nic_index) % 4)
    yield make_record(
        case="cufile/test_read.py::test_a_read_is_direct",
        substrate={"cuda": "hardware", "cufile": "hardware"},
        files=(ClaimedFile(0, "/data", "nvfs"), ClaimedFile(0, "/scratch", "posix", "O_DIRECT is not possible")),
    )
    yield make_record(
        Verdict.NOT_RUN,
        case="gaudi/test_export.py::test_a_dmabuf",
        reasons=(CaseReason("no Gaudi here", need="gaudi.device", foreseen=True),),
    )
    for direction, full_rate_gb_per_s in (("host_to_device", 55.0), ("device_to_host", 53.5)):
        for size_index, size_label in enumerate(SIZE_LABELS):
            rate_gb_per_s = full_rate_gb_per_s * rate_factor * (size_index + 1) / len(SIZE_LABELS)
            yield make_record(
                case=f"throughput/test_copies.py::test_pinned_copy[{direction}-{size_label}]",
                substrate={"cuda": "hardware", "verbs": "twin"},
                uses=("cuda",),
                numbers={
                    "rounds_count": 15,
                    "rate_gb_per_s_median": rate_gb_per_s,
                    "rate_gb_per_s_min": rate_gb_per_s * 0.97,
                    "rate_gb_per_s_max": rate_gb_per_s * 1.02,
                    "rate_spread_percent": 1.5,
                },
            )


def write_run(
    path: Path, facts: Facts, records: Sequence[Record], *, host: str = "node1", host_id: str | None = None
) -> Path:
    """Write the files of a run with these facts and records, but no report, to the folder `path`, and return `path`."""
    run_folder = RunFolder(path)
    run_folder.make_empty()
    has_failures = any(record.is_failure for record in records)
    run = make_run(
        exit_code=int(has_failures), verdict="2 of 12 cases failed" if has_failures else "Every route is proven"
    )
    run_folder.write_run(dataclasses.replace(run, host=host, host_id=host_id, substrate=HARDWARE_SUBSTRATES))
    run_folder.facts.write_text(facts.to_json(), encoding="utf-8")
    for record in records:
        append_record(run_folder.records, record)
    return path


def _make_gpu(index: int, gpu_count: int) -> PciDevice:
    return PciDevice(
        address=f"0000:{0x1B + 16 * index:02x}:00.0",
        vendor_id=0x10DE,  # NVIDIA
        device_id=0x2335,  # H200
        class_code=0x030200,  # 3D controller
        driver="nvidia",
        numa_node=index * 2 // gpu_count,
        iommu_group=None,
        link_speed="32.0 GT/s PCIe",
        link_width="16",
    )


def _make_nic(index: int, nic_count: int) -> RdmaDevice:
    return RdmaDevice(
        name=f"mlx5_{index}",
        driver="mlx5_core",
        has_device=True,
        node_guid=f"b83f:d203:00a1:7c{index:02x}",
        firmware="28.41.1000",
        pci_address=f"0000:{0x1C + 16 * index:02x}:00.0",
        numa_node=index * 2 // nic_count,
        ports=(PortFacts(1, "ACTIVE", "LinkUp", "400 Gb/sec (4X NDR)", "InfiniBand"),),
    )


def _make_route_record(device_index: int, nic: str, outcome_index: int) -> Record:
    """Return a record about a registration route with one of four outcomes: pass, unproven, fallback, failure."""
    case = f"rdma/test_first_light.py::test_remote_write[{device_index}-{nic}]"
    claimed_route = make_proven_route(device_index, nic)
    if outcome_index == 0:
        return make_record(case=case, routes=(claimed_route,), substrate=HARDWARE_SUBSTRATES)
    if outcome_index == 1:
        reason = CaseReason("the port's counter did not move")
        return make_record(
            Verdict.UNPROVEN, case=case, routes=(claimed_route,), substrate=HARDWARE_SUBSTRATES, reasons=(reason,)
        )
    if outcome_index == 2:
        fallback_route = dataclasses.replace(
            claimed_route, fell_back="registered by a copy through the host. To do: load nvidia-peermem"
        )
        return make_record(case=case, routes=(fallback_route,), substrate=HARDWARE_SUBSTRATES)
    error_text = "VerbsError: ibv_reg_dmabuf_mr failed: Operation not supported (EOPNOTSUPP)"
    reason = CaseReason(f"{error_text}. To do: update the driver of the NIC")
    return make_record(
        Verdict.FAIL, case=case, reasons=(reason,), routes=(claimed_route,), evidence={"traceback": "line 1\nline 2"}
    )

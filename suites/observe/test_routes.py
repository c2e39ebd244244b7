"""Verdicts about routes (proven, unproven, fell back, not possible) that follow from the evidence of an observation."""

from __future__ import annotations

import dataclasses

import pytest

from gdrkit.evidence import HeldDmabuf, RdmaQueuePair
from gdrkit.host import GpuTraffic, PortCounters, WrappingCounter
from gdrkit.observe import Observation, ObservedProcess, ObservedRoute, PortTraffic, derive_routes
from gdrkit.observe.observation import SCHEMA_VERSION, ObservedLibrary
from gdrkit.observe.observer import port_traffic
from gdrkit.units import GIB, MIB
from gdrkit.verdict import RouteOutcome

# Device, port, number, remote number, type, state, process ID.
QUEUE_PAIR = RdmaQueuePair("mlx5_0", 1, 10, 20, "RC", "RTS", 7)
# Device, port, sent bytes, received bytes, sent packets, received packets.
PORT = PortTraffic("mlx5_0", 1, 500 * MIB, 4 * MIB, 120_000, 60_000)
PORT_WITHOUT_TRAFFIC = PortTraffic("mlx5_0", 1, 0, 0, 0, 0)
# PCI address, minor, received and sent bytes over PCIe, received and sent bytes over NVLink, late_count, process IDs.
# The GPU has received 1 GiB of data and 8 % of packet headers.
GPU = GpuTraffic("0000:1b:00.0", 0, int(1.08 * GIB), 20 * MIB, 0, 0, 0, ())


def make_process(*libraries: str, **fields: object) -> ObservedProcess:
    """Return an observed process with the ID 7 that has loaded these libraries. It has done only what `fields` say."""
    empty_process = ObservedProcess(7, "program", (), (), (), (), (), None, None, None, 0, 0, 0, 0, 0, {}, {})
    loaded_libraries = tuple(ObservedLibrary(name, f"/usr/lib/lib{name}.so", None, is_twin=False) for name in libraries)
    return dataclasses.replace(empty_process, libraries=loaded_libraries, **fields)  # type: ignore[arg-type]


def derive_routes_by_name(*processes: ObservedProcess, **fields: object) -> dict[str, ObservedRoute]:
    """Return the verdicts about an observation of these processes, by the name of the route."""
    empty_observation = Observation(SCHEMA_VERSION, ("program",), 1.0, 0, processes, (), (), None, (), (), (), ())
    observation = derive_routes(dataclasses.replace(empty_observation, **fields))  # type: ignore[arg-type]
    return {route.route: route for route in observation.routes}


def make_reader(*libraries: str, **fields: object) -> ObservedProcess:
    """Return an observed process that has a GPU open and has read 1 GiB from files."""
    default_fields = {"read_bytes": GIB, "storage_read_bytes": 0, "nodes": ("/dev/nvidia0", "/dev/nvidiactl")}
    return make_process("cuda", *libraries, **{**default_fields, **fields})


def test_queue_pair_and_growing_counters_prove_rdma() -> None:
    route = derive_routes_by_name(make_process("verbs", queue_pairs=(QUEUE_PAIR,)), ports=(PORT,))["rdma"]
    assert (route.outcome, route.moved_bytes, route.cause) == (RouteOutcome.PROVEN, 500 * MIB, None)
    assert "1 queue pair RC on mlx5_0" in route.evidence[0]


def test_counters_that_stand_still_prove_nothing() -> None:
    route = derive_routes_by_name(make_process("verbs", queue_pairs=(QUEUE_PAIR,)), ports=(PORT_WITHOUT_TRAFFIC,))[
        "rdma"
    ]
    assert (route.outcome, route.cause) == (RouteOutcome.UNPROVEN, "the counters of the ports stood still")


@pytest.mark.parametrize(
    ("other_queue_pair", "cause_part"),
    [
        (dataclasses.replace(QUEUE_PAIR, number=20, remote_number=10, process_id=8), None),
        (dataclasses.replace(QUEUE_PAIR, number=99, remote_number=98, process_id=8), "include pid 8"),
        (dataclasses.replace(QUEUE_PAIR, number=99, remote_number=98, process_id=None), "include the kernel"),
        (dataclasses.replace(QUEUE_PAIR, number=1, remote_number=None, process_id=None, type="GSI"), None),
        (dataclasses.replace(QUEUE_PAIR, device="mlx5_1", number=99, process_id=8), None),
    ],
    ids=["peer", "process", "kernel", "management", "device"],
)
def test_others_on_the_port_make_rdma_unproven(other_queue_pair: RdmaQueuePair, cause_part: str | None) -> None:
    route = derive_routes_by_name(
        make_process("verbs", queue_pairs=(QUEUE_PAIR,)), ports=(PORT,), other_queue_pairs=(other_queue_pair,)
    )["rdma"]
    if cause_part is None:
        assert (route.outcome, route.cause) == (RouteOutcome.PROVEN, None)
    else:
        assert route.outcome is RouteOutcome.UNPROVEN
        assert cause_part in (route.cause or "")


def test_unconnected_queue_pair_proves_nothing() -> None:
    route = derive_routes_by_name(
        make_process("verbs", queue_pairs=(dataclasses.replace(QUEUE_PAIR, state="INIT"),)), ports=(PORT,)
    )["rdma"]
    assert route.outcome is RouteOutcome.UNPROVEN
    assert "in which it can send" in (route.cause or "")


@pytest.mark.parametrize(("ports", "cause_part"), [((), "no RDMA device"), ((PORT_WITHOUT_TRAFFIC,), "no queue pair")])
def test_ucx_over_tcp_fell_back(ports: tuple[PortTraffic, ...], cause_part: str) -> None:
    routes = derive_routes_by_name(make_process("ucx", remote_sent_bytes=GIB), ports=ports)
    assert routes["rdma"].outcome is RouteOutcome.FELL_BACK
    assert cause_part in (routes["rdma"].cause or "")
    assert (routes["tcp"].outcome, routes["tcp"].moved_bytes) == (RouteOutcome.PROVEN, GIB)


def test_queue_pairs_without_bytes_fell_back_to_tcp() -> None:
    ucx_process = make_process("ucx", "verbs", queue_pairs=(QUEUE_PAIR,), remote_sent_bytes=GIB)
    route = derive_routes_by_name(ucx_process, ports=(PORT_WITHOUT_TRAFFIC,))["rdma"]
    assert (route.outcome, route.moved_bytes) == (RouteOutcome.FELL_BACK, 0)
    assert "went over TCP" in (route.cause or "")


def test_dmabuf_without_a_queue_pair_is_not_rdma() -> None:
    dmabuf = HeldDmabuf(4096, "nv_dmabuf", GIB)
    gpu = dataclasses.replace(GPU, nvlink_sent_bytes=GIB, nvlink_received_bytes=GIB, process_ids=(7,))
    assert "rdma" not in derive_routes_by_name(
        make_process("nccl", nodes=("/dev/nvidia0",), dmabufs=(dmabuf,)), gpus=(gpu,)
    )


def test_bytes_between_two_observed_processes_count_once() -> None:
    first_process, second_process = make_process(loopback_sent_bytes=GIB), make_process(loopback_received_bytes=GIB)
    assert derive_routes_by_name(first_process, second_process)["tcp"].moved_bytes == GIB


def test_handshake_over_tcp_is_no_fallback() -> None:
    assert derive_routes_by_name(make_process("ucx", remote_sent_bytes=2000)).keys() == {"unknown"}


def test_verbs_without_a_device_is_not_possible() -> None:
    assert derive_routes_by_name(make_process("verbs"))["rdma"].outcome is RouteOutcome.NOT_POSSIBLE


@pytest.mark.parametrize(("library", "route_name"), [("torch", "posix"), ("gdrkit.gds", "engine"), ("cufile", "posix")])
def test_cached_file_came_through_host_memory(library: str, route_name: str) -> None:
    route = derive_routes_by_name(make_reader(library), gpus=(GPU,))[route_name]
    assert (route.outcome, route.moved_bytes, route.cause) == (RouteOutcome.PROVEN, GIB, None)


def test_cufile_from_a_disk_may_be_peer_to_peer() -> None:
    route = derive_routes_by_name(make_reader("cufile", storage_read_bytes=GIB), gpus=(GPU,))["unknown"]
    assert route.outcome is RouteOutcome.UNPROVEN
    assert "peer to peer" in (route.cause or "")


def test_counters_of_nvidia_fs_prove_nvfs() -> None:
    counter_growths = {"Reads.readMiB": 1024, "Reads.ok": 64}
    assert (
        derive_routes_by_name(make_reader("cufile"), gpus=(GPU,), nvidia_fs=counter_growths)["nvfs"].outcome
        is RouteOutcome.PROVEN
    )


@pytest.mark.parametrize(
    ("gpu", "cause_part"),
    [
        (dataclasses.replace(GPU, pcie_received_bytes=GIB // 2), "0.50 times"),
        (dataclasses.replace(GPU, pcie_received_bytes=2 * GIB), "2.00 times"),
        (dataclasses.replace(GPU, pcie_received_bytes=None), "no counter"),
        (dataclasses.replace(GPU, late_count=1), "too late"),
        (dataclasses.replace(GPU, process_ids=(7, 9)), "include pid 9"),
    ],
    ids=["half", "double", "none", "late", "shared"],
)
def test_wrong_pcie_bytes_make_a_file_unproven(gpu: GpuTraffic, cause_part: str) -> None:
    route = derive_routes_by_name(make_reader("torch"), gpus=(gpu,))["posix"]
    assert route.outcome is RouteOutcome.UNPROVEN
    assert cause_part in (route.cause or "")


@pytest.mark.parametrize(("library", "read_bytes"), [("torch", MIB), ("torch", 0), ("cufile", 0)])
def test_mapped_file_is_unproven(library: str, read_bytes: int) -> None:
    reader = make_reader(library, read_bytes=read_bytes, mapped_file_bytes=GIB)
    route = derive_routes_by_name(reader, gpus=(GPU,))["posix"]
    assert route.outcome is RouteOutcome.UNPROVEN
    assert "were mapped" in (route.cause or "")


def test_gpu_that_is_not_open_does_not_count() -> None:
    other_gpu = dataclasses.replace(GPU, minor=1, nvlink_sent_bytes=GIB)
    assert derive_routes_by_name(
        make_reader("torch"), gpus=(dataclasses.replace(other_gpu, pcie_received_bytes=GIB),)
    ).keys() == {"unknown"}


@pytest.mark.parametrize(("process_ids", "outcome"), [((7,), RouteOutcome.PROVEN), ((7, 9), RouteOutcome.UNPROVEN)])
def test_nvlink_is_proven_for_the_only_user(process_ids: tuple[int, ...], outcome: RouteOutcome) -> None:
    gpu = dataclasses.replace(GPU, nvlink_sent_bytes=GIB, nvlink_received_bytes=GIB, process_ids=process_ids)
    route = derive_routes_by_name(
        make_process("nccl", nodes=("/dev/nvidia0",)), gpus=(gpu,), log=("NCCL: channels via P2P/CUMEM",)
    )["nvlink"]
    assert (route.outcome, route.moved_bytes) == (outcome, GIB)
    assert "NCCL: channels via P2P/CUMEM" in route.evidence


def test_wrapping_counter_continues_at_zero() -> None:
    counter = WrappingCounter()
    # The counter wraps at 2**32 = 4_294_967_296, between the first two and between the last two values.
    for index, value in enumerate((4_294_967_000, 200, 1_000_000_000, 500)):
        counter.add(value, index * 0.02)
    assert (counter.growth, counter.late_count) == (296 + 200 + 999_999_800 + 3_294_967_296 + 500, 0)


def test_late_reading_of_a_growing_counter_is_counted() -> None:
    counter = WrappingCounter()
    for value, now_s in ((0, 0.0), (0, 1.0), (10, 1.02), (20, 1.2)):
        counter.add(value, now_s)
    assert (counter.growth, counter.late_count) == (20, 1)


# A port counts words of 4 bytes, and a full counter stays at 0xFFFF_FFFF. gdrkit converts the words to bytes.
@pytest.mark.parametrize(
    ("value_before", "value_after", "expected_gap"),
    [(500, 400, "went back from 500 to 400"), (0xFFFF_FFFF * 4, 0xFFFF_FFFF * 4, "stands still"), (None, None, None)],
)
def test_port_counter_that_cannot_tell_is_a_gap(
    value_before: int | None, value_after: int | None, expected_gap: str | None
) -> None:
    port_counters = (PortCounters("mlx5_0", 1, value, 0, 0, 0) for value in (value_before, value_after))
    traffic, gaps = port_traffic(*port_counters)
    assert traffic == PortTraffic("mlx5_0", 1, None, 0, 0, 0)
    assert len(gaps) == (expected_gap is not None)
    assert expected_gap is None or (expected_gap in gaps[0] and gaps[0].startswith("sent bytes of mlx5_0 port 1"))


def test_port_without_counters_is_a_gap() -> None:
    _traffic, (gap,) = port_traffic(*[PortCounters("siw0", 1, None, None, None, None)] * 2)
    assert gap == "traffic of siw0 port 1: its driver has no counters in sysfs"

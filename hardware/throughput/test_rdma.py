"""Throughput and latency of RDMA WRITE and READ: by size, by queue depth, by pair of GPU and NIC, and by address.

The initiator (the side that posts the work requests) and the target memory use the same NIC. So the cases measure the
path between this NIC and the memory. Every case checks all bytes of its last transfers.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import pytest
from support.initiators import connect_initiator
from support.memory_kinds import MEMORY_KINDS, NEEDS_DMABUF, ROUTES, register_device_memory

from gdrkit import pattern
from gdrkit.cuda import PinnedMemory
from gdrkit.registration import Distance, Placement
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Access, Direction

if TYPE_CHECKING:
    from support.memory_kinds import RdmaMemory, RdmaMemoryKind
    from support.rates import Meter, Rates

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.registration import RegistrationRoute
    from gdrkit.verbs import Initiator, Nic

SIZES = [pytest.param(size * KIB, id=f"{size}KiB") for size in (4, 64, 1024, 8192)]
DEPTHS = (1, 4, 16, 64)
QUEUE_DEPTH, WORK_REQUESTS_PER_POST = 64, 16
MEMORY_BYTES = 64 * MIB
LATENCY_SAMPLE_COUNT = 2000


def fill_source(memory: RdmaMemory, initiator: Initiator, direction: Direction, memory_bytes: int, seed: int) -> None:
    """Write the pattern of the seed into the source of the transfer: the initiator for WRITE, the memory for READ."""
    data = pattern.payload(memory_bytes, seed=seed)
    if direction is Direction.WRITE:
        initiator.write(data)
    else:
        memory.write(data)


def check_target(memory: RdmaMemory, initiator: Initiator, direction: Direction, moved_bytes: int, seed: int) -> None:
    """Check that the target of the transfer has the pattern of the seed."""
    received_bytes = (
        memory.read(length_bytes=moved_bytes) if direction is Direction.WRITE else initiator.read()[:moved_bytes]
    )
    pattern.check(received_bytes, seed=seed)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("length_bytes", SIZES)
def test_by_size(
    meter: Meter,
    nic: Nic,
    memory_kind: RdmaMemoryKind,
    seed: int,
    evidence: Evidence,
    direction: Direction,
    length_bytes: int,
) -> None:
    memory_bytes = meter.choose_length(MEMORY_BYTES, small_bytes=2 * length_bytes)
    # count_transfers_per_round() returns at most 256, which would be too few short operations.
    operation_count = (
        meter.count_transfers_per_round(length_bytes)
        if length_bytes > 64 * KIB
        else meter.choose_count(4096, small_count=64)
    )
    with (
        memory_kind.memory(length_bytes=memory_bytes) as memory,
        connect_initiator(nic, memory_bytes=memory_bytes) as initiator,
    ):
        fill_source(memory, initiator, direction, memory_bytes, seed)
        remote_range = memory.remote()

        def transfer() -> None:
            initiator.run(
                direction,
                remote_range,
                length_bytes=length_bytes,
                operations=operation_count,
                depth=QUEUE_DEPTH,
                list_length=WORK_REQUESTS_PER_POST,
            )

        meter.measure(transfer, moved_bytes=length_bytes * operation_count)
        check_target(memory, initiator, direction, min(memory_bytes, operation_count * length_bytes), seed)
    memory_kind.record_route(evidence)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize("direction", Direction)
def test_by_depth(meter: Meter, nic: Nic, memory_kind: RdmaMemoryKind, seed: int, direction: Direction) -> None:
    length_bytes, operation_count = 64 * KIB, meter.choose_count(512, small_count=16)
    memory_bytes = 64 * length_bytes
    with (
        memory_kind.memory(length_bytes=memory_bytes) as memory,
        connect_initiator(nic, memory_bytes=memory_bytes) as initiator,
    ):
        fill_source(memory, initiator, direction, memory_bytes, seed)
        remote_range = memory.remote()

        def run_burst(depth: int) -> None:
            initiator.run(direction, remote_range, length_bytes=length_bytes, operations=operation_count, depth=depth)

        bursts = {f"depth_{depth}": lambda depth=depth: run_burst(depth) for depth in DEPTHS}
        meter.measure_methods(bursts, moved_bytes=length_bytes * operation_count)
        check_target(memory, initiator, direction, min(memory_bytes, operation_count * length_bytes), seed)


@pytest.mark.parametrize("memory_kind", MEMORY_KINDS, indirect=True)
@pytest.mark.parametrize("direction", Direction)
def test_latency(
    meter: Meter, nic: Nic, memory_kind: RdmaMemoryKind, seed: int, evidence: Evidence, direction: Direction
) -> None:
    length_bytes, operation_count = 8, meter.choose_count(LATENCY_SAMPLE_COUNT, small_count=10)
    with (
        memory_kind.memory(length_bytes=4 * KIB) as memory,
        connect_initiator(nic, memory_bytes=4 * KIB) as initiator,
    ):
        fill_source(memory, initiator, direction, 4 * KIB, seed)
        remote_range = memory.remote()
        # The operations of this first call are not measured.
        initiator.run(direction, remote_range, length_bytes=length_bytes, operations=operation_count)
        latencies = initiator.run_singly(direction, remote_range, length_bytes=length_bytes, operations=operation_count)
        check_target(memory, initiator, direction, min(4 * KIB, operation_count * length_bytes), seed)
    if meter.is_on:
        sorted_times_ns = sorted(latencies.times_ns)
        for quantile_name, quantile in (("p50", 0.50), ("p99", 0.99)):
            evidence.number(f"latency_us_{quantile_name}", sorted_times_ns[int(len(sorted_times_ns) * quantile)] / 1e3)
        evidence.number("latency_us_min", sorted_times_ns[0] / 1e3)
        meter.record_apis()


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.timeout(300)
def test_every_pair_of_gpu_and_nic(
    meter: Meter,
    devices: tuple[Device, ...],
    nics: tuple[Nic, ...],
    seed: int,
    evidence: Evidence,
    route: RegistrationRoute,
) -> None:
    """Measure WRITE and READ of 1 MiB for each pair of GPU and NIC.

    Also record how much faster pairs on one PCIe switch are than pairs on different sockets.
    """
    length_bytes = meter.choose_length(MIB, small_bytes=64 * KIB)
    operation_count = meter.choose_count(128, small_count=8)
    placement = Placement()
    medians_by_distance: dict[tuple[Distance, Direction], list[float]] = {}
    for device in devices:
        for nic in nics:
            pair_name = f"gpu{device.index}_{nic.name}"
            distance = placement.distance(device.pci_bus_id, nic.name)
            evidence[pair_name] = distance.name
            for direction in Direction:
                rates = measure_pair(meter, device, nic, route, direction, (length_bytes, operation_count, seed))
                if rates is not None:
                    meter.record_path(f"GPU{device.index}", nic.name, name=f"{pair_name}_{direction.value}")
                    meter.record(f"{pair_name}_{direction.value}", rates)
                    medians_by_distance.setdefault((distance, direction), []).append(rates.median)
            evidence.route(device=device, nic=nic, method=route)
    for direction in Direction:
        # A path of distance PIX between GPU and NIC crosses at most one PCIe switch. A path of distance SYS crosses the
        # link between NUMA nodes.
        medians_behind_one_switch, medians_across_sockets = (
            medians_by_distance.get((Distance.PIX, direction)),
            medians_by_distance.get((Distance.SYS, direction)),
        )
        if medians_behind_one_switch and medians_across_sockets:
            ratio = statistics.median(medians_behind_one_switch) / statistics.median(medians_across_sockets)
            evidence.number(f"{direction.value}_same_switch_over_across_sockets_ratio", ratio)


def measure_pair(
    meter: Meter,
    device: Device,
    nic: Nic,
    route: RegistrationRoute,
    direction: Direction,
    sizes_and_seed: tuple[int, int, int],
) -> Rates | None:
    """Return the rates between the NIC and the memory of the device, or None if the meter is off.

    `sizes_and_seed` has the length of an operation in bytes, the number of operations in a round, and the seed.
    """
    length_bytes, operation_count, seed = sizes_and_seed
    memory_bytes = 8 * length_bytes
    with (
        register_device_memory(device, nic, route, length_bytes=memory_bytes) as (memory, registration),
        connect_initiator(nic, memory_bytes=memory_bytes) as initiator,
    ):
        remote_range, data = registration.remote(nic), pattern.payload(memory_bytes, seed=seed)
        if direction is Direction.WRITE:
            initiator.write(data)
        else:
            memory.write(data)
        rates = meter.measure_unrecorded(
            lambda: initiator.run(
                direction, remote_range, length_bytes=length_bytes, operations=operation_count, depth=8
            ),
            moved_bytes=length_bytes * operation_count,
        )
        pattern.check(memory.read() if direction is Direction.WRITE else initiator.read(), seed=seed)
    return rates


@NEEDS_DMABUF
@pytest.mark.parametrize("length_bytes", [pytest.param(size * KIB, id=f"{size}KiB") for size in (4, 16, 64, 256, 1024)])
def test_direct_write_beside_a_copy_through_the_host(
    meter: Meter, device: Device, nic: Nic, seed: int, evidence: Evidence, length_bytes: int
) -> None:
    """Record the ratio of the direct rate to the rate through host memory. It should exceed 1 for 64 KiB or more."""
    operation_count = meter.choose_count(64, small_count=4)
    with (
        register_device_memory(device, nic, length_bytes=length_bytes) as (memory, registration),
        PinnedMemory(device, length_bytes) as pinned_memory,
        connect_initiator(nic, memory_bytes=length_bytes) as initiator,
        device.stream() as stream,
        nic.register_host(pinned_memory.view(), access=Access.LOCAL_WRITE | Access.REMOTE_WRITE) as pinned_region,
    ):
        initiator.write(pattern.payload(length_bytes, seed=seed))
        device_range, pinned_range = registration.remote(nic), pinned_region.remote()

        def write_directly() -> None:
            for _ in range(operation_count):
                initiator.run(Direction.WRITE, device_range, length_bytes=length_bytes, operations=1)

        def write_through_host() -> None:
            for _ in range(operation_count):
                initiator.run(Direction.WRITE, pinned_range, length_bytes=length_bytes, operations=1)
                stream.write(memory, pinned_memory.view())
                stream.synchronize()

        for write in (write_directly, write_through_host):
            memory.fill(0)
            write()
            pattern.check(memory.read(), seed=seed)
        rates = meter.measure_methods(
            {"direct": write_directly, "by_host": write_through_host}, moved_bytes=length_bytes * operation_count
        )
        pattern.check(memory.read(), seed=seed)
    if rates:
        evidence.number("direct_over_by_host_ratio", rates["direct"].median / rates["by_host"].median)


@NEEDS_DMABUF
def test_aligned_beside_odd_addresses(meter: Meter, device: Device, nic: Nic, seed: int, evidence: Evidence) -> None:
    """Record the ratio of the rates at aligned and odd addresses. Aligned transfers should be faster."""
    length_bytes, operation_count = 64 * KIB, meter.choose_count(512, small_count=8)
    offsets = {"aligned_4096": 4096, "aligned_256": 4096 + 256, "aligned_64": 4096 + 64, "odd": 4096 + 255}
    with (
        register_device_memory(device, nic, length_bytes=MIB) as (memory, registration),
        connect_initiator(nic, memory_bytes=length_bytes) as initiator,
    ):
        initiator.write(pattern.payload(length_bytes, seed=seed))

        def run_burst(offset_bytes: int) -> None:
            remote_range = registration.remote(nic, offset_bytes=offset_bytes, length_bytes=length_bytes)
            initiator.run(
                Direction.WRITE, remote_range, length_bytes=length_bytes, operations=operation_count, depth=16
            )

        for offset_bytes in offsets.values():
            memory.fill(0)
            run_burst(offset_bytes)
            pattern.check(memory.read(offset_bytes=offset_bytes, length_bytes=length_bytes), seed=seed)
        bursts = {
            name: lambda offset_bytes=offset_bytes: run_burst(offset_bytes) for name, offset_bytes in offsets.items()
        }
        memory.fill(0)
        rates = meter.measure_methods(bursts, moved_bytes=length_bytes * operation_count)
        # Only the bytes of the last burst are checked. The other bursts write the same bytes at other offsets.
        pattern.check(memory.read(offset_bytes=offsets["odd"], length_bytes=length_bytes), seed=seed)
    if rates:
        evidence.number("aligned_256_over_odd_ratio", rates["aligned_256"].median / rates["odd"].median)

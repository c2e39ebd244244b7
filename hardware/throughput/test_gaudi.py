"""Throughput of RDMA into and out of Gaudi memory: directly by a dma-buf, and by copies through host memory.

Programs that do not use dma-bufs must copy: the NIC accesses host memory, and the device copies between host memory
and device memory. Both methods take turns in one run and move the same bytes. Every case checks the bytes after the
last round of each method.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.initiators import connect_initiator

from gdrkit import pattern
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, verbs
from gdrkit.registration import register
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Direction

if TYPE_CHECKING:
    from support.rates import Meter

    from gdrkit.gaudi import Device, DeviceMemory
    from gdrkit.harness.evidence import Evidence
    from gdrkit.verbs import Initiator, Nic

pytestmark = needs(gaudi_needs.device(), verbs.nic(), verbs.dmabuf_region)

OPERATION_BYTES, QUEUE_DEPTH = 64 * KIB, 16
SIZES = [pytest.param(size * MIB, id=f"{size}MiB") for size in (1, 64)]


def check_and_clear_target(
    memory: DeviceMemory, initiator: Initiator, direction: Direction, staging_buffer: bytearray, seed: int
) -> None:
    """Check the target of the transfer, and clear it, so that the next check does not find old bytes."""
    zeros = bytes(len(staging_buffer))
    if direction is Direction.WRITE:
        pattern.check(memory.read(), seed=seed)
        memory.write(zeros)
    else:
        pattern.check(initiator.read()[: len(staging_buffer)], seed=seed)
        initiator.write(zeros)
    staging_buffer[:] = zeros


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("length_bytes", SIZES)
def test_direct_beside_copies(
    meter: Meter, gaudi: Device, nic: Nic, seed: int, evidence: Evidence, direction: Direction, length_bytes: int
) -> None:
    length_bytes = meter.choose_length(length_bytes)
    transfers_per_round = meter.count_transfers_per_round(length_bytes)
    data, is_write = pattern.payload(length_bytes, seed=seed), direction is Direction.WRITE
    staging_buffer = bytearray(length_bytes)
    with (
        gaudi.allocate(length_bytes) as memory,
        register(memory, [nic]) as registration,
        nic.register_host(staging_buffer) as staging_region,
        connect_initiator(nic, memory_bytes=length_bytes) as initiator,
    ):
        if is_write:
            initiator.write(data)
        else:
            memory.write(data)

        def move_by_nic(target_memory: object) -> None:
            initiator.run(
                direction,
                registration.remote(nic) if target_memory is memory else staging_region.remote(),
                length_bytes=OPERATION_BYTES,
                operations=length_bytes // OPERATION_BYTES,
                depth=QUEUE_DEPTH,
                list_length=QUEUE_DEPTH,
            )

        def transfer_directly() -> None:
            for _ in range(transfers_per_round):
                move_by_nic(memory)

        def transfer_by_copies() -> None:
            for _ in range(transfers_per_round):
                if is_write:
                    move_by_nic(staging_buffer)
                    memory.write(staging_buffer)
                else:
                    memory.read_into(staging_buffer)
                    move_by_nic(staging_buffer)

        methods = {"direct": transfer_directly, "copies": transfer_by_copies}
        rates = meter.measure_methods(
            methods,
            moved_bytes=length_bytes * transfers_per_round,
            check=lambda: check_and_clear_target(memory, initiator, direction, staging_buffer, seed),
        )
    evidence["registration_route"] = registration.route.value
    if rates:
        evidence.number("direct_to_copies_ratio", rates["direct"].median / rates["copies"].median)


@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
@pytest.mark.parametrize("length_bytes", SIZES)
def test_copy_by_the_device(meter: Meter, gaudi: Device, seed: int, direction: str, length_bytes: int) -> None:
    length_bytes = meter.choose_length(length_bytes)
    transfers_per_round = meter.count_transfers_per_round(length_bytes)
    buffer = bytearray(pattern.payload(length_bytes, seed=seed))
    with gaudi.allocate(length_bytes) as memory:
        memory.write(buffer)

        def copy_one_round() -> None:
            for _ in range(transfers_per_round):
                if direction == "host_to_device":
                    memory.write(buffer)
                else:
                    memory.read_into(buffer)

        meter.measure(copy_one_round, moved_bytes=length_bytes * transfers_per_round)
        pattern.check(memory.read(), seed=seed)
        pattern.check(bytes(buffer), seed=seed)

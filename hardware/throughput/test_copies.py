"""Throughput of CUDA copies: between host and device, in a device, between devices, and from imported memory.

Imported memory belongs to a peer process, which exports it with CUDA IPC. Host memory is pinned. Every case checks the
bytes of its last round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from gdrkit import pattern
from gdrkit.cuda import PinnedMemory, can_access_peer, open_handle, peer_access
from gdrkit.harness.needs import cuda, needs
from gdrkit.units import MIB

if TYPE_CHECKING:
    from support.rates import Meter

    from gdrkit.cuda import Device
    from gdrkit.harness.evidence import Evidence
    from gdrkit.harness.peer import Peer

SIZES = [pytest.param(size * MIB, id=f"{size}MiB") for size in (1, 16, 256)]


@needs(cuda.device())
@pytest.mark.parametrize("length_bytes", SIZES)
@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_pinned_copy(meter: Meter, device: Device, seed: int, direction: str, length_bytes: int) -> None:
    length_bytes = meter.choose_length(length_bytes)
    copies_per_round = meter.count_transfers_per_round(length_bytes)
    data = pattern.payload(length_bytes, seed=seed)
    is_write = direction == "host_to_device"
    meter.record_path(f"GPU{device.index}")
    with (
        device.allocate(length_bytes) as memory,
        PinnedMemory(device, length_bytes) as pinned_memory,
        device.stream() as stream,
    ):
        if is_write:
            pinned_memory.view()[:] = data
        else:
            memory.write(data)

        def copy_one_round() -> None:
            for _ in range(copies_per_round):
                if is_write:
                    stream.write(memory, pinned_memory.view())
                else:
                    stream.read_into(memory, pinned_memory.view())
            stream.synchronize()

        meter.measure(copy_one_round, moved_bytes=length_bytes * copies_per_round)
        pattern.check(memory.read() if is_write else bytes(pinned_memory.view()), seed=seed)


@needs(cuda.device())
def test_copy_within_a_device(meter: Meter, device: Device, seed: int) -> None:
    length_bytes = meter.choose_length(256 * MIB)
    # A copy within a device is fast, so a round has up to 16 times as many copies.
    copies_per_round = meter.count_transfers_per_round(length_bytes // 16)
    with (
        device.allocate(length_bytes) as source,
        device.allocate(length_bytes) as destination,
        device.stream() as stream,
    ):
        source.write(pattern.payload(length_bytes, seed=seed))

        def copy_one_round() -> None:
            for _ in range(copies_per_round):
                stream.copy(source, destination)
            stream.synchronize()

        meter.measure(copy_one_round, moved_bytes=length_bytes * copies_per_round)
        pattern.check(destination.read(), seed=seed)


@needs(cuda.device(count_min=2))
def test_peer_copy_beside_a_copy_through_the_host(
    meter: Meter, devices: tuple[Device, ...], seed: int, evidence: Evidence
) -> None:
    first_device, second_device = devices[:2]
    assert can_access_peer(first_device, second_device)
    length_bytes, copies_per_round = meter.choose_length(256 * MIB), 4
    with (
        first_device.allocate(length_bytes) as source,
        second_device.allocate(length_bytes) as destination,
        PinnedMemory(first_device, length_bytes) as pinned_memory,
        first_device.stream() as first_stream,
        second_device.stream() as second_stream,
        peer_access(first_device, second_device),
    ):

        def copy_directly() -> None:
            for _ in range(copies_per_round):
                first_stream.copy(source, destination)
            first_stream.synchronize()

        def copy_through_host() -> None:
            for _ in range(copies_per_round):
                first_stream.read_into(source, pinned_memory.view())
                first_stream.synchronize()
                second_stream.write(destination, pinned_memory.view())
                second_stream.synchronize()

        source.write(pattern.payload(length_bytes, seed=seed))
        for copy in (copy_directly, copy_through_host):
            destination.fill(0)
            copy()
            pattern.check(destination.read(), seed=seed)
        rates = meter.measure_methods(
            {"direct": copy_directly, "by_host": copy_through_host}, moved_bytes=length_bytes * copies_per_round
        )
        pattern.check(destination.read(), seed=seed)
    if rates:
        evidence.number("direct_over_by_host_ratio", rates["direct"].median / rates["by_host"].median)


@needs(cuda.device(), cuda.ipc)
def test_copy_from_imported_memory(meter: Meter, device: Device, peer: Peer, seed: int) -> None:
    length_bytes = meter.choose_length(256 * MIB)
    copies_per_round = meter.count_transfers_per_round(length_bytes // 16)
    peer_memory = peer.device().allocate(length_bytes)
    peer_memory.write(seed=seed)
    with (
        open_handle(device, peer_memory.export_ipc(), length_bytes=length_bytes) as imported_memory,
        device.allocate(length_bytes) as destination,
        device.stream() as stream,
    ):

        def copy_one_round() -> None:
            for _ in range(copies_per_round):
                stream.copy(imported_memory, destination)
            stream.synchronize()

        meter.measure(copy_one_round, moved_bytes=length_bytes * copies_per_round)
        pattern.check(destination.read(), seed=seed)


@needs(cuda.device(count_min=2), cuda.ipc)
def test_peer_copy_from_imported_memory(meter: Meter, devices: tuple[Device, ...], peer: Peer, seed: int) -> None:
    first_device, second_device = devices[:2]
    length_bytes = meter.choose_length(256 * MIB)
    # A copy over NVLink is fast, so a round has up to 4 times as many copies.
    copies_per_round = meter.count_transfers_per_round(length_bytes // 4)
    peer_memory = peer.device(1).allocate(length_bytes)
    peer_memory.write(seed=seed)
    with (
        open_handle(second_device, peer_memory.export_ipc(), length_bytes=length_bytes) as imported_memory,
        first_device.allocate(length_bytes) as destination,
        first_device.stream() as stream,
        peer_access(first_device, second_device),
    ):

        def copy_one_round() -> None:
            for _ in range(copies_per_round):
                stream.copy(imported_memory, destination)
            stream.synchronize()

        meter.measure(copy_one_round, moved_bytes=length_bytes * copies_per_round)
        pattern.check(destination.read(), seed=seed)

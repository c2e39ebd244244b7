"""Throughput of pinned copies and cached files with all GPUs of a host at once, compared with one GPU.

Every method of a case moves the same number of bytes, into one GPU or into all of them. The rate of all GPUs can be
limited by their links, by a link that several GPUs share, or by the memory of the host. Therefore the records also have
the rate of copies within host memory and the NUMA node of each GPU. Every case checks the bytes of each GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from gdrkit import gds, host, pattern
from gdrkit.cuda import PinnedMemory
from gdrkit.harness.needs import cuda, needs
from gdrkit.harness.needs.cufile import DISK
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.rates import Meter

    from gdrkit.cuda import CudaMemory, Device, Stream
    from gdrkit.harness.evidence import Evidence

COPY_BYTES = 256 * MIB
FILE_BYTES = 1024 * MIB
# At most this many threads copy host memory.
HOST_THREADS_MAX = 16


@dataclass(frozen=True)
class PinnedCopy:
    """Memory of one device, pinned host memory of the same length, and a stream for copies between them."""

    memory: CudaMemory
    pinned: PinnedMemory
    stream: Stream

    def start(self, *, is_write: bool) -> None:
        """Start a copy in the stream: into the device if `is_write` is true, else from the device."""
        if is_write:
            self.stream.write(self.memory, self.pinned.view())
        else:
            self.stream.read_into(self.memory, self.pinned.view())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on the disk of the temporary files."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-throughput-", dir=DISK) as path:
        yield Path(path).resolve()
        gds.close_engines()


@needs(cuda.device(count_min=2))
@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_pinned_copies_of_all_devices(
    meter: Meter, devices: tuple[Device, ...], seed: int, evidence: Evidence, direction: str
) -> None:
    length_bytes, is_write = meter.choose_length(COPY_BYTES), direction == "host_to_device"
    with contextlib.ExitStack() as stack:
        copies = pinned_copies(devices, length_bytes, stack)
        for number, copy in enumerate(copies):
            payload = pattern.payload(length_bytes, seed=seed + number)
            if is_write:
                copy.pinned.view()[:] = payload
            else:
                copy.memory.write(payload)
        rates = meter.measure_methods(copy_methods(copies, is_write=is_write), moved_bytes=length_bytes * len(copies))
        for number, copy in enumerate(copies):
            pattern.check(copy.memory.read() if is_write else bytes(copy.pinned.view()), seed=seed + number)
    evidence["numa_nodes"] = numa_nodes(devices)
    if rates:
        evidence.number("all_over_one_ratio", rates["all"].median / rates["one"].median)


@needs(cuda.device(count_min=2))
def test_cached_files_into_all_devices(
    meter: Meter, devices: tuple[Device, ...], folder: Path, seed: int, evidence: Evidence
) -> None:
    length_bytes = meter.choose_length(FILE_BYTES)
    with contextlib.ExitStack() as stack:
        stack.callback(gds.close_engines)
        files, memories = [], []
        for number, device in enumerate(devices):
            path = folder / f"file{number}"
            path.write_bytes(pattern.payload(length_bytes, seed=seed + number))
            files.append(stack.enter_context(gds.File(path, access="buffered", direct="never")))
            memories.append(stack.enter_context(device.allocate(length_bytes)))
        copies = pinned_copies(devices, length_bytes, stack)
        methods = {
            "one": lambda: read_all(files, memories[:1] * len(files)),
            "all": lambda: read_all(files, memories),
            "pinned": copy_methods(copies, is_write=True)["all"],
            "host_copy": host_copies(length_bytes * len(devices), stack),
        }
        rates = meter.measure_methods(methods, moved_bytes=length_bytes * len(devices))
        for memory in memories:
            memory.fill(0)
        read_all(files, memories)
        for number, memory in enumerate(memories):
            pattern.check(memory.read(), seed=seed + number)
    evidence["numa_nodes"] = numa_nodes(devices)
    if rates:
        limit = min("pinned", "host_copy", key=lambda name: rates[name].median)
        evidence["limit"] = limit
        evidence.number("all_over_one_ratio", rates["all"].median / rates["one"].median)
        evidence.number("all_over_limit_ratio", rates["all"].median / rates[limit].median)


def pinned_copies(devices: Sequence[Device], length_bytes: int, stack: contextlib.ExitStack) -> list[PinnedCopy]:
    """Return a copy of `length_bytes` for each device. The end of the stack frees the memory."""
    return [
        PinnedCopy(
            stack.enter_context(device.allocate(length_bytes)),
            stack.enter_context(PinnedMemory(device, length_bytes)),
            stack.enter_context(device.stream()),
        )
        for device in devices
    ]


def copy_methods(copies: Sequence[PinnedCopy], *, is_write: bool) -> dict[str, Callable[[], object]]:
    """Return two methods that move the same number of bytes: ``one`` device alone, and ``all`` devices at once."""

    def copy_with(used_copies: Sequence[PinnedCopy]) -> None:
        for _ in range(len(copies) // len(used_copies)):
            for copy in used_copies:
                copy.start(is_write=is_write)
        for copy in used_copies:
            copy.stream.synchronize()

    return {"one": lambda: copy_with(copies[:1]), "all": lambda: copy_with(copies)}


def read_all(files: Sequence[gds.File], memories: Sequence[CudaMemory]) -> None:
    """Read each file into the memory with the same index, all at the same time."""
    for transfer in [file.start_read_into(memory) for file, memory in zip(files, memories, strict=True)]:
        transfer.result()


def host_copies(total_bytes: int, stack: contextlib.ExitStack) -> Callable[[], object]:
    """Return a method that copies `total_bytes` within host memory, in one thread for each processor."""
    threads_count = min(HOST_THREADS_MAX, len(os.sched_getaffinity(0)))
    part_bytes = total_bytes // threads_count
    buffers = [
        (ctypes.create_string_buffer(part_bytes), ctypes.create_string_buffer(part_bytes)) for _ in range(threads_count)
    ]
    pool = stack.enter_context(ThreadPoolExecutor(threads_count))

    # memmove of ctypes releases the interpreter's lock.
    def copy_all() -> None:
        list(pool.map(lambda pair: ctypes.memmove(pair[1], pair[0], part_bytes), buffers))

    return copy_all


def numa_nodes(devices: Sequence[Device]) -> dict[str, int | None]:
    """Return the NUMA node of each device, or None if the firmware does not state it."""
    nodes = {pci.address: pci.numa_node for pci in host.pci_devices(host.HostTree())}
    return {f"GPU{device.index}": nodes.get(device.pci_bus_id) for device in devices}

"""Throughput of pinned copies and cached files with all GPUs of a host at once, compared with one GPU.

All methods of a case move the same number of bytes. A method uses one GPU or all of them. The rate of all GPUs can be
limited by their links, by a link that several GPUs share, or by the processors. Therefore the records also have the
rate of copies out of the page cache and the NUMA node of each GPU. Every case checks the bytes of each GPU.
"""

from __future__ import annotations

import contextlib
import mmap
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
from gdrkit.harness.needs.cufile import DISK_FOLDER
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from support.rates import Meter

    from gdrkit.cuda import CudaMemory, Device, Stream
    from gdrkit.harness.evidence import Evidence

COPY_BYTES = 256 * MIB
FILE_BYTES = 1024 * MIB
# Buffers of this size stay in the processor caches, as the staging buffers of the copy engines do. With larger buffers,
# the memory of the host limits the copies.
HOST_BUFFER_BYTES = 4 * MIB
HOST_THREADS_PER_DEVICE_MAX = gds.EngineOptions().workers_count


@dataclass(frozen=True)
class PinnedCopy:
    """Memory of one device, pinned host memory of the same length, and a stream for copies between them."""

    device_memory: CudaMemory
    pinned_memory: PinnedMemory
    stream: Stream

    def start(self, *, is_write: bool) -> None:
        """Start a copy in the stream: into the device if `is_write` is true, else from the device."""
        if is_write:
            self.stream.write(self.device_memory, self.pinned_memory.view())
        else:
            self.stream.read_into(self.device_memory, self.pinned_memory.view())


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder on the disk of the temporary files."""
    with tempfile.TemporaryDirectory(prefix="gdrkit-throughput-", dir=DISK_FOLDER) as path:
        yield Path(path).resolve()
        gds.close_engines()


@needs(cuda.device(count_min=2))
@pytest.mark.parametrize("direction", ["host_to_device", "device_to_host"])
def test_pinned_copies_of_all_devices(
    meter: Meter, devices: tuple[Device, ...], seed: int, evidence: Evidence, direction: str
) -> None:
    length_bytes, is_write = meter.choose_length(COPY_BYTES), direction == "host_to_device"
    with contextlib.ExitStack() as stack:
        copies = make_pinned_copies(devices, length_bytes, stack)
        for index, copy in enumerate(copies):
            payload = pattern.payload(length_bytes, seed=seed + index)
            if is_write:
                copy.pinned_memory.view()[:] = payload
            else:
                copy.device_memory.write(payload)
        rates = meter.measure_methods(
            make_copy_methods(copies, is_write=is_write), moved_bytes=length_bytes * len(copies)
        )
        for index, copy in enumerate(copies):
            pattern.check(
                copy.device_memory.read() if is_write else bytes(copy.pinned_memory.view()), seed=seed + index
            )
    evidence["numa_nodes"] = read_numa_nodes(devices)
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
        for index, device in enumerate(devices):
            path = folder / f"file{index}"
            path.write_bytes(pattern.payload(length_bytes, seed=seed + index))
            files.append(stack.enter_context(gds.File(path, access="buffered", direct="never")))
            memories.append(stack.enter_context(device.allocate(length_bytes)))
        copies = make_pinned_copies(devices, length_bytes, stack)
        # `one` reads all files into one GPU, `all` reads each file into a GPU of its own. `pinned` and `host_read`
        # measure the two steps of `all`: the copies to the GPUs, and the copies out of the page cache.
        methods = {
            "one": lambda: read_all(files, memories[:1] * len(files)),
            "all": lambda: read_all(files, memories),
            "pinned": make_copy_methods(copies, is_write=True)["all"],
            "host_read": make_host_reader(files, stack),
        }
        rates = meter.measure_methods(methods, moved_bytes=length_bytes * len(devices))
        for memory in memories:
            memory.fill(0)
        read_all(files, memories)
        for index, memory in enumerate(memories):
            pattern.check(memory.read(), seed=seed + index)
    evidence["numa_nodes"] = read_numa_nodes(devices)
    if rates:
        slower_step = min("pinned", "host_read", key=lambda name: rates[name].median)
        evidence["limit"] = slower_step
        evidence.number("all_over_one_ratio", rates["all"].median / rates["one"].median)
        evidence.number("all_over_limit_ratio", rates["all"].median / rates[slower_step].median)


def make_pinned_copies(devices: Sequence[Device], length_bytes: int, stack: contextlib.ExitStack) -> list[PinnedCopy]:
    """Return a PinnedCopy of `length_bytes` for each device. The memory is freed when `stack` closes."""
    return [
        PinnedCopy(
            stack.enter_context(device.allocate(length_bytes)),
            stack.enter_context(PinnedMemory(device, length_bytes)),
            stack.enter_context(device.stream()),
        )
        for device in devices
    ]


def make_copy_methods(copies: Sequence[PinnedCopy], *, is_write: bool) -> dict[str, Callable[[], object]]:
    """Return the methods ``one`` (one device) and ``all`` (all devices at once), which move equally many bytes."""

    def run_copies(used_copies: Sequence[PinnedCopy]) -> None:
        # One device makes as many copies as all devices make together.
        for _ in range(len(copies) // len(used_copies)):
            for copy in used_copies:
                copy.start(is_write=is_write)
        for copy in used_copies:
            copy.stream.synchronize()

    return {"one": lambda: run_copies(copies[:1]), "all": lambda: run_copies(copies)}


def read_all(files: Sequence[gds.File], memories: Sequence[CudaMemory]) -> None:
    """Read all files at the same time, each into the memory with the same index."""
    for transfer in [file.start_read_into(memory) for file, memory in zip(files, memories, strict=True)]:
        transfer.result()


def make_host_reader(files: Sequence[gds.File], stack: contextlib.ExitStack) -> Callable[[], object]:
    """Return a method that copies the files out of the page cache into host memory.

    The method uses as many threads as the copy engines have workers, but at most one for each processor.
    """
    threads_count = min(HOST_THREADS_PER_DEVICE_MAX * len(files), len(os.sched_getaffinity(0)))
    pool = stack.enter_context(ThreadPoolExecutor(threads_count))
    file_parts = []
    for file in files:
        fd = os.open(file.path, os.O_RDONLY)
        stack.callback(os.close, fd)
        file_parts += [(fd, offset) for offset in range(0, file.size_bytes, HOST_BUFFER_BYTES)]

    def read_parts(thread_index: int, buffer: mmap.mmap) -> None:
        for fd, offset in file_parts[thread_index::threads_count]:
            os.preadv(fd, [buffer], offset)

    buffers = [stack.enter_context(mmap.mmap(-1, HOST_BUFFER_BYTES)) for _ in range(threads_count)]

    def read_all_parts() -> None:
        list(pool.map(read_parts, range(threads_count), buffers))

    return read_all_parts


def read_numa_nodes(devices: Sequence[Device]) -> dict[str, int | None]:
    """Return the NUMA node of each device, or None if the firmware does not state it."""
    numa_node_by_address = {pci.address: pci.numa_node for pci in host.pci_devices(host.HostTree())}
    return {f"GPU{device.index}": numa_node_by_address.get(device.pci_bus_id) for device in devices}

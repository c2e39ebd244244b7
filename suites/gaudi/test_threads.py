"""Many threads access Gaudi memory by RDMA and by copies of the device, and compare every byte.

Each thread exports a dma-buf and registers it as a region. It repeats two steps: it writes by RDMA and reads with a
copy of the device, then it writes with a copy of the device and reads by RDMA. The threads have separate memory in one
case, and parts of one memory in another. The dma-buf tests of hl-thunk have the same cases, but compare no data.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING

import pytest

from gdrkit import pattern
from gdrkit.harness.needs import gaudi as gaudi_needs
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.gaudi import Device, GaudiMemory
    from gdrkit.verbs import Nic, QueuePair, Region

pytestmark = needs(gaudi_needs.device(), verbs.nic(), verbs.dmabuf_region)

ALLOCATION_BYTES = 32 * MIB
ACCESS_BYTES = 4 * KIB


class Importer:
    """Writes to regions of this process and reads from them through a NIC, one request at a time.

    An importer uses two connected queue pairs of this process. More queue pairs would not be faster, because pyverbs
    holds the GIL in its calls.
    """

    def __init__(self, nic: Nic, requester: QueuePair, host_region: Region) -> None:
        self.nic = nic
        self._requester = requester
        self._host_region = host_region
        self._lock = threading.Lock()

    def write(self, region: Region, data: bytes, *, offset_bytes: int) -> None:
        with self._lock:
            assert self._host_region.memory is not None
            self._host_region.memory[: len(data)] = data
            remote_range = region.remote(offset_bytes=offset_bytes, length_bytes=len(data))
            self._requester.post_write(self._host_region, remote_range, work_id=1, length_bytes=len(data))
            self._requester.wait(10_000).expect(Status.SUCCESS)

    def read(self, region: Region, *, offset_bytes: int, length_bytes: int) -> bytes:
        with self._lock:
            assert self._host_region.memory is not None
            remote_range = region.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
            self._requester.post_read(self._host_region, remote_range, work_id=2, length_bytes=length_bytes)
            self._requester.wait(10_000).expect(Status.SUCCESS)
            return bytes(self._host_region.memory[:length_bytes])


@pytest.fixture
def importer(nic: Nic) -> Iterator[Importer]:
    """Yield an importer on the first NIC."""
    with (
        nic.completion_queue(depth=16) as completion_queue,
        nic.queue_pair(completion_queue) as requester,
        nic.queue_pair(completion_queue) as responder,
        nic.register_host(bytearray(ACCESS_BYTES)) as host_region,
    ):
        requester.connect(responder.endpoint())
        responder.connect(requester.endpoint())
        yield Importer(nic, requester, host_region)


def run_threads(thread_count: int, run_thread: Callable[[int], None]) -> None:
    """Run `run_thread` in `thread_count` threads, and raise the first failure."""
    failures: list[BaseException] = []

    def run_and_store_failure(thread_index: int) -> None:
        try:
            run_thread(thread_index)
        except BaseException as error:
            failures.append(error)
            raise

    with contextlib.ExitStack() as stack:
        # The default hook would print each exception.
        previous_hook, threading.excepthook = threading.excepthook, lambda _: None
        stack.callback(setattr, threading, "excepthook", previous_hook)
        threads = [
            threading.Thread(target=run_and_store_failure, args=(thread_index,)) for thread_index in range(thread_count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def write_and_read_back(
    importer: Importer, memory: GaudiMemory, *, seed: int, iteration_count: int, offsets: Iterator[int]
) -> None:
    """Run the steps of one thread. No other thread may access the memory at these offsets."""
    with memory.export_dmabuf() as dmabuf:
        region = importer.nic.register_dmabuf(dmabuf)
    with region:
        for iteration in range(iteration_count):
            offset_bytes = next(offsets)
            nic_data, device_data = (
                pattern.payload(ACCESS_BYTES, seed=seed + 2 * iteration + direction) for direction in (0, 1)
            )
            importer.write(region, nic_data, offset_bytes=offset_bytes)
            assert memory.read(offset_bytes=offset_bytes, length_bytes=ACCESS_BYTES) == nic_data
            memory.write(device_data, offset_bytes=offset_bytes)
            assert importer.read(region, offset_bytes=offset_bytes, length_bytes=ACCESS_BYTES) == device_data


def generate_offsets(seed: int, *, begin: int, end: int) -> Iterator[int]:
    """Yield random offsets, including odd numbers."""
    rng = random.Random(seed)
    while True:
        yield rng.randrange(begin, end - ACCESS_BYTES)


def test_one_thread(gaudi: Device, importer: Importer, seed: int) -> None:
    with gaudi.allocate(ALLOCATION_BYTES) as memory:
        write_and_read_back(
            importer,
            memory,
            seed=seed,
            iteration_count=1,
            offsets=generate_offsets(seed, begin=0, end=ALLOCATION_BYTES),
        )


def test_fifteen_threads_with_separate_memory(gaudi: Device, importer: Importer, seed: int) -> None:
    def run_thread(thread_index: int) -> None:
        offsets = generate_offsets(seed + thread_index, begin=0, end=ALLOCATION_BYTES)
        with gaudi.allocate(ALLOCATION_BYTES) as memory:
            write_and_read_back(importer, memory, seed=seed + 1000 * thread_index, iteration_count=10, offsets=offsets)

    run_threads(15, run_thread)


def test_thirty_threads_with_shared_memory(gaudi: Device, importer: Importer, seed: int) -> None:
    """Give each thread a thirtieth of the memory, so that the thread can compare its data.

    In the corresponding test of hl-thunk, all threads write to the whole memory, and nothing is compared.
    """
    part_bytes = ALLOCATION_BYTES // 30

    with gaudi.allocate(ALLOCATION_BYTES) as memory:

        def run_thread(thread_index: int) -> None:
            begin = thread_index * part_bytes
            offsets = generate_offsets(seed + thread_index, begin=begin, end=begin + part_bytes)
            write_and_read_back(importer, memory, seed=seed + 1000 * thread_index, iteration_count=20, offsets=offsets)

        run_threads(30, run_thread)

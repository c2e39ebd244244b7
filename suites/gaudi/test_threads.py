"""The cases of hl-thunk's own dma-buf tests, with a NIC instead of its importer device, and with data compared.

Each thread has memory (of its own, or shared), a dma-buf and a region. It repeats: write through the region and compare
with the device's copy, then write by the device's copy and compare with a read through the region.
"""

from __future__ import annotations

import contextlib
import random
import threading
from typing import TYPE_CHECKING

import pytest

from gdrkit import pattern
from gdrkit.harness.needs import gaudi as a_gaudi
from gdrkit.harness.needs import needs, verbs
from gdrkit.units import KIB, MIB
from gdrkit.verbs import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gdrkit.gaudi import Device, GaudiMemory
    from gdrkit.verbs import Nic, QueuePair, Region

pytestmark = needs(a_gaudi.device(), verbs.nic(), verbs.dmabuf_region)

ALLOCATION_BYTES = 32 * MIB
ACCESS_BYTES = 4 * KIB


class Importer:
    """Writes to regions of this process and reads from them through a NIC, one request at a time.

    It has two queue pairs of this process. More would not help, because pyverbs holds the GIL during its calls.
    """

    def __init__(self, nic: Nic, ours: QueuePair, host: Region) -> None:
        self.nic = nic
        self._queue_pair = ours
        self._host = host
        self._lock = threading.Lock()

    def write(self, region: Region, data: bytes, *, offset_bytes: int) -> None:
        with self._lock:
            assert self._host.memory is not None
            self._host.memory[: len(data)] = data
            remote = region.remote(offset_bytes=offset_bytes, length_bytes=len(data))
            self._queue_pair.post_write(self._host, remote, work_id=1, length_bytes=len(data))
            self._queue_pair.wait(10_000).expect(Status.SUCCESS)

    def read(self, region: Region, *, offset_bytes: int, length_bytes: int) -> bytes:
        with self._lock:
            assert self._host.memory is not None
            remote = region.remote(offset_bytes=offset_bytes, length_bytes=length_bytes)
            self._queue_pair.post_read(self._host, remote, work_id=2, length_bytes=length_bytes)
            self._queue_pair.wait(10_000).expect(Status.SUCCESS)
            return bytes(self._host.memory[:length_bytes])


@pytest.fixture
def importer(nic: Nic) -> Iterator[Importer]:
    """Yield an importer on the first NIC."""
    with (
        nic.completion_queue(depth=16) as queue,
        nic.queue_pair(queue) as ours,
        nic.queue_pair(queue) as theirs,
        nic.register_host(bytearray(ACCESS_BYTES)) as host,
    ):
        ours.connect(theirs.endpoint())
        theirs.connect(ours.endpoint())
        yield Importer(nic, ours, host)


def run_threads(count: int, body: Callable[[int], None]) -> None:
    """Run `body` in `count` threads, and raise the first failure."""
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            body(number)
        except BaseException as error:
            failures.append(error)
            raise

    with contextlib.ExitStack() as stack:
        # An exception of a thread is raised by the caller.
        hook, threading.excepthook = threading.excepthook, lambda _: None
        stack.callback(setattr, threading, "excepthook", hook)
        threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]


def exchange(importer: Importer, memory: GaudiMemory, *, seed: int, iterations: int, offsets: Iterator[int]) -> None:
    """Run the body of a thread, which alone uses its part of the memory."""
    with memory.export_dmabuf() as exported:
        region = importer.nic.register_dmabuf(exported)
    with region:
        for iteration in range(iterations):
            offset_bytes = next(offsets)
            to_device, to_host = (pattern.payload(ACCESS_BYTES, seed=seed + 2 * iteration + which) for which in (0, 1))
            importer.write(region, to_device, offset_bytes=offset_bytes)
            assert memory.read(offset_bytes=offset_bytes, length_bytes=ACCESS_BYTES) == to_device
            memory.write(to_host, offset_bytes=offset_bytes)
            assert importer.read(region, offset_bytes=offset_bytes, length_bytes=ACCESS_BYTES) == to_host


def anywhere(seed: int, *, begin: int, end: int) -> Iterator[int]:
    """Yield random offsets, also odd ones."""
    draw = random.Random(seed)
    while True:
        yield draw.randrange(begin, end - ACCESS_BYTES)


def test_one_thread(gaudi: Device, importer: Importer, seed: int) -> None:
    with gaudi.allocate(ALLOCATION_BYTES) as memory:
        exchange(importer, memory, seed=seed, iterations=1, offsets=anywhere(seed, begin=0, end=ALLOCATION_BYTES))


def test_fifteen_threads_with_separate_memory(gaudi: Device, importer: Importer, seed: int) -> None:
    def body(number: int) -> None:
        offsets = anywhere(seed + number, begin=0, end=ALLOCATION_BYTES)
        with gaudi.allocate(ALLOCATION_BYTES) as memory:
            exchange(importer, memory, seed=seed + 1000 * number, iterations=10, offsets=offsets)

    run_threads(15, body)


def test_thirty_threads_with_shared_memory(gaudi: Device, importer: Importer, seed: int) -> None:
    """Give each thread a thirtieth of the memory. In hl-thunk's case, all threads write anywhere without comparing."""
    part_bytes = ALLOCATION_BYTES // 30

    with gaudi.allocate(ALLOCATION_BYTES) as memory:

        def body(number: int) -> None:
            begin = number * part_bytes
            offsets = anywhere(seed + number, begin=begin, end=begin + part_bytes)
            exchange(importer, memory, seed=seed + 1000 * number, iterations=20, offsets=offsets)

        run_threads(30, body)

"""The open cuFile driver that the files of a process share, with its threads, its registered memory and its queue.

libcufile counts the routes of transfers for the whole process. So the route of a transfer is proven only if no other
transfer runs between the two readings of the counters. One thread therefore takes the transfers from a queue. It runs
all waiting transfers of the same file and direction together, with one proof, and worker threads transfer their parts.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections import deque
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gdrkit import cuda, cufile, forks
from gdrkit.errors import ApiError
from gdrkit.gds._native import native
from gdrkit.host import HostTree
from gdrkit.units import KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.gds.buffer import TransferBuffer
    from gdrkit.gds.cufile_job import CufileJob, CufilePart
    from gdrkit.gds.transfer import Transfer

__all__ = ["CufileOptions", "JobRunner", "RegisteredRanges", "SharedDriver", "close_driver", "shared_driver"]

# Largest number of jobs that run together, with one proof of their route.
_JOBS_MAX = 1024


@dataclass(frozen=True, slots=True)
class CufileOptions:
    """Settings of the transfers by cuFile.

    The defaults were the fastest values measured on one H200 with 16 processors in compat mode. See docs/gds.md.

    Attributes
    ----------
    workers_count : int
        Number of threads that call cuFile at the same time.
    part_bytes_max : int
        Largest size of one call of cuFile, in bytes. Cancellation is checked between two calls.
    batch_range_bytes_max : int
        Largest range that a batch transfers, in bytes. Larger ranges are transferred by single calls.
    batch_ranges_min : int
        Smallest number of ranges for which a batch is used.
    batch_entries_max : int
        Largest number of requests in progress in a batch. With more than 64, cuFile 1.15 may never return from a batch
        that goes through host memory (see ``posix_pool_slab_count`` of cufile.json).
    registers_memory : bool
        Whether memory is registered with cuFile before a transfer.
    """

    workers_count: int = 16
    part_bytes_max: int = 8 * MIB
    batch_range_bytes_max: int = 64 * KIB
    batch_ranges_min: int = 8
    batch_entries_max: int = 64
    registers_memory: bool = True


class JobRunner(Protocol):
    """An object that runs the jobs of one file, such as a :class:`gdrkit.gds.cufile_path.CufilePath`."""

    def execute(self, jobs: Sequence[CufileJob]) -> None:
        """Run the jobs together, and store the results in them."""


class SharedDriver:
    """The open cuFile driver, its threads, its registered memory and its queue of jobs (transfers)."""

    def __init__(self, options: CufileOptions | None = None) -> None:
        self.options = options or CufileOptions()
        self.host_tree = HostTree()
        self.driver = cufile.Driver()
        # cuFile before 1.15 has no statistics. The counters of nvidia-fs may still show the route.
        with contextlib.suppress(ApiError):
            self.driver.statistics.start()
        self.buffer_cache = cufile.BufferCache(self.driver)
        self.batch_capacity = min(self.options.batch_entries_max, self.driver.properties().max_batch_io)
        self.workers = futures.ThreadPoolExecutor(self.options.workers_count, thread_name_prefix="gdrkit-cufile-io")
        # The queue of the jobs that callers submit (None ends the thread), and the jobs that the thread has taken from
        # this queue and not run yet.
        self._submitted_jobs: queue.SimpleQueue[tuple[JobRunner, CufileJob] | None] = queue.SimpleQueue()
        self._taken_jobs: deque[tuple[JobRunner, CufileJob]] = deque()
        # An interrupted Thread.join() would count the thread as ended, so close() waits for this native object.
        self._thread_completion = native.Completion()
        # The thread is a daemon, because Python waits for all other threads before it calls close_driver(), which ends
        # this thread.
        self._thread = threading.Thread(target=self._run_jobs, name="gdrkit-cufile", daemon=True)
        self._thread.start()
        forks.register(self)

    def submit(self, runner: JobRunner, job: CufileJob, transfer: Transfer | None = None) -> None:
        """Add a job to the queue. If `transfer` is given, store the job in it, too; see :meth:`Transfer.start`."""
        if transfer is None:
            self._submitted_jobs.put((runner, job))
        else:
            transfer.start(job, self._submitted_jobs.put, (runner, job))

    def close(self) -> None:
        """Run the jobs in the queue, deregister all memory and close the driver."""
        self._submitted_jobs.put(None)
        self._thread_completion.wait()
        self.workers.shutdown()
        self.driver.close()

    def register_memory(
        self, jobs: Sequence[CufileJob], device_index: int, leases: contextlib.ExitStack
    ) -> RegisteredRanges:
        """Keep the memory of the jobs registered until `leases` is closed, and return the registered ranges.

        If cuFile refuses to register memory, its range is left out.
        """
        registered_ranges = RegisteredRanges()
        for job in jobs:
            if job.memory is None or registered_ranges.contains(job.memory.address, job.memory.length_bytes):
                continue
            memory = job.memory.memory_owner
            if not isinstance(memory, cuda.CudaMemory):
                memory = _ForeignMemory(leases.enter_context(cuda.Device(device_index)), job.memory)
            if leases.enter_context(self.buffer_cache.lease(memory)):
                registered_ranges.add(memory.address, memory.length_bytes)
        return registered_ranges

    def after_fork_in_child(self) -> None:
        """Forget this driver in the child, which then opens another one. Its threads exist only in the parent."""
        for drivers in (_shared_drivers, _retired_drivers):
            if self in drivers:
                drivers.remove(self)

    def _run_jobs(self) -> None:
        """Run the jobs of the queue until :meth:`close`. The thread of the queue runs this method."""
        is_closing = False
        try:
            while not is_closing or self._taken_jobs:
                # Take all submitted jobs, and wait for one only if there is no taken job to run.
                while not is_closing and (not self._taken_jobs or not self._submitted_jobs.empty()):
                    submitted_job = self._submitted_jobs.get()
                    if submitted_job is None:
                        is_closing = True
                    else:
                        self._taken_jobs.append(submitted_job)
                if self._taken_jobs:
                    self._run_next_jobs()
        finally:
            self._thread_completion.end()

    def _run_next_jobs(self) -> None:
        """Run the first job of the queue, together with later jobs of the same file and direction.

        Small jobs (see :meth:`_is_small`) and large jobs do not run together: no batch runs if one job is large.
        """
        runner, first_job = self._taken_jobs.popleft()
        jobs, other_jobs = [first_job], deque[tuple["JobRunner", "CufileJob"]]()
        is_small = self._is_small(first_job)
        while self._taken_jobs and len(jobs) < _JOBS_MAX:
            next_runner, job = self._taken_jobs.popleft()
            if next_runner is runner and job.write == first_job.write and self._is_small(job) == is_small:
                jobs.append(job)
            else:
                other_jobs.append((next_runner, job))
        self._taken_jobs.extendleft(reversed(other_jobs))
        try:
            runner.execute(jobs)
        except BaseException as error:
            # The threads that wait for the jobs raise the error.
            for job in jobs:
                job.end(error)
            if not isinstance(error, Exception):
                raise
        else:
            for job in jobs:
                job.end()

    def _is_small(self, job: CufileJob) -> bool:
        """Return whether the job is so small that a batch may transfer it."""
        return job.largest_range_bytes <= self.options.batch_range_bytes_max


class RegisteredRanges:
    """The memory ranges, registered with cuFile, of the jobs that run together."""

    def __init__(self) -> None:
        self._ranges: list[_MemoryRange] = []

    def add(self, address: int, length_bytes: int) -> None:
        """Add registered memory."""
        self._ranges.append(_MemoryRange(address, length_bytes))

    def contains(self, address: int, length_bytes: int) -> bool:
        """Return whether a range is inside registered memory."""
        return any(registered_range.contains(address, length_bytes) for registered_range in self._ranges)

    def find(self, part: CufilePart) -> tuple[_MemoryRange, int]:
        """Return the registered range that contains a part, and the offset of the part in this range.

        If no registered range contains the part, return the range of the part itself, and 0.
        """
        for registered_range in self._ranges:
            if registered_range.contains(part.address, part.length_bytes):
                return registered_range, part.address - registered_range.address
        return _MemoryRange(part.address, part.length_bytes), 0


@dataclass(frozen=True, slots=True)
class _MemoryRange:
    """Device memory of a running job, with the interface :class:`gdrkit.cufile.Memory`."""

    address: int
    length_bytes: int
    closed: bool = False

    def contains(self, address: int, length_bytes: int) -> bool:
        return self.address <= address and address + length_bytes <= self.address + self.length_bytes

    @staticmethod
    def current() -> contextlib.AbstractContextManager[None]:
        """Return an empty context, because the CUDA context is current during the whole job."""
        return contextlib.nullcontext()


class _ForeignMemory:
    """Memory of another library. The library may free it after the transfer without informing gdrkit."""

    def __init__(self, device: cuda.Device, buffer: TransferBuffer) -> None:
        self._device = device
        self.address = buffer.address
        self.length_bytes = buffer.length_bytes
        self.closed = False

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Make the context of the device current in this thread during a block."""
        return self._device.current()


# The shared driver of this process, or an empty list if it is not open.
_shared_drivers: list[SharedDriver] = []
# The drivers that close_driver() has taken out of use and not closed yet.
_retired_drivers: list[SharedDriver] = []
# The lock is reentrant, because a signal handler may search for a direct path while its thread opens or closes the
# driver.
_drivers_lock = forks.ForkSafeLock(reentrant=True)


def shared_driver() -> SharedDriver:
    """Return the shared driver of this process. Open it if it is not open."""
    with _drivers_lock:
        if not _shared_drivers:
            driver = SharedDriver()
            if _shared_drivers:  # A signal handler has opened one meanwhile.
                driver.close()
            else:
                _shared_drivers.append(driver)
        return _shared_drivers[0]


def close_driver() -> None:
    """Close the cuFile driver if it is open. The caller must first close all files that use it.

    If Ctrl-C ends the wait for the transfers in the queue, the next call waits again.
    """
    with _drivers_lock:
        _retired_drivers.extend(_shared_drivers)
        _shared_drivers.clear()
        for driver in tuple(_retired_drivers):
            driver.close()
            if driver in _retired_drivers:  # A signal handler may have closed and removed it meanwhile.
                _retired_drivers.remove(driver)


atexit.register(close_driver)

"""The direct path by cuFile: transfers whose route is proven by the counters of libcufile and nvidia-fs.

A file takes this path only if the counters showed that a first read (the probe) was direct. The counters are read again
for each transfer, and its result reports the route that they showed.

Large ranges are divided into parts. Several threads transfer the parts, each by one call. Many small ranges are
transferred as one batch (cuFileBatchIO), if the counters showed that a test batch of reads was direct, too. Calls on
CUDA streams are not used: libcufile executes them one after another on a thread per stream, so they are no faster than
the calls of several threads.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from concurrent import futures
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, cufile
from gdrkit.cufile.obstacles import transfer_obstacles
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.gds._native import call_native
from gdrkit.gds.cufile_driver import RegisteredRanges, shared_driver
from gdrkit.gds.cufile_job import CufileJob, PartSource
from gdrkit.gds.direct import DirectPathResult
from gdrkit.gds.opening import open_file
from gdrkit.host import HostTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.gds.buffer import TransferBuffer
    from gdrkit.gds.cufile_driver import CufileOptions, SharedDriver
    from gdrkit.gds.cufile_job import CufilePart
    from gdrkit.gds.transfer import Transfer

__all__ = ["CufilePath", "probe_cufile"]

# Size of the first block, which the probe reads, in bytes.
_BLOCK_BYTES = 4096
# Number of reads in the batch that finds out whether libcufile counts the routes of batches.
_BATCH_PROBE_READS_COUNT = 2
# Longest wait for results of a batch before the thread checks whether its transfers were cancelled, in seconds.
_BATCH_POLL_S = 0.1


def probe_cufile(fd: int, device_index: int) -> DirectPathResult:
    """Read the first block of a file by cuFile. Return the path if the block took a direct route, else the reason.

    Parameters
    ----------
    fd : int
        Descriptor of the open file. The probe opens the file again with O_DIRECT, so the flags of `fd` do not change.
    device_index : int
        Index of the CUDA device.
    """
    try:
        native_file = open_file(f"/proc/self/fd/{fd}", _query_access_mode(fd) | os.O_DIRECT)
    except OSError as error:
        return DirectPathResult(None, f"the file system does not support O_DIRECT ({error.strerror})")
    obstacles = [
        obstacle.text
        for obstacle in cufile.obstacles(HostTree(), native_file.fileno())
        if obstacle.prevents_registration
    ]
    if obstacles:
        return DirectPathResult(None, f"cuFile: {'; '.join(obstacles)}")
    if os.fstat(native_file.fileno()).st_size < _BLOCK_BYTES:
        return DirectPathResult(None, f"the file is smaller than the {_BLOCK_BYTES} bytes that the probe reads")
    try:
        path = CufilePath(shared_driver(), native_file, device_index)
    except GdrkitError as error:
        return DirectPathResult(None, f"cuFile: {error}")
    return _probe_path(path)


def _probe_path(path: CufilePath) -> DirectPathResult:
    """Return the path if a read of the first block proves it. Otherwise close the path and return the reason."""
    try:
        job = path.read_first_block()
    except GdrkitError as error:
        # For example, the device is out of memory. The copy engine may still work.
        path.close()
        return DirectPathResult(None, f"cuFile: {error}")
    if job.proof.state is cufile.RouteState.PROVEN:
        return DirectPathResult(path)
    path.close()
    return DirectPathResult(None, job.why_not_direct)


class CufilePath:
    """A file that is registered with cuFile, for one device; see :class:`gdrkit.gds.DirectPath`.

    Parameters
    ----------
    driver : SharedDriver
        The open driver and its threads.
    native_file : object
        The file of the native engine, opened with O_DIRECT. :meth:`close` closes it.
    device_index : int
        Index of the CUDA device.
    options : CufileOptions or None
        Settings of the transfers; with None the driver's settings are used.
    """

    def __init__(
        self,
        driver: SharedDriver,
        native_file: Any,  # noqa: ANN401 - native object.
        device_index: int,
        options: CufileOptions | None = None,
    ) -> None:
        self._driver = driver
        self._options = options or driver.options
        self._device_index = device_index
        # `keep` keeps the descriptor open as long as it is registered, even if this object is dropped without close().
        # Otherwise another file could get the number of a descriptor that cuFile still uses.
        self._file_handle = cufile.FileHandle(driver.driver, native_file.fileno(), keep=native_file)
        self._fd = native_file.fileno()
        self._native_file = native_file
        # The reason why a transfer after the probe was not direct; empty as long as all transfers were direct.
        self._why_fell_back = ""
        # Whether libcufile counts the routes of batches of this file; None before the first batch.
        self._batches_are_proven: bool | None = None

    def read_first_block(self) -> CufileJob:
        """Read the first block into device memory, to find out its route, and return the finished job."""
        # The trigger job moves no bytes: it makes the thread of the queue call the runner. The runner allocates memory,
        # and runs another job, which reads the block.
        trigger_job = CufileJob(write=False, extents=[0, 0, 0, _BLOCK_BYTES])
        runner = _FirstRead(self, self._device_index)
        self._driver.submit(runner, trigger_job)
        trigger_job.wait(-1)
        trigger_job.progress()  # If the runner raised an error, this call raises it.
        return runner.job

    def why_not(self, extents: Sequence[int]) -> str:
        """Return why these ranges cannot be transferred directly; empty if they can."""
        if self._why_fell_back:
            return self._why_fell_back
        # The lowest set bit of `alignment_bits` is the common alignment of all offsets, addresses and lengths.
        alignment_bits = 0
        for offset, address, length in zip(extents[1::4], extents[2::4], extents[3::4], strict=True):
            alignment_bits |= offset | address | length
        return "; ".join(obstacle.text for obstacle in transfer_obstacles(alignment_bits=alignment_bits))

    def submit(
        self,
        *,
        write: bool,
        extents: Sequence[int],
        durable: bool = False,
        memory: TransferBuffer,
        transfer: Transfer | None = None,
    ) -> CufileJob:
        """Start a transfer; see :class:`gdrkit.gds.DirectPath`."""
        job = CufileJob(write=write, extents=extents, durable=durable, memory=memory)
        self._driver.submit(self, job, transfer)
        return job

    def close(self) -> None:
        """Deregister the file from cuFile and close its descriptor. An interrupt can leave the file open."""
        self._file_handle.close()
        call_native(self._native_file.close)

    def execute(self, jobs: Sequence[CufileJob]) -> None:
        """Run jobs of one direction (read or write), and store in them the route that the counters showed.

        The thread of the queue calls this method for every transfer that :mod:`gdrkit.gds` makes by cuFile, blocking or
        not, with one range or with many.
        """
        uses_batch = self._should_use_batch(jobs)
        monitor = cufile.RouteMonitor(self._driver.driver, self._driver.host_tree)
        with contextlib.ExitStack() as leases:
            part_source = PartSource(jobs, self._choose_part_bytes(jobs))
            try:
                registered_ranges = RegisteredRanges()
                if self._options.registers_memory:
                    registered_ranges = self._driver.register_memory(jobs, self._device_index, leases)
                with monitor.watch(self._fd):
                    # An error of a part is stored in its job and does not end this block, because the other parts still
                    # need the proof of the monitor.
                    if uses_batch:
                        self._run_batch(part_source, registered_ranges)
                    else:
                        self._run_calls(part_source, registered_ranges)
                    self._sync(jobs)
            except ApiError as error:
                part_source.fail(error)
        for job in jobs:
            job.proof = monitor.proof
        if monitor.proof.state is not cufile.RouteState.PROVEN and any(job.moved_bytes for job in jobs):
            self._why_fell_back = f"cuFile: {monitor.proof.why}"

    def _choose_part_bytes(self, jobs: Sequence[CufileJob]) -> int:
        """Return the size of the parts of these jobs, in bytes."""
        if len(jobs) > 1:
            return self._options.part_bytes_max
        return jobs[0].choose_part_bytes(self._options.workers_count, self._options.part_bytes_max)

    def _should_use_batch(self, jobs: Sequence[CufileJob]) -> bool:
        """Return whether these jobs are many small ranges, and libcufile counts the routes of batches."""
        range_bytes_max = self._options.batch_range_bytes_max
        if any(job.largest_range_bytes > range_bytes_max for job in jobs):
            return False
        if sum(job.count_parts(range_bytes_max) for job in jobs) < self._options.batch_ranges_min:
            return False
        if self._batches_are_proven is None:
            self._batches_are_proven = self._probe_batch()
        return self._batches_are_proven

    def _probe_batch(self) -> bool:
        """Read the first block several times in one batch, and return whether the counters showed a direct route."""
        monitor = cufile.RouteMonitor(self._driver.driver, self._driver.host_tree)
        try:
            with (
                cuda.Device(self._device_index) as device,
                device.allocate(_BATCH_PROBE_READS_COUNT * _BLOCK_BYTES) as memory,
                monitor.watch(self._fd),
            ):
                # The four numbers of a range are: file index, offset in the file, device address, length.
                extents = [
                    number
                    for index in range(_BATCH_PROBE_READS_COUNT)
                    for number in (0, 0, memory.address + index * _BLOCK_BYTES, _BLOCK_BYTES)
                ]
                job = CufileJob(write=False, extents=extents)
                self._run_batch(PartSource([job], _BLOCK_BYTES), RegisteredRanges())
        except ApiError:
            return False
        return job.failure is None and monitor.proof.state is cufile.RouteState.PROVEN

    def _run_calls(self, part_source: PartSource, registered_ranges: RegisteredRanges) -> None:
        """Transfer all parts by single calls of several threads, one of which is this thread."""
        helper_count = min(self._options.workers_count, part_source.parts_count) - 1
        # If no thread can be started, submit() raises RuntimeError and returns no future, but the call stays in the
        # queue of the pool. So this method creates the futures itself, and can cancel them.
        helper_futures: list[futures.Future[None]] = [futures.Future() for _ in range(helper_count)]
        try:
            with contextlib.suppress(RuntimeError):  # If a thread cannot be started, fewer threads transfer the parts.
                for helper_future in helper_futures:
                    self._driver.workers.submit(self._run_helper, helper_future, part_source, registered_ranges)
            self._run_worker(part_source, registered_ranges)
        except BaseException:
            part_source.stop()
            raise
        finally:
            started_futures = [helper_future for helper_future in helper_futures if not helper_future.cancel()]
            futures.wait(started_futures)
        for helper_future in started_futures:
            helper_future.result()

    def _run_helper(
        self, future: futures.Future[None], part_source: PartSource, registered_ranges: RegisteredRanges
    ) -> None:
        """Transfer parts until there are none left, and complete `future`. If it was cancelled before, do nothing."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            self._run_worker(part_source, registered_ranges)
        except BaseException as error:
            part_source.stop()
            future.set_exception(error)
            raise
        future.set_result(None)

    def _run_worker(self, part_source: PartSource, registered_ranges: RegisteredRanges) -> None:
        """Transfer parts until there are none left."""
        try:
            with cuda.Device(self._device_index) as device, device.current():
                while (job_and_part := part_source.take()) is not None:
                    self._run_part(*job_and_part, registered_ranges)
        except ApiError as error:
            part_source.fail(error)

    def _run_part(self, job: CufileJob, part: CufilePart, registered_ranges: RegisteredRanges) -> None:
        """Transfer one part. If a call transfers fewer bytes, further calls transfer the rest."""
        transfer_function = self._file_handle.write if job.write else self._file_handle.read
        try:
            while part.length_bytes and not job.is_stopped:
                memory, memory_offset = registered_ranges.find(part)
                moved_bytes = transfer_function(
                    memory,
                    file_offset_bytes=part.file_offset_bytes,
                    offset_bytes=memory_offset,
                    length_bytes=part.length_bytes,
                )
                job.complete(part, moved_bytes)
                if moved_bytes == 0:
                    return
                part = part.without_first(moved_bytes)
        except ApiError as error:
            job.fail(error, part)

    def _run_batch(self, part_source: PartSource, registered_ranges: RegisteredRanges) -> None:
        """Transfer all parts by one batch, which is filled again whenever parts of it are complete."""
        with (
            cuda.Device(self._device_index) as device,
            device.current(),
            cufile.IoBatch(self._driver.driver, self._driver.batch_capacity) as batch,
        ):
            batch_transfers = _BatchTransfers(batch, self._file_handle, registered_ranges)
            while batch_transfers.fill(part_source):
                batch_transfers.collect()

    def _sync(self, jobs: Sequence[CufileJob]) -> None:
        """Sync the written data to the disk if a job is durable. If this fails, store the error in these jobs."""
        durable_jobs = [job for job in jobs if job.durable]
        if not durable_jobs:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            for job in durable_jobs:
                job.fail_sync(error)


class _FirstRead:
    """The read of the first block of a file, which the thread of the queue runs.

    That thread frees the memory after the read, even if an interrupt has ended the wait of the caller.
    """

    job: CufileJob

    def __init__(self, path: CufilePath, device_index: int) -> None:
        self._path = path
        self._device_index = device_index

    def execute(self, _jobs: Sequence[CufileJob]) -> None:
        """Read the block, and store the finished job."""
        with cuda.Device(self._device_index) as device, device.allocate(_BLOCK_BYTES) as memory:
            self.job = CufileJob(write=False, extents=[0, 0, memory.address, _BLOCK_BYTES])
            self._path.execute([self.job])


class _BatchTransfers:
    """The submitted transfers of one batch, and the remainders of transfers that moved fewer bytes than requested."""

    def __init__(
        self, batch: cufile.IoBatch, file_handle: cufile.FileHandle, registered_ranges: RegisteredRanges
    ) -> None:
        self._batch = batch
        self._file_handle = file_handle
        self._registered_ranges = registered_ranges
        self._remainders: deque[tuple[CufileJob, CufilePart]] = deque()
        # The submitted transfers by the id() of their requests.
        self._submitted_transfers: dict[int, tuple[cufile.BatchRequest, CufileJob, CufilePart]] = {}
        self._is_batch_cancelled = False

    def fill(self, part_source: PartSource) -> bool:
        """Submit as many parts as the batch has room for. Return whether transfers are in progress."""
        requests = []
        for job, part in self._next_parts(part_source):
            memory, memory_offset = self._registered_ranges.find(part)
            opcode = cufile.Opcode.WRITE if job.write else cufile.Opcode.READ
            buffer_range = cufile.BufferRange(memory, memory_offset, part.length_bytes)
            request = cufile.BatchRequest(opcode, self._file_handle, buffer_range, part.file_offset_bytes)
            self._submitted_transfers[id(request)] = request, job, part
            requests.append(request)
        if requests:
            try:
                self._batch.submit(requests)
            except ApiError as error:
                for request in requests:
                    _, job, part = self._submitted_transfers.pop(id(request))
                    job.fail(error, part)
        return bool(self._submitted_transfers)

    def collect(self) -> None:
        """Wait for results, and store them in their jobs. If all jobs have stopped, cancel the batch first."""
        if not self._is_batch_cancelled and all(job.is_stopped for _, job, _ in self._submitted_transfers.values()):
            self._is_batch_cancelled = True
            self._batch.cancel()
        for event in self._batch.fetch_events(count_min=1, timeout_s=_BATCH_POLL_S):
            _, job, part = self._submitted_transfers.pop(id(event.request))
            if event.error is not None:
                job.fail(event.error, part)
                continue
            job.complete(part, event.bytes)
            if 0 < event.bytes < part.length_bytes:
                self._remainders.append((job, part.without_first(event.bytes)))

    def _next_parts(self, part_source: PartSource) -> Iterator[tuple[CufileJob, CufilePart]]:
        while len(self._submitted_transfers) < self._batch.capacity:
            job_and_part = self._remainders.popleft() if self._remainders else part_source.take()
            if job_and_part is None:
                return
            job, _ = job_and_part
            if not job.is_stopped:
                yield job_and_part


def _query_access_mode(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE

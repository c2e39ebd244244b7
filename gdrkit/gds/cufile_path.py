"""The direct path by cuFile: transfers whose route is proven by the counters of libcufile and nvidia-fs.

A file takes this path only if the counters showed that a first read (the probe) was direct. The counters are read again
for each transfer, and its result reports the route that they showed. libcufile counts for the whole process, so only
one transfer runs at a time. This costs little, because the device and the disk do the work of a direct transfer.

The extents of a transfer are one flat list with four numbers for each range: index of the file (here always 0), offset
in the file, device address, length in bytes.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, cufile, forks
from gdrkit.cufile.obstacles import request_obstacles
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.gds.direct import DirectPathResult
from gdrkit.host import HostTree
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gdrkit.gds._native import Failure

__all__ = ["CufileJob", "CufilePath", "close_driver", "probe_cufile"]

# Bytes that the probe reads.
_BLOCK_BYTES = 4096
# Largest size of one call of cuFile, in bytes. Cancellation is checked between two calls.
_CALL_BYTES_MAX = 64 * MIB


class _SharedDriver:
    """The open cuFile driver that all files of this process share, and the thread that executes its transfers."""

    def __init__(self) -> None:
        self.host_tree = HostTree()
        self.driver = cufile.Driver()
        # cuFile before 1.15 has no statistics. The counters of nvidia-fs may still show the route.
        with contextlib.suppress(ApiError):
            self.driver.statistics.start()
        self.thread = futures.ThreadPoolExecutor(1, thread_name_prefix="gdrkit-cufile")
        forks.register(self)

    def close(self) -> None:
        self.thread.shutdown()
        self.driver.close()

    def after_fork_in_child(self) -> None:
        """Forget this driver in the child, which then opens another one. The thread exists only in the parent."""
        if self in _shared_drivers:
            _shared_drivers.remove(self)


# The shared driver of this process, or an empty list if it is not open.
_shared_drivers: list[_SharedDriver] = []
_lock = forks.ForkSafeLock()


def probe_cufile(fd: int, device_index: int) -> DirectPathResult:
    """Read the first block of a file by cuFile. Return the path if the block took a direct route, else the reason.

    Parameters
    ----------
    fd : int
        The open file. Its flags are not changed.
    device_index : int
        Index of the CUDA device.
    """
    try:
        direct_fd = os.open(f"/proc/self/fd/{fd}", _access_mode(fd) | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return DirectPathResult(None, f"the file system does not support O_DIRECT ({error.strerror})")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, direct_fd)
        obstacles = [obstacle.text for obstacle in cufile.obstacles(HostTree(), direct_fd) if obstacle.refuses]
        if obstacles:
            return DirectPathResult(None, f"cuFile: {'; '.join(obstacles)}")
        if os.fstat(direct_fd).st_size < _BLOCK_BYTES:
            return DirectPathResult(None, f"the file is smaller than the {_BLOCK_BYTES} bytes that the probe reads")
        try:
            path = CufilePath(_open_driver(), direct_fd, device_index)
        except GdrkitError as error:
            return DirectPathResult(None, f"cuFile: {error}")
        stack.pop_all()
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
    shared_driver : object
        The open driver and its thread.
    fd : int
        A descriptor with O_DIRECT. This object owns and closes it.
    device_index : int
        Index of the CUDA device.
    """

    def __init__(self, shared_driver: _SharedDriver, fd: int, device_index: int) -> None:
        self._shared_driver = shared_driver
        self._device_index = device_index
        self._file = cufile.FileHandle(shared_driver.driver, fd)
        self._fd = fd
        # Why a transfer after the probe was not direct. Empty as long as all transfers were direct.
        self._why_fell_back = ""

    def read_first_block(self) -> CufileJob:
        """Read the first block into device memory, to find out its route, and return the finished job."""
        with cuda.Device(self._device_index) as device, device.allocate(_BLOCK_BYTES) as memory:
            job = self.submit(write=False, extents=[0, 0, memory.address, _BLOCK_BYTES])
            job.wait(-1)
            return job

    def why_not(self, extents: Sequence[int]) -> str:
        """Return why these ranges cannot be transferred directly; empty if they can."""
        if self._why_fell_back:
            return self._why_fell_back
        # The lowest set bit is the common alignment of all offsets, addresses and lengths.
        alignment_bits = 0
        for offset, address, length in zip(extents[1::4], extents[2::4], extents[3::4], strict=True):
            alignment_bits |= offset | address | length
        return "; ".join(obstacle.text for obstacle in request_obstacles(offset_bits=alignment_bits))

    def submit(self, *, write: bool, extents: Sequence[int], durable: bool = False) -> CufileJob:
        """Start a transfer; see :class:`gdrkit.gds.DirectPath`."""
        job = CufileJob(write=write, extents=extents, durable=durable)
        job.future = self._shared_driver.thread.submit(self._execute, job)
        return job

    def close(self) -> None:
        """Deregister the file from cuFile and close its descriptor."""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._fd)
            self._file.close()

    def _execute(self, job: CufileJob) -> None:
        """Execute a job, and store the route that the counters showed. This method runs on the thread of the driver.

        It executes every transfer of :mod:`gdrkit.gds` by cuFile, blocking or not, with one range or with many.
        """
        monitor = cufile.RouteMonitor(self._shared_driver.driver, self._shared_driver.host_tree)
        transfer = self._file.write if job.write else self._file.read
        try:
            with cuda.Device(self._device_index) as device, device.current(), monitor.watch(self._fd):
                # If a part fails, the parts before it still need a proof. So the error must not end the outer block.
                try:
                    for part in job.parts_left():
                        job.add(part, transfer(part, file_offset_bytes=part.file_offset_bytes))
                except ApiError as error:
                    job.fail(error)
                if job.durable:
                    self._sync(job)
        except ApiError as error:
            job.fail(error)
        job.proof = monitor.proof
        if job.proof.state is not cufile.RouteState.PROVEN and job.moved_bytes:
            self._why_fell_back = f"cuFile: {job.proof.why}"

    def _sync(self, job: CufileJob) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            job.failure = job.failure or ("kernel", "fdatasync", error.errno or 0, "")


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a range that one cuFile call transfers. It has the interface of :class:`gdrkit.cufile.Memory`."""

    address: int
    length_bytes: int
    file_offset_bytes: int
    range_index: int
    closed: bool = False

    @staticmethod
    def current() -> contextlib.AbstractContextManager[None]:
        """Return an empty context, because the CUDA context is current during the whole job."""
        return contextlib.nullcontext()


class CufileJob:
    """A transfer by cuFile; a :class:`gdrkit.gds.transfer.TransferJob`. :class:`CufilePath` executes it.

    Attributes
    ----------
    write : bool
        True: write from memory into the file. False: read from the file into memory.
    durable : bool
        Whether a write is synced to the disk before the job is over.
    future : concurrent.futures.Future
        Future of the execution on the thread of the driver.
    proof : Proof
        The route that the counters showed. It is valid when the job is over.
    moved_bytes : int
        Bytes that arrived so far.
    failure : tuple or None
        The first failure.
    """

    future: futures.Future[None]

    def __init__(self, *, write: bool, extents: Sequence[int], durable: bool) -> None:
        self.write = write
        self.durable = durable
        self.proof = cufile.Proof(cufile.Route.UNKNOWN, cufile.RouteState.UNPROVEN)
        self.moved_bytes = 0
        self.failure: Failure | None = None
        self._extents = extents
        self._arrived_bytes = [0] * (len(extents) // 4)  # By range.
        self._is_at_end = False
        self._why_failed = ""
        self._stop_event = threading.Event()
        self._is_cancelled = False

    @property
    def route(self) -> cufile.Route:
        """The route that the counters showed; ``UNKNOWN`` if they showed none."""
        return self.proof.route

    @property
    def why_not_direct(self) -> str:
        """The reason why the transfer is not proven to be direct; empty if it is."""
        is_proven = self.proof.state is cufile.RouteState.PROVEN
        return "" if is_proven else f"cuFile: {self.proof.why or self._why_failed or self.proof.state.value}"

    def wait(self, timeout_us: int) -> bool:
        """Wait at most `timeout_us`, or without limit if it is negative. Return whether the transfer is over."""
        futures.wait([self.future], None if timeout_us < 0 else timeout_us / 1e6)
        return self.future.done()

    def cancel(self) -> None:
        """Stop the transfer before its next call of cuFile."""
        if not self.future.done():
            self._stop_event.set()

    def progress(self) -> dict[str, Any]:
        """Return the progress. If an unexpected exception (not an ApiError) ended the transfer, raise it."""
        if self.future.done():
            self.future.result()
        return {
            "bytes": self.moved_bytes,
            "direct_bytes": self.moved_bytes,
            "cancelled": self._is_cancelled,
            "failure": self.failure,
        }

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived."""
        return self._arrived_bytes

    def parts_left(self) -> Iterator[_Part]:
        """Yield the parts of all ranges in order. Skip the rest of a range after the end of the file.

        After each part, the caller must call :meth:`add`. The iteration ends if the job is cancelled.
        """
        ranges = zip(self._extents[1::4], self._extents[2::4], self._extents[3::4], strict=True)
        for index, (file_offset, address, length) in enumerate(ranges):
            self._is_at_end = False
            while self._arrived_bytes[index] < length and not self._is_at_end:
                if self._stop_event.is_set():
                    self._is_cancelled = True
                    return
                done = self._arrived_bytes[index]
                yield _Part(address + done, min(_CALL_BYTES_MAX, length - done), file_offset + done, index)

    def add(self, part: _Part, moved_bytes: int) -> None:
        """Add the number of bytes of a part that arrived. 0 means the end of the file."""
        self._arrived_bytes[part.range_index] += moved_bytes
        self.moved_bytes += moved_bytes
        self._is_at_end = moved_bytes == 0

    def fail(self, error: ApiError) -> None:
        """Store an error, unless an earlier one is stored."""
        self.failure = self.failure or _failure_of(error)
        self._why_failed = self._why_failed or str(error)


def _failure_of(error: ApiError) -> Failure:
    if error.errno is not None:
        return "kernel", error.operation, error.errno, error.status_name
    return error.api.value, error.operation, error.status or 0, error.status_name


def _access_mode(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def _open_driver() -> _SharedDriver:
    with _lock:
        if not _shared_drivers:
            _shared_drivers.append(_SharedDriver())
        return _shared_drivers[0]


def close_driver() -> None:
    """Close the cuFile driver if it is open. The caller must first close all files that use it."""
    with _lock:
        while _shared_drivers:
            _shared_drivers.pop().close()


atexit.register(close_driver)

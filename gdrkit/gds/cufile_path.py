"""The direct path by cuFile: transfers whose route is proven by counters.

A file takes this path only if the counters showed that a first read was direct. The counters are read again for each
transfer, and its result reports what they showed. libcufile counts for the whole process, so only one transfer runs at
a time. This costs little, because the device and the disk do the work of a direct transfer.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait
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

_BLOCK_BYTES = 4096
# Largest size of one call of cuFile, in bytes. Cancellation is checked between two calls.
_CALL_BYTES_MAX = 64 * MIB


class _CufileDriver:
    """The open cuFile driver of this process, and the thread that executes its transfers."""

    def __init__(self) -> None:
        self.tree = HostTree()
        self.driver = cufile.Driver()
        # cuFile before 1.15 has no statistics. The counters of nvidia-fs may still show the route.
        with contextlib.suppress(ApiError):
            self.driver.statistics.start()
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="gdrkit-cufile")
        forks.register(self)

    def close(self) -> None:
        self.thread.shutdown()
        self.driver.close()

    def after_fork_in_child(self) -> None:
        """Have the child open a driver of its own: this one and its thread belong to the parent."""
        if self in _opened:
            _opened.remove(self)


_opened: list[_CufileDriver] = []
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
        refusing = [each.text for each in cufile.obstacles(HostTree(), direct_fd) if each.refuses]
        if refusing:
            return DirectPathResult(None, f"cuFile: {'; '.join(refusing)}")
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
    driver : object
        The open driver.
    fd : int
        A descriptor with O_DIRECT. This object owns and closes it.
    device_index : int
        Index of the CUDA device.
    """

    def __init__(self, driver: _CufileDriver, fd: int, device_index: int) -> None:
        self._driver = driver
        self._device_index = device_index
        self._file = cufile.FileHandle(driver.driver, fd)
        self._fd = fd
        self._why_lost = ""

    def read_first_block(self) -> CufileJob:
        """Read the first block into device memory, to find out its route, and return the finished job."""
        with cuda.Device(self._device_index) as device, device.allocate(_BLOCK_BYTES) as memory:
            job = self.submit(write=False, extents=[0, 0, memory.address, _BLOCK_BYTES])
            job.wait(-1)
            return job

    def why_not(self, extents: Sequence[int]) -> str:
        """Return why these ranges cannot go directly; empty if they can."""
        if self._why_lost:
            return self._why_lost
        offset_bits = 0
        for offset, address, length in zip(extents[1::4], extents[2::4], extents[3::4], strict=True):
            offset_bits |= offset | address | length
        return "; ".join(each.text for each in request_obstacles(offset_bits=offset_bits))

    def submit(self, *, write: bool, extents: Sequence[int], durable: bool = False) -> CufileJob:
        """Start a transfer; see :class:`gdrkit.gds.DirectPath`."""
        job = CufileJob(write=write, extents=extents, durable=durable)
        job.future = self._driver.thread.submit(self._execute, job)
        return job

    def close(self) -> None:
        """Deregister the file from cuFile and close its descriptor."""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._fd)
            self._file.close()

    def _execute(self, job: CufileJob) -> None:
        """Execute a job, and store what the counters showed of its route. It runs on the thread of the driver.

        Every transfer by cuFile is executed here: reads, writes, futures, and transfers of one range or of many.
        """
        monitor = cufile.RouteMonitor(self._driver.driver, self._driver.tree)
        transfer = self._file.write if job.write else self._file.read
        try:
            with cuda.Device(self._device_index) as device, device.current(), monitor.watch(self._fd):
                # An error of a transfer is stored inside the block, because the bytes before it need a proof too.
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
            self._why_lost = f"cuFile: {job.proof.why}"

    def _sync(self, job: CufileJob) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            job.failure = job.failure or ("kernel", "fdatasync", error.errno or 0, "")


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a range that one call of cuFile transfers, with the interface of :class:`gdrkit.cufile.Memory`."""

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
    """A transfer by cuFile, as a :class:`gdrkit.gds.transfer.TransferJob`. :class:`CufilePath` executes it.

    Attributes
    ----------
    write, durable : bool
        Direction of the transfer, and whether the disk must have the data at the end.
    future : Future
        The execution on the thread of the driver.
    proof : Proof
        The route that the counters showed. It is valid when the job is over.
    moved_bytes : int
        Bytes that arrived so far.
    failure : tuple or None
        The first failure.
    """

    future: Future[None]

    def __init__(self, *, write: bool, extents: Sequence[int], durable: bool) -> None:
        self.write = write
        self.durable = durable
        self.proof = cufile.Proof(cufile.Route.UNKNOWN, cufile.RouteState.UNPROVEN)
        self.moved_bytes = 0
        self.failure: Failure | None = None
        self._extents = extents
        self._arrived = [0] * (len(extents) // 4)
        self._at_end = False
        self._why_failed = ""
        self._stopped = threading.Event()
        self._cancelled = False

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
        wait([self.future], None if timeout_us < 0 else timeout_us / 1e6)
        return self.future.done()

    def cancel(self) -> None:
        """Stop the transfer before its next call of cuFile."""
        if not self.future.done():
            self._stopped.set()

    def progress(self) -> dict[str, Any]:
        """Return the progress. Raise the exception that ended the transfer if it was not an error of an API."""
        if self.future.done():
            self.future.result()
        return {
            "bytes": self.moved_bytes,
            "direct_bytes": self.moved_bytes,
            "cancelled": self._cancelled,
            "failure": self.failure,
        }

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived."""
        return self._arrived

    def parts_left(self) -> Iterator[_Part]:
        """Yield the next part of each range until the range is complete, the file ends, or the job is cancelled."""
        ranges = zip(self._extents[1::4], self._extents[2::4], self._extents[3::4], strict=True)
        for index, (file_offset, address, length) in enumerate(ranges):
            self._at_end = False
            while self._arrived[index] < length and not self._at_end:
                if self._stopped.is_set():
                    self._cancelled = True
                    return
                done = self._arrived[index]
                yield _Part(address + done, min(_CALL_BYTES_MAX, length - done), file_offset + done, index)

    def add(self, part: _Part, moved_bytes: int) -> None:
        """Count the bytes of a part that arrived. 0 means the end of the file."""
        self._arrived[part.range_index] += moved_bytes
        self.moved_bytes += moved_bytes
        self._at_end = moved_bytes == 0

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


def _open_driver() -> _CufileDriver:
    with _lock:
        if not _opened:
            _opened.append(_CufileDriver())
        return _opened[0]


def close_driver() -> None:
    """Close the cuFile driver if it is open. All files that use it must be closed before."""
    with _lock:
        while _opened:
            _opened.pop().close()


atexit.register(close_driver)

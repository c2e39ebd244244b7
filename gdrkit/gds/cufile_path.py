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
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gdrkit import cuda, cufile, forks
from gdrkit.cufile.obstacles import request_obstacles
from gdrkit.errors import ApiError, GdrkitError
from gdrkit.gds.direct import Verdict
from gdrkit.host import HostTree
from gdrkit.units import MIB

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gdrkit.gds._native import Failure

__all__ = ["CufilePath", "CufileWork", "close_driver", "probe_cufile"]

_BLOCK_BYTES = 4096
# Largest size of one call, in bytes. Cancellation is checked between two calls.
_STEP_BYTES = 64 * MIB


@dataclass(frozen=True, slots=True)
class _Memory:
    address: int
    length_bytes: int
    closed: bool = False

    @staticmethod
    def current() -> contextlib.AbstractContextManager[None]:
        """Return an empty context, because the caller has already made the CUDA context current."""
        return contextlib.nullcontext()


class _Library:
    """The open cuFile driver of this process, and the thread that runs its transfers."""

    def __init__(self) -> None:
        self.tree = HostTree()
        self.driver = cufile.Driver()
        try:
            self.driver.statistics.start()
        except ApiError:
            # cuFile before 1.15 has no statistics. The counters of nvidia-fs may still show the route.
            self.uncounted = True
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="gdrkit-cufile")
        forks.register(self)

    uncounted = False

    def close(self) -> None:
        self.thread.shutdown()
        self.driver.close()

    def after_fork_in_child(self) -> None:
        """Have the child open a driver of its own: this one and its thread belong to the parent."""
        if self in _opened:
            _opened.remove(self)


_opened: list[_Library] = []
_lock = forks.ForkSafeLock()


def probe_cufile(fd: int, device_index: int) -> Verdict:
    """Read the first block of a file by cuFile and return whether its bytes took a direct path.

    Parameters
    ----------
    fd : int
        The open file. Its flags are not changed.
    device_index : int
        Index of the CUDA device.
    """
    try:
        own = os.open(f"/proc/self/fd/{fd}", _mode_of(fd) | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        return Verdict(None, f"the file system has no O_DIRECT ({error.strerror})")
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, own)
        refusing = [each.text for each in cufile.obstacles(HostTree(), own) if each.refuses]
        if refusing:
            return Verdict(None, f"cuFile: {'; '.join(refusing)}")
        if os.fstat(own).st_size < _BLOCK_BYTES:
            return Verdict(None, f"the file has no whole block of {_BLOCK_BYTES} bytes to prove a direct path by")
        try:
            found = CufilePath(_library(), own, device_index)
        except GdrkitError as error:
            return Verdict(None, f"cuFile: {error}")
        stack.pop_all()
    return _judged(found)


def _judged(found: CufilePath) -> Verdict:
    """Return the verdict by a read of the first block. A path that is not proven is closed."""
    try:
        work = found.try_first_block()
    except GdrkitError as error:
        # For example, the device is out of memory. The copy engine may still work.
        found.close()
        return Verdict(None, f"cuFile: {error}")
    if work.proof.state is cufile.RouteState.PROVEN:
        return Verdict(found)
    found.close()
    return Verdict(None, work.why_not_direct)


class CufilePath:
    """A file that is registered with cuFile, for one device.

    Parameters
    ----------
    library : object
        The open driver.
    fd : int
        A descriptor with O_DIRECT. This object owns and closes it.
    device_index : int
        Index of the CUDA device.
    """

    def __init__(self, library: _Library, fd: int, device_index: int) -> None:
        self._library = library
        self._device_index = device_index
        self._file = cufile.FileHandle(library.driver, fd)
        self._fd = fd
        self._why_lost = ""

    def try_first_block(self) -> CufileWork:
        """Read the first block into device memory, to find out its route, and return the finished transfer."""
        with cuda.Device(self._device_index) as device, device.allocate(_BLOCK_BYTES) as memory:
            extents = [0, 0, memory.address, _BLOCK_BYTES]
            work = self.submit(write=False, extents=extents)
            work.wait(-1)
            return work

    def why_not(self, extents: Sequence[int]) -> str:
        """Return why these ranges cannot go directly; empty if they can."""
        if self._why_lost:
            return self._why_lost
        odd = 0
        for offset, address, length in zip(extents[1::4], extents[2::4], extents[3::4], strict=True):
            odd |= offset | address | length
        return "; ".join(each.text for each in request_obstacles(offset_bits=odd))

    def submit(self, *, write: bool, extents: Sequence[int], durable: bool = False) -> CufileWork:
        """Start a transfer; see :class:`gdrkit.gds.DirectPath`."""
        return CufileWork(self, write=write, extents=extents, durable=durable)

    def run(self, work: CufileWork) -> None:
        """Run a transfer on the thread of the library, and store the proof from the counters in `work`."""
        monitor = cufile.RouteMonitor(self._library.driver, self._library.tree)
        try:
            with cuda.Device(self._device_index) as device, device.current(), monitor.watch(self._fd):
                work.move(self._file)
                if work.durable:
                    work.sync(self._fd)
        except ApiError as error:
            work.fail(error)
        work.proof = monitor.proof
        if monitor.proof.state is not cufile.RouteState.PROVEN and work.moved_bytes:
            self._why_lost = f"cuFile: {monitor.proof.why}"

    def start(self, work: CufileWork) -> Any:  # noqa: ANN401 - a future of the standard library.
        """Queue a transfer on the thread of the library and return its future."""
        return self._library.thread.submit(self.run, work)

    def close(self) -> None:
        """Deregister the file from cuFile and close its descriptor."""
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, self._fd)
            self._file.close()


class CufileWork:
    """A transfer by cuFile; see :class:`gdrkit.gds.transfer.Work`."""

    def __init__(self, path: CufilePath, *, write: bool, extents: Sequence[int], durable: bool) -> None:
        self.durable = durable
        self.proof = cufile.Proof(cufile.Route.UNKNOWN, cufile.RouteState.UNPROVEN)
        self.moved_bytes = 0
        self._write = write
        self._extents = extents
        self._arrived = [0] * (len(extents) // 4)
        self._failure: Failure | None = None
        self._why_failed = ""
        self._stopped = threading.Event()
        self._cancelled = False
        self._future = path.start(self)

    @property
    def route(self) -> cufile.Route:
        """The route that the counters showed; ``UNKNOWN`` if they showed none."""
        return self.proof.route

    @property
    def why_not_direct(self) -> str:
        """The reason why the transfer is not known to be direct; empty if it is."""
        proven = self.proof.state is cufile.RouteState.PROVEN
        return "" if proven else f"cuFile: {self.proof.why or self._why_failed or self.proof.state.value}"

    def wait(self, timeout_us: int) -> bool:
        """Wait at most `timeout_us`, or without limit if it is negative. Return whether the transfer is over."""
        wait([self._future], None if timeout_us < 0 else timeout_us / 1e6)
        return bool(self._future.done())

    def cancel(self) -> None:
        """Stop the transfer before its next call of cuFile."""
        if not self._future.done():
            self._stopped.set()

    def progress(self) -> dict[str, Any]:
        """Return the progress. Raise the exception that ended the transfer if it was not an error of an API."""
        if self._future.done():
            self._future.result()
        return {
            "bytes": self.moved_bytes,
            "direct_bytes": self.moved_bytes,
            "cancelled": self._cancelled,
            "failure": self._failure,
        }

    def arrived(self) -> Sequence[int]:
        """Return how many bytes of each range arrived."""
        return self._arrived

    def move(self, file: cufile.FileHandle) -> None:
        """Move range after range. A failure is stored and ends the transfer."""
        rows = zip(self._extents[1::4], self._extents[2::4], self._extents[3::4], strict=True)
        for index, (offset, address, length) in enumerate(rows):
            try:
                if not self._move_range(file, index, (offset, address, length)):
                    return
            except ApiError as error:
                self.fail(error)
                return

    def fail(self, error: ApiError) -> None:
        """Store an error, unless an earlier one is stored."""
        self._failure = self._failure or _failure_of(error)
        self._why_failed = self._why_failed or str(error)

    def _move_range(self, file: cufile.FileHandle, index: int, where: tuple[int, int, int]) -> bool:
        offset, address, length = where
        call = file.write if self._write else file.read
        while self._arrived[index] < length:
            if self._stopped.is_set():
                self._cancelled = True
                return False
            at = self._arrived[index]
            step = min(_STEP_BYTES, length - at)
            moved = call(_Memory(address + at, step), file_offset_bytes=offset + at)
            self._arrived[index] += moved
            self.moved_bytes += moved
            if moved == 0:
                break
        return True

    def sync(self, fd: int) -> None:
        """Make the written bytes durable by fdatasync."""
        try:
            os.fdatasync(fd)
        except OSError as error:
            self._failure = self._failure or ("kernel", "fdatasync", error.errno or 0, "")


def _failure_of(error: ApiError) -> Failure:
    if error.errno is not None:
        return "kernel", error.operation, error.errno, error.status_name
    return error.api.value, error.operation, error.status or 0, error.status_name


def _mode_of(fd: int) -> int:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE


def _library() -> _Library:
    with _lock:
        if not _opened:
            _opened.append(_Library())
        return _opened[0]


def close_driver() -> None:
    """Close the cuFile driver if it is open. All files that use it must be closed before."""
    with _lock:
        while _opened:
            _opened.pop().close()


atexit.register(close_driver)
